"""`cooc duplicates`: what is shown of groups, and what --move and --link do and refuse."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from cooc.image_search import ImageSearch
from tests.shell import Shell
from tests.verification.pictures import photo

RECIPE = "paper-linear+backbone=efficientnet-lite0+raw+size=128"


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """coffee.png with a half-size and a turned copy, cat.png twice with the same bytes, and one picture alone."""
    folder = tmp_path_factory.mktemp("copies")
    (folder / "again").mkdir()
    for name in ("coffee", "cat", "rocket"):
        Image.fromarray(photo(name)).save(folder / f"{name}.png")
    whole = Image.fromarray(photo("coffee"))
    whole.resize((whole.width // 2, whole.height // 2)).save(folder / "again/coffee <small>.jpg", quality=90)
    whole.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.jpg", quality=80)
    shutil.copy(folder / "cat.png", folder / "again/cat.png")
    with ImageSearch.create(folder / ".cooc", recipe=RECIPE, device="cpu") as search:
        search.index([folder], workers=0)
    return folder


@pytest.fixture
def photos(indexed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(indexed, tmp_path / "photos"))


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and ".cooc" not in p.parts
    }


def test_groups_say_which_one_to_keep_and_why(cooc: Shell, indexed: Path, tmp_path: Path) -> None:
    before = files(indexed)
    done = cooc("duplicates", "--index", indexed / ".cooc", "--html", tmp_path / "copies.html")
    assert done.code == 0, done.err
    assert "2 pictures, same content\n  again/cat.png  " in done.out
    assert "keep (the first by name)" in done.out
    assert "3 pictures\n  coffee.png  600x400  " in done.out
    assert "2 groups, 5 pictures." in done.out
    page = (tmp_path / "copies.html").read_text()
    assert page.count("<img ") == 5
    assert page.count("<b>keep: ") == 2
    assert "coffee &lt;small&gt;.jpg" in page
    assert "<script" not in page
    groups = [json.loads(line) for line in cooc("duplicates", "--index", indexed / ".cooc", "--json").out.splitlines()]
    assert [[one["path"] for one in group if one["keep"]] for group in groups] == [["again/cat.png"], ["coffee.png"]]
    listed = cooc("duplicates", "--index", indexed / ".cooc", "--list").out.splitlines()
    assert listed == [str(indexed / name) for name in ("cat.png", "again/coffee <small>.jpg", "turned.jpg")]
    assert files(indexed) == before


def test_move(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    before, target = files(photos), tmp_path / "rest"
    (target / "again").mkdir(parents=True)
    taken = target / "again/coffee <small>.jpg"
    taken.write_bytes(b"was there")
    done = cooc("duplicates", "--index", photos / ".cooc", "--move", target)
    assert done.code == 3
    assert "is there already" in done.err
    assert "2 files moved, 1 left as they are." in done.out
    assert taken.read_bytes() == b"was there"
    assert files(photos) | files(target) | {"again/coffee <small>.jpg": before["again/coffee <small>.jpg"]} == before
    assert sorted(files(photos)) == ["again/cat.png", "again/coffee <small>.jpg", "coffee.png", "rocket.png"]
    assert cooc("status", "--index", photos / ".cooc", "--json").json["images"] == 4
    inside = cooc("duplicates", "--index", photos / ".cooc", "--move", photos / "again")
    assert inside.code == 2
    assert "lies in the indexed folder" in inside.err


def test_move_to_another_disk(cooc: Shell, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no link can be made, bytes and times are copied, and the file goes only then."""
    before = files(photos)
    times = {name: (photos / name).stat().st_mtime_ns for name in before}

    def other_disk(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    assert cooc("duplicates", "--index", photos / ".cooc", "--move", tmp_path / "rest").code == 0
    moved = files(tmp_path / "rest")
    assert sorted(moved) == ["again/coffee <small>.jpg", "cat.png", "turned.jpg"]
    assert files(photos) | moved == before
    assert all((tmp_path / "rest" / name).stat().st_mtime_ns == times[name] for name in moved)


@pytest.mark.parametrize("kind", ["hard", "symbolic"])
def test_link_only_what_has_the_same_bytes(cooc: Shell, photos: Path, kind: str) -> None:
    before = files(photos)
    done = cooc("duplicates", "--index", photos / ".cooc", "--link", kind)
    assert done.code == 0, done.err
    assert "1 file linked, 2 left as they are." in done.out
    assert files(photos) == before
    assert (photos / "cat.png").samefile(photos / "again/cat.png")
    assert (photos / "cat.png").is_symlink() == (kind == "symbolic")
    assert not list(photos.rglob("*.tmp"))
    again = cooc("duplicates", "--index", photos / ".cooc", "--link", kind)
    assert "0 files linked" in again.out


def test_what_has_changed_since_is_left(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    Image.fromarray(photo("rocket")).save(photos / "turned.jpg")  # a picture of its own now
    Image.fromarray(photo("rocket")).save(photos / "again/cat.png")  # which was the one to keep
    before = files(photos)
    done = cooc("duplicates", "--index", photos / ".cooc", "--move", tmp_path / "rest")
    assert done.code == 3
    assert "turned.jpg: it has changed" in done.err
    assert "Its copies stay, too" in done.err
    assert sorted(files(tmp_path / "rest")) == ["again/coffee <small>.jpg"]
    assert files(photos) | files(tmp_path / "rest") == before


def test_one_thing_at_a_time(cooc: Shell, indexed: Path, tmp_path: Path) -> None:
    done = cooc("duplicates", "--index", indexed / ".cooc", "--list", "--move", tmp_path)
    assert done.code == 2
    assert "Choose one of" in done.err
