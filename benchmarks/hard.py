"""Queries that are hard: a part of a photo, the photo from afar, the same at dusk. What is a recipe worth on each?

The pictures of a data set lie among others that show nothing of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cooc.bench.scoring import evaluate_vectors
from cooc.datasets.retrieval import Dataset
from cooc.descriptor import Descriptor
from cooc.evaluation import bootstrap_interval
from cooc.pictures.decode import load_image
from cooc.provenance import provenance

Pixels = NDArray[np.uint8]
PART = 0.5, 0.75  # of a photo's sides
AFAR = 0.25, 0.4


def part(photo: Pixels, chance: np.random.Generator) -> Pixels:
    height, width = (int(side * chance.uniform(*PART)) for side in photo.shape[:2])
    top, left = (int(chance.integers(side - own + 1)) for side, own in zip(photo.shape, (height, width), strict=False))
    return photo[top : top + height, left : left + width]


def afar(photo: Pixels, chance: np.random.Generator) -> Pixels:
    share = chance.uniform(*AFAR)
    height, width = (max(1, round(side * share)) for side in photo.shape[:2])
    return np.array(Image.fromarray(photo).resize((width, height), Image.Resampling.LANCZOS))


def dusk(photo: Pixels, chance: np.random.Generator) -> Pixels:
    """A tenth of the light, bluish, with a sensor's noise, as the JPEG that a camera makes of it."""
    light = (photo / 255) ** 2.2 * chance.uniform(0.05, 0.15) * (0.75, 0.9, 1.25)
    light += chance.normal(0, 0.004, light.shape)
    seen = (255 * np.clip(1.5 * light, 0, 1) ** (1 / 2.2)).astype(np.uint8)
    Image.fromarray(seen).save(kept := io.BytesIO(), "JPEG", quality=60)
    return np.array(Image.open(kept))


VIEWS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "whole": lambda photo, chance: photo,
    "part": part,
    "afar": afar,
    "dusk": dusk,
}


def measure_hard(dataset: Dataset, others: Sequence[Path], recipes: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """mAP of each recipe by each view, one protocol after the other, and what it gains over the first recipe."""
    asked = [load_image(query.path, box=query.box) for query in dataset.queries]
    views = {
        name: [view(photo, np.random.default_rng([seed, n])) for n, photo in enumerate(asked)]
        for name, view in VIEWS.items()
    }
    found: dict[str, Any] = {}
    first: dict[tuple[str, str], Any] = {}
    for recipe in recipes:
        describe = Descriptor.from_pretrained(recipe)
        database = describe([*dataset.image_paths, *others]).numpy()
        found[recipe] = {}
        for name, pictures in views.items():
            found[recipe][name] = {}
            for protocol, score in evaluate_vectors(dataset, database, describe(pictures).numpy(), "none").items():
                ap = 100 * np.array(score["ap"], np.float64)
                gain = ap - first.setdefault((name, protocol), ap)
                found[recipe][name][protocol] = {
                    "mAP": round(float(np.nanmean(ap)), 2),
                    "gain": [round(float(g), 2) for g in (np.nanmean(gain), *bootstrap_interval(gain))],
                }
    count = {"queries": len(asked), "pictures": len(dataset.image_paths), "others": len(others)}
    return {"benchmark": "hard-queries", "dataset": dataset.name, **count, "results": found, **provenance("cpu")}
