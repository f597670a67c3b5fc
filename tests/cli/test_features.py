"""`cooc index --verify`: local features from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.index.test_completing import write_rough
from tests.shell import Shell
from tests.tiny import BACKBONE

RECIPE = f"paper-linear+backbone={BACKBONE}+raw+size=64"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_rough(tmp_path / "photos", 3)
    return tmp_path / "photos"


def test_a_new_index_has_features(cooc: Shell, photos: Path) -> None:
    assert "3 described" in cooc("index", photos, "--recipe", RECIPE).out
    found = cooc("status", "--index", photos / ".cooc", "--json").json
    assert (found["features"], found["with_features"]) == ("sift", 3)
    assert found["feature_bytes"] > 0
    assert "sift, 3 pictures" in cooc("status", "--index", photos / ".cooc").out
    refused = cooc("index", photos, "--verify", "none")
    assert refused.code == 2
    assert "cooc rebuild --verify none" in refused.err
    refused = cooc("index", photos, "--verify", "sift+xfeat")
    assert refused.code == 2
    assert "cooc rebuild --verify sift+xfeat" in refused.err
    assert cooc("rebuild", "--index", photos / ".cooc", "--verify", "none").code == 0
    assert cooc("status", "--index", photos / ".cooc", "--json").json["features"] == ""


@pytest.mark.parametrize("engines", ["activations", "sift+activations"])
def test_features_of_the_network_of_the_paper(cooc: Shell, photos: Path, engines: str) -> None:
    (photos / "02.jpg").unlink()  # the large one: VGG16 would take most of the time for it
    assert "2 described" in cooc("index", photos, "--recipe", RECIPE, "--verify", engines).out
    found = cooc("status", "--index", photos / ".cooc", "--json").json
    assert (found["features"], found["with_features"]) == (engines, 2)
    picture = photos / "00.jpg"
    best = cooc("search", picture, "--index", photos / ".cooc", "--json").json["matches"][0]
    assert (best["path"], best["verified"]) == ("00.jpg", True)
    assert cooc("match", picture, picture, "--engine", "xfeat+activations").code == 0


def test_an_index_without_features_says_how_to_add_them(cooc: Shell, photos: Path) -> None:
    assert cooc("index", photos, "--recipe", RECIPE, "--verify", "none").code == 0
    plain = cooc("index", photos)
    assert plain.code == 0
    said = " ".join(plain.out.split())
    assert "--verify sift" in said
    assert "none (cooc index FOLDER --verify sift)" in cooc("status", "--index", photos / ".cooc").out
    added = cooc("index", photos, "--verify", "sift")
    assert added.code == 0
    assert "3 given local features" in " ".join(added.out.split())
    assert "--verify" not in cooc("index", photos).out
    assert cooc("verify", "--index", photos / ".cooc").code == 0


def test_an_engine_that_there_is_not(cooc: Shell, photos: Path) -> None:
    refused = cooc("index", photos, "--recipe", RECIPE, "--verify", "shift")
    assert refused.code == 2
    assert "sift" in refused.err
    assert not (photos / ".cooc").exists()
