"""The embedded engine: an index is a folder, SQLite in it is the truth, and faiss searches a copy of its vectors.

    index.sqlite        metadata, vectors (`database.py`) and local features (`features.py`), one transaction for each
                        change (`changes.py`)
    writer.lock         held by the process that writes (`locks.py`)
    cache/              the same vectors, laid out for searching (`cache.py`); may be deleted at any time

Every read happens inside one SQLite transaction (`reading.py`), so it sees one committed state while a writer goes on.
That state is known by its epoch, slots given out and slots removed; when these have moved, the view that is
searched (`nearest.py`) is renewed. `upkeep.py` verifies, compacts and copies.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from cooc.errors import StoreError
from cooc.index.checks import read_only
from cooc.index.embedded import changes, features, upkeep
from cooc.index.embedded.coding import Coding
from cooc.index.embedded.database import Connection, connect, create, database, explained, require, version
from cooc.index.embedded.locks import WriterLock
from cooc.index.embedded.reading import IndexFile, Reading
from cooc.index.embedded.rows import RECORD, each, find_slots, good, in_order, matching, read_state
from cooc.index.records import BadFile, Filter, Forgotten, Record, StoreMeta, now, path_bytes, path_text, show
from cooc.index.sql import SqlStore, record
from cooc.index.store import Block, Code, SearchResult, Tally, Vectors, pages

APPROXIMATE_FROM = 200_000  # images: an exact search then takes about 40 ms on two cores
FOLLOW = 4096  # images added before the cache follows

_T = TypeVar("_T")


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
                require(folder)
                connect(folder).close()  # says what is wrong with it, if anything is
                raise StoreError(f"There is an index in {show(folder)} already: open it, or delete the folder first.")
            new = folder / "index.new"
            new.unlink(missing_ok=True)
            with closing(create(new)) as connection:
                connection.execute("INSERT INTO meta VALUES (?)", (meta.as_json(),))
                if meta.features:
                    features.set_engines(connection, meta.features)
                connection.execute("INSERT INTO state VALUES (?, 0, 0, 0, 0)", (uuid4().hex,))
            new.replace(database(folder))
        finally:
            lock.release()
    return EmbeddedStore(folder, write=True)


class EmbeddedStore(SqlStore):
    """`cooc.index.store.Store` in a folder. Threads may share it: reads run side by side, changes one after another."""

    def __init__(self, folder: Path, *, write: bool = False) -> None:
        self.folder, self.shown = folder, f"the index in {show(folder)}"
        self._mutex = threading.RLock()
        self._writer: Connection | None = None
        self._behind = 0
        self._closed = False
        with ExitStack() as opened, explained(folder):
            require(folder)
            if write:
                opened.callback(WriterLock(folder).release)
                self._writer = opened.enter_context(closing(connect(folder, write=True)))
            self._read = Reading(folder)
            opened.callback(self._read.close)  # before the writer: the last one out moves the WAL into the database
            self._opened = opened.pop_all()

    @property
    def meta(self) -> StoreMeta:
        return self._read.file.meta

    @property
    def _coding(self) -> Coding:
        return self._read.file.coding

    def __len__(self) -> int:
        return self._read(lambda connection, _: read_state(connection)).images

    # changes

    def add_all(self, blocks: Iterable[Block]) -> int:
        def work(connection: Connection) -> int:
            count = 0
            for records, vectors, codes in map(self._checked, blocks):
                count += changes.add(connection, records, self._coding.encode(vectors), codes)
            return count

        count = self._write(work)
        self._behind += count
        if self._behind >= FOLLOW:
            self._follow()
        return count

    def remove(self, paths: Iterable[str]) -> int:
        names = [path_bytes(path) for path in paths]
        return self._write(lambda connection: changes.remove(connection, names))

    def rename(self, moves: Mapping[str, str]) -> int:
        return self._write(lambda connection: changes.rename(connection, moves))

    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        rows = [(time, path_bytes(path)) for path, time in mtimes_ns.items()]
        return self._change_each("UPDATE images SET mtime_ns = ? WHERE path = ?", rows)

    def _tag(self, ids: list[bytes], add: frozenset[str], remove: frozenset[str]) -> int:
        return self._write(lambda connection: changes.tag(connection, ids, add, remove))

    def report_bad(self, files: Iterable[BadFile]) -> None:
        """The first report's time stays, whatever the reason is by now; '' where an older cooc did not keep it."""
        time = now()
        self._change_each(
            "INSERT INTO bad VALUES (?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET size = excluded.size,"
            " mtime_ns = excluded.mtime_ns, reason = excluded.reason,"
            " since = CASE since WHEN '' THEN excluded.since ELSE since END",
            [(path_bytes(file.path), file.size, file.mtime_ns, file.reason, file.since or time) for file in files],
        )

    def clear_bad(self, paths: Iterable[str]) -> int:
        return self._change_each("DELETE FROM bad WHERE path = ?", [(path_bytes(path),) for path in paths])

    def remember(self, tags: Iterable[Forgotten]) -> None:
        self._write(lambda connection: changes.keep(connection, tags))

    def _set_engines(self, engines: str) -> None:
        self._write(lambda connection: features.set_engines(connection, engines))
        self._read.file.meta = replace(self.meta, features=engines)

    def _set_features(self, codes: Mapping[str, bytes]) -> None:
        self._write(lambda connection: features.put(connection, codes))

    # questions

    def _images(self, field: str, values: list[bytes]) -> list[Record]:
        query = f"{RECORD} WHERE {field} IN"
        return self._read(lambda connection, _: [record(row) for row in each(connection, query, values)])

    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        table = self._read(lambda connection, _: in_order(connection, where))

        def page(last: bytes, size: int) -> list[Record]:
            condition, values = matching(where, last)
            chosen = f"SELECT slot FROM {table} WHERE {condition} ORDER BY path LIMIT ?"  # nothing larger is sorted
            return self._records(f"slot IN ({chosen}) ORDER BY path", *values, size)

        return pages(page, after, limit)

    def tally(self) -> Tally:
        def work(connection: Connection, _: IndexFile) -> Tally:
            found = Counter(path.rpartition(b"/")[0] for (path,) in connection.execute("SELECT path FROM images"))
            folders = Counter({path_text(folder): count for folder, count in found.items()})
            months = connection.execute("SELECT substr(ifnull(taken, ''), 1, 7), count(*) FROM images GROUP BY 1")
            tags = connection.execute("SELECT tag, count(*) FROM tags GROUP BY tag")
            return Tally(folders, Counter(dict(months)), Counter(dict(tags)))

        return self._read(work)

    def damaged(self) -> Iterator[str]:
        return iter(upkeep.damaged(self._read))

    def _vectors(self, ids: set[bytes]) -> dict[str, tuple[str, Vectors | None]]:
        query = "SELECT id, path, vector, crc FROM images LEFT JOIN vectors USING (slot) WHERE id IN"

        def work(connection: Connection, file: IndexFile) -> dict[str, tuple[str, Vectors | None]]:
            found, width = list(each(connection, query, ids)), file.coding.width
            whole = {name.hex(): data for name, _, data, crc in found if good(data, crc, width)}
            codes = np.frombuffer(b"".join(whole.values()), np.uint8).reshape(len(whole), width)
            vectors = dict(zip(whole, file.coding.unit(codes), strict=True))
            return {name.hex(): (path_text(path), vectors.get(name.hex())) for name, path, *_ in found}

        return self._read(work)

    def _codes(self, ids: set[bytes]) -> list[Code]:
        query = "SELECT id, path, code, crc FROM images JOIN features USING (sha256) WHERE id IN"
        rows = self._read(lambda connection, _: list(each(connection, query, ids)))
        return [
            Code(name.hex(), path_text(path), code if zlib.crc32(code) == crc else None)
            for name, path, code, crc in rows
        ]

    def _features_damaged(self) -> Iterator[Record]:
        for sha256 in self._read(lambda connection, _: features.damaged(connection)):
            yield from self.by_sha256(sha256.hex())

    def _search(self, queries: Vectors, k: int, where: Filter | None, exact: bool | None) -> SearchResult:
        def work(connection: Connection, file: IndexFile) -> Any:
            view = file.cache.view(connection)
            slots = None
            if where is not None and where != Filter():
                slots = view.chosen(where)
                if slots is None:
                    slots = view.alive(find_slots(connection, where))
                    if not where.tags:  # they change without a new view
                        view.remember(where, slots)
            return view, slots

        view, slots = self._read(work)
        self._left_out(view.damaged)
        approximate = view.count >= APPROXIMATE_FROM if exact is None else not exact
        scores, found = view.search(queries, k, slots, approximate)
        names = view.ids[found.ravel()].tobytes().hex()
        ids = [names[start : start + 32] for start in range(0, len(names), 32)]
        width = found.shape[1]
        return SearchResult(scores, [ids[row * width : (row + 1) * width] for row in range(len(queries))])

    # upkeep

    def salvaged(self) -> Iterator[Record]:
        """What can still be read of the images of a damaged index."""
        return upkeep.salvaged(self._read)

    def snapshot(self, dest: str) -> None:
        upkeep.snapshot(self._read, Path(dest))

    def _problems(self) -> list[str]:
        return self._read(lambda connection, file: list(upkeep.problems(self.folder, connection, file)))

    def compact(self) -> None:
        self._write(lambda connection: upkeep.tidy(connection, self._read.file.cache))
        with self._mutex, explained(self.folder):
            assert self._writer is not None
            self._writer.executescript("PRAGMA incremental_vacuum")  # execute() would free one page only
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if len(self) >= APPROXIMATE_FROM and not self._coding.small:
            self.build_graph()
        self._read(lambda connection, file: file.cache.clean(connection))

    def build_graph(self) -> None:
        """Build or extend the graph for approximate search. `compact` does it for large indexes."""
        if self._coding.small:
            return
        graph = self._read(lambda connection, file: file.cache.build_graph(connection))
        statement = "UPDATE state SET graph = ?, graph_crc = ?, graph_ef = ? WHERE epoch = ?"
        self._write(lambda connection: connection.execute(statement, graph))
        self._read(lambda connection, file: file.cache.clean(connection))

    def disk_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def close(self) -> None:
        try:
            if self._behind and not self._closed:
                self._follow()
        finally:
            self._closed = True
            with self._mutex:
                self._opened.close()

    # statements

    def _rows(self, statement: str, *values: object) -> list[Any]:
        return self._read(lambda connection, _: connection.execute(_signs(statement), values).fetchall())

    def _rows_since_3(self, statement: str) -> list[Any]:
        return self._read(lambda file, _: file.execute(statement).fetchall() if version(file) >= 3 else [])

    def _records(self, condition: str, *values: object) -> list[Record]:
        return [record(row) for row in self._rows(f"{RECORD} WHERE {condition}", *values)]

    def _change(self, statement: str, *values: object) -> int:
        return self._write(lambda connection: connection.execute(_signs(statement), values).rowcount)

    def _change_each(self, statement: str, rows: Sequence[tuple[object, ...]]) -> int:
        """The same for each of these values."""
        return self._write(lambda connection: connection.executemany(statement, rows).rowcount if rows else 0)

    def _write(self, work: Callable[[Connection], _T]) -> _T:
        """What `work` returns, in one transaction: committed when it returns, undone when it raises."""
        with self._mutex, explained(self.folder):
            connection = self._writer
            if connection is None or self._closed:
                raise read_only(f"in {show(self.folder)}")
            if connection.moved():
                raise StoreError(f"The index in {show(self.folder)} was replaced by another one: open it again.")
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.commit()
                return result
            except BaseException:
                connection.rollback()
                raise

    def _follow(self) -> None:
        self._read(lambda connection, file: file.cache.follow(connection))
        self._behind = 0


def _signs(statement: str) -> str:
    """As SQLite writes a value."""
    return statement.replace("%s", "?")
