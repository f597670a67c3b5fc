"""Raw vectors of many recipes at once: one network, one pass over the pictures, kept by recipe and picture.

A picture is decoded and goes through the network once for each scale, whatever the number of poolings. A run that was
stopped goes on where it was, and datasets that share pictures share the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cooc.activations import resolve_device
from cooc.descriptor import NOT_FINITE, Descriptor, load_backbone, rescale
from cooc.errors import CoocError, DatasetError, InputError
from cooc.files import replacing
from cooc.pictures.batches import Item
from cooc.recipes import Recipe
from cooc.stream import download, stream, upload
from cooc.verification.rounds import TOP

Vectors = NDArray[np.float32]
PART = 512  # pictures in one part of the cache


@dataclass(frozen=True)
class BenchOptions:
    """How to run. `whitening_set`: pictures to fit the whitening on; without them the recipe's own is used."""

    device: str = "auto"
    dtype: str = "auto"
    workers: int | None = None
    cache: Path = Path(".cooc/bench")
    expansions: tuple[str, ...] = ("none", "average-10", "alpha-10")
    whitening_set: tuple[Path, ...] = ()
    whitening_size: int = 640
    whitening_shrinkage: float = 0.0  # share of the mean variance that is added to every variance
    whitening_each_scale: bool = False  # fit on the vectors of every scale by itself: so many times more samples
    whitening_exponent: float = 0.5  # 0.5 whitens, 0 only turns; see cooc.whitening
    whitening_name: str = ""
    verify: tuple[str, ...] = ()  # engines of geometric verification, "sift+xfeat" for several at once
    top: int = TOP  # pictures verified in a round
    progress: Callable[[str, int, int], None] = lambda what, done, total: None


def raw_vectors(
    items: Sequence[Item], recipes: Sequence[Recipe], options: BenchOptions, what: str = "", size: int | None = None
) -> dict[str, Vectors]:
    """pooling_hash -> (N, D) unit vectors before whitening, for recipes that share network, layer and image sizes."""
    size = size or recipes[0].config.size
    folders = {r.config.pooling_hash: options.cache / f"{r.config.pooling_hash}-{size}" for r in recipes}
    known = {pooling: _vectors(folder) for pooling, folder in folders.items()}
    keys = [item_key(item) for item in items]
    todo: dict[str, Item] = {}
    for key, item in zip(keys, items, strict=True):
        if any(key not in vectors for vectors in known.values()):
            todo.setdefault(key, item)
    finished: dict[str, list[Vectors]] = {}

    def keep() -> None:
        for i, (pooling, folder) in enumerate(folders.items()):
            made = np.stack([vectors[i] for vectors in finished.values()])
            write_part(folder, list(finished), vectors=made)
            known[pooling] |= zip(finished, made, strict=True)
        finished.clear()

    for done, (key, vectors) in enumerate(_describe(todo, recipes, size, options) if todo else (), start=1):
        finished[key] = vectors
        if len(finished) == PART or done == len(todo):
            keep()
            options.progress(what, done, len(todo))
    return {pooling: np.stack([vectors[key] for key in keys]) for pooling, vectors in known.items()}


def _vectors(folder: Path) -> dict[str, Vectors]:
    """Of one recipe at one image size, by the keys of the pictures."""
    parts = read_parts(folder)
    return {key: vector for part in parts for key, vector in zip(part["keys"].tolist(), part["vectors"], strict=True)}


def read_parts(folder: Path) -> Iterator[dict[str, NDArray[Any]]]:
    """A cache is a folder of parts, each written whole or not at all."""
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as part:
            yield dict(part)


def write_part(folder: Path, keys: Sequence[str], **arrays: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"{hashlib.sha256(''.join(keys).encode()).hexdigest()[:20]}.npz") as out:
        np.savez(out, keys=np.array(keys), **arrays)


def item_key(item: Item) -> str:
    """A picture by its file name and size, and the box: enough to tell the pictures of a benchmark apart."""
    path = Path(str(item.picture))
    text = f"{path.parent.name}/{path.name} {path.stat().st_size} {item.box}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


class _Shared:
    """One network, many poolings: (B, 3, H, W) -> the vectors of every recipe."""

    def __init__(self, recipes: list[Recipe], options: BenchOptions) -> None:
        self.recipes = recipes
        device = resolve_device(options.device)
        self.device = device
        config = recipes[0].config.replace(dtype=options.dtype)
        self.backbone = load_backbone(config, device)
        self.descriptors = [
            Descriptor(r.config.replace(whitening="", dim=0), device=str(device), backbone=self.backbone)
            for r in recipes
        ]
        self.scales = sorted({scale for recipe in recipes for scale in recipe.config.scales}, reverse=True)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Callable[[], list[list[Vectors]]]:
        images = upload(images, self.device)
        found: list[list[Tensor]] = [[] for _ in self.descriptors]
        for scale in self.scales:
            A = self.backbone(rescale(images, scale, self.backbone.stride))
            for vectors, descriptor in zip(found, self.descriptors, strict=True):
                if scale in descriptor.config.scales:
                    vectors.append(descriptor.pooler(A))
        waits = [download(d.combine(v).float()) for d, v in zip(self.descriptors, found, strict=True)]
        return lambda: [list(of_one) for of_one in zip(*(wait() for wait in waits), strict=True)]


def _describe(
    todo: dict[str, Item], recipes: Sequence[Recipe], size: int, options: BenchOptions
) -> Iterator[tuple[str, list[Vectors]]]:
    """Each picture's key and its vector for every recipe, in the order in which they get done."""
    describe = _Shared(list(recipes), options)
    items = (Item(key, item.picture, item.box) for key, item in todo.items())
    stride, least = describe.backbone.stride, recipes[0].config.least
    for item, found in stream(
        items, describe, device=describe.device, size=size, min_side=stride, least=least, workers=options.workers
    ):
        if isinstance(found, CoocError):
            raise DatasetError(f"A benchmark needs all of its pictures. {found}") from found
        if not all(np.isfinite(vector).all() for vector in found):
            raise InputError(NOT_FINITE)
        yield item.key, found
