"""The rows of a search, code and id of each slot: in this process's own memory, and in a file that fills it.

    rows-EPOCH.STORAGE      "coocrows", epoch, bytes of a code, crc32 of these; then blocks, each of them
                            first slot, rows, crc32 of the block; the ids of its slots (16 bytes each), then their codes

A slot never changes what it holds, so both only ever grow. SQLite has the same rows: it gives those that the file has
not, and all of them where the file is missing, damaged or of another history. Reading the file is ten times as fast.

Why it is read, not mapped: every block is checked as it comes in, so a flipped bit on disk cannot change an answer;
and nobody can truncate private memory, while a mapped file that another program cuts short (`cp` over it does) ends
the process by SIGBUS. It takes 0.2 s for 100,000 vectors of 512 float32 and 2 s for a million, once for each process,
and as much memory as the search would want in the page cache anyway. Beyond half of the machine's memory the copy is a
file without a name.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from filelock import FileLock

from cooc.index.embedded.coding import Codes, Coding
from cooc.index.embedded.nearest import Ids

CHUNK = 16_384  # rows of a block at most
MAGIC = b"coocrows"
HEADER = struct.Struct("<8s32sII")  # magic, epoch, bytes of a code, crc32 of these
BLOCK = struct.Struct("<QII")  # first slot, rows, crc32 of these two and of all that follows

Fetch = Callable[[int, int], tuple[Codes, Ids]]  # slots [first, last)


class Rows:
    """Slots 0..count-1 of an epoch in memory. They only grow, so arrays that were given out stay true."""

    def __init__(self, epoch: str, coding: Coding, capacity: int) -> None:
        self.epoch, self.capacity, self.count = epoch, capacity, 0
        size = capacity * (coding.width + 16)
        memory = _memory(size)
        self.codes: Codes = memory[: capacity * coding.width].reshape(capacity, coding.width)
        self.ids: Ids = memory[capacity * coding.width :].reshape(capacity, 16)

    def append(self, codes: Codes, ids: Ids) -> None:
        first, last = self.count, self.count + len(codes)
        self.codes[first:last], self.ids[first:last] = codes, ids
        self.count = last

    def get(self, first: int, last: int) -> tuple[Codes, Ids]:
        return self.codes[first:last], self.ids[first:last]


def _memory(size: int) -> Codes:
    """Bytes that are taken when they are first written to."""
    if size <= _machine() // 2:
        return np.empty(size, np.uint8)
    with tempfile.TemporaryFile() as file:  # without a name: nobody else can open it, and it goes with this process
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, not a signal later
        else:
            file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


def _machine() -> int:
    """Bytes of memory that this process may count on: of the machine, or of its container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if hasattr(os, "sysconf") else [8 << 30]
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)


class _Block(NamedTuple):
    offset: int
    first: int
    rows: int
    crc: int

    @property
    def last(self) -> int:
        return self.first + self.rows


class RowFile:
    """The file of an epoch. Whoever may write here appends to it; the lock is for these alone."""

    def __init__(self, folder: Path, epoch: str, coding: Coding) -> None:
        self.folder, self.epoch, self.width = folder, epoch, coding.width
        self.path = folder / file_name(epoch, coding)

    @property
    def count(self) -> int:
        """How many slots it says it has. Their checksums are looked at by `load`."""
        try:
            with self.path.open("rb") as file:
                return max((block.last for block in self._blocks(file)), default=0)
        except FileNotFoundError:
            return 0

    def load(self, rows: Rows, last: int) -> _Block | None:
        """Read blocks into `rows` until it has slots up to `last`. If a block is not what was written: that one."""
        try:
            with self.path.open("rb", buffering=0) as file:
                for block in self._blocks(file):
                    if rows.count >= last or block.last > rows.capacity:
                        return None
                    codes, ids = rows.codes[block.first : block.last], rows.ids[block.first : block.last]
                    if not self._read(file, block, codes, ids):
                        return block
                    rows.count = block.last
        except FileNotFoundError:
            pass
        return None

    def extend(self, fetch: Fetch, last: int) -> None:
        """Append the slots up to `last`. filelock's Timeout where another process is at it."""
        self.folder.mkdir(exist_ok=True)
        with FileLock(self.folder / "lock", blocking=False), _open(self.path) as file:
            blocks = list(self._blocks(file))
            if not blocks:
                file.seek(0)
                file.write(self._header())
            end = blocks[-1].offset + self._size(blocks[-1].rows) if blocks else HEADER.size
            file.truncate(end)  # what a process left half written
            file.seek(end)
            for first in range(blocks[-1].last if blocks else 0, last, CHUNK):
                codes, ids = fetch(first, min(first + CHUNK, last))
                head = struct.pack("<QI", first, len(ids))
                crc = _crc(head, ids, codes)
                file.write(head + crc.to_bytes(4, "little") + ids.tobytes() + codes.tobytes())

    def cut(self, damaged: _Block | None = None) -> None:
        """Keep what comes before a damaged block, or nothing at all; it is appended again by `extend`."""
        with FileLock(self.folder / "lock"), _open(self.path) as file:
            if damaged is None:
                file.truncate(0)
                return
            codes, ids = np.empty((damaged.rows, self.width), np.uint8), np.empty((damaged.rows, 16), np.uint8)
            if damaged in self._blocks(file) and not self._read(file, damaged, codes, ids):  # nobody was faster
                file.truncate(damaged.offset)

    def _blocks(self, file: IO[bytes]) -> Iterator[_Block]:
        """By their heads, for as long as these follow one another and the file is long enough."""
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        if file.read(HEADER.size) != self._header():
            return
        offset, slot = HEADER.size, 0
        while offset + BLOCK.size <= size:
            file.seek(offset)
            block = _Block(offset, *BLOCK.unpack(file.read(BLOCK.size)))
            offset += self._size(block.rows)
            if block.first != slot or not 0 < block.rows <= CHUNK or offset > size:
                return
            slot = block.last
            yield block

    def _read(self, file: IO[bytes], block: _Block, codes: Codes, ids: Ids) -> bool:
        """Fill the arrays. Is it what was written?"""
        file.seek(block.offset + BLOCK.size)
        whole = _fill(file, ids) and _fill(file, codes)
        return whole and _crc(struct.pack("<QI", block.first, block.rows), ids, codes) == block.crc

    def _header(self) -> bytes:
        data = HEADER.pack(MAGIC, self.epoch.encode(), self.width, 0)[:-4]
        return data + zlib.crc32(data).to_bytes(4, "little")

    def _size(self, rows: int) -> int:
        return BLOCK.size + rows * (16 + self.width)


def file_name(epoch: str, coding: Coding) -> str:
    return f"rows-{epoch}.{coding.name}"


def _crc(head: bytes, ids: Ids, codes: Codes) -> int:
    return zlib.crc32(codes.data, zlib.crc32(ids.data, zlib.crc32(head)))


def _fill(file: IO[bytes], array: Codes) -> bool:
    view = array.reshape(-1).data
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            return False
        view = view[count:]
    return True


def _open(path: Path) -> IO[bytes]:
    """For reading and writing; made if it is not there."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b")
