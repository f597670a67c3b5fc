"""Memory that a decoding process and its parent both see. Every process imports this, so it imports nothing heavy.

Pixels come back through memory that both processes see: through a pipe, two megabytes for each picture would keep the
one thread that reads it busy, and a GPU waiting.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture, load_image

__all__ = ["Place", "Shared", "attach", "load"]

Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # (H, W, 3)

_memory: mmap.mmap | None = None  # in a decoding process: that of its parent


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
        """What a decoding process has put there. It stays until the place is free again."""
        return _view(self._bytes, place, shape)

    def close(self) -> None:
        """No further process can join in."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def attach(address: str) -> None:
    """Use the memory of the parent, if it has any."""
    global _memory
    if address:
        try:
            with open(address, "r+b") as file:  # noqa: PTH123 (a number in /proc, not a path)
                _memory = mmap.mmap(file.fileno(), 0)
        except OSError:  # /proc is hidden from us: pictures go through the pipe
            _memory = None


def load(picture: Picture, place: Place | None, size: int, box: Box | None, min_side: int) -> Pixels | tuple[int, ...]:
    """Decode: into its place, which is answered by the shape alone; or, where it has none, as the answer."""
    pixels = load_image(picture, size=size, box=box, min_side=min_side)
    if place is None or _memory is None or pixels.nbytes > place.size:
        return pixels
    _view(_memory, place, pixels.shape)[:] = pixels
    return pixels.shape


def _view(memory: mmap.mmap, place: Place, shape: tuple[int, ...]) -> Pixels:
    return np.frombuffer(memory, np.uint8, int(np.prod(shape)), place.offset).reshape(shape)
