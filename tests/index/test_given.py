"""Vectors of another method as an index: what is in it, what can be asked, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cooc.cli import warm
from cooc.errors import InputError, StoreMismatchError
from cooc.image_search import ImageSearch
from tests.shell import Shell
from tests.tiny import write_photos
from tests.verification.pictures import photo

DIM = 7


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """photos/ with 5 pictures, v.npy in float64 and not of length 1, and names.txt."""
    files = write_photos(tmp_path / "photos", 5)
    np.save(tmp_path / "v.npy", 3 * np.random.default_rng(0).standard_normal((5, DIM)))
    (tmp_path / "names.txt").write_text("".join(f"{file.name}\n" for file in files))
    return tmp_path


def imported(place: Path, name: str = "mine") -> ImageSearch:
    files = place / "v.npy", place / "names.txt"
    search, report = ImageSearch.import_vectors(*files, place / "photos/.cooc", name=name)
    assert report.bad == report.failed == 0
    return search


def test_vectors_are_those_that_came_with_unit_length(given: Path) -> None:
    vectors = np.load(given / "v.npy")
    with imported(given) as search:
        assert (search.meta.dim, search.meta.recipe, search.config.given) == (DIM, "mine", "mine")
        records = list(search.store.records())
        assert [record.path for record in records] == [f"{n:02}.jpg" for n in range(5)]
        assert {(record.width, record.height) for record in records} == {(64, 48), (48, 64)}
        kept = search.vectors([record.id for record in records])
        np.testing.assert_allclose(kept, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-6)
        assert search.store.verify() == []


def test_questions(given: Path, tmp_path: Path) -> None:
    imported(given).close()
    vectors = np.load(given / "v.npy")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    order = [f"{n:02}.jpg" for n in np.argsort(-vectors @ vectors[3])]
    with ImageSearch.open(given / "photos/.cooc") as search:
        for query in (given / "photos/03.jpg", (given / "photos/03.jpg").read_bytes()):
            assert [match.path for match in search.search(query).matches] == order
        id = search.store.find(["03.jpg"])[0]
        assert id is not None
        assert [match.path for match in search.search_id(id.id).matches] == order[1:]
        both = search.search([given / "photos/03.jpg", given / "photos/01.jpg"]).matches[0]
        assert both.path in ("03.jpg", "01.jpg")
        (other,) = write_photos(tmp_path / "other", 1, seed=9)
        for unknown, box in ((other, None), (given / "photos/03.jpg", (0, 0, 20, 20))):
            with pytest.raises(InputError, match="'mine' were imported"):
                search.search(unknown, box)
        with pytest.raises(InputError, match=r"nothing\.jpg"):
            search.search(tmp_path / "nothing.jpg")


def test_the_process_that_stays_needs_no_network_for_them(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(given).close()
    monkeypatch.setattr(warm, "_stays", True)
    with warm.opened(str(given / "photos/.cooc"), "cpu") as search:
        assert len(search.search(given / "photos/03.jpg").matches) == 5


def test_local_features_can_be_added(cooc: Shell, given: Path) -> None:
    whole = Image.fromarray(photo("cat"))
    whole.save(given / "photos/00.jpg")
    whole.rotate(10).save(given / "photos/01.jpg")
    imported(given).close()
    done = cooc("index", given / "photos", "--verify", "sift", "--device", "cpu")
    assert done.code == 0, done.err
    found = cooc("search", given / "photos/00.jpg", "--index", given / "photos/.cooc", "--json", "--device", "cpu").json
    assert [match["path"] for match in found["matches"] if match["verified"]] == ["00.jpg", "01.jpg"]


def test_more_of_the_same_and_others(cooc: Shell, given: Path) -> None:
    imported(given).close()
    write_photos(given / "photos/more", 2, seed=1)
    np.save(given / "more.npy", np.eye(3, DIM, dtype=np.float16))
    (given / "more.txt").write_text(f"{given}/photos/more/00.jpg\nmore/01.jpg\nmore/gone.jpg\n")
    words = ("import", given / "more.npy", "--paths", given / "more.txt", "--index", given / "photos/.cooc")
    done = cooc(*words, "--name", "mine")
    assert done.code == 3  # one of them is not there
    assert "gone.jpg" in done.err
    assert "2 described, 1 bad" in done.out
    assert "7 in the index" in done.out
    other = cooc(*words)
    assert other.code == StoreMismatchError.exit_code
    with pytest.raises(InputError, match="'mine' were imported"):
        ImageSearch.open(given / "photos/.cooc").descriptor  # noqa: B018


@pytest.mark.parametrize(
    ("vectors", "names", "said"),
    [
        (np.ones((2, 3)), "00.jpg\n", "2 rows, and .* 1 line"),
        (np.ones((2, 3)), "00.jpg\n00.jpg\n", "twice, in lines 1 and 2"),
        (np.ones(3), "00.jpg\n", r"vectors \(N, D\), not float64 \(3,\)"),
        (np.ones((1, 3), int), "00.jpg\n", "floating-point"),
        (np.array([[1.0, 2.0], [0, 0]]), "00.jpg\n01.jpg\n", "row 1 is zero"),
        (np.array([[1.0, np.nan]]), "00.jpg\n", "row 0 is zero, or not finite"),
        (np.array([[{"a": 1}]], object), "00.jpg\n", "no array of numpy"),
        (np.ones((1, 3)), "/elsewhere/00.jpg\n", "does not exist"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_made(given: Path, vectors: np.ndarray, names: str, said: str) -> None:
    np.save(given / "v.npy", vectors)
    (given / "names.txt").write_text(names)
    with pytest.raises(InputError, match=said):
        imported(given)
    assert not (given / "photos/.cooc").exists()
