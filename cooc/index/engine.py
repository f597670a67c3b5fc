"""What reads, decodes and describes files for `cooc.index.sync`: this machine, or many (`cooc.index.ray`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cooc.errors import CoocError
from cooc.index.examine import Candidate, Examined, Reader
from cooc.pictures import Collection, Folder
from cooc.pictures.batches import Item, default_workers
from cooc.pictures.shared_memory import Beside

FEW = 32  # pictures: for no more than that, starting worker processes costs more time than they save

Vector = NDArray[np.float32]
Decide = Callable[[Examined], bool]  # must it be described?


class Made(NamedTuple):
    """Of one picture, in one pass over its file."""

    vector: Vector
    features: bytes | None = None  # local ones, as a code; None where the index keeps none


Described = tuple[Examined, Made | CoocError]  # what was made, or why there is nothing


class Extraction(Beside, Protocol):
    """What makes local features: `cooc.verification.extraction.Extraction`. Called where a picture is decoded."""

    def finish(self, aside: Any, device: str) -> bytes:
        """The code of a picture, from what the call gave. Here is torch, and the network's device."""
        ...


class Engine(Protocol):
    def describe(self, collection: Collection, files: Iterable[Candidate], decide: Decide) -> Iterator[Described]:
        """Examine all files, ask about each, and describe those that must be; files are taken as there is room."""
        ...


class Describer(Protocol):
    """What makes vectors: a `cooc.descriptor.Descriptor`."""

    @property
    def device(self) -> Device: ...
    @property
    def fingerprint(self) -> str:
        """Of all that its vectors depend on."""
        ...

    def stream(
        self, items: Iterable[Item], *, workers: int | None = None, beside: Beside | None = None
    ) -> Iterator[tuple[Item, Vector | CoocError]]:
        """Each item with its vector, or why it has none, in whatever order; it carries what was made `beside`."""
        ...


class Device(Protocol):
    @property
    def type(self) -> str: ...


class Here:
    """The engine of one machine: threads or processes read ahead, others decode, the network describes."""

    def __init__(
        self, describer: Callable[[], Describer], workers: int | None = None, extraction: Extraction | None = None
    ) -> None:
        """The describer is loaded if there is something to describe."""
        self.describer, self.workers, self.extraction = describer, workers, extraction

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
        yield from describe_items(describer, itertools.chain(first, items), workers, self.extraction)


def describe_items(
    describer: Describer, seen: Iterable[Examined], workers: int, extraction: Extraction | None = None
) -> Iterator[Described]:
    items = (Item(one, one.picture) for one in seen if one.picture is not None)
    for item, found in describer.stream(items, workers=workers, beside=extraction):
        if isinstance(found, CoocError) or extraction is None:
            yield item.key, found if isinstance(found, CoocError) else Made(found)
            continue
        try:
            code = extraction.finish(item.aside, describer.device.type)
        except CoocError as error:
            yield item.key, error
        else:
            yield item.key, Made(found, code)
