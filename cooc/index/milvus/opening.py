"""Making and opening an index on Milvus."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from dataclasses import replace
from typing import Any

from cooc.errors import InputError, StoreError, StoreMissingError
from cooc.index.checks import check_format, missing
from cooc.index.milvus import former, rows, structures
from cooc.index.milvus.address import Address
from cooc.index.milvus.features import nowhere, place
from cooc.index.milvus.server import Server
from cooc.index.milvus.store import FEATURES, MilvusStore
from cooc.index.records import FORMAT, StoreMeta
from cooc.index.store import kept_open

META = "cooc.meta"  # property of the collection
DIMENSIONS = 32_768

log = logging.getLogger("cooc")


def create_store(address: str, meta: StoreMeta) -> MilvusStore:
    where = Address.parse(address)
    if meta.storage != "float32":
        raise InputError(f"An index on Milvus keeps float32 vectors, not {meta.storage}; index=ivf_pq searches codes.")
    prepare_collection(where, meta.dim)
    kept = {META: meta.as_json()}
    if meta.features and place(where):
        kept[FEATURES] = json.dumps({"engines": meta.features, "at": place(where)})
    elif meta.features:
        log.warning("%s", nowhere(where))
    with closing(Server(where)) as server:
        server.put(kept)  # the last step: from here on there is an index
    return open_store(address, write=True)


def prepare_collection(where: Address, dim: int) -> None:
    """An empty collection, loaded: all of an index but its `StoreMeta`. One that was left so half-made is used."""
    if dim > DIMENSIONS:
        raise InputError(f"Milvus holds up to {DIMENSIONS} dimensions, not {dim}: use another recipe or engine.")
    with closing(Server(where)) as server:
        if not server.ask("has_collection"):
            options: dict[str, Any] = {} if where.lite else {"num_shards": where.shards}
            server.ask("create_collection", schema=rows.schema(dim), **options)
        found = server.ask("describe_collection")
        if META in found["properties"]:
            raise StoreError(f"There is an index at {where.shown} already: open it, or drop the collection first.")
        fields = {field["name"]: field["params"].get("dim") for field in found["fields"]}
        if set(fields) != set(rows.ALL) or fields["vector"] != dim:
            raise StoreError(f"There is another collection at {where.shown} already: choose another name.")
        structures.build(server, "FLAT", dim)


def open_store(address: str, *, write: bool = False) -> MilvusStore:
    where = Address.parse(address)
    server = Server(where)
    with kept_open(server):
        former.take_up(server)
        found = server.properties()
        if META not in found:
            raise missing(where.place)
        values = json.loads(found[META])
        check_format(where.place, values["format"])
        meta = StoreMeta(**values)
        if former.STATE in found:
            if not write:
                raise former.refusal(where)
            _move(address, server, meta)
            server.close()
            return open_store(address, write=True)
        if write:
            server.become_writer()
            # A `compact` that was cut short may have left the collection without a structure, or not loaded.
            structures.build(server, structures.current(server).kind or "FLAT", meta.dim)
        return MilvusStore(server, meta, json.loads(found.get(FEATURES, "{}")))


def _move(address: str, server: Server, meta: StoreMeta) -> None:
    """To the layout of this cooc."""
    server.become_writer()
    try:
        copy = open_store(former.beside(address), write=True)
    except StoreMissingError:
        copy = create_store(former.beside(address), replace(meta, format=FORMAT))
    with copy:
        former.copy(server, meta.dim, copy)
    server.ask("drop_collection")
    former.take_up(server)
