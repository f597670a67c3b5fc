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
OPTIONS = {"index": str, "timeout": float, "shards": int, "replicas": int, "features": str}


@dataclass(frozen=True)
class Address:
    """milvus://user:password@host:19530/database/name?options, or milvus:///folder/file.db/name for milvus-lite."""

    uri: str  # what pymilvus connects to
    name: str  # of the collection
    shown: str
    token: str
    lite: bool = False
    database: str = ""
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
            given = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
            scheme = "https" if given.pop("secure", "false") == "true" else "http"
            token = given.pop("token", "") or os.environ.get("MILVUS_TOKEN", "")
            if parts.username is not None:
                token = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            folder, _, name = unquote(parts.path).strip("/").rpartition("/")
            options = {option: OPTIONS[option](value) for option, value in given.items()}
            lite = not parts.hostname
            named = NAME.fullmatch(name) and (folder.endswith(".db") or not lite)
            if not named or options.get("index", "auto") not in STRUCTURES:
                raise ValueError
            uri = f"/{folder}" if lite else f"{scheme}://{parts.hostname}:{parts.port or 19530}"
            return cls(uri, name, shown, token, lite, "" if lite else folder, **options)
        except (ValueError, KeyError):  # whose text may hold the password
            raise InputError(
                f"{shown} is no address of an index on Milvus: write milvus://host:19530/name or "
                "milvus:///folder/file.db/name (letters, digits, _ in the name); options are "
                f"index={'|'.join(STRUCTURES)}, timeout, shards, replicas, secure, features=FOLDER|URL."
            ) from None
