"""Making and opening an index on Milvus."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from dataclasses import replace
from typing import Any

from cooc.errors import InputError, StoreError
from cooc.index.checks import check_format, missing
from cooc.index.milvus import rows
from cooc.index.milvus.features import place
from cooc.index.milvus.searching import Structure, build
from cooc.index.milvus.server import Address, Row, Server
from cooc.index.milvus.store import FEATURES, MilvusStore
from cooc.index.records import FORMAT, BadFile, StoreMeta, now
from cooc.index.store import kept_open

META = "cooc.meta"  # property of the collection
STATE, COPY = "cooc.state", "cooc.copy"  # of an index of format 1 or 2, and of what it was copied to
BESIDE = "_cooc3"  # behind the name of that copy, which then takes the name
DIMENSIONS = 32_768
BLOCK = 256  # rows copied at once

log = logging.getLogger("cooc")


def create_store(address: str, meta: StoreMeta) -> MilvusStore:
    where = Address.parse(address)
    if meta.storage != "float32":
        raise InputError(f"An index on Milvus keeps float32 vectors, not {meta.storage}; index=ivf_pq searches codes.")
    prepare_collection(where, meta.dim)
    kept = {META: meta.as_json()}
    if meta.features:
        try:
            kept[FEATURES] = json.dumps({"engines": meta.features, "at": place(where)})
        except InputError as error:
            log.warning("%s", error)
    with closing(Server(where)) as server:
        server.put(kept)  # the last step: from here on there is an index
    return open_store(address, write=True)


def prepare_collection(where: Address, dim: int) -> None:
    """An empty collection, loaded: all of an index but its `StoreMeta`. One that was left so half-made is used."""
    if dim > DIMENSIONS:
        raise InputError(f"Milvus holds up to {DIMENSIONS} dimensions, not {dim}: use another recipe or engine.")
    with closing(Server(where)) as server:
        if not server.ask("has_collection"):
            shards = {} if where.lite else {"num_shards": where.shards}
            server.ask("create_collection", schema=rows.schema(dim), **shards)
        found = server.ask("describe_collection")
        if META in found["properties"]:
            raise StoreError(f"There is an index at {where.shown} already: open it, or drop the collection first.")
        fields = {field["name"]: field["params"].get("dim") for field in found["fields"]}
        if set(fields) != set(rows.ALL) or fields["vector"] != dim:
            raise StoreError(f"There is another collection at {where.shown} already: choose another name.")
        build(server, "FLAT", dim)


def open_store(address: str, *, write: bool = False) -> MilvusStore:
    where = Address.parse(address)
    server = Server(where)
    with kept_open(server):
        if not server.ask("has_collection") and _copied(server):  # the last step of `_move`
            server.ask("rename_collection", where.name, name=where.name + BESIDE)
        found = server.properties()
        if META not in found:
            raise missing(server.place)
        values = json.loads(found[META])
        check_format(server.place, values["format"])
        meta = StoreMeta(**values)
        if write:
            server.become_writer()
        if STATE in found:
            if not write:
                raise StoreError(
                    f"{where.shown} was made by an earlier cooc, and is moved to the layout of this one when it is "
                    f"opened for writing. Nothing is lost or described again: cooc compact --index '{where.shown}'"
                )
            _move(server, json.loads(found[STATE]), replace(meta, format=FORMAT))
            server.close()
            return open_store(address, write=True)
        if write:  # a `compact` that was cut short may have left the collection without a structure, or not loaded
            build(server, Structure.of(server).kind or "FLAT", meta.dim)
        return MilvusStore(server, meta, json.loads(found.get(FEATURES, "{}")))


def _copied(server: Server) -> bool:
    """Is there a complete copy of it? (Not: an index of that name.)"""
    name = server.address.name + BESIDE
    return server.ask("has_collection", name=name) and COPY in server.properties(name)


def _move(server: Server, state: dict[str, Any], meta: StoreMeta) -> None:
    """Rows of format 1 or 2 that count, as a state tells, to a collection of today's layout. Cut short before the old
    one is dropped, it begins again; after that, only the name is missing."""
    log.warning("%s is moved to the layout of this cooc, once.", server.address.shown)
    where = replace(server.address, name=server.address.name + BESIDE)
    if _copied(server):
        server.ask("drop_collection", name=where.name)
    prepare_collection(where, meta.dim)
    dead = [range(first, last) for first, last, _ in state["dead"]]
    fields = ["key", "row", "bad", "reason", "crc", "vector", *rows.RECORD]
    with closing(Server(where)) as new:
        new.block = server.block = BLOCK
        old = server.rows(f"row >= 0 and row < {state['next']}", fields)
        new.upsert(_moved(row) for row in old if not any(row["row"] in numbers for numbers in dead))
        new.put({META: meta.as_json(), COPY: ""})
    server.ask("drop_collection")


def _moved(row: Row) -> Row:
    """A vector that was damaged still is, and known as such."""
    row = row | {"key": rows.IMAGE + row["key"].partition("-")[0]}
    if row["bad"]:
        bad = BadFile(rows.path(row), row["size"], row["mtime_ns"], row["reason"], now())
        return rows.of_bad(bad, len(row["vector"]))
    return rows.of_record(rows.record(row), row["vector"], row["crc"])
