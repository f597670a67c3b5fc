"""Where an index on Milvus is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from cooc.errors import InputError
from cooc.index import without_password

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
STRUCTURES = ("auto", "flat", "hnsw", "ivf_pq", "diskann")


@dataclass(frozen=True)
class Address:
    """milvus://user:password@host:19530/database/name?options, or milvus:///folder/file.db/name for milvus-lite."""

    uri: str  # what pymilvus connects to
    name: str  # of the collection
    shown: str
    database: str = ""
    token: str = ""
    lite: bool = False
    index: str = "auto"
    timeout: float = 30.0  # seconds for which a request is tried again
    shards: int = 1
    replicas: int = 1
    features: str = ""  # where local features lie, see `features.py`

    @property
    def place(self) -> str:
        return f"at {self.shown}"

    @classmethod
    def parse(cls, address: str) -> Address:
        shown = without_password(address)
        try:
            parts = urlsplit(address)
            options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
            host, port = parts.hostname, parts.port or 19530
            secure = options.pop("secure", "false") == "true"
            token = options.pop("token", "")
            if parts.username is not None:
                token = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            folder, _, name = unquote(parts.path).strip("/").rpartition("/")
            lite = not host
            known = cls(
                uri=f"/{folder}" if lite else f"{'https' if secure else 'http'}://{host}:{port}",
                name=name,
                shown=shown,
                database="" if lite else folder,
                token=token or os.environ.get("MILVUS_TOKEN", ""),
                lite=lite,
                index=options.pop("index", "auto"),
                timeout=float(options.pop("timeout", 30)),
                shards=int(options.pop("shards", 1)),
                replicas=int(options.pop("replicas", 1)),
                features=options.pop("features", ""),
            )
        except ValueError:  # whose text may hold the password
            raise _no_address(shown) from None
        wrong = options or known.index not in STRUCTURES or (lite and not folder.endswith(".db"))
        if wrong or not NAME.fullmatch(name):
            raise _no_address(shown)
        return known

    def hidden(self, text: str) -> str:
        """A message of the server without the password that it may repeat."""
        for secret in (self.token, self.token.partition(":")[2]):
            text = text.replace(secret, "***") if secret else text
        return text


def _no_address(shown: str) -> InputError:
    return InputError(
        f"{shown} is no address of an index on Milvus: write milvus://host:19530/name or milvus:///folder/file.db/name "
        f"(letters, digits, _ in the name); options are index={'|'.join(STRUCTURES)}, timeout, shards, replicas, "
        "secure, features=FOLDER|URL."
    )
