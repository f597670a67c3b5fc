"""Memory that a decoding process and its parent both see. Every process imports this, so it imports nothing heavy.

Beside the pixels it may make something else of a picture (`Beside`), such as its local features: what takes a
processor's time is done here, and not where a GPU waits.

Pixels come back through memory that both processes see: through a pipe, two megabytes for each picture would keep the
one thread that reads it busy, and a GPU waiting.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np

from cooc.errors import CoocError, InputError, MachineError
from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture, load_image, load_twice

Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # (H, W, 3)

_memory: mmap.mmap | None = None  # in a decoding process: that of its parent


class Beside(Protocol):
    """What is made of a picture beside its pixels. It can be pickled, and imports what it needs when it is called."""

    @property
    def size(self) -> int:
        """The longest side of the pixels that it wants."""
        ...

    def __call__(self, pixels: Pixels, size: tuple[int, int]) -> Any:
        """`size`: width and height of the whole picture."""
        ...


class Loaded(NamedTuple):
    pixels: Pixels | None  # None: they are in their place
    shape: tuple[int, ...]
    aside: Any  # what was made beside them


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


def load(
    picture: Picture,
    place: Place | None,
    size: int,
    box: Box | None,
    min_side: int,
    least: int,
    beside: Beside | None = None,
) -> Loaded:
    """Decode: into its place, and then the shape alone is answered; or, where it has none, as the answer."""
    aside = None
    if beside is None:
        pixels = load_image(picture, size=size, box=box, min_side=min_side, least=least)
    elif box is not None:
        raise InputError("Only of whole pictures something is made beside the pixels, not of a box.")
    else:
        pixels, larger, full = load_twice(picture, size=size, larger=beside.size, min_side=min_side, least=least)
        aside = _made(beside, larger, full)
    if place is None or _memory is None or pixels.nbytes > place.size:
        return Loaded(pixels, pixels.shape, aside)
    _view(_memory, place, pixels.shape)[:] = pixels
    return Loaded(None, pixels.shape, aside)


def _made(beside: Beside, pixels: Pixels, size: tuple[int, int]) -> Any:
    try:
        return beside(pixels, size)
    except CoocError:
        raise
    except Exception as error:  # the picture is decoded, so nothing is wrong with it: no memory, a broken installation
        raise MachineError(
            f"Its local features could not be made ({type(error).__name__}: {error}). Free memory, and try again."
        ) from error


def _view(memory: mmap.mmap, place: Place, shape: tuple[int, ...]) -> Pixels:
    return np.frombuffer(memory, np.uint8, int(np.prod(shape)), place.offset).reshape(shape)
