"""Images as rows of SQLite: the statements that reading, changing and searching an embedded index share."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cooc.index.embedded.coding import Codes, Coding
from cooc.index.embedded.features import read_engines
from cooc.index.embedded.nearest import Ids, Slots
from cooc.index.records import Filter, StoreMeta, in_words

IDS = 500  # parameters in one SQL statement
MANY = 5000  # images of a time, beyond which they are not sorted

RECORD = (
    "SELECT path, size, mtime_ns, sha256, width, height, taken,"
    " (SELECT json_group_array(tag) FROM tags WHERE tags.slot = images.slot), slot FROM images"
)


class State(NamedTuple):
    """What a search structure depends on; equal states have equal vectors in equal slots."""

    epoch: str
    slots: int  # given out so far
    graph: int  # slots that the HNSW graph covers, 0 for none
    graph_crc: int
    graph_ef: int
    removed: int

    @property
    def images(self) -> int:
        return self.slots - self.removed


def read_state(connection: sqlite3.Connection) -> State:
    query = "SELECT epoch, next_slot, graph, graph_crc, graph_ef, (SELECT count(*) FROM removed) FROM state"
    return State(*connection.execute(query).fetchone())


def read_meta(connection: sqlite3.Connection) -> StoreMeta:
    meta = StoreMeta(**json.loads(connection.execute("SELECT json FROM meta").fetchone()[0]))
    return replace(meta, features=read_engines(connection))


def each(connection: sqlite3.Connection, query: str, values: Iterable[object]) -> Iterator[Any]:
    """Rows of a query that ends in IN, for any number of values."""
    values = list(values)
    for start in range(0, len(values), IDS):
        part = values[start : start + IDS]
        yield from connection.execute(f"{query} ({','.join('?' * len(part))})", part).fetchall()


def good(data: bytes | None, crc: int | None, width: int) -> bool:
    """Is it what was written? (None: the row is not there at all.)"""
    return data is not None and len(data) == width and zlib.crc32(data) == crc


matching = partial(in_words, value="?", tagged="slot IN (SELECT slot FROM tags WHERE tag = ?)")


def find_slots(connection: sqlite3.Connection, where: Filter) -> Slots:
    """Slots of the images that match, in order. As one text: half the time of a row for each, and other threads run."""
    condition, values = matching(where)
    (text,) = connection.execute(f"SELECT group_concat(slot) FROM images WHERE {condition}", values).fetchone()
    return np.sort(np.fromstring(text, np.int64, sep=",")) if text else np.empty(0, np.int64)


def in_order(connection: sqlite3.Connection, where: Filter | None) -> str:
    """The table to list images from, in the order of paths, with the index that finds the first of them soonest.

    SQLite would guess. Few that were taken in a time are found by it and sorted; of many, the next are never far.
    """
    if where is None or (where.taken_from is None and where.taken_to is None):
        return "images"
    time, values = matching(replace(where, prefix=None, tags=frozenset()))
    query = f"SELECT count(*) FROM (SELECT 1 FROM images INDEXED BY images_taken WHERE {time} LIMIT {MANY})"
    (count,) = connection.execute(query, values).fetchone()
    return f"images INDEXED BY {'images_taken' if count < MANY else 'sqlite_autoindex_images_1'}"


def fetch(connection: sqlite3.Connection, coding: Coding, first: int, last: int) -> tuple[Codes, Ids]:
    """Codes and ids of the slots [first, last); blank and zero where the image was removed or its vector is damaged."""
    codes, ids = np.full((last - first, coding.width), coding.blank, np.uint8), np.zeros((last - first, 16), np.uint8)
    rows = connection.execute(
        "SELECT slot, id, vector, crc FROM vectors JOIN images USING (slot) WHERE slot >= ? AND slot < ?", (first, last)
    )
    for slot, name, data, crc in rows:
        if good(data, crc, coding.width):
            codes[slot - first] = np.frombuffer(data, np.uint8)
            ids[slot - first] = np.frombuffer(name, np.uint8)
    return codes, ids
