"""Many pictures through a network: decoded ahead, batched by shape, the device never waiting.

    for item, found in stream(items, begin, device=device, size=1024):
        found                    # what `begin` gives for that picture, or the CoocError why there is nothing

`begin(images)` starts the work on a batch (B, 3, H, W) of bytes and returns a call that waits for its results, one for
each picture. Indexing, benchmarks, training, `cooc describe` and the workers of Ray all come through here.

Memory is bounded by the batch, never by the number of pictures. Where the device fails on a batch (out of memory, say),
the batch is halved down to single pictures, and one that still fails is given to `fallback`, such as the same network
on the CPU. What then fails is a MachineError for that picture alone: nothing is wrong with the file.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cooc.errors import CoocError, MachineError, first_line
from cooc.pictures.batches import Bad, Batch, Item, batches, default_workers
from cooc.pictures.shared_memory import Beside

T = TypeVar("T")
Begin = Callable[[Tensor], Callable[[], Iterable[T]]]


def batch_pixels(device: torch.device) -> int:
    """Pixels that go through the network together."""
    return 1 << 20 if device.type == "cpu" else 24 << 20


def stream(
    items: Iterable[Item],
    begin: Begin[T],
    *,
    device: torch.device,
    size: int,
    min_side: int = 1,
    least: int = 0,
    workers: int | None = None,
    fallback: Begin[T] | None = None,
    beside: Beside | None = None,
) -> Iterator[tuple[Item, T | CoocError]]:
    """Each item with its result, in whatever order batches fill up. `workers`: processes that decode; 0 is threads.

    `beside` makes something else of each picture where it is decoded; items carry it as `aside`.
    """
    if workers is None:
        workers = default_workers(device.type)
    ahead = 0 if device.type == "cpu" else 2  # batches that wait at a device, which has no rest then
    begun: deque[tuple[list[Item], Callable[[], list[T | CoocError]]]] = deque()
    most = batch_pixels(device)
    decoded = batches(
        items, size=size, min_side=min_side, least=least, workers=workers, batch_pixels=most, beside=beside
    )
    for batch in decoded:
        if isinstance(batch, Bad):
            yield batch.item, batch.error
            continue
        try:
            images = _gathered(batch, device)
        except (RuntimeError, MemoryError) as error:  # torch's own is a RuntimeError
            batch.give_back()
            yield from ((item, _machine_error(error)) for item in batch.items)
            continue
        begun.append((batch.items, _begun(images, begin, fallback)))
        if len(begun) > ahead:
            done, results = begun.popleft()
            yield from zip(done, results(), strict=True)
    for done, results in begun:
        yield from zip(done, results(), strict=True)


def _gathered(batch: Batch, device: torch.device) -> Tensor:
    """The batch in memory of ours, from which a GPU can fetch it by itself: (B, 3, H, W)"""
    images = torch.empty(batch.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    batch.copy_to(images.numpy())
    return images.permute(0, 3, 1, 2)


def _begun(images: Tensor, begin: Begin[T], fallback: Begin[T] | None) -> Callable[[], list[T | CoocError]]:
    def again(error: Exception) -> list[T | CoocError]:
        """A smaller batch, then another device; then it is this machine's error."""
        if len(images) > 1:
            half = len(images) // 2
            return [one for part in (images[:half], images[half:]) for one in _begun(part, begin, fallback)()]
        if fallback is not None:
            return _begun(images, fallback, None)()
        return [error if isinstance(error, CoocError) else _machine_error(error)]

    try:
        wait = begin(images)
    except (CoocError, RuntimeError, MemoryError) as error:  # RuntimeError: whatever a device says, out of memory too
        problem = error
        return lambda: again(problem)

    def results() -> list[T | CoocError]:
        try:
            return list(wait())
        except (CoocError, RuntimeError, MemoryError) as error:
            return again(error)

    return results


def _machine_error(error: Exception) -> MachineError:
    return MachineError(f"This machine could not describe it ({first_line(error)}). Free memory, or use --device cpu.")


def upload(images: Tensor, device: torch.device) -> Tensor:
    """Pictures on their device; from pinned memory to a GPU while it works on what it was given before."""
    if device.type != "cuda" or images.is_cuda:
        return images.to(device)
    work, copies = torch.cuda.current_stream(device), _copies(device)
    with torch.cuda.stream(copies):
        moved = images.to(device, non_blocking=True)
    work.wait_stream(copies)
    moved.record_stream(work)
    return moved


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def download(vectors: Tensor) -> Callable[[], np.ndarray[Any, np.dtype[np.float32]]]:
    """Begin to bring vectors to the CPU. What is returned waits for them, for nothing that a GPU was given later."""
    if not vectors.is_cuda:
        return vectors.cpu().numpy
    here = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    here.copy_(vectors, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(vectors.device))

    def wait() -> np.ndarray[Any, np.dtype[np.float32]]:
        arrived.synchronize()
        return here.numpy()

    return wait
