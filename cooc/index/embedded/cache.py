"""The files in an embedded index's `cache/`: what SQLite holds, laid out for searching. All of it may be deleted.

    vectors-EPOCH.f32       a page of header, then row s = the vector of slot s; mapped into memory, never read whole.
                            .float16 and .int8 where vectors are stored so
    ids-EPOCH.bin           row s = the 16 bytes of the id of slot s
    graph-EPOCH-N.hnsw      faiss's HNSW graph over the first N slots, without the vectors

A slot never changes what it holds, and a new epoch begins whenever slots are given out anew. So these files only ever
grow, any process may append to them, and a file of another epoch is simply not looked at. The smallest storages (int4,
pq) have no files here: each process reads the codes into a temporary one, and there is no graph.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import sqlite3
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import faiss
import numpy as np
from numpy.typing import NDArray

from cooc.index.embedded.coding import Codes, Coding
from cooc.index.embedded.locks import locked
from cooc.index.embedded.nearest import Graph, Ids, View
from cooc.index.embedded.rows import State, fetch, read_state
from cooc.index.store import Vectors

log = logging.getLogger("cooc")

PAGE = 4096
CHUNK = 16_384  # rows appended at once
HEADER = struct.Struct("<8s32sIQ")  # magic, epoch, dimension, rows; a crc32 of these follows
MAGIC = b"coocvec1"
M, EF_CONSTRUCTION = 32, 80  # measured: as few distances at recall 0.95 as M=16 with ef 200, at half the building time
EFFORTS = (100, 150, 200, 300, 400, 600, 900, 1400)
RECALL = 0.97  # at 100, to be had when a graph is built

Fetch = Callable[[int, int], tuple[Codes, Ids]]  # slots [first, last) from SQLite; of removed ones the id is zero
_T = TypeVar("_T")


class Cache:
    """The cache of one open index: gives the view of a connection's state, and renews it when that has moved."""

    def __init__(self, folder: Path, coding: Coding) -> None:
        self.folder, self.coding = folder, coding
        self._mutex = threading.Lock()
        self._file: VectorFile | None = None
        self._graph: Graph | None = None
        self._seen: tuple[State, View] | None = None
        self._warned = False

    def view(self, connection: sqlite3.Connection) -> View:
        state = read_state(connection)
        with self._mutex:
            if self._seen is None or self._seen[0] != state:
                self._seen = state, self._renewed(connection, state)
            return self._seen[1]

    def _renewed(self, connection: sqlite3.Connection, state: State) -> View:
        """Append what is missing on disk; what cannot be written there is held in memory."""
        load = partial(fetch, connection, self.coding)
        file = self._file
        if file is None or file.epoch != state.epoch:
            self._forget()
            self._file = file = attempt(lambda: VectorFile(self.folder, state.epoch, self.coding, load))
        rows = 0
        if file is not None:
            if file.rows < state.slots:
                attempt(lambda: file.extend(state.slots, load))
            rows = max(0, min(file.rows, state.slots))
        mapped, mapped_ids = file.map(rows) if file is not None else load(0, 0)
        tail, tail_ids = load(rows, state.slots)
        live = np.ones(state.slots, np.bool_)
        live[[slot for (slot,) in connection.execute("SELECT slot FROM removed")]] = False
        there = np.concatenate([mapped_ids, tail_ids]).any(axis=1)
        self._warn(int(np.count_nonzero(live & ~there)))
        live &= there
        if self._graph is None or self._graph.size != state.graph:
            path, covered = self._graph_path(state), mapped[: state.graph]
            usable = 0 < state.graph <= rows
            self._graph = (
                attempt(lambda: load_graph(path, state.graph_crc, state.graph_ef, self.coding, covered))
                if usable
                else None
            )
        return View(self.coding, mapped, mapped_ids, tail, tail_ids, live, int(np.count_nonzero(live)), self._graph)

    def _warn(self, damaged: int) -> None:
        """Once, however often the view is renewed."""
        if damaged and not self._warned:
            self._warned = True
            log.warning(
                "%d pictures are not searched: their vectors are damaged. The next `cooc index` describes them again.",
                damaged,
            )

    def prepare(self, connection: sqlite3.Connection, epoch: str, slots: int) -> None:
        """Write the vectors of an epoch that is yet to be committed."""
        if self.coding.small:
            return
        load = partial(fetch, connection, self.coding)

        def write() -> None:
            with closing(VectorFile(self.folder, epoch, self.coding, load)) as file:
                file.extend(slots, load)

        attempt(write)

    def build_graph(self, connection: sqlite3.Connection) -> tuple[int, int, int, str]:
        """Build the graph, or extend it by what is new; return its size, crc32 and ef, and the epoch."""
        view, state = self.view(connection), read_state(connection)
        size = len(view.mapped)
        if view.graph is not None and view.graph.size == size:
            return size, state.graph_crc, state.graph_ef, state.epoch
        base = self._graph_path(state) if view.graph is not None else None
        vectors = self.coding.decode(view.mapped)
        return size, *build_graph(self._graph_path(state._replace(graph=size)), vectors, base), state.epoch

    def clean(self, connection: sqlite3.Connection) -> None:
        """Delete the files of former epochs. Who still searches there has them open, and keeps them."""
        state = read_state(connection)
        keep = {file_name(self.coding, state.epoch), f"ids-{state.epoch}.bin", self._graph_path(state).name, "lock"}
        for path in self.folder.glob("*"):
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._mutex:
            self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._graph = self._seen = None

    def _graph_path(self, state: State) -> Path:
        return self.folder / f"graph-{state.epoch}-{state.graph}.hnsw"


def attempt(work: Callable[[], _T]) -> _T | None:
    """Do something for the cache. Where the folder cannot be written, searching goes on without it, from memory."""
    try:
        return work()
    except BlockingIOError:  # another process is at it
        return None
    except OSError as error:
        log.warning("The index's cache could not be used and is done without: %s", error)
        return None


def file_name(coding: Coding, epoch: str) -> str:
    return f"vectors-{epoch}.{'f32' if coding.plain else coding.name}"


class VectorFile:
    """The mapped codes and ids of one epoch. Once open they stay valid, whatever others do to the folder."""

    def __init__(self, folder: Path, epoch: str, coding: Coding, fetch: Fetch) -> None:
        """Open the files, or begin new ones where they are missing, damaged, or not what `fetch` says."""
        self.folder, self.epoch, self.coding = folder, epoch, coding
        self._files: tuple[int, ...] = ()
        if coding.small:
            self._begin_unnamed()
            return
        self._open()
        if not self._trusted(fetch):
            with _locked(folder, wait=True):
                self._open()  # another process may have begun new ones meanwhile
                if not self._trusted(fetch):
                    self._begin()
                    self._open()

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = ()

    @property
    def rows(self) -> int:
        """How many slots are on disk, by the header; -1 where it is damaged."""
        data = os.pread(self._files[0], HEADER.size + 4, 0) if self._files else b""
        if len(data) < HEADER.size + 4 or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            return -1
        magic, epoch, dim, rows = HEADER.unpack(data[:-4])
        vectors, ids = (os.fstat(file).st_size for file in self._files)
        fits = vectors >= PAGE + rows * self.coding.width and ids >= rows * 16
        return int(rows) if (magic, epoch, dim) == (MAGIC, self.epoch.encode(), self.coding.dim) and fits else -1

    def map(self, rows: int) -> tuple[Codes, Ids]:
        """The first `rows` rows. Pages are read when they are touched, and shared with every other process."""
        width = self.coding.width
        if rows <= 0:
            return np.empty((0, width), np.uint8), np.empty((0, 16), np.uint8)
        codes = mmap.mmap(self._files[0], PAGE + rows * width, access=mmap.ACCESS_READ)
        ids = mmap.mmap(self._files[1], rows * 16, access=mmap.ACCESS_READ)
        return (
            np.frombuffer(codes, np.uint8, rows * width, PAGE).reshape(rows, width),
            np.frombuffer(ids, np.uint8, rows * 16).reshape(rows, 16),
        )

    def extend(self, last: int, fetch: Fetch) -> None:
        """Append the slots up to `last`. Rows reach the disk before the header counts them."""
        with _locked(self.folder, wait=last - self.rows > CHUNK):
            first = self.rows
            while 0 <= first < last:
                stop = min(first + CHUNK, last)
                codes, ids = fetch(first, stop)
                _write(self._files[1], ids.tobytes(), first * 16)
                _write(self._files[0], codes.tobytes(), PAGE + first * self.coding.width)
                for file in () if self.coding.small else self._files:
                    os.fdatasync(file)
                _write(self._files[0], self._header(stop), 0)
                first = stop

    def _paths(self) -> tuple[Path, Path]:
        return self.folder / file_name(self.coding, self.epoch), self.folder / f"ids-{self.epoch}.bin"

    def _open(self) -> None:
        self.close()
        try:
            for path in self._paths():
                self._files += (_open(path),)
        except FileNotFoundError:
            self.close()

    def _trusted(self, fetch: Fetch) -> bool:
        """A look at a few rows: enough to catch a file of another history; `Store.verify` compares them all."""
        rows = self.rows
        codes, ids = self.map(rows)
        for slot in {rows - 1, *range(0, rows, max(1, rows // 16))} if rows > 0 else ():
            (code,), (name,) = fetch(slot, slot + 1)
            if name.any() and not (np.array_equal(code, codes[slot]) and np.array_equal(name, ids[slot])):
                return False
        return rows >= 0

    def _begin(self) -> None:
        """New files in place of the old: never a truncation, which would pull the pages from under other processes."""
        for path, data in zip(self._paths(), (self._header(0).ljust(PAGE, b"\0"), b""), strict=True):
            new = path.with_suffix(".new")
            new.write_bytes(data)
            new.replace(path)

    def _begin_unnamed(self) -> None:
        """Files that only this process sees, and that are gone when it ends."""
        for data in (self._header(0).ljust(PAGE, b"\0"), b""):
            with tempfile.TemporaryFile() as file:
                self._files += (os.dup(file.fileno()),)
            _write(self._files[-1], data, 0)

    def _header(self, rows: int) -> bytes:
        data = HEADER.pack(MAGIC, self.epoch.encode(), self.coding.dim, rows)
        return data + zlib.crc32(data).to_bytes(4, "little")


def load_graph(path: Path, crc: int, ef: int, coding: Coding, codes: Codes) -> Graph:
    """The graph in `path` over these mapped codes. A damaged one is an OSError: following it could end anywhere."""
    if _crc(path) != crc:
        raise OSError(f"{path} is damaged")
    with path.open("rb") as file:
        index = faiss.read_index(faiss.PyCallbackIOReader(file.read), faiss.IO_FLAG_SKIP_STORAGE)
    storage = coding.borrow(codes)
    index.storage, index.own_fields = storage, False
    return Graph(index, storage, codes, ef)


def build_graph(path: Path, vectors: Vectors, base: Path | None) -> tuple[int, int]:
    """Write the graph over these vectors to `path`, going on from `base` where there is one; return its crc32 and ef.

    Building needs a second copy of the vectors in memory for as long as it takes; searching does not.
    """
    index = faiss.IndexHNSWFlat(vectors.shape[1], M, faiss.METRIC_INNER_PRODUCT)
    if base is not None:
        with base.open("rb") as file:
            index = faiss.read_index(faiss.PyCallbackIOReader(file.read), faiss.IO_FLAG_SKIP_STORAGE)
        storage = faiss.IndexFlatIP(vectors.shape[1])
        storage.add(vectors[: index.ntotal])
        index.storage, index.own_fields = storage, False
    index.hnsw.efConstruction = EF_CONSTRUCTION
    for start in range(index.ntotal, len(vectors), CHUNK):
        index.add(vectors[start : start + CHUNK])
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        writer = faiss.PyCallbackIOWriter(file.write)
        faiss.write_index(index, writer, faiss.IO_FLAG_SKIP_STORAGE)
        del writer  # it holds what it has not yet written
    new.replace(path)
    return _crc(path), _calibrated(index, vectors)


def _calibrated(index: faiss.IndexHNSW, vectors: Vectors) -> int:
    """The least effort that finds what a scan finds in *these* vectors: sets differ tenfold in what they take."""
    rng, k = np.random.default_rng(0), min(100, len(vectors))
    near = vectors[rng.choice(len(vectors), min(64, len(vectors)), replace=False)]
    queries = _unit(near + _unit(rng.normal(size=near.shape)) / 2)  # as another picture of the same thing might be
    _, expected = faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
    for ef in EFFORTS:
        _, found = index.search(queries, k, params=faiss.SearchParametersHNSW(efSearch=ef))
        if np.mean([np.isin(a, b).mean() for a, b in zip(expected, found, strict=True)]) >= RECALL:
            break
    return ef


def _unit(rows: NDArray[np.floating[Any]]) -> Vectors:
    unit: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY)


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _locked(folder: Path, wait: bool) -> AbstractContextManager[None]:
    folder.mkdir(exist_ok=True)
    return locked(folder / "lock", wait=wait)
