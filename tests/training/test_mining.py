"""Pairs of an index that geometry proves: real SIFT features of photographs seen from elsewhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor

from cooc.datasets.photos import Photos
from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.recipes import find_recipe
from cooc.training.mining import mine_pairs
from cooc.verification.features import unpack
from cooc.verification.probability import PROVEN, same_thing
from cooc.verification.verifier import verify
from cooc.verified_duplicates import is_copy
from tests.shell import Shell
from tests.tiny import BACKBONE, RECIPE, descriptor, write_photos
from tests.verification.pictures import SLANTED, photo, turned, warp

VIEWS = {
    "near": turned(12, 0.8, (200, 150), (40, 30)),
    "slanted": SLANTED,
    "far": turned(-20, 0.6, (250, 200), (20, 60)),
}
THINGS = ("astronaut", "cat", "coffee")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three views of three photographs, a smaller copy of one of them, and pictures that show nothing."""
    root = tmp_path_factory.mktemp("mined")
    for name, (view, transform) in itertools.product(THINGS, VIEWS.items()):
        Image.fromarray(warp(photo(name), transform, (480, 450))).save(root / f"{name}-{view}.png")
    with Image.open(root / "cat-near.png") as picture:
        picture.resize((360, 338)).save(root / "cat-copy.jpg", quality=80)
    write_photos(root / "smooth", 3)
    with ImageSearch.create(root / ".cooc", recipe=RECIPE, descriptor=descriptor()) as search:
        search.index([root], workers=0)
    return root / ".cooc"


def name_of(photos: Photos, row: int) -> str:
    return Path(str(photos.items[row].picture)).name


def test_all_that_is_proven_and_nothing_else(index: Path) -> None:
    """Against every pair of pictures, one by one."""
    with ImageSearch.open(index, device="cpu") as search:
        photos = mine_pairs(search, held_out=0)
        records = sorted(search.store.records(), key=lambda record: Path(record.path).name)
        features = [unpack(code or b"") for code in search.store.features([record.id for record in records])]
    names = [Path(record.path).name for record in records]
    pairs, groups = set(), [{name} for name in names]
    for i, k in itertools.combinations(range(len(names)), 2):
        (agreement,) = verify(features[i], [features[k]])
        if same_thing(agreement) >= PROVEN:
            one, two = (next(group for group in groups if names[n] in group) for n in (i, k))
            if one is not two:
                groups.remove(two)
                one |= two
            if not is_copy(agreement):
                pairs.add((names[i], names[k]))
    found = {(name_of(photos, q), name_of(photos, p)) for q, p in zip(*photos.pairs(), strict=True)}
    assert found == pairs | {(two, one) for one, two in pairs}
    assert len(pairs) == 7  # with the slanted view; turned, or smaller, it is a copy: of its group, but no match
    assert all("slanted" in one + two for one, two in pairs)
    rows = {name_of(photos, row): cluster for row, cluster in enumerate(photos.clusters.tolist())}
    assert len(rows) == len(names)
    for group in groups:
        assert len({rows[name] for name in group}) == 1
    assert len(set(rows.values())) == len(groups) == 6


def test_groups_are_held_out_as_a_whole_and_a_sample_brings_its_matches(index: Path) -> None:
    with ImageSearch.open(index, device="cpu") as search:
        photos = mine_pairs(search, held_out=0.34)
        few = mine_pairs(search, most=4, held_out=0)
    held = set(photos.clusters[photos.held_out])
    assert len(held) == 1
    assert not held & set(photos.clusters[~photos.held_out])
    assert 4 < len(few) < 13
    assert all(few.clusters[q] == few.clusters[p] for q, p in zip(*few.pairs(), strict=True))


def test_an_index_that_cannot_teach(tmp_path: Path) -> None:
    write_photos(tmp_path, 2)
    with ImageSearch.create(tmp_path / ".cooc", recipe=RECIPE, descriptor=descriptor()) as search:
        search.index([tmp_path], workers=0)
        with pytest.raises(InputError, match="No two pictures"):
            mine_pairs(search)
    plain = ImageSearch.create(tmp_path / "plain", recipe=RECIPE, features="", descriptor=descriptor())
    with plain, pytest.raises(InputError, match="--verify sift"):
        mine_pairs(plain)


def test_what_does_not_help_is_not_kept(
    index: Path, tmp_path: Path, cooc: Shell, real_weights: Callable[[str], dict[str, Tensor]]
) -> None:
    """Too few pictures to tell: it is said, and there is no recipe."""
    real_weights(BACKBONE)
    tiny = (
        "--train",
        "exponent",
        "--epochs",
        1,
        "--queries",
        4,
        "--negatives",
        1,
        "--held-out",
        0.34,
        "--device",
        "cpu",
    )
    found = cooc("train", "--index", index, "-o", tmp_path, *tiny, "--device", "cpu", "--workers", 0)
    assert found.code == 0, found
    assert f"{index} stays as it is" in found.out
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["recipe"], run["config"]["descriptor"]["size"]) == (RECIPE, 64)
    assert run["judged"]["better"] is False
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "log.jsonl", "checkpoint.pt"}
    with pytest.raises(InputError, match="There is no descriptor"):
        find_recipe(str(tmp_path))
    both = cooc("train", "--index", index, "--data", index.parent, "-o", tmp_path)
    assert "give one of them" in both.err
