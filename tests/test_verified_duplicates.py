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
from cooc.verified_duplicates import is_copy
from tests.verification.pictures import photo, warp

RECIPE = "light+size=192"
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
    """A picture of its own, with corners everywhere, of which none is like another one's."""
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    picture = Image.fromarray(rough).resize((400, 300), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    for _ in range(90):
        x, y = rng.integers(0, 400), rng.integers(0, 300)
        corners = [(int(x + dx), int(y + dy)) for dx, dy in rng.normal(0, 18, (rng.integers(3, 7), 2))]
        pen.polygon(corners, fill=tuple(rng.integers(0, 256, 3).tolist()))
    return picture


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 different pictures, ten of which have a copy of each kind, and smooth ones without any texture."""
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
    found = {
        path for group in groups if group[0][3:] == "-crop.jpg" or any(p[3] == "." for p in group) for path in group
    }
    for kind in ("saved", *KINDS):
        assert sum(f"{n:03}-{kind}.jpg" in found for n in range(COPIED)) >= 9, kind
    assert sum(map(len, plain)) < sum(map(len, groups))  # vectors alone miss many


def test_a_least_similarity_may_be_demanded(collection: Path) -> None:
    with ImageSearch.open(collection / ".cooc", device="cpu") as search:
        every = sum(len(group) for group in search.duplicates())
        close = [[record.path for record in group] for group in search.duplicates(0.95)]
    assert 0 < sum(map(len, close)) < every
    assert all(len({path[:3] for path in group}) == 1 for group in close)


def test_pictures_without_texture_go_by_their_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(3):
        rough = Image.fromarray(rng.integers(0, 256, (2, 2, 3), dtype=np.uint8))
        smooth = rough.resize((300, 200), Image.Resampling.BICUBIC)
        smooth.save(tmp_path / f"{number}.png")
        if number == 0:
            smooth.save(tmp_path / "0-copy.jpg", quality=95)
    descriptor = Descriptor(find_recipe(RECIPE).config, device="cpu")
    with ImageSearch.create(tmp_path / ".cooc", recipe=RECIPE, descriptor=descriptor) as search:
        search.index([tmp_path], workers=0)
        assert [[r.path for r in group] for group in search.duplicates()] == [["0-copy.jpg", "0.png"]]


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
