"""What is searched: the rows of SQLite in this process's memory, and a graph over them where there are many.

The folder `cache/` keeps both for the next process (`rowfile.py`, `graph.py`). All of it may be deleted; where it
cannot be written, or is not what was written, SQLite is read instead. A file of another epoch is not looked at.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from cooc.index.embedded.coding import Codes, Coding
from cooc.index.embedded.nearest import Graph, View
from cooc.index.embedded.rowfile import CHUNK, Fetch, RowFiles, Rows
from cooc.index.embedded.rows import State, fetch, read_state

log = logging.getLogger("cooc")

FILED_FROM = 4096  # rows that the file has not, from which they are written there; fewer come from SQLite in no time
SAMPLE = 16  # rows by which a file of another history is known

_T = TypeVar("_T")


class Cache:
    """The cache of one open index: gives the view of a connection's state, and renews it when that has moved."""

    def __init__(self, folder: Path, coding: Coding) -> None:
        self.folder, self.coding = folder, coding
        self._mutex = threading.Lock()
        self._rows: Rows | None = None
        self._graph: Graph | None = None
        self._seen: tuple[State, View] | None = None

    def view(self, connection: sqlite3.Connection) -> View:
        state = read_state(connection)
        with self._mutex:
            if self._seen is None or self._seen[0] != state:
                self._seen = state, self._renewed(connection, state)
            return self._seen[1]

    def _renewed(self, connection: sqlite3.Connection, state: State) -> View:
        rows = self._filled(connection, state)
        codes, ids = rows.get(0, state.slots)
        live = np.ones(state.slots, np.bool_)
        live[[slot for (slot,) in connection.execute("SELECT slot FROM removed")]] = False
        there = np.bitwise_or.reduce(ids.view(np.uint64), axis=1) != 0  # no id: there was nothing good to fetch
        damaged = int(np.count_nonzero(live & ~there))
        live &= there
        if self._graph is None or self._graph.size != state.graph:
            self._graph = attempt(lambda: self._load(state, codes)) if 0 < state.graph <= len(codes) else None
        return View(self.coding, codes, ids, live, int(np.count_nonzero(live)), damaged, self._graph)

    def _filled(self, connection: sqlite3.Connection, state: State) -> Rows:
        """All rows of a state in memory: those that are there, then those in the file, then those in SQLite alone."""
        load, rows, missing = partial(fetch, connection, self.coding), self._rows, 0
        if rows is None or rows.epoch != state.epoch or state.slots > rows.capacity:
            self._forget()  # first: for a moment there may be no room for both
            rows = Rows(state.epoch, self.coding, state.slots + state.slots // 4 + CHUNK)
            attempt(lambda: self._read_file(rows, state, load))
        while rows.count < state.slots:
            codes, ids = load(rows.count, min(rows.count + CHUNK, state.slots))
            rows.append(codes, ids)
            missing += len(ids)
        if missing >= FILED_FROM and not self.coding.small:
            attempt(lambda: self._files(state).extend(rows.get, state.slots))
        self._rows = rows
        return rows

    def _read_file(self, rows: Rows, state: State, load: Fetch) -> None:
        files = self._files(state)
        damaged = files.load(rows, state.slots)
        if damaged is not None:
            log.warning("%s is damaged, and made again from the index.", damaged.path)
            files.drop(damaged.first)
        if not _agree(rows, state, load):
            rows.count = 0
            files.drop()

    def follow(self, connection: sqlite3.Connection) -> None:
        """Bring the file up to date without a search: by who writes, for those who will search."""
        state = read_state(connection)
        files = self._files(state)
        if not self.coding.small and state.slots - files.count >= FILED_FROM:
            attempt(lambda: files.extend(partial(fetch, connection, self.coding), state.slots))

    def _load(self, state: State, codes: Codes) -> Graph:
        from cooc.index.embedded.graph import load_graph

        path, covered = self._graph_path(state), codes[: state.graph]
        return load_graph(path, state.graph_crc, state.graph_ef, self.coding, covered)

    def build_graph(self, connection: sqlite3.Connection) -> tuple[int, int, int, str]:
        """Build the graph, or extend it by what is new; return its size, crc32 and ef, and the epoch."""
        from cooc.index.embedded.graph import build_graph

        view, state = self.view(connection), read_state(connection)
        size = len(view.codes)
        if view.graph is not None and view.graph.size == size:
            return size, state.graph_crc, state.graph_ef, state.epoch
        base = self._graph_path(state) if view.graph is not None else None
        vectors = self.coding.decode(view.codes)
        return size, *build_graph(self._graph_path(state._replace(graph=size)), vectors, base), state.epoch

    def clean(self, connection: sqlite3.Connection) -> None:
        """Delete the files of former epochs, and those of older versions of cooc."""
        state = read_state(connection)
        keep = {block.path for block in self._files(state).blocks()} | {self._graph_path(state)}
        for path in self.folder.glob("*"):
            if path not in keep:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._mutex:
            self._forget()

    def _forget(self) -> None:
        self._rows = self._graph = self._seen = None

    def _files(self, state: State) -> RowFiles:
        return RowFiles(self.folder, state.epoch, self.coding)

    def _graph_path(self, state: State) -> Path:
        return self.folder / f"graph-{state.epoch}-{state.graph}.hnsw"


def _agree(rows: Rows, state: State, load: Fetch) -> bool:
    """A look at a few rows: enough to catch a file of another history, where all rows from some slot on differ."""
    count = min(rows.count, state.slots)
    for slot in {count - 1, *range(0, count, max(1, count // SAMPLE))} if count else ():
        code, name = load(slot, slot + 1)
        if name.any() and not (np.array_equal(code[0], rows.codes[slot]) and np.array_equal(name[0], rows.ids[slot])):
            return False
    return True


def attempt(work: Callable[[], _T]) -> _T | None:
    """Do something for the cache. Where the folder cannot be read or written, searching goes on without it."""
    try:
        return work()
    except OSError as error:
        log.warning("The index's cache could not be used and is done without: %s", error)
        return None
