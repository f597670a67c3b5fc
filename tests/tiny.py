"""A real descriptor that is fast because it is small and knows nothing: EfficientNet-Lite0 with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cooc.activations import build_backbone
from cooc.descriptor import Descriptor
from cooc.errors import StoreMissingError
from cooc.image_search import ImageSearch
from cooc.recipes import find_recipe
from tests.test_activations import random_weights

BACKBONE = "efficientnet-lite0"
RECIPE = f"paper-linear+backbone={BACKBONE}+raw+size=64"


@functools.cache
def descriptor(recipe: str = RECIPE) -> Descriptor:
    return make_descriptor(recipe)


def make_descriptor(recipe: str = RECIPE, seed: int = 0) -> Descriptor:
    weights = dict(random_weights(BACKBONE))
    if seed:
        weights = {key: value * 1.5 if value.dim() == 4 else value for key, value in weights.items()}
    return Descriptor(find_recipe(recipe).config, device="cpu", backbone=build_backbone(BACKBONE, weights=weights))


def open_index(index: Path, root: Path | None = None) -> ImageSearch:
    """Open for writing; made if it is not there."""
    torch.set_num_threads(1)
    try:
        return ImageSearch.open(index, write=True, descriptor=descriptor())
    except StoreMissingError:
        return ImageSearch.create(index, recipe=RECIPE, root=root, descriptor=descriptor())


def write_photos(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Smooth pictures in two shapes, all different, named 00.jpg and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths = [folder / f"{i:02}.jpg" for i in range(count)]
    for i, path in enumerate(paths):
        rough = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        rough.resize((64, 48) if i % 2 else (48, 64), Image.Resampling.BICUBIC).save(path)
    return paths


class Watched(Descriptor):
    """The tiny descriptor; counts the pictures that it describes, and does `meanwhile` before each batch."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.__dict__.update(descriptor().__dict__)
        self.count = 0
        self.meanwhile = meanwhile

    def raw(self, images: Tensor) -> Tensor:
        self.meanwhile()
        self.count += len(images)
        return super().raw(images)
