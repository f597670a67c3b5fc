"""Many pictures -> vectors: decoded in parallel, batched by shape, one bad file never stops the run.

    for done in extract(items, descriptor.describe, size=1024):
        done.items, done.result        # a batch of one shape, in whatever order batches fill up

Memory is bounded by the number of workers and the batch size, never by the number of pictures: items are taken from
the iterable as there is room for them. Decoding runs in worker processes (a decoder that crashes takes its worker
along, not the run: the file is reported as bad), or in threads with workers=0, for callers that cannot spawn any.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from cooc.errors import CoocError
from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture
from cooc.pictures.worker import Place, Shared, load, start

__all__ = ["Bad", "Batch", "Item", "decode", "extract"]

SHARED = 2 << 30  # bytes at most for pictures that come from other processes; only what is used takes memory

log = logging.getLogger("cooc")

T = TypeVar("T")
Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # (H, W, 3)


@dataclass(frozen=True)
class Item:
    """One picture to describe. `key` is the caller's own."""

    key: Any
    picture: Picture
    box: Box | None = None


@dataclass(frozen=True)
class Bad:
    """A picture that was left out, and why."""

    item: Item
    reason: str


@dataclass(frozen=True)
class Batch(Generic[T]):
    """Pictures of one shape and what `describe` returned for them."""

    items: list[Item]
    result: T


def default_workers(device: str = "cpu") -> int:
    """On a CPU the network needs the cores and one decoder keeps up with it; a GPU needs all cores for decoding."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if device == "cpu" else cores


def extract(
    items: Iterable[Item],
    describe: Callable[[Tensor], T],
    *,
    size: int,
    min_side: int = 1,
    workers: int = 0,
    batch_pixels: int = 1 << 20,
    hold_pixels: int | None = None,
    ahead: int = 0,
) -> Iterator[Batch[T] | Bad]:
    """Decode items and describe them in batches (B, 3, H, W) of one shape and at most `batch_pixels` pixels.

    At most `hold_pixels` (8 batches) wait for others of their shape; past that the fullest shape goes ahead.
    A batch is handed out when `ahead` others have been given to `describe`: for one that begins the work and lets its
    result be waited for, as keeps a GPU busy.
    """
    hold_pixels = hold_pixels or 8 * batch_pixels
    most = max(size, min_side) ** 2  # pixels of a picture
    held = 2 * (hold_pixels + 3 * batch_pixels) // most  # pictures that wait or are being described
    pictures = _decoded(items, size, min_side, workers, min(held, SHARED // (3 * most)))
    batches = _batches(pictures, batch_pixels, hold_pixels)
    begun: deque[Batch[T]] = deque()
    for batch in batches:
        if isinstance(batch, Bad):
            yield batch
            continue
        begun.append(Batch(_items(batch), describe(_stack(batch))))
        if len(begun) > ahead:
            yield begun.popleft()
    yield from begun


class _Decoded(NamedTuple):
    """A picture in memory that is lent: `give_back` says that it was copied."""

    item: Item
    pixels: Pixels
    give_back: Callable[[], None]


def _items(batch: list[_Decoded]) -> list[Item]:
    return [decoded.item for decoded in batch]


def _batches(pictures: Iterable[_Decoded | Bad], batch_pixels: int, hold_pixels: int) -> Iterator[list[_Decoded] | Bad]:
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


def _stack(batch: list[_Decoded]) -> Tensor:
    """(B, 3, H, W), in memory that a GPU copies from at full speed where there is one."""
    shape = (len(batch), *batch[0].pixels.shape)
    images = torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    np.stack([decoded.pixels for decoded in batch], out=images.numpy())
    for decoded in batch:
        decoded.give_back()
    return images.permute(0, 3, 1, 2)


def decode(
    items: Iterable[Item], *, size: int, min_side: int = 1, workers: int = 0
) -> Iterator[tuple[Item, Pixels | str]]:
    """Items in order, each with its pixels (H, W, 3) or the reason why there are none."""
    for picture in _decoded(items, size, min_side, workers, 0):
        if isinstance(picture, Bad):
            yield picture.item, picture.reason
        else:
            pixels = picture.pixels.copy()
            picture.give_back()
            yield picture.item, pixels


def _decoded(items: Iterable[Item], size: int, min_side: int, workers: int, spare: int) -> Iterator[_Decoded | Bad]:
    """Items in order. `spare` pictures may be kept at a time; past that, others come through a pipe."""
    ahead = 4 * max(workers, 1)
    pool = _Pool(workers, ahead + spare, size, min_side)
    running: deque[tuple[Item, _Task]] = deque()
    try:
        for item in items:
            running.append((item, pool.submit(item)))
            if len(running) >= ahead:
                pool, result = _first(pool, running)
                yield result
        while running:
            pool, result = _first(pool, running)
            yield result
    finally:
        pool.shutdown()


class _Task(NamedTuple):
    future: Future[Pixels | tuple[int, ...]]
    place: Place | None


class _Pool:
    """Processes that decode (workers import `images` alone, which starts fast and takes little memory), or threads."""

    def __init__(self, workers: int, places: int, size: int, min_side: int) -> None:
        self.arguments = workers, places, size, min_side
        self.executor: Executor
        if workers:
            self.shared = Shared(places, 3 * max(size, min_side) ** 2)
            context = multiprocessing.get_context("spawn")
            self.executor = ProcessPoolExecutor(workers, context, start, (self.shared.address,))
        else:
            self.shared = Shared(0, 0)
            self.executor = ThreadPoolExecutor(2)

    def submit(self, item: Item) -> _Task:
        _, _, size, min_side = self.arguments
        place = self.shared.free.pop() if self.shared.free else None  # the one that was used last
        try:
            return _Task(self.executor.submit(load, place, item.picture, size, item.box, min_side), place)
        except BrokenExecutor as error:  # a worker died since the last result: `_first` sees to it in its turn
            failed: Future[Pixels | tuple[int, ...]] = Future()
            failed.set_exception(error)
            return _Task(failed, place)

    def result(self, item: Item, task: _Task) -> _Decoded | Bad:
        """The picture, or the reason why there is none. Whatever else one file does, it is one bad file."""
        place, free = task.place, self.shared.free

        def give_back() -> None:
            if place is not None:
                free.append(place)

        try:
            found = task.future.result()
        except BrokenExecutor:
            raise
        except CoocError as error:
            give_back()
            return Bad(item, str(error))
        except Exception as error:
            give_back()
            return Bad(item, f"{type(error).__name__}: {error}")
        if place is None or not isinstance(found, tuple):
            give_back()
            assert not isinstance(found, tuple)
            return _Decoded(item, found, lambda: None)
        return _Decoded(item, self.shared.view(place, found), give_back)

    def anew(self) -> _Pool:
        """Another one, with memory of its own: a worker that is about to be ended may still write."""
        self.shutdown()
        return _Pool(*self.arguments)

    def shutdown(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.shared.close()


def _first(pool: _Pool, running: deque[tuple[Item, _Task]]) -> tuple[_Pool, _Decoded | Bad]:
    """The oldest result. Where a worker died, its pool is made anew and what was under way is decoded one at a time,
    so that the file which kills a decoder is found out and the others are not blamed for it."""
    item, task = running.popleft()
    try:
        return pool, pool.result(item, task)
    except BrokenExecutor:
        pool = pool.anew()
    result: _Decoded | Bad
    try:
        result = pool.result(item, pool.submit(item))
    except BrokenExecutor:
        pool = pool.anew()
        result = Bad(item, "Decoding this picture crashed the decoder. Leave the file out, or save it again.")
    again = [(other, pool.submit(other)) for other, _ in running]
    running.clear()
    running.extend(again)
    return pool, result
