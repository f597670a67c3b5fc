"""Several processes that train together, as torchrun starts them: which one this is, and whose turn it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from cooc.activations import resolve_device


def rank() -> int:
    """Which of the processes this is; the first one writes."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def processes(device: str) -> Iterator[str]:
    """Join the others that torchrun started, if it did; gives this process's own device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield device
        return
    own = resolve_device(device)
    if own.type == "cuda":
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
    backend = "nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=12))  # others wait while the first fills the cache
    try:
        yield str(own)
    finally:
        dist.destroy_process_group()


@contextmanager
def first_before_others() -> Iterator[None]:
    """`with first_before_others(): ...` runs in the first process, then in the others: for work on one folder."""
    if rank() > 0:
        dist.barrier()
    yield
    if world() > 1 and rank() == 0:
        dist.barrier()
