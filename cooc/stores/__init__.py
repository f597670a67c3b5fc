"""The engines that implement `cooc.store.Store`, one file each, chosen by the scheme of the index's address.

    photos/.cooc                            a folder: the embedded engine, nothing to install or to start
    postgresql://user@host/db?index=name    PostgreSQL with the pgvector extension
    milvus://host:19530/name                Milvus

An engine's module has `open_store(address, write)` and `create_store(address, meta)`, and is imported only when an
address asks for it: nobody needs the client of a server that they do not use.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import cast

from cooc.errors import UnknownNameError
from cooc.store import Store, StoreMeta

__all__ = ["ENGINES", "create_store", "open_store"]

ENGINES = {
    "file": "cooc.stores.embedded",
    "milvus": "cooc.stores.milvus",
    "postgres": "cooc.stores.postgres",
    "postgresql": "cooc.stores.postgres",
}

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://")


def open_store(address: str | Path, *, write: bool = False) -> Store:
    """Open an index to read it, or (one process at a time) to change it as well."""
    module, address = _engine(address)
    return cast(Store, importlib.import_module(module).open_store(address, write=write))


def create_store(address: str | Path, meta: StoreMeta) -> Store:
    """Make an empty index, open for writing. It is an error if there is one already."""
    module, address = _engine(address)
    return cast(Store, importlib.import_module(module).create_store(address, meta))


def _engine(address: str | Path) -> tuple[str, str]:
    address = os.fspath(address)
    scheme = match[1] if (match := _SCHEME.match(address)) else "file"
    if scheme not in ENGINES:
        raise UnknownNameError("kind of index", scheme, ENGINES)
    return ENGINES[scheme], address.removeprefix("file://")
