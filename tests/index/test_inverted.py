"""The inverted file of visual words: found as by comparing with every picture, kept up to date, never in the way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cooc.image_search import ImageSearch
from cooc.index import inverted
from cooc.index.inverted import Inverted, update
from cooc.index.records import Filter
from cooc.index.shortlist import Options
from cooc.verification.engines import extract
from cooc.verification.words import WORDS, Signature, similarity
from cooc.verified_search import find_verified
from tests.tiny import RECIPE, descriptor, write_photos
from tests.verification.pictures import photo, turned, warp


def made(count: int, seed: int = 0) -> list[tuple[bytes, Signature]]:
    chance = np.random.default_rng(seed)
    found = []
    for number in range(count):
        words = np.unique(chance.integers(0, WORDS, chance.integers(0, 400)) // 16 * 16).astype(np.uint16)
        found.append(
            (bytes([seed]) * 8 + number.to_bytes(8), Signature(words, chance.bit_generator.random_raw(len(words))))
        )
    return found


def naive(pictures: list[tuple[bytes, Signature]], query: Signature, k: int) -> list[str]:
    asked = dict(zip(query.words.tolist(), query.bits, strict=True))
    scores = {}
    for name, one in pictures:
        shared = [(asked[word], bits) for word, bits in zip(one.words.tolist(), one.bits, strict=True) if word in asked]
        total = sum(float(similarity(np.array([a]), np.array([b]))[0]) for a, b in shared)
        if total:
            scores[name] = total / np.sqrt(len(one.words))
    return [name.hex() for name in sorted(scores, key=lambda name: (-scores[name], name))[:k]]


@pytest.mark.parametrize("segment", [1 << 15, 16])
def test_as_by_comparing_with_every_picture(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverted, "SEGMENT", segment)
    monkeypatch.setattr(inverted, "PART", 8)
    pictures = made(60)
    found = Inverted.of(pictures)
    assert len(found) == 60
    assert (len(found.segments) > 1) == (segment == 16)
    for _, query in made(5, seed=1):
        assert found.search(query, 7) == naive(pictures, query, 7)
    assert found.search(Signature(np.zeros(0, np.uint16), np.zeros(0, np.uint64)), 5) == []


def test_the_rarest_words_are_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    common, rare = np.array([7], np.uint16), np.array([7, 9], np.uint16)
    pictures = [
        (bytes(15) + bytes([n]), Signature(rare if n == 3 else common, np.zeros(1 + (n == 3), np.uint64)))
        for n in range(9)
    ]
    monkeypatch.setattr(inverted, "MOST", 2)
    query = Signature(rare, np.zeros(2, np.uint64))
    assert Inverted.of(pictures).search(query, 5) == [pictures[3][0].hex()]


@pytest.fixture
def search(tmp_path: Path) -> Iterator[ImageSearch]:
    """Photographs, and smooth pictures that have hardly any words."""
    for name in ("cat", "coffee"):
        Image.fromarray(photo(name)).save(tmp_path / f"{name}.png")
    write_photos(tmp_path / "smooth", 6)
    with ImageSearch.create(tmp_path / ".cooc", recipe=RECIPE, descriptor=descriptor()) as search:
        search.index([tmp_path], workers=0)
        yield search


def ids(words: Inverted | None) -> list[bytes]:
    assert words is not None
    return sorted(name.tobytes() for segment in words.segments for name in segment.ids)


def test_it_follows_the_index(search: ImageSearch) -> None:
    """What comes is added, what goes is left out, what is spoiled is made again; nothing is written without need."""
    folder = Path(search.index_path) / "words"
    assert ids(search.words) == sorted(bytes.fromhex(record.id) for record in search.store.records())
    before = list(folder.iterdir())
    assert update(folder, search.store) == 0
    assert list(folder.iterdir()) == before
    (kept,) = Inverted.open(folder).segments
    (before[0] / "lengths.npy").unlink()  # as segments were before lengths were kept
    np.testing.assert_array_equal(Inverted.open(folder).segments[0].lengths, kept.lengths)
    np.testing.assert_array_equal(kept.lengths, [(kept.pictures == n).sum() for n in range(len(kept.ids))])
    Image.fromarray(photo("rocket")).save(search.root / "rocket.png")
    search.index([search.root], workers=0)
    assert len(ids(search.words)) == 9
    search.remove(["smooth"])
    update(folder, search.store)
    assert len(ids(search.words)) == 3
    (segment,) = folder.iterdir()
    (segment / "bits.npy").write_bytes((segment / "bits.npy").read_bytes()[:-100])
    (folder / f"{'0' * 32}.new").mkdir()  # of a run that was killed
    assert len(search.words or []) in (0, 3)  # mapped before, or left out: no crash
    update(folder, search.store)
    assert len(list(folder.iterdir())) == 1
    assert ids(Inverted.open(folder)) == sorted(bytes.fromhex(record.id) for record in search.store.records())


def test_words_find_what_the_vector_misses(search: ImageSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector that points at a smooth picture: only words know the cat."""
    monkeypatch.setattr("cooc.verified_search.SHORTLIST", 1)
    wrong = search.vectors([next(r.id for r in search.store.records() if r.path.startswith("smooth"))])[0]
    asked = [extract("sift", warp(photo("cat"), turned(12, 0.8, (200, 150), (40, 30)), (600, 560)))]
    without = find_verified(search.store, wrong, asked, Options(k=1))
    assert without.no_match
    found = find_verified(search.store, wrong, asked, Options(k=1), words=search.words)
    assert [match.path for match in found.matches if match.verified] == ["cat.png"]
    elsewhere = Options(k=1, where=Filter(prefix="smooth"))
    assert find_verified(search.store, wrong, asked, elsewhere, words=search.words).no_match


def test_without_it_a_search_is_as_before(search: ImageSearch) -> None:
    shutil.rmtree(Path(search.index_path) / "words")
    assert search.words is None
    assert search.search(photo("cat"), k=1).matches[0].path == "cat.png"


def test_a_failing_machine_is_no_damage(
    search: ImageSearch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No file handles: the search goes on without words, a run leaves them as they were, and nothing is made again."""
    folder = Path(search.index_path) / "words"
    before = sorted(folder.iterdir())

    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(np, "load", fail)
        search._words = None
        assert search.words is None
        search.find_words()
    assert "cannot be read now" in caplog.text
    assert "not brought up to date" in caplog.text
    assert "damaged" not in caplog.text
    assert sorted(folder.iterdir()) == before
    assert len(search.words or []) == 8
