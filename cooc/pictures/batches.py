"""Many pictures -> batches of one shape, decoded in parallel; one bad file never stops the run.

    for batch in batches(items, size=1024):
        batch.items, batch.shape       # (B, H, W, 3), in whatever order batches fill up

Memory is bounded by the number of workers and the batch size, never by the number of pictures: items are taken from
the iterable as there is room for them. Decoding runs in other processes (a decoder that crashes, or takes too long,
takes its process along, not the run: the file is reported), or in threads with workers=0, for a few pictures.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cooc.errors import CoocError, MachineError
from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture
from cooc.pictures.decoders import Decoders, Limits
from cooc.pictures.shared_memory import Beside, Loaded, Place, Shared, load

LIMITS = Limits()  # of a picture
SHARED = 2 << 30  # bytes at most for pictures that come from other processes; only what is used takes memory

Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # (H, W, 3)
Sides = tuple[int, int, int]  # size, min_side and least of `load_image`


@dataclass(frozen=True)
class Item:
    """One picture to decode. `key` is the caller's own."""

    key: Any
    picture: Picture
    box: Box | None = None
    aside: Any = None  # in results: what was made of the picture beside its pixels


@dataclass(frozen=True)
class Bad:
    """A picture that was left out, and why: an ImageError is its own fault, a MachineError is not."""

    item: Item
    error: CoocError

    @property
    def reason(self) -> str:
        return str(self.error)


def default_workers(device: str = "cpu") -> int:
    """On a CPU the network needs the cores and one decoder keeps up with it; a GPU needs all cores for decoding."""
    return 1 if device == "cpu" else cores_of_this_process()


def cores_of_this_process() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batches(
    items: Iterable[Item],
    *,
    size: int,
    min_side: int = 1,
    least: int = 0,
    workers: int = 0,
    batch_pixels: int = 1 << 20,
    hold_pixels: int | None = None,
    beside: Beside | None = None,
) -> Iterator[Batch | Bad]:
    """Decode items into batches of one shape and at most `batch_pixels` pixels. Sides as in `load_image`.

    `beside` makes something else of each picture, where it is decoded; items carry it as `aside`. At most
    `hold_pixels` (8 batches) wait for others of their shape; past that the fullest shape goes ahead.
    """
    hold_pixels = hold_pixels or 8 * batch_pixels
    most = max(size, min_side) ** 2  # pixels of a picture
    held = 2 * (hold_pixels + 3 * batch_pixels) // most  # pictures that wait or are being described
    pictures = _decoded(items, (size, min_side, least), workers, min(held, SHARED // (3 * most)), beside)
    for group in _grouped(pictures, batch_pixels, hold_pixels):
        yield group if isinstance(group, Bad) else Batch(group)


class _Decoded(NamedTuple):
    """A picture in memory that is lent: `give_back` says that it was copied."""

    item: Item
    pixels: Pixels
    give_back: Callable[[], None]


class Batch:
    """Pictures of one shape, in memory that is lent until `copy_to`."""

    def __init__(self, decoded: list[_Decoded]) -> None:
        self._decoded = decoded
        self.items = [one.item for one in decoded]
        self.shape = (len(decoded), *decoded[0].pixels.shape)  # (B, H, W, 3)

    def copy_to(self, out: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Once: the memory is given back."""
        np.stack([one.pixels for one in self._decoded], out=out)
        self.give_back()

    def give_back(self) -> None:
        for one in self._decoded:
            one.give_back()


def _grouped(pictures: Iterable[_Decoded | Bad], batch_pixels: int, hold_pixels: int) -> Iterator[list[_Decoded] | Bad]:
    waiting: dict[tuple[int, ...], list[_Decoded]] = {}
    held = 0
    for picture in pictures:
        if isinstance(picture, Bad):
            yield picture
            continue
        shape = picture.pixels.shape[:2]
        area = shape[0] * shape[1]
        waiting.setdefault(shape, []).append(picture)
        held += area
        if (len(waiting[shape]) + 1) * area > batch_pixels:
            held -= len(waiting[shape]) * area
            yield waiting.pop(shape)
        elif held > hold_pixels:
            fullest = max(waiting, key=lambda s: len(waiting[s]) * s[0] * s[1])
            held -= len(waiting[fullest]) * fullest[0] * fullest[1]
            yield waiting.pop(fullest)
    yield from waiting.values()


def decode(
    items: Iterable[Item], *, size: int, workers: int = 0, beside: Beside | None = None
) -> Generator[tuple[Item, Pixels | CoocError], None, None]:
    """Items in order, each with its pixels (H, W, 3) or the error why there are none."""
    for picture in _decoded(items, (size, 1, 0), workers, 0, beside):
        if isinstance(picture, Bad):
            yield picture.item, picture.error
        else:
            pixels = picture.pixels.copy()
            picture.give_back()
            yield picture.item, pixels


def _decoded(
    items: Iterable[Item], sides: Sides, workers: int, spare: int, beside: Beside | None
) -> Iterator[_Decoded | Bad]:
    """Items in order. `spare` pictures may be kept at a time; past that, others come through a pipe."""
    ahead = 4 * max(workers, 1)
    pool = _Pool(workers, ahead + spare, sides, beside)
    running: deque[tuple[Item, _Task]] = deque()
    try:
        for item in items:
            running.append((item, pool.submit(item)))
            if len(running) >= ahead:
                yield pool.result(*running.popleft())
        while running:
            yield pool.result(*running.popleft())
    finally:
        pool.shutdown()


class _Task(NamedTuple):
    future: Future[Loaded]
    place: Place | None


class _Pool:
    """Threads that decode, or that each ask a process to."""

    def __init__(self, workers: int, places: int, sides: Sides, beside: Beside | None) -> None:
        self.sides, self.beside = sides, beside
        self.shared = Shared(places, 3 * max(sides) ** 2) if workers else Shared(0, 0)
        self.decoders = Decoders(LIMITS, self.shared.address) if workers else None
        self.threads = ThreadPoolExecutor(workers or 2, thread_name_prefix="decoding")

    def submit(self, item: Item) -> _Task:
        place = self.shared.free.pop() if self.shared.free else None  # the one that was used last
        run = partial(self.decoders.run, load) if self.decoders else load
        size, min_side, least = self.sides
        work = self.threads.submit(run, item.picture, place, size, item.box, min_side, least, self.beside)
        return _Task(work, place)

    def result(self, item: Item, task: _Task) -> _Decoded | Bad:
        """The picture, or the reason why there is none. Whatever else one file does, it is one bad file."""
        place, free = task.place, self.shared.free

        def give_back() -> None:
            if place is not None:
                free.append(place)

        try:
            found = task.future.result()
        except CoocError as error:
            give_back()
            return Bad(item, error)
        except Exception as error:  # decoders' own have become ImageErrors: this is the pipe, memory, ...
            give_back()
            return Bad(item, MachineError(f"It could not be decoded ({type(error).__name__}: {error}). Try again."))
        if found.aside is not None:
            item = replace(item, aside=found.aside)
        if found.pixels is not None:
            give_back()
            return _Decoded(item, found.pixels, lambda: None)
        assert place is not None
        return _Decoded(item, self.shared.view(place, found.shape), give_back)

    def shutdown(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.decoders is not None:
            self.decoders.close()
        self.shared.close()
