"""What it takes to index a folder on this machine, told from a sample of its pictures: `cooc index --estimate`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cooc.errors import InputError
from cooc.image_search.changing import ChangingIndex
from cooc.image_search.opening import QUALITIES, Path_
from cooc.pictures import open_collection
from cooc.pictures.collection import fail

RUNS = (1, 2, 10)  # pictures of the sample, in three runs


@dataclass(frozen=True)
class Estimate:
    """Of one quality, for all pictures of a folder."""

    quality: str
    recipe: str
    features: str
    pictures: int
    sampled: int
    seconds: float
    bytes: int


def list_pictures(folder: Path_, *, follow: bool = False) -> list[str]:
    """The addresses of all pictures below a folder or URL."""
    collection = open_collection(folder)
    return [collection.address(entry.name) for entry in collection.entries("", follow=follow, on_error=fail)]


def estimate(
    folder: Path_,
    quality: str,
    pictures: Sequence[str] | None = None,
    *,
    device: str = "auto",
    workers: int | None = None,
) -> Estimate:
    """Index a sample as a run would, into an index that is thrown away.

    `pictures` is what `list_pictures` has found. A run of one picture comes first, in which the network starts; then
    one of two and one of ten. The difference of these is what a picture takes, without the start of a run.
    """
    pictures = list_pictures(folder) if pictures is None else pictures
    if not pictures:
        raise InputError(f"There are no pictures in {os.fspath(folder)!r}.")
    chosen = QUALITIES[quality]
    wanted = min(sum(RUNS), len(pictures))
    left = [pictures[i * len(pictures) // wanted] for i in range(wanted)]
    times, counts = [], []
    with (
        TemporaryDirectory(prefix="cooc-estimate-") as place,
        ChangingIndex.create(
            Path(place) / "index", recipe=chosen.recipe, root=folder, features=chosen.features, device=device
        ) as index,
    ):
        for count in RUNS:
            run, left = left[:count], left[count:]
            began = time.monotonic()
            counts.append(index.add(run, workers=workers).described if run else 0)
            times.append(time.monotonic() - began)
        index.store.compact()
        size = index.status().bytes or 0
    if not sum(counts):
        raise InputError(f"None of {wanted} pictures of {os.fspath(folder)!r} could be described.")
    if counts[2] > counts[1]:
        each = max(times[2] - times[1], 0.0) / (counts[2] - counts[1])
        start = max(times[1] - counts[1] * each, 0.0)
    else:  # a small folder
        each, start = sum(times) / sum(counts), 0.0
    return Estimate(
        quality,
        chosen.recipe,
        chosen.features,
        len(pictures),
        sum(counts),
        start + each * len(pictures),
        round(size / sum(counts) * len(pictures)),
    )
