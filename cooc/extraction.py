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
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from cooc.errors import CoocError
from cooc.images import Box, Source, load_image
from cooc.workers import start

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
) -> Iterator[Batch[T] | Bad]:
    """Decode items and describe them in batches (B, 3, H, W) of one shape and at most `batch_pixels` pixels.

    At most `hold_pixels` (8 batches) wait for others of their shape; past that the fullest shape goes ahead.
    """
    hold_pixels = hold_pixels or 8 * batch_pixels
    waiting: dict[tuple[int, ...], list[tuple[Item, Pixels]]] = {}
    held = 0

    def flush(shape: tuple[int, ...]) -> Batch[T]:
        members = waiting.pop(shape)
        stack = np.stack([pixels for _, pixels in members])
        images = torch.from_numpy(stack).permute(0, 3, 1, 2)  # (B, 3, H, W)
        return Batch([item for item, _ in members], describe(images))

    for item, pixels in decode(items, size=size, min_side=min_side, workers=workers):
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


def decode(
    items: Iterable[Item], *, size: int, min_side: int = 1, workers: int = 0
) -> Iterator[tuple[Item, Pixels | str]]:
    """Items in order, each with its pixels (H, W, 3) or the reason why there are none."""
    pool = _pool(workers)
    ahead = 2 * max(workers, 2)
    running: deque[tuple[Item, Future[Pixels]]] = deque()
    try:
        for item in items:
            running.append((item, _submit(pool, item, size, min_side)))
            if len(running) >= ahead:
                pool, result = _first(pool, workers, running, size, min_side)
                yield result
        while running:
            pool, result = _first(pool, workers, running, size, min_side)
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _first(
    pool: Executor, workers: int, running: deque[tuple[Item, Future[Pixels]]], size: int, min_side: int
) -> tuple[Executor, tuple[Item, Pixels | str]]:
    """The oldest result. Where a worker died, its pool is made anew and what was under way is decoded one at a time,
    so that the file which kills a decoder is found out and the others are not blamed for it."""
    item, future = running.popleft()
    try:
        return pool, (item, _pixels(future))
    except BrokenExecutor:
        pool.shutdown(wait=False, cancel_futures=True)
    pool = _pool(workers)
    try:
        result = _pixels(_submit(pool, item, size, min_side))
    except BrokenExecutor:
        pool.shutdown(wait=False)
        pool = _pool(workers)
        result = "Decoding this picture crashed the decoder. Leave the file out, or save it again."
    again = [(other, _submit(pool, other, size, min_side)) for other, _ in running]
    running.clear()
    running.extend(again)
    return pool, (item, result)


def _pool(workers: int) -> Executor:
    """Workers import `images` and `workers` alone, which starts fast and takes little memory."""
    if not workers:
        return ThreadPoolExecutor(2)
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=start)


def _submit(pool: Executor, item: Item, size: int, min_side: int) -> Future[Pixels]:
    try:
        return pool.submit(load_image, item.source, size=size, box=item.box, min_side=min_side)
    except BrokenExecutor as error:  # a worker died since the last result: `_first` sees to it in its turn
        failed: Future[Pixels] = Future()
        failed.set_exception(error)
        return failed


def _pixels(future: Future[Pixels]) -> Pixels | str:
    """The picture, or the reason why there is none. Whatever else one file does, it is one bad file."""
    try:
        return future.result()
    except BrokenExecutor:
        raise
    except CoocError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
