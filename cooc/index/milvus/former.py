"""An index that a cooc before format 3 made on Milvus, and moving it to today's layout.

Transactions were imitated then: a property of the collection said which rows count. Such an index is copied to a
collection beside it, which then takes its name. A move that is cut short is taken up by the next one: what is copied
twice is there once.
"""

from __future__ import annotations

import json
import logging

import numpy as np

from cooc.errors import StoreError
from cooc.index.milvus import rows
from cooc.index.milvus.address import Address
from cooc.index.milvus.server import Server
from cooc.index.records import BadFile, Forgotten, now
from cooc.index.store import Store, blocks

STATE = "cooc.state"  # property of the collection, which only such an index has
FIELDS = ["key", *rows.RECORD, "row", "bad", "reason", "crc", "vector"]
BLOCK = 256  # rows moved at once
BESIDE = "_cooc3"  # behind the name of the collection that an index is copied to

log = logging.getLogger("cooc")


def refusal(where: Address) -> StoreError:
    return StoreError(
        f"The index at {where.shown} was made by an earlier cooc, and is moved to the layout of this one when it is "
        f"opened for writing. Nothing is lost, nothing described again: cooc compact --index '{where.shown}'"
    )


def beside(address: str) -> str:
    path, mark, options = address.partition("?")
    return path.rstrip("/") + BESIDE + mark + options


def copy(server: Server, dim: int, store: Store) -> None:
    """All that counts in a collection of the former layout. Tags of damaged vectors wait for these to be described."""
    log.warning("%s is moved to the layout of this cooc, once.", server.address.shown)
    state = json.loads(server.properties()[STATE])
    dead = [range(first, last) for first, last, _ in state["dead"]]
    found = (
        row | {"key": rows.IMAGE + row["key"].partition("-")[0]}
        for row in server.pages(f"row >= 0 and row < {state['next']}", FIELDS, BLOCK)
        if not any(row["row"] in numbers for numbers in dead)
    )
    for block in blocks(found, BLOCK):
        bad = [row for row in block if row["bad"]]
        store.report_bad(BadFile(rows.path(row), row["size"], row["mtime_ns"], row["reason"]) for row in bad)
        images = [(rows.record(row), rows.vector(row)) for row in block if not row["bad"]]
        sound = [(record, vector) for record, vector in images if vector is not None]
        store.add([record for record, _ in sound], np.array([one for _, one in sound], np.float32).reshape(-1, dim))
        lost = (record for record, vector in images if vector is None)
        store.remember(Forgotten(record.sha256, record.path, record.tags, now()) for record in lost)


def take_up(server: Server) -> None:
    """The end of a move, also of one that was cut short there: the new collection gets the name of the dropped one."""
    new = server.address.name + BESIDE
    if not server.ask("has_collection") and server.ask("has_collection", name=new):
        server.ask("rename_collection", server.address.name, name=new)
