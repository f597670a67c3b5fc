"""The engines that implement `cooc.index.store.Store`, one file each, chosen by the scheme of the index's address.

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
from typing import Any, cast

from cooc.errors import InputError, check_name
from cooc.index.records import StoreMeta
from cooc.index.store import Store

ENGINES = {
    "file": "cooc.index.embedded",
    "milvus": "cooc.index.milvus",
    "postgres": "cooc.index.postgres",
    "postgresql": "cooc.index.postgres",
}

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://")


def open_store(address: str | Path, *, write: bool = False) -> Store:
    """Open an index to read it, or (one process at a time) to change it as well."""
    module, address = _engine(address)
    return cast(Store, module.open_store(address, write=write))


def create_store(address: str | Path, meta: StoreMeta) -> Store:
    """Make an empty index, open for writing. It is an error if there is one already."""
    module, address = _engine(address)
    return cast(Store, module.create_store(address, meta))


def is_folder(address: str | os.PathLike[str]) -> bool:
    """Is it the folder of an embedded index? Else it is an address on a server."""
    return _SCHEME.match(os.fspath(address)) is None


def without_password(address: str) -> str:
    """An address as it may be shown."""
    if is_folder(address):
        return address
    address = re.sub(r"^([^:]+://[^:@/?]*):.*@", r"\1@", address)  # up to the last @: a password may hold anything
    kept = re.sub(r"(?<=[?&])[a-z]*(password|token)=[^&]*&?", "", address)
    return kept.rstrip("?&")


def _engine(address: str | Path) -> tuple[Any, str]:
    address = os.fspath(address)
    scheme = match[1] if (match := _SCHEME.match(address)) else "file"
    check_name("kind of index", scheme, ENGINES)
    try:
        return importlib.import_module(ENGINES[scheme]), address.removeprefix("file://")
    except ModuleNotFoundError as error:
        extra = ENGINES[scheme].rpartition(".")[2]
        raise InputError(f"An index at {scheme}:// needs {error.name}: pip install 'cooc[{extra}]'.") from error
