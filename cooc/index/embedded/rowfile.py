"""The rows of a search, code and id of each slot: in this process's own memory, and in files that fill it.

    rows-EPOCH-FIRST-LAST.STORAGE   of the slots from FIRST to LAST - 1: crc32 of the name and of all that follows; the
                                    ids (16 bytes each), then the codes

A slot never changes what it holds, so files only ever come; two processes that write one at once write the same. SQLite
has the same rows: it gives those that no file has, and all of them where files are missing, damaged or of another
history. Reading the files is ten times as fast.

Why they are read, not mapped: every file is checked as it comes in, so a flipped bit on disk cannot change an answer;
and nobody can truncate private memory, while a mapped file that another program cuts short (`cp` over it does) ends
the process by SIGBUS. It takes 0.2 s for 100,000 vectors of 512 float32 and 2 s for a million, once for each process,
and as much memory as the search would want in the page cache anyway. Beyond half of the machine's memory the copy is a
file without a name.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from cooc.files import write_whole
from cooc.index.embedded.coding import Codes, Coding
from cooc.index.embedded.nearest import Ids

CHUNK = 16_384  # rows of a file at most

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


class Block(NamedTuple):
    first: int
    last: int
    path: Path


class RowFiles:
    """The files of an epoch."""

    def __init__(self, folder: Path, epoch: str, coding: Coding) -> None:
        self.folder, self.epoch, self.coding = folder, epoch, coding

    def blocks(self) -> Iterator[Block]:
        """By their names, for as long as they follow one another from slot 0 on."""
        pattern = re.compile(rf"rows-{self.epoch}-(\d+)-(\d+)\.{self.coding.name}")
        names = (pattern.fullmatch(path.name) for path in self.folder.glob("rows-*"))
        found = sorted((int(name[1]), int(name[2]), name[0]) for name in names if name)
        longest, slot = {first: Block(first, last, self.folder / name) for first, last, name in found}, 0
        while (block := longest.get(slot)) is not None and block.last > slot:
            yield block
            slot = block.last

    @property
    def count(self) -> int:
        """How many slots there are by the names of the files. Their checksums are looked at by `load`."""
        return max((block.last for block in self.blocks()), default=0)

    def load(self, rows: Rows, last: int) -> Block | None:
        """Fill `rows` until it has slots up to `last`. If a file is not what was written: that one."""
        for block in self.blocks():
            if rows.count >= last or block.last > rows.capacity:
                break
            try:
                if not _read(block, rows):
                    return block
            except FileNotFoundError:  # another process has just cleaned up
                break
            rows.count = block.last
        return None

    def extend(self, fetch: Fetch, last: int) -> None:
        """Write the slots up to `last`."""
        self.folder.mkdir(exist_ok=True)
        for first in range(self.count, last, CHUNK):
            end = min(first + CHUNK, last)
            codes, ids = fetch(first, end)
            path = self.folder / f"rows-{self.epoch}-{first}-{end}.{self.coding.name}"
            write_whole(path, _crc(path, ids, codes) + ids.tobytes() + codes.tobytes())

    def drop(self, first: int = 0) -> None:
        """The files from that slot on; `extend` writes them again."""
        for block in [block for block in self.blocks() if block.first >= first]:
            block.path.unlink(missing_ok=True)


def _read(block: Block, rows: Rows) -> bool:
    """Is it what was written? Then its rows are in their place."""
    ids, codes = rows.ids[block.first : block.last], rows.codes[block.first : block.last]
    with block.path.open("rb", buffering=0) as file:
        crc = file.read(4)
        return _fill(file, ids) and _fill(file, codes) and not file.read(1) and crc == _crc(block.path, ids, codes)


def _crc(path: Path, ids: Ids, codes: Codes) -> bytes:
    return zlib.crc32(codes.data, zlib.crc32(ids.data, zlib.crc32(path.name.encode()))).to_bytes(4, "little")


def _fill(file: IO[bytes], array: Codes) -> bool:
    view = array.reshape(-1).data
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            return False
        view = view[count:]
    return True
