"""The embedded engine: an index is a folder, SQLite in it is the truth, and faiss searches a cache of its vectors.

    index.sqlite        metadata and vectors (see `database.py`), one transaction for each change
    writer.lock         held by the process that writes
    cache/              the same vectors, mapped into memory for searching (see `_cache.py`); may be deleted at any time

Every read happens inside one SQLite transaction, so it sees one committed state while a writer goes on. That state is
known by three numbers (epoch, slots given out, slots removed); when they have moved, the view of the cache is renewed.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

import numpy as np

from cooc.errors import CoocError, InputError, StoreError
from cooc.index.embedded.cache import Cache
from cooc.index.embedded.coding import Coding
from cooc.index.embedded.database import WriterLock, connect, create, database, explained, require, show
from cooc.index.embedded.rows import (
    RECORD,
    State,
    drop,
    each,
    find_slots,
    in_order,
    matching,
    read_meta,
    read_state,
    record,
    renumber,
)
from cooc.index.store import (
    BadFile,
    Filter,
    Record,
    SearchResult,
    StoreMeta,
    Vectors,
    check_tags,
    check_vectors,
    id_bytes,
    path_bytes,
    path_text,
)

APPROXIMATE_FROM = 200_000  # images: an exact search then takes about 40 ms on two cores
RENUMBER_FROM = 0.1  # share of removed slots from which compacting gives all slots out anew
CATCH_UP = 4096  # images added before the cache follows
PAGE = 1000  # records read at once


def open_store(address: str, *, write: bool = False) -> EmbeddedStore:
    return EmbeddedStore(Path(address), write=write)


def create_store(address: str, meta: StoreMeta) -> EmbeddedStore:
    folder = Path(address)
    Coding(meta.storage, meta.dim)  # refuses what cannot be stored so
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(folder)
        try:
            if database(folder).exists():
                raise StoreError(f"There is an index in {show(folder)} already: open it, or delete the folder first.")
            new = folder / "index.new"
            new.unlink(missing_ok=True)
            connection = create(new)
            try:
                connection.execute("INSERT INTO meta VALUES (?)", (json.dumps(asdict(meta)),))
                connection.execute("INSERT INTO state VALUES (?, 0, 0, 0, 0)", (uuid4().hex,))
            finally:
                connection.close()
            new.replace(database(folder))
        finally:
            lock.release()
    return EmbeddedStore(folder, write=True)


class EmbeddedStore:
    """`cooc.index.store.Store` in a folder. Threads may share it: reads run side by side, changes one after another."""

    def __init__(self, folder: Path, *, write: bool = False) -> None:
        self.folder = folder
        self._idle: deque[sqlite3.Connection] = deque()
        self._mutex = threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._behind = 0
        self._closed = threading.Event()
        require(folder)
        with ExitStack() as opened, explained(folder):
            if write:
                opened.callback(WriterLock(folder).release)
                self._writer = opened.enter_context(closing(connect(folder, write=True)))
            opened.callback(self._close_idle)  # before the writer: the last one out moves the WAL into the database
            self._idle.append(connect(folder))
            with self._reading() as connection:
                self.meta = read_meta(connection)
            self._coding = Coding(self.meta.storage, self.meta.dim)
            self._cache = Cache(folder / "cache", self._coding)
            opened.callback(self._cache.close)
            self._opened = opened.pop_all()

    def __len__(self) -> int:
        with self._reading() as connection:
            state = read_state(connection)
            return state.slots - state.removed

    # changes

    def add(self, records: Sequence[Record], vectors: Vectors) -> None:
        vectors = check_vectors(np.asarray(vectors), self.meta.dim)
        if len(records) != len(vectors):
            raise InputError(f"{len(records)} records came with {len(vectors)} vectors: one for each is needed.")
        latest = {path_bytes(record.path): row for row, record in enumerate(records)}
        codes = self._coding.encode(vectors)
        with self._writing() as connection:
            had = drop(connection, list(latest))
            first = read_state(connection).slots
            rows = [
                (slot, path, records[row], codes[row].tobytes())
                for slot, (path, row) in enumerate(latest.items(), first)
            ]
            connection.executemany(
                "INSERT INTO images VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (
                        slot,
                        path,
                        bytes.fromhex(r.id),
                        r.size,
                        r.mtime_ns,
                        bytes.fromhex(r.sha256),
                        r.width,
                        r.height,
                        r.taken,
                    )
                    for slot, path, r, _ in rows
                ),
            )
            connection.executemany(
                "INSERT INTO vectors VALUES (?, ?, ?)", ((s, v, zlib.crc32(v)) for s, _, _, v in rows)
            )
            connection.executemany(
                "INSERT INTO tags VALUES (?, ?)",
                ((tag, slot) for slot, path, record, _ in rows for tag in record.tags | had.get(path, frozenset())),
            )
            connection.executemany("DELETE FROM bad WHERE path = ?", ((path,) for path in latest))
            connection.execute("UPDATE state SET next_slot = ?", (first + len(rows),))
        self._behind += len(rows)
        if self._behind >= CATCH_UP and not self._coding.small:
            self._catch_up()

    def remove(self, paths: Iterable[str]) -> int:
        with self._writing() as connection:
            return len(drop(connection, [path_bytes(path) for path in paths]))

    def rename(self, moves: Mapping[str, str]) -> int:
        if len(set(moves.values())) < len(moves):
            raise InputError("Two images cannot be moved to one path.")
        wanted = {path_bytes(old): path_bytes(new) for old, new in moves.items() if old != new}
        with self._writing() as connection:
            found = {
                path: (slot, sha256)
                for path, slot, sha256 in each(
                    connection, "SELECT path, slot, sha256 FROM images WHERE path IN", wanted
                )
            }
            drop(connection, [wanted[path] for path in found if wanted[path] not in found])
            # Through names that no file can have, so that images may change places.
            connection.executemany(
                "UPDATE images SET path = ? WHERE slot = ?", ((b"\0%d" % s, s) for s, _ in found.values())
            )
            first = read_state(connection).slots
            for path, (old, sha256) in found.items():
                name = Record(path_text(wanted[path]), 0, 0, sha256.hex(), 0, 0).id
                connection.execute(
                    "UPDATE images SET path = ?, id = ? WHERE slot = ?", (wanted[path], bytes.fromhex(name), old)
                )
            renumber(connection, [(old, slot) for slot, (old, _) in enumerate(found.values(), first)])
            connection.executemany("INSERT INTO removed VALUES (?)", ((old,) for old, _ in found.values()))
            connection.execute("UPDATE state SET next_slot = ?", (first + len(found),))
            return len(found)

    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        with self._writing() as connection:
            return (
                connection.executemany(
                    "UPDATE images SET mtime_ns = ? WHERE path = ?",
                    ((m, path_bytes(path)) for path, m in mtimes_ns.items()),
                ).rowcount
                if mtimes_ns
                else 0
            )

    def tag(self, ids: Iterable[str], add: Iterable[str] = (), remove: Iterable[str] = ()) -> int:
        add, remove = set(add), set(remove)
        check_tags(add)
        with self._writing() as connection:
            slots = [slot for (slot,) in each(connection, "SELECT slot FROM images WHERE id IN", map(id_bytes, ids))]
            connection.executemany(
                "DELETE FROM tags WHERE tag = ? AND slot = ?", ((t, s) for t in remove for s in slots)
            )
            connection.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", ((t, s) for t in add for s in slots))
            return len(slots)

    def report_bad(self, files: Iterable[BadFile]) -> None:
        rows = [(path_bytes(file.path), file.size, file.mtime_ns, file.reason) for file in files]
        with self._writing() as connection:
            connection.executemany("INSERT OR REPLACE INTO bad VALUES (?, ?, ?, ?)", rows)

    def clear_bad(self, paths: Iterable[str]) -> int:
        names = [(path_bytes(path),) for path in paths]
        with self._writing() as connection:
            return connection.executemany("DELETE FROM bad WHERE path = ?", names).rowcount if names else 0

    # questions

    def get(self, ids: Sequence[str]) -> list[Record | None]:
        with self._reading() as connection:
            found = {r.id: r for r in map(record, each(connection, f"{RECORD} WHERE id IN", map(id_bytes, ids)))}
        return [found.get(name) for name in ids]

    def find(self, paths: Sequence[str]) -> list[Record | None]:
        with self._reading() as connection:
            found = {
                r.path: r for r in map(record, each(connection, f"{RECORD} WHERE path IN", map(path_bytes, paths)))
            }
        return [found.get(path) for path in paths]

    def by_sha256(self, sha256: str) -> list[Record]:
        with self._reading() as connection:
            rows = connection.execute(f"{RECORD} WHERE sha256 = ? ORDER BY path", (bytes.fromhex(sha256),))
            return [record(row) for row in rows]

    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        last = b"" if after is None else path_bytes(after)
        with self._reading() as connection:
            table = in_order(connection, where)
        while limit is None or limit > 0:
            size = PAGE if limit is None else min(PAGE, limit)
            condition, values = matching(where, last)
            chosen = f"SELECT slot FROM {table} WHERE {condition} ORDER BY path LIMIT ?"  # nothing larger is sorted
            with self._reading() as connection:
                rows = connection.execute(
                    f"{RECORD} WHERE slot IN ({chosen}) ORDER BY path", (*values, size)
                ).fetchall()
            yield from map(record, rows)
            if len(rows) < size:
                return
            last = rows[-1][1]
            limit = None if limit is None else limit - size

    def bad_files(self) -> Iterator[BadFile]:
        last = b""
        while True:
            with self._reading() as connection:
                rows = connection.execute(
                    "SELECT * FROM bad WHERE path > ? ORDER BY path LIMIT ?", (last, PAGE)
                ).fetchall()
            yield from (BadFile(path_text(path), *rest) for path, *rest in rows)
            if len(rows) < PAGE:
                return
            last = rows[-1][0]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        names = [id_bytes(name) for name in ids]
        with self._reading() as connection:
            found = dict(each(connection, "SELECT id, vector FROM images JOIN vectors USING (slot) WHERE id IN", names))
        if missing := [name for name in names if name not in found]:
            raise InputError(f"There is no image {missing[0].hex()} in the index in {show(self.folder)}: search again.")
        codes = np.frombuffer(b"".join(found[name] for name in names), np.uint8).reshape(len(names), self._coding.width)
        return self._coding.unit(codes).copy()

    def search(
        self, queries: Vectors, k: int, *, where: Filter | None = None, exact: bool | None = None
    ) -> SearchResult:
        queries = check_vectors(np.asarray(queries), self.meta.dim)
        if k < 1:
            raise InputError(f"k must be at least 1, not {k}.")
        with self._reading() as connection:
            view = self._cache.view(connection)
            slots = None
            if where is not None and where != Filter():
                slots = view.chosen(where)
                if slots is None:
                    slots = find_slots(connection, where)
                    if not where.tags:  # they change without a new view
                        view.remember(where, slots)
        approximate = view.count >= APPROXIMATE_FROM if exact is None else not exact
        scores, found = view.search(queries, k, slots, approximate)
        names = view.ids(found.ravel()).tobytes().hex()
        ids = [names[start : start + 32] for start in range(0, len(names), 32)]
        width = found.shape[1]
        return SearchResult(scores, [ids[row * width : (row + 1) * width] for row in range(len(queries))])

    # upkeep

    def snapshot(self, dest: str) -> None:
        target = Path(dest)
        if target.exists():
            raise StoreError(f"{show(target)} exists already: name a folder that does not.")
        new = target.with_name(target.name + ".new")
        with explained(target):
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            copy = database(new)
            with self._connection() as connection:
                connection.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(copy),))
            with closing(connect(new, write=True)) as connection:
                connection.execute("UPDATE state SET epoch = ?, graph = 0, graph_crc = 0, graph_ef = 0", (uuid4().hex,))
            new.replace(target)

    def verify(self) -> list[str]:
        problems: list[str] = []
        try:
            with self._reading() as connection:
                problems += [
                    f"SQLite: {text}" for (text,) in connection.execute("PRAGMA integrity_check") if text != "ok"
                ]
                if not problems:
                    problems += self._verify_rows(connection)
        except CoocError as error:
            problems.append(str(error))
        return problems

    def _verify_rows(self, connection: sqlite3.Connection) -> Iterator[str]:
        state, view = read_state(connection), self._cache.view(connection)
        (images,) = connection.execute("SELECT count(*) FROM images").fetchone()
        if images != state.slots - state.removed:
            yield f"{images} images are kept, {state.slots - state.removed} are expected"
        for table in ("vectors", "tags"):
            lost = connection.execute(f"SELECT slot FROM {table} WHERE slot NOT IN (SELECT slot FROM images) LIMIT 1")
            yield from (f"{table}: row {slot} belongs to no image" for (slot,) in lost)
        rows = connection.execute(
            "SELECT slot, path, sha256, id, vector, crc FROM images LEFT JOIN vectors USING (slot) ORDER BY slot"
        )
        while page := rows.fetchmany(PAGE):
            slots = np.array([row[0] for row in page])
            copies, names, live = view.codes(slots), view.ids(slots), view.live[slots]
            for row, (_, path, sha256, name, data, crc) in enumerate(page):
                text = show(Path(path_text(path)))
                if data is None or len(data) != self._coding.width or zlib.crc32(data) != crc:
                    yield f"{text}: the vector is damaged; remove the image and index it again"
                elif Record(path_text(path), 0, 0, sha256.hex(), 0, 0).id != name.hex():
                    yield f"{text}: the id does not fit content and path; remove the image and index it again"
                elif copies[row].tobytes() != data or names[row].tobytes() != name or not live[row]:
                    yield f"{text}: the copy in cache/ differs; delete {show(self.folder / 'cache')}, it is made anew"

    def compact(self) -> None:
        with self._writing() as connection:
            state = read_state(connection)
            if state.removed and (not state.graph or state.removed >= RENUMBER_FROM * state.slots):
                self._fill_holes(connection, state)
        with self._mutex, explained(self.folder):
            connection.executescript("PRAGMA incremental_vacuum")  # execute() would free one page only
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if len(self) >= APPROXIMATE_FROM and not self._coding.small:
            self.build_graph()
        with self._reading() as connection:
            self._cache.clean(connection)

    def _fill_holes(self, connection: sqlite3.Connection, state: State) -> None:
        """Move the last images into the slots of removed ones: work for what was removed, not for what is kept."""
        count, epoch = state.slots - state.removed, uuid4().hex
        holes = connection.execute("SELECT slot FROM removed WHERE slot < ? ORDER BY slot", (count,)).fetchall()
        last = connection.execute("SELECT slot FROM images WHERE slot >= ? ORDER BY slot", (count,)).fetchall()
        renumber(connection, [(old, new) for (old,), (new,) in zip(last, holes, strict=True)])
        connection.execute("DELETE FROM removed")
        connection.execute(
            "UPDATE state SET epoch = ?, next_slot = ?, graph = 0, graph_crc = 0, graph_ef = 0", (epoch, count)
        )
        # Before the commit: readers find the new cache as soon as they find the new epoch.
        self._cache.prepare(connection, epoch, count)

    def build_graph(self) -> None:
        """Build or extend the graph for approximate search. `compact` does it for large indexes."""
        if self._coding.small:
            return
        with self._reading() as connection:
            graph = self._cache.build_graph(connection)
        with self._writing() as connection:
            connection.execute("UPDATE state SET graph = ?, graph_crc = ?, graph_ef = ? WHERE epoch = ?", graph)
        with self._reading() as connection:
            self._cache.clean(connection)

    def disk_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def close(self) -> None:
        try:
            if self._behind and not self._coding.small and not self._closed.is_set():
                self._catch_up()
        finally:
            self._closed.set()
            with self._mutex:
                self._opened.close()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # how it works

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading that nobody else uses meanwhile."""
        if self._closed.is_set():
            raise StoreError(f"The index in {show(self.folder)} has been closed: open it again.")
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = connect(self.folder)
        try:
            with explained(self.folder):
                yield connection
        finally:
            self._idle.append(connection)
            if self._closed.is_set():  # by another thread, meanwhile
                self._close_idle()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.rollback()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        if self._writer is None or self._closed.is_set():
            raise StoreError(f"The index in {show(self.folder)} is open for reading only: open it with write=True.")
        with self._mutex, explained(self.folder):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.commit()
            except BaseException:
                self._writer.rollback()
                raise

    def _catch_up(self) -> None:
        with self._reading() as connection:
            self._cache.view(connection)
        self._behind = 0
