"""`cooc search` in an index with local features, and `cooc match`: through `main` as a shell would."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cooc.errors import WeightsError
from cooc.image_search import ImageSearch
from cooc.verification.transforms import project
from cooc.weights import weights_home
from tests.shell import Shell
from tests.verification.pictures import PHOTOS, SLANTED, photo, turned, warp

RECIPE = "paper-linear+backbone=efficientnet-lite0+raw+size=128"
NEAR = turned(10, 0.8, (200, 150), (40, 30))
SIZE = (560, 480)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two views of each photograph with their index; the photographs themselves are the queries, beside it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "index").mkdir()
    for name in PHOTOS:
        Image.fromarray(photo(name)).save(folder / f"{name}.png")
        for view, transform in (("near", NEAR), ("slanted", SLANTED)):
            Image.fromarray(warp(photo(name), transform, SIZE)).save(folder / "index" / f"{name}-{view}.png")
    with ImageSearch.create(folder / "index/.cooc", recipe=RECIPE, device="cpu") as search:
        search.index([folder / "index"], workers=0)
    Image.effect_noise((300, 240), 70).convert("RGB").save(folder / "noise.png")
    return folder


def test_damaged_weights_are_called_damaged(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are hashed once, as part of the network's fingerprint; what is wrong is still said."""
    name = "efficientnet-lite0.safetensors"
    data = bytearray((weights_home() / name).read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / name).write_bytes(data)
    monkeypatch.setenv("COOC_HOME", str(tmp_path))
    with (
        ImageSearch.open(photos / "index/.cooc", device="cpu") as search,
        pytest.raises(WeightsError, match=f"{name} is damaged"),
    ):
        _ = search.descriptor


def words(photos: Path, *more: object) -> tuple[object, ...]:
    return ("--index", photos / "index/.cooc", "--device", "cpu", *more)


def test_the_table_says_what_is_verified(cooc: Shell, photos: Path) -> None:
    found = cooc("search", photos / "cat.png", *words(photos, "--no-thumbnails"))
    assert found.code == 0
    lines = found.out.splitlines()[2:]
    assert all(re.search(r"\d+ points agree, \d\d %  +cat-", line) for line in lines[:2])
    assert re.search(r"-+ +merely similar from here on", lines[2])
    assert all("similar 0." in line for line in lines[3:])
    assert len(lines) == 9
    assert "calibration" not in found.err


def test_nothing_verified_is_said(cooc: Shell, photos: Path) -> None:
    found = cooc("search", photos / "noise.png", *words(photos, "--no-thumbnails"))
    assert "Nothing found" in found.out
    assert "merely similar" in found.out
    assert "agree, " not in found.out


def test_json_holds_regions_and_transforms(cooc: Shell, photos: Path) -> None:
    found = cooc("search", photos / "coffee.png", *words(photos, "--json")).json
    assert (found["checked"], found["no_match"]) == (True, False)
    for match in found["matches"][:2]:
        agreement = match["agreement"]
        known = NEAR if "near" in match["path"] else SLANTED
        region = np.array(agreement["query"]["region"], np.float32)
        there = project(np.array(agreement["transform"]), region)
        assert np.abs(there - project(known, region)).max() < 6
        assert (agreement["engine"], agreement["query_picture"]) == ("sift", 0)
        assert agreement["picture"]["size"] == list(SIZE)
    assert found["matches"][2]["agreement"] is None
    plain = cooc("search", photos / "coffee.png", *words(photos, "--json", "--no-verify")).json
    assert not plain["checked"]
    assert not any(match["verified"] for match in plain["matches"])
    part = cooc("search", photos / "coffee.png", *words(photos, "--json", "--box", "150,60,450,340")).json
    x0, y0, x1, y1 = part["matches"][0]["agreement"]["query"]["box"]
    assert 150 <= x0 < x1 <= 450
    assert 60 <= y0 < y1 <= 340
    joined = cooc("search", photos / "cat.png", photos / "rocket.png", *words(photos, "--json")).json
    agreed = {
        (m["path"].partition("-")[0], m["agreement"]["query_picture"]) for m in joined["matches"] if m["verified"]
    }
    assert agreed == {("cat", 0), ("rocket", 1)}


def test_page_and_sheet_draw_the_region(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    page, sheet, plain = tmp_path / "page.html", tmp_path / "sheet.png", tmp_path / "plain.png"
    cooc("search", photos / "astronaut.png", *words(photos, "--html", page, "--sheet", sheet))
    text = page.read_text()
    assert len(re.findall(r"<figure class=agrees>", text)) == 2
    assert re.search(r"\d+ points agree, \d\d %", text)
    assert text.index("merely similar from here on") > text.rindex("class=agrees")
    cooc("search", photos / "astronaut.png", *words(photos, "--no-verify", "--sheet", plain))

    def green(file: Path) -> int:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB")).astype(int)
        return int((np.abs(pixels - (46, 204, 113)).max(axis=2) < 12).sum())

    assert green(sheet) > 500
    assert green(plain) < 50


def test_an_index_without_features_says_how_to_get_them(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    Image.fromarray(photo("cat")).save(tmp_path / "cat.png")
    with ImageSearch.create(tmp_path / ".cooc", recipe=RECIPE, features="", device="cpu") as search:
        search.index([tmp_path], workers=0)
    refused = cooc("search", photos / "cat.png", "--verify", "--index", tmp_path / ".cooc")
    assert refused.code == 2
    assert "cooc index --verify sift" in refused.err
    assert cooc("search", photos / "cat.png", "--index", tmp_path / ".cooc", "--json").json["checked"] is False


# match


def test_match_of_two_views(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    view, drawn = photos / "index/cat-near.png", tmp_path / "drawn.jpg"
    found = cooc("match", photos / "cat.png", view, "--output", drawn)
    assert found.code == 0
    assert re.search(r"The same thing: \d+ points agree \(sift\), \d\d %", found.out)
    assert "Transform" in found.out
    with Image.open(drawn) as image:
        assert image.height == 640
        assert image.width > 1200
    told = cooc("match", photos / "cat.png", view, "--json").json
    assert told["verified"]
    assert len(told["points"]) == told["inliers"] > 50
    region = np.array(told["query"]["region"], np.float32)
    assert np.abs(project(np.array(told["transform"]), region) - project(NEAR, region)).max() < 4
    part = cooc("match", photos / "cat.png", view, "--json", "--box", "100,50,300,250").json
    assert part["query"]["box"][0] >= 100
    assert part["inliers"] < told["inliers"]


def test_match_of_two_things(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    """Exit code 1: not verified. It is drawn all the same."""
    found = cooc("match", photos / "cat.png", photos / "noise.png", "-o", tmp_path / "no.png")
    assert found.code == 1
    assert "Nothing agrees" in found.out or "Not verified" in found.out
    assert (tmp_path / "no.png").exists()
    told = cooc("match", photos / "cat.png", photos / "noise.png", "--json")
    assert told.code == 1
    assert told.json["verified"] is False


def test_match_refuses(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    Image.new("RGB", (200, 150), "teal").save(tmp_path / "flat.png")
    for call, says in (
        ((tmp_path / "flat.png", photos / "cat.png"), "no texture"),
        ((photos / "cat.png", tmp_path / "flat.png"), "no texture"),
        ((photos / "cat.png", photos / "none.png"), "does not exist"),
        ((photos / "cat.png", photos / "cat.png", "--engine", "sitf"), "'sift'"),
        ((photos / "cat.png", photos / "cat.png", "--box", "9000,0,9100,50"), "outside"),
        ((photos / "cat.png", photos / "cat.png", "-o", tmp_path / "x.txt"), ".jpg"),
    ):
        refused = cooc("match", *call)
        assert (refused.code, says in refused.err) == (2, True), refused
