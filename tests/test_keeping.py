"""Of copies, the one to keep: real files, each better in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, ImageFilter

from cooc.index.records import Record
from cooc.keeping import Choice, choose
from cooc.pictures import open_collection
from tests.verification.pictures import photo

WHOLE = Image.fromarray(photo("coffee"))


def record(folder: Path, name: str, picture: Image.Image, quality: int = 95) -> Record:
    picture.save(folder / name, quality=quality)
    status = (folder / name).stat()
    return Record(name, status.st_size, status.st_mtime_ns, "0" * 64, picture.width, picture.height)


def chosen(folder: Path, *group: Record) -> tuple[str, str]:
    choice = choose(group, open_collection(folder))
    assert {choice.keep, *choice.rest} == set(group)
    return choice.keep.path, choice.why


def half(picture: Image.Image) -> Image.Image:
    return picture.resize((picture.width // 2, picture.height // 2))


@pytest.mark.parametrize(
    "change",
    [half, lambda p: p.crop((40, 30, 400, 300)), lambda p: half(p).transpose(Image.Transpose.ROTATE_90)],
    ids=["half", "crop", "half and turned"],
)
def test_the_largest_is_kept(tmp_path: Path, change: Callable[[Image.Image], Image.Image]) -> None:
    group = record(tmp_path, "a.jpg", change(WHOLE)), record(tmp_path, "b.jpg", WHOLE)
    assert chosen(tmp_path, *group) == ("b.jpg", "the largest")
    assert chosen(tmp_path, *group[::-1]) == ("b.jpg", "the largest")


def test_pixels_without_anything_in_them_do_not_count(tmp_path: Path) -> None:
    """An enlarged copy is larger, and not better."""
    small = half(WHOLE)
    blown = small.resize((1400, 1400 * small.height // small.width), Image.Resampling.BICUBIC)
    group = record(tmp_path, "enlarged.jpg", blown), record(tmp_path, "small.jpg", small)
    assert chosen(tmp_path, *group)[0] == "small.jpg"


def test_the_sharpest_of_one_size(tmp_path: Path) -> None:
    soft = WHOLE.filter(ImageFilter.GaussianBlur(2))
    group = record(tmp_path, "a.jpg", soft), record(tmp_path, "b.jpg", WHOLE)
    assert chosen(tmp_path, *group) == ("b.jpg", "the sharpest")


def test_then_what_is_known_of_it(tmp_path: Path) -> None:
    a, b = record(tmp_path, "a.png", WHOLE), record(tmp_path, "b.png", WHOLE)
    assert chosen(tmp_path, a, b) == ("a.png", "the first by name")
    heavier = replace(b, size=2 * b.size)
    assert chosen(tmp_path, a, heavier) == ("b.png", "the least compressed")
    tagged = replace(a, tags=frozenset({"mine"}))
    assert chosen(tmp_path, tagged, heavier) == ("a.png", "has tags")
    dated = replace(heavier, taken="2024-05-31")
    assert chosen(tmp_path, tagged, dated) == ("b.png", "knows when it was taken")


def test_what_cannot_be_read_is_not_kept(tmp_path: Path) -> None:
    small, large = record(tmp_path, "small.jpg", half(WHOLE)), record(tmp_path, "large.jpg", WHOLE)
    (tmp_path / "large.jpg").write_bytes(b"no picture any more")
    choice: Choice = choose([large, small], open_collection(tmp_path))
    assert choice.keep is small
    assert choice.why == "the only one that can be read"
    assert choice.unread == {"large.jpg"}
    (tmp_path / "small.jpg").unlink()
    assert choose([large, small], open_collection(tmp_path)).unread == {"large.jpg", "small.jpg"}
