"""What reads, decodes and describes files for `cooc.index.sync`: this machine, or many (`cooc.index.ray`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cooc.errors import CoocError
from cooc.index.examine import Candidate, Examined, Reader
from cooc.pictures import Collection, Folder
from cooc.pictures.batches import Item, default_workers

__all__ = ["Decide", "Described", "Describer", "Engine", "Here", "Vector", "describe_items"]

FEW = 32  # pictures: for no more than that, starting worker processes costs more time than they save

Vector = NDArray[np.float32]
Decide = Callable[[Examined], bool]  # must it be described?
Described = tuple[Examined, Vector | CoocError]  # a vector, or why there is none


class Engine(Protocol):
    def describe(self, collection: Collection, files: Iterable[Candidate], decide: Decide) -> Iterator[Described]:
        """Examine all files, ask about each, and describe those that must be; files are taken as there is room."""
        ...


class Describer(Protocol):
    """What makes vectors: a `cooc.descriptor.Descriptor`."""

    @property
    def device(self) -> Device: ...
    def stream(self, items: Iterable[Item], *, workers: int | None = None) -> Iterator[tuple[Item, Vector | CoocError]]:
        """Each item with its vector, or why it has none, in whatever order."""
        ...


class Device(Protocol):
    @property
    def type(self) -> str: ...


class Here:
    """The engine of one machine: threads or processes read ahead, others decode, the network describes."""

    def __init__(self, describer: Callable[[], Describer], workers: int | None = None) -> None:
        """The describer is loaded if there is something to describe."""
        self.describer, self.workers = describer, workers

    def describe(self, collection: Collection, files: Iterable[Candidate], decide: Decide) -> Iterator[Described]:
        reader = Reader(collection)
        items = (seen for seen in reader.examined(files) if decide(seen))
        first = list(itertools.islice(items, FEW + 1))
        if not first:
            return
        describer = self.describer()
        workers = self.workers
        if workers is None:
            workers = default_workers(describer.device.type) if len(first) > FEW else 0
        if workers > 1 and isinstance(collection, Folder):  # of others a connection is shared
            reader.use_processes()
        yield from describe_items(describer, itertools.chain(first, items), workers)


def describe_items(describer: Describer, seen: Iterable[Examined], workers: int) -> Iterator[Described]:
    items = (Item(one, one.picture) for one in seen if one.picture is not None)
    return ((item.key, found) for item, found in describer.stream(items, workers=workers))
