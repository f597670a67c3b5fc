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
from cooc.images import Box, Source
from cooc.workers import Place, Shared, load, start

__all__ = ["Bad", "Batch", "Item", "decode", "extract"]

log = logging.getLogger("cooc")

T = TypeVar("T")
Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # (H, W, 3)


@dataclass(frozen=True)
class Item:
    """One picture to describe. `key` is the caller's own."""

    key: Any
    source: Source
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
    threads: int = 0,
) -> Iterator[Batch[T] | Bad]:
    """Decode items and describe them in batches (B, 3, H, W) of one shape and at most `batch_pixels` pixels.

    At most `hold_pixels` (8 batches) wait for others of their shape; past that the fullest shape goes ahead.
    `threads` put batches together and describe them meanwhile, as keeps a GPU busy. Two have streams of their own
    there, so that the next batch has arrived when one is done; what `describe` returns must have left the GPU then.
    """
    batches = _batches(
        decode(items, size=size, min_side=min_side, workers=workers), batch_pixels, hold_pixels or 8 * batch_pixels
    )
    if not threads:
        for batch in batches:
            yield batch if isinstance(batch, Bad) else Batch(batch[0], describe(_stack(batch[1])))
        return
    with ThreadPoolExecutor(threads, "describe", _own_stream if threads > 1 else None) as runner:
        running: deque[tuple[list[Item], Future[T]]] = deque()
        try:
            for batch in batches:
                if isinstance(batch, Bad):
                    yield batch
                    continue
                running.append((batch[0], runner.submit(lambda pixels: describe(_stack(pixels)), batch[1])))
                if len(running) > threads + 1:
                    members, future = running.popleft()
                    yield Batch(members, future.result())
            for members, future in running:
                yield Batch(members, future.result())
        finally:
            runner.shutdown(wait=False, cancel_futures=True)


def _own_stream() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]  # of this thread


def _batches(
    decoded: Iterable[tuple[Item, Pixels | str]], batch_pixels: int, hold_pixels: int
) -> Iterator[tuple[list[Item], list[Pixels]] | Bad]:
    waiting: dict[tuple[int, ...], list[tuple[Item, Pixels]]] = {}
    held = 0

    def flush(shape: tuple[int, ...]) -> tuple[list[Item], list[Pixels]]:
        members = waiting.pop(shape)
        return [item for item, _ in members], [pixels for _, pixels in members]

    for item, pixels in decoded:
        if isinstance(pixels, str):
            yield Bad(item, pixels)
            continue
        shape, area = pixels.shape[:2], pixels.shape[0] * pixels.shape[1]
        waiting.setdefault(shape, []).append((item, pixels))
        held += area
        if (len(waiting[shape]) + 1) * area > batch_pixels:
            held -= len(waiting[shape]) * area
            yield flush(shape)
        elif held > hold_pixels:
            fullest = max(waiting, key=lambda s: len(waiting[s]) * s[0] * s[1])
            held -= len(waiting[fullest]) * fullest[0] * fullest[1]
            yield flush(fullest)
    for shape in list(waiting):
        yield flush(shape)


def _stack(pictures: list[Pixels]) -> Tensor:
    """(B, 3, H, W), in memory that a GPU copies from at full speed where there is one."""
    images = torch.empty((len(pictures), *pictures[0].shape), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    np.stack(pictures, out=images.numpy())
    return images.permute(0, 3, 1, 2)


def decode(
    items: Iterable[Item], *, size: int, min_side: int = 1, workers: int = 0
) -> Iterator[tuple[Item, Pixels | str]]:
    """Items in order, each with its pixels (H, W, 3) or the reason why there are none."""
    ahead = 4 * max(workers, 1)
    pool = _Pool(workers, ahead, size, min_side)
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

    def __init__(self, workers: int, ahead: int, size: int, min_side: int) -> None:
        self.arguments = workers, ahead, size, min_side
        self.executor: Executor
        if workers:
            self.shared = Shared(ahead, 3 * max(size, min_side) ** 2)
            context = multiprocessing.get_context("spawn")
            self.executor = ProcessPoolExecutor(workers, context, start, (self.shared.address,))
        else:
            self.shared = Shared(0, 0)
            self.executor = ThreadPoolExecutor(2)

    def submit(self, item: Item) -> _Task:
        _, _, size, min_side = self.arguments
        place = self.shared.free.popleft() if self.shared.free else None
        try:
            return _Task(self.executor.submit(load, place, item.source, size, item.box, min_side), place)
        except BrokenExecutor as error:  # a worker died since the last result: `_first` sees to it in its turn
            failed: Future[Pixels | tuple[int, ...]] = Future()
            failed.set_exception(error)
            return _Task(failed, place)

    def result(self, task: _Task) -> Pixels | str:
        """The picture, or the reason why there is none. Whatever else one file does, it is one bad file."""
        try:
            found = task.future.result()
            if isinstance(found, tuple):
                assert task.place is not None
                return self.shared.take(task.place, found)
            return found
        except BrokenExecutor:
            raise
        except CoocError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if task.place is not None:
                self.shared.free.append(task.place)

    def anew(self) -> _Pool:
        """Another one, with memory of its own: a worker that is about to be ended may still write."""
        self.shutdown()
        return _Pool(*self.arguments)

    def shutdown(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.shared.close()


def _first(pool: _Pool, running: deque[tuple[Item, _Task]]) -> tuple[_Pool, tuple[Item, Pixels | str]]:
    """The oldest result. Where a worker died, its pool is made anew and what was under way is decoded one at a time,
    so that the file which kills a decoder is found out and the others are not blamed for it."""
    item, task = running.popleft()
    try:
        return pool, (item, pool.result(task))
    except BrokenExecutor:
        pool = pool.anew()
    try:
        result = pool.result(pool.submit(item))
    except BrokenExecutor:
        pool = pool.anew()
        result = "Decoding this picture crashed the decoder. Leave the file out, or save it again."
    again = [(other, pool.submit(other)) for other, _ in running]
    running.clear()
    running.extend(again)
    return pool, (item, result)
