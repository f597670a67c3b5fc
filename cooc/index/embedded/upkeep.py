"""Looking after an embedded index: find damage, give back space, copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np

from cooc.errors import StoreDamagedError, StoreError
from cooc.index.checks import FEATURES_DAMAGED, VECTOR_DAMAGED, WRONG_ID
from cooc.index.embedded import changes, features
from cooc.index.embedded.cache import Cache
from cooc.index.embedded.database import Connection, connect, database, explained
from cooc.index.embedded.reading import IndexFile, Reading
from cooc.index.embedded.rows import RECORD, good, read_state
from cooc.index.records import Record, long_ago, path_bytes, path_text, show
from cooc.index.sql import record

RENUMBER_FROM = 0.1  # share of removed slots from which compacting gives all slots out again
PAGE = 1000  # rows read at once


def damaged(read: Reading) -> list[str]:
    """Paths of images whose vector is not there, or not what was written; in their order, found in that of the disk."""
    found, last = list[str](), -1

    def work(connection: Connection, file: IndexFile) -> list[tuple[int, bytes, bool]]:
        rows = connection.execute(
            "SELECT slot, path, vector, crc FROM images LEFT JOIN vectors USING (slot) WHERE slot > ?"
            " ORDER BY slot LIMIT ?",
            (last, PAGE),
        )
        return [(slot, path, good(data, crc, file.coding.width)) for slot, path, data, crc in rows]

    while page := read(work):
        found += [path_text(path) for _, path, whole in page if not whole]
        last = page[-1][0]
    return sorted(found, key=path_bytes)


def salvaged(read: Reading) -> Iterator[Record]:
    """What can still be read of the images, in no order, where pages of the database are damaged."""
    state = read(lambda connection, _: read_state(connection))

    def between(first: int, last: int) -> list[Record]:
        query = f"{RECORD} NOT INDEXED WHERE slot >= ? AND slot < ?"
        return read(lambda connection, _: [record(row) for row in connection.execute(query, (first, last))])

    for first in range(0, state.slots, PAGE):
        try:
            yield from between(first, min(first + PAGE, state.slots))
        except StoreDamagedError:
            for slot in range(first, min(first + PAGE, state.slots)):
                with suppress(StoreDamagedError, ValueError):
                    yield from between(slot, slot + 1)


def problems(folder: Path, connection: Connection, file: IndexFile) -> Iterator[str]:
    broken = [f"SQLite: {text}" for (text,) in connection.execute("PRAGMA integrity_check") if text != "ok"]
    yield from broken
    if broken:
        return
    state, view = read_state(connection), file.cache.view(connection)
    (images,) = connection.execute("SELECT count(*) FROM images").fetchone()
    if images != state.images:
        yield f"{images} images are kept, {state.images} are expected"
    for table in ("vectors", "tags"):
        lost = connection.execute(f"SELECT slot FROM {table} WHERE slot NOT IN (SELECT slot FROM images) LIMIT 1")
        yield from (f"{table}: row {slot} belongs to no image" for (slot,) in lost)
    rows = connection.execute(
        "SELECT slot, path, sha256, id, vector, crc FROM images LEFT JOIN vectors USING (slot) ORDER BY slot"
    )
    while page := rows.fetchmany(PAGE):
        slots = np.array([row[0] for row in page])
        copies, names, live = view.codes[slots], view.ids[slots], view.live[slots]
        for row, (_, path, sha256, name, data, crc) in enumerate(page):
            text = show(path)
            if not good(data, crc, file.coding.width):
                yield f"{text}: {VECTOR_DAMAGED}"
            elif Record(path_text(path), 0, 0, sha256.hex(), 0, 0).id != name.hex():
                yield f"{text}: {WRONG_ID}"
            elif copies[row].tobytes() != data or names[row].tobytes() != name or not live[row]:
                yield f"{text}: the copy in cache/ differs; delete {show(folder / 'cache')}, it is made again"
    for content in features.damaged(connection) if file.meta.features else ():
        paths = connection.execute("SELECT path FROM images WHERE sha256 = ? ORDER BY path", (content,))
        yield from (f"{show(path)}: {FEATURES_DAMAGED}" for (path,) in paths)


def tidy(connection: Connection, cache: Cache) -> None:
    """Inside a transaction: forget old tags and unused features; give all slots out again where many are holes."""
    connection.execute("DELETE FROM forgotten WHERE removed < ?", (long_ago(),))
    features.drop_unused(connection)
    state = read_state(connection)
    if state.removed and (not state.graph or state.removed >= RENUMBER_FROM * state.slots):
        changes.fill_holes(connection, state)
        cache.follow(connection)  # before the commit: who finds the new epoch finds its file


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A folder to be filled, which takes that name when it is complete."""
    if target.exists():
        raise StoreError(f"{show(target)} exists already: name a folder that does not.")
    new = target.with_name(target.name + ".new")
    with explained(target):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            yield new
            new.replace(target)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def snapshot(read: Reading, target: Path) -> None:
    """A copy of the database; its cache is made when it is first searched."""
    with appearing(target) as new:
        copy = os.fsencode(database(new))
        read(partial(_vacuum, copy))
        with closing(connect(new, write=True)) as connection:
            connection.execute("UPDATE state SET epoch = ?, graph = 0, graph_crc = 0, graph_ef = 0", (uuid4().hex,))
        with database(new).open("rb") as file:
            os.fsync(file.fileno())


def _vacuum(copy: bytes, connection: Connection, _: IndexFile) -> None:
    connection.rollback()  # it is a transaction of its own
    connection.execute("VACUUM INTO CAST(? AS TEXT)", (copy,))
