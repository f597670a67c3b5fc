"""What a decoding process does. Every worker imports this module, so it imports nothing heavy.

Pixels come back through memory that both processes see: through a pipe, two megabytes for each picture would keep the
one thread that reads it busy, and a GPU waiting.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from cooc.errors import CoocError, ImageError, MachineError
from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture, load_image
from cooc.pictures.malloc import keep_memory

__all__ = ["Alone", "Place", "Shared", "load", "start"]

Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # (H, W, 3)
T = TypeVar("T")
CRASHES = ("SIGSEGV", "SIGILL", "SIGFPE")  # a program ends so by what it was given; by others, it was ended

_memory: mmap.mmap | None = None  # in a worker: that of its parent


class Place(NamedTuple):
    """Where in the shared memory a picture may be put."""

    offset: int
    size: int


class Shared:
    """Memory for `count` pictures of at most `size` bytes; none where the system cannot do this (then pipes are used).

    It has no name in any file system: it goes with the last process that uses it, however that ends.
    """

    def __init__(self, count: int, size: int) -> None:
        self.address = ""
        self.free: deque[Place] = deque()
        self._file = -1
        if not count or not hasattr(os, "memfd_create"):
            return
        self._file = os.memfd_create("cooc")
        os.ftruncate(self._file, count * size)
        self._bytes = mmap.mmap(self._file, count * size)
        self.address = f"/proc/{os.getpid()}/fd/{self._file}"
        self.free.extend(Place(i * size, size) for i in range(count))

    def view(self, place: Place, shape: tuple[int, ...]) -> Pixels:
        """What a worker has put there. It stays until the place is free again."""
        return _view(self._bytes, place, shape)

    def close(self) -> None:
        """No further worker can join in."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def start(address: str = "") -> None:
    """Ctrl-C is for the parent, which stops feeding its workers. One that is killed cannot, so they watch over it."""
    global _memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_memory(1 << 25, 1 << 28)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if address:
        try:
            with open(address, "r+b") as file:  # noqa: PTH123 (a number in /proc, not a path)
                _memory = mmap.mmap(file.fileno(), 0)
        except OSError:  # /proc is hidden from us: pictures go through the pipe
            _memory = None


def load(place: Place | None, picture: Picture, size: int, box: Box | None, min_side: int) -> Pixels | tuple[int, ...]:
    """Decode: into its place, which is answered by the shape alone; or, where it has none, as the answer."""
    pixels = load_image(picture, size=size, box=box, min_side=min_side)
    if place is None or _memory is None or pixels.nbytes > place.size:
        return pixels
    _view(_memory, place, pixels.shape)[:] = pixels
    return pixels.shape


def _view(memory: mmap.mmap, place: Place, shape: tuple[int, ...]) -> Pixels:
    return np.frombuffer(memory, np.uint8, int(np.prod(shape)), place.offset).reshape(shape)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Alone:
    """A process that does one thing at a time, for what was under way when a process of many died.

    Should it die, too, it died of what it was given; but a process that was killed, gave up or never got ready (memory,
    file handles) says nothing about that. Another one takes its place then.
    """

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def call(self, function: Callable[..., T], *arguments: object) -> T | CoocError:
        """What the function returns; a CoocError that it raises, or that explains why there is no answer."""
        ready = False
        try:
            pipe = self._pipe or self._start()
            ready = True
            pipe.send((function, arguments))
            result: T | Exception = pipe.recv()
        except (EOFError, ConnectionError):
            return _why(self._end(), ready)
        if isinstance(result, Exception) and not isinstance(result, CoocError):
            raise result
        return result

    def _start(self) -> Connection:
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_answer, args=(other,), daemon=True)
        self._process.start()
        other.close()  # the process has it now: when that ends, so does the pipe
        self._pipe.recv()
        return self._pipe

    def _end(self) -> int:
        """Its exit code."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return 0
        process.join()
        return process.exitcode or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()


def _answer(pipe: Connection) -> None:
    start()
    pipe.send(True)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = function(*arguments)
        except Exception as error:
            result = error
        pipe.send(result)


def _why(code: int, ready: bool) -> CoocError:
    name = {one.value: one.name for one in signal.Signals}.get(-code, f"code {code}")
    if ready and name in CRASHES:
        return ImageError(f"This picture crashes its decoder ({name}). Leave the file out, or save it again.")
    return MachineError(
        f"The process that read this picture ended without an answer ({name}). "
        "Memory may be short: free some, or use fewer --workers, and try again."
    )
