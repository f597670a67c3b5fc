"""Copies of every kind are found, and no two different pictures are taken for copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from cooc.descriptor import Descriptor
from cooc.image_search import ImageSearch
from cooc.recipes import find_recipe
from cooc.verification.engines import extract
from cooc.verification.verifier import verify
from cooc.verified_duplicates import FLAT, is_copy
from tests.verification.pictures import photo, warp

RECIPE = "light+size=256"
DIFFERENT, COPIED = 100, 10

KINDS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "crop": lambda p: p.crop((p.width // 5, p.height // 8, p.width * 9 // 10, p.height * 17 // 20)),
    "half": lambda p: p.resize((p.width // 2, p.height // 2)),
    "dark": lambda p: p.point(lambda value: value * 0.7),
    "framed": lambda p: ImageOps.expand(p, 20, "white"),
    "mirrored": ImageOps.mirror,
    "turned": lambda p: p.transpose(Image.Transpose.ROTATE_90),
}


def drawing(seed: int) -> Image.Image:
    """A picture of its own: its colours, and shapes of one kind and size all over it."""
    rng = np.random.default_rng(seed)
    palette = rng.integers(0, 256, (4, 3))
    rough = Image.fromarray(palette[rng.integers(0, 2, (3, 4))].astype(np.uint8))
    picture = rough.resize((400, 300), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    wide, high = rng.uniform(6, 45, 2)
    kind = rng.integers(0, 4)
    for _ in range(int(rng.integers(50, 140))):
        x, y = rng.integers(0, 400), rng.integers(0, 300)
        colour = tuple(np.clip(palette[rng.integers(0, 4)] + rng.normal(0, 25, 3), 0, 255).astype(int).tolist())
        w, h = rng.uniform(0.4, 1.2, 2) * (wide, high)
        if kind == 0:
            pen.rectangle((x, y, x + w, y + h), fill=colour)
        elif kind == 1:
            pen.ellipse((x, y, x + w, y + h), fill=colour)
        elif kind == 2:
            end = x + rng.normal(0, 3 * w), y + rng.normal(0, 3 * h)
            pen.line((x, y, *end), fill=colour, width=int(rng.integers(2, 9)))
        else:
            pen.polygon([(x + dx * wide, y + dy * high) for dx, dy in rng.normal(0, 0.8, (5, 2))], fill=colour)
    return picture


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 different pictures, ten of which have a copy of each kind."""
    root = tmp_path_factory.mktemp("copies")
    for number in range(DIFFERENT):
        picture = drawing(number)
        picture.save(root / f"{number:03}.jpg", quality=92)
        if number < COPIED:
            picture.save(root / f"{number:03}-saved.jpg", quality=40)
            for kind, change in KINDS.items():
                change(picture).save(root / f"{number:03}-{kind}.jpg", quality=88)
    descriptor = Descriptor(find_recipe(RECIPE).config, device="cpu")
    with ImageSearch.create(root / ".cooc", recipe=RECIPE, descriptor=descriptor) as search:
        search.index([root], workers=0)
    return root


def test_copies_of_every_kind_and_nothing_else(collection: Path) -> None:
    with ImageSearch.open(collection / ".cooc", device="cpu") as search:
        groups = [[record.path for record in group] for group in search.duplicates()]
        plain = [[record.path for record in group] for group in search.duplicates(verify=False)]
    assert groups == sorted(groups)
    for group in groups:
        assert len({path[:3] for path in group}) == 1, group  # no false group
    found = {path for group in groups for path in group if f"{path[:3]}.jpg" in group}
    for kind in ("saved", *KINDS):
        assert sum(f"{n:03}-{kind}.jpg" in found for n in range(COPIED)) >= 9, kind
    assert any(len({path[:3] for path in group}) > 1 for group in plain)  # what vectors alone take for copies


def test_a_least_similarity_may_be_demanded(collection: Path) -> None:
    with ImageSearch.open(collection / ".cooc", device="cpu") as search:
        groups = [[record.path for record in group] for group in search.duplicates(0.95)]
        near = {record.path: record.id for record in search.store.records()}
        assert groups
        for group in groups:
            assert len({path[:3] for path in group}) == 1
            vectors = search.vectors([near[path] for path in group])
            similar = vectors @ vectors.T - np.eye(len(group))
            assert similar.max(axis=1).min() >= 0.95  # each has one that close


def test_pictures_without_texture_go_by_their_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(3):
        rough = Image.fromarray(rng.integers(0, 256, (2, 2, 3), dtype=np.uint8))
        smooth = rough.resize((300, 200), Image.Resampling.BICUBIC)
        smooth.save(tmp_path / f"{number}.png")
        if number == 0:
            smooth.save(tmp_path / "0-copy.jpg", quality=100, subsampling=0)  # near in bfloat16 and in float32
    descriptor = Descriptor(find_recipe(RECIPE).config, device="cpu")
    with ImageSearch.create(tmp_path / ".cooc", recipe=RECIPE, descriptor=descriptor) as search:
        search.index([tmp_path], workers=0)
        groups = list(search.duplicates())
        assert groups == list(search.duplicates(FLAT, verify=False))
        assert {"0-copy.jpg", "0.png"} <= {record.path for record in groups[0]}


def test_another_view_is_no_copy() -> None:
    """The same thing from the side, or only a part of each picture in common, is not the same picture."""

    def copies(first: np.ndarray, second: np.ndarray) -> bool:
        return is_copy(verify(extract("sift", first), [extract("sift", second)])[0])

    whole = photo("astronaut")
    half = np.ascontiguousarray(whole[::2, ::2])
    assert copies(whole, half)
    assert copies(half, whole)
    assert copies(whole, np.ascontiguousarray(whole[100:400, 120:480]))
    assert copies(whole, np.ascontiguousarray(np.rot90(whole)))
    slanted = np.array([[1, 0.06, 0], [0.02, 1, 0], [2e-4, 0, 1.0]])
    assert not copies(whole, warp(whole, slanted, (512, 512)))
    assert not copies(whole[:, :350].copy(), whole[:, 150:].copy())  # they overlap
    assert not copies(whole, photo("coffee"))
