"""Read files ahead of the decoder: their hash, and what the header of the picture says.

A thread is enough for that beside a CPU that describes one picture a second. A GPU takes hundreds, and then reading in
processes leaves the interpreter, which one thread at a time may use, to those who feed it. Every such process
imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from cooc.errors import CoocError, UnreadableError
from cooc.index.records import Record
from cooc.pictures import Collection, Entry
from cooc.pictures.child_process import start
from cooc.pictures.decode import ImageInfo, Picture, image_info
from cooc.pictures.decoders import Decoders
from cooc.pictures.faults import blame, is_machine

READERS = 4  # threads or processes; hashing and reading let others run
AHEAD = 64  # files that threads read ahead
CHUNK = 16  # files that a process is sent at once
CHUNKS_AHEAD = 3 * READERS

CHANGED = "It changed while it was being read. The next run tries again."


@dataclass(frozen=True)
class Candidate:
    """A file that is new, or not as the index knows it."""

    file: Entry
    known: Record | None
    damaged: bool = False  # is what the index knows of it? Then it is described again, whether it changed or not.


@dataclass(frozen=True)
class Examined(Candidate):
    """The same after its content was read: the header of the picture, or the reason why there is none."""

    sha256: str = ""
    info: ImageInfo | None = None
    picture: Picture | None = None  # to be decoded
    error: CoocError | None = None  # an ImageError (but no UnreadableError) is its content's

    @property
    def record(self) -> Record:
        assert self.info is not None
        return Record(*self.file, self.sha256, self.info.width, self.info.height, self.info.taken)


def examine(collection: Collection, candidate: Candidate) -> Examined:
    """Read the content once: its hash, and what the header says unless the hash is the known one."""
    file, known, damaged = candidate.file, candidate.known, candidate.damaged
    try:
        sha256, picture, later = collection.fetch(file)
        if known is not None and known.sha256 == sha256 and not damaged:
            return Examined(file, known, sha256=sha256)
        info = image_info(picture)
        if not collection.steady and collection.stamp(file) != file.stamp:
            raise UnreadableError(CHANGED)
    except (CoocError, OSError, MemoryError) as error:
        return Examined(file, known, damaged, error=blame(error, repr(collection.address(file.name))))
    return Examined(file, known, damaged, sha256, info, later)


class Reader:
    """Examines files in order and ahead of whoever asks for them: in threads, or in processes once it is told so."""

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        self.chunk, self.ahead = 1, AHEAD
        self.pool: Executor = ThreadPoolExecutor(READERS)

    def use_processes(self) -> None:
        self.chunk, self.ahead = CHUNK, CHUNKS_AHEAD
        self._replace()

    def examined(self, files: Iterable[Candidate]) -> Iterator[Examined]:
        """Files are taken as there is room."""
        running: deque[tuple[list[Candidate], Executor, Future[list[Examined]]]] = deque()
        files = iter(files)
        try:
            while chunk := list(islice(files, self.chunk)):
                running.append((chunk, self.pool, self._submit(chunk)))
                while len(running) >= self.ahead:
                    yield from self._result(*running.popleft())
            while running:
                yield from self._result(*running.popleft())
        finally:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, chunk: list[Candidate]) -> Future[list[Examined]]:
        try:
            return self.pool.submit(_examine_all, self.collection, chunk)
        except (RuntimeError, OSError) as error:  # a process died, or cannot be started: `_result` sees to it
            failed: Future[list[Examined]] = Future()
            failed.set_exception(error)
            return failed

    def _result(self, chunk: list[Candidate], pool: Executor, future: Future[list[Examined]]) -> list[Examined]:
        """Where a process died or could not be started, what was under way there is read one file at a time."""
        try:
            return future.result()
        except Exception as error:
            if not isinstance(error, BrokenExecutor) and not is_machine(error):
                raise
            if pool is self.pool and self.chunk > 1:
                self._replace()
            with Decoders() as alone:
                return [self._alone(alone, one) for one in chunk]

    def _alone(self, alone: Decoders, one: Candidate) -> Examined:
        try:
            return alone.run(_examine_alone, self.collection.address(one.file.name), self.collection, one)
        except CoocError as error:
            return Examined(one.file, one.known, one.damaged, error=error)

    def _replace(self) -> None:
        self.pool.shutdown(wait=False)
        self.pool = ProcessPoolExecutor(READERS, multiprocessing.get_context("spawn"), start)


def _examine_alone(address: str, collection: Collection, file: Candidate) -> Examined:
    return examine(collection, file)


def _examine_all(collection: Collection, chunk: list[Candidate]) -> list[Examined]:
    return [examine(collection, file) for file in chunk]
