"""cooc index --quality, --estimate: what a new index is made of, and what it will take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cooc.cli import options
from cooc.cli.estimating import duration
from cooc.image_search import DEFAULT_QUALITY, QUALITIES, ImageSearch, Quality
from cooc.image_search.estimating import estimate, list_pictures
from cooc.recipes import find_recipe, find_whitening
from tests.shell import Shell
from tests.tiny import write_photos

SMALL = Quality("light+size=64", "sift", "small")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_photos(tmp_path / "photos", 15)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no picture")
    return tmp_path / "photos"


@pytest.mark.parametrize("quality", QUALITIES.values(), ids=QUALITIES)
def test_what_ships_is_whole(quality: Quality) -> None:
    config = find_recipe(quality.recipe).config
    assert find_whitening(config).truncate(config.dim).dim == 512


def test_the_default_quality(cooc: Shell, photos: Path) -> None:
    """What a newcomer gets: the real network, features and words; a photo finds itself, and that is proven."""
    assert cooc("index", photos, "-q").code == 3  # of one broken file
    with ImageSearch.open(photos / ".cooc") as search:
        assert search.meta.recipe == QUALITIES[DEFAULT_QUALITY].recipe == options.DEFAULT
        assert search.meta.features == QUALITIES[DEFAULT_QUALITY].features
        assert search.words is not None
        record = next(search.store.records())
        assert search.search(search.file(record.id), k=1).matches[0].id == record.id
    again = cooc("index", photos, "--quality", "best")
    assert again.code == 2
    assert "cooc rebuild --verify sift+xfeat" in again.err
    other = cooc("index", photos, "--quality", "fast")
    assert other.code == 5
    assert "cannot be compared" in other.err


def test_a_quality_and_a_recipe_exclude_each_other(cooc: Shell, photos: Path) -> None:
    assert "give one of the two" in cooc("index", photos, "--quality", "fast", "-r", "light").err
    assert "'fast'" in cooc("index", photos, "--quality", "fats").err
    assert not (photos / ".cooc").exists()


def test_without_npm_the_message_names_a_way(
    cooc: Shell, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = cooc("index", photos)
    assert done.code == 4
    assert "npm is not installed" in done.err
    assert "-r paper-linear" in done.err


def test_an_estimate_is_of_all_pictures(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a sample that is indexed and thrown away; a broken file does not spoil it."""
    monkeypatch.setitem(QUALITIES, "fast", SMALL)
    assert len(list_pictures(photos)) == 16
    found = estimate(photos, "fast", workers=0, device="cpu")
    assert (found.pictures, found.recipe) == (16, SMALL.recipe)
    assert 11 <= found.sampled <= 13
    assert found.seconds > 0
    assert found.bytes > 16 * 4 * 512
    few = estimate(photos, "fast", list_pictures(photos)[:2], workers=0, device="cpu")
    assert few.pictures == 2
    assert sorted(path.name for path in photos.iterdir() if path.is_dir()) == []


def test_a_long_run_says_so_before(cooc: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the fastest quality would take; not of an index that is there, nor where nobody reads it."""
    for name in QUALITIES:
        monkeypatch.setitem(QUALITIES, name, SMALL)
    monkeypatch.setattr("cooc.cli.estimating.MANY", 16)
    told = "16 pictures: about 1 s; `--quality fast`: about 1 s. Ctrl-C loses nothing."
    assert told not in cooc("index", photos, "--workers", 0, "--index", photos / "short").err  # than half an hour
    monkeypatch.setattr("cooc.cli.estimating.LONG", 0)
    monkeypatch.setattr("cooc.cli.estimating.duration", lambda seconds: "about 1 s" if seconds > 0 else "nothing")
    before = torch.get_num_threads()
    assert told in cooc("index", photos).err
    assert torch.get_num_threads() == before
    assert told not in cooc("index", photos).err
    assert "pictures: about" not in cooc("index", photos, "--workers", 0, "-q", "--index", photos / "other").err


def test_the_command_says_it(cooc: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUALITIES:
        monkeypatch.setitem(QUALITIES, name, SMALL)
    done = cooc("index", photos, "--estimate", "--workers", 0)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["quality", *QUALITIES]
    lines = cooc("index", photos, "--estimate", "--quality", "fast", "--json", "--workers", 0).out.splitlines()
    assert [json.loads(line)["pictures"] for line in lines] == [16]
    assert not (photos / ".cooc").exists()
    (photos / "empty").mkdir()
    assert "no pictures" in cooc("index", photos / "empty", "--estimate").err


def test_durations_as_people_say_them() -> None:
    assert [duration(s) for s in (0.2, 40, 900, 22_320)] == ["about 1 s", "about 40 s", "about 15 min", "about 6.2 h"]
