"""Searches that are verified: real SIFT features of photographs seen from elsewhere, in a real index."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cooc import verified_search
from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.index.records import Filter
from cooc.verification.transforms import project
from tests.tiny import RECIPE, descriptor, write_photos
from tests.verification.pictures import PHOTOS, SLANTED, photo, turned, warp

VIEWS = {
    "near": turned(12, 0.8, (200, 150), (40, 30)),
    "slanted": SLANTED,
    "far": turned(-20, 0.55, (250, 200), (20, 60)),
}
ASKED = turned(7, 0.7, (220, 180), (30, 10))  # a view that is not in the index
SIZE = (600, 560)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three views of each photograph, and smooth pictures in which SIFT finds hardly anything; with their index."""
    root = tmp_path_factory.mktemp("verified")
    for name in PHOTOS:
        (root / name).mkdir()
        for view, transform in VIEWS.items():
            Image.fromarray(warp(photo(name), transform, SIZE)).save(root / name / f"{view}.png")
    write_photos(root / "smooth", 14)
    with ImageSearch.create(root / ".cooc", recipe=RECIPE, descriptor=descriptor()) as search:
        search.index([root], workers=0)
        assert search.status().with_features == 3 * len(PHOTOS) + 14
    return root


@pytest.fixture(scope="module")
def search(photos: Path) -> Iterator[ImageSearch]:
    with ImageSearch.open(photos / ".cooc", descriptor=descriptor()) as search:
        yield search


def asked(name: str) -> np.ndarray:
    return warp(photo(name), ASKED, SIZE)


def things(matches: list[Any]) -> list[str]:
    return [match.path.partition("/")[0] for match in matches]


def test_local_features_and_words_do_not_wait_for_torch(photos: Path) -> None:
    """It takes a second to load, in a thread of its own; faiss is for larger indexes."""
    code = (
        "import sys, cooc.cli.showing; from cooc.image_search import ImageSearch; from cooc.verified_search import *\n"
        "from cooc.verified_search import _by_words\n"
        "search = ImageSearch.open(sys.argv[1]); asked = search._local([sys.argv[2]], [None])\n"
        "found = _by_words(search.store, search.words, asked, Options())\n"
        "print(search.store.get(found[0][:1])[0].path, sys.modules.keys() & {'torch', 'faiss'})"
    )
    query = f"{next(iter(PHOTOS))}/near.png"
    command = [sys.executable, "-c", code, str(photos / ".cooc"), str(photos / query)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{query} set()"


@pytest.mark.parametrize("name", PHOTOS)
def test_what_is_verified_leads(search: ImageSearch, name: str) -> None:
    """The three views lead, each with the transform that its picture was made by; all others are merely similar."""
    results = search.search(asked(name), k=26)
    assert results.checked
    assert not results.no_match
    first, rest = results.matches[:3], results.matches[3:]
    assert things(first) == [name] * 3
    corners = np.array([[150, 120], [400, 120], [400, 350], [150, 350]], np.float32)
    for match in first:
        assert match.verified
        assert match.probability is not None
        assert match.probability >= 0.5
        assert match.agreement is not None
        assert match.agreement.picture_size == SIZE
        known = VIEWS[Path(match.path).stem] @ np.linalg.inv(ASKED)
        found = project(match.agreement.transform, corners)
        assert np.abs(found - project(known, corners)).max() < 4
    assert [match.probability for match in first] == sorted((m.probability or 0 for m in first), reverse=True)
    assert len(rest) == 23
    assert all((m.verified, m.agreement, m.probability) == (False, None, None) for m in rest)


def test_a_box_is_what_is_looked_for(search: ImageSearch) -> None:
    """Two photographs in one picture: the region lies in the box, in pixels of the whole picture."""
    both = np.concatenate([asked("cat"), asked("coffee")], axis=1)
    for name, box in (("cat", (0, 0, SIZE[0], SIZE[1])), ("coffee", (SIZE[0], 0, 2 * SIZE[0], SIZE[1]))):
        matches = search.search(both, box, k=5).matches
        assert [match.path.partition("/")[0] for match in matches if match.verified] == [name] * 3
        agreement = matches[0].agreement
        assert agreement is not None
        assert agreement.query_box is not None
        assert box[0] <= agreement.query_box[0] < agreement.query_box[2] <= box[2]
    whole = search.search(both, k=6).matches
    assert {match.path.partition("/")[0] for match in whole if match.verified} == {"cat", "coffee"}


def test_each_match_names_the_picture_it_agrees_with(search: ImageSearch) -> None:
    matches = search.search([asked("rocket"), asked("astronaut")], k=6).matches
    assert all(match.verified for match in matches)
    assert {(match.path.partition("/")[0], match.query) for match in matches} == {("rocket", 0), ("astronaut", 1)}


def test_filters(search: ImageSearch) -> None:
    inside = search.search(asked("cat"), where=Filter(prefix="cat"))
    assert [match.verified for match in inside.matches] == [True] * 3
    outside = search.search(asked("cat"), k=30, where=Filter(prefix="smooth"))
    assert things(outside.matches) == ["smooth"] * 14
    assert outside.no_match


@pytest.mark.parametrize("thorough", [False, True])
def test_a_search_goes_on_from_what_is_proven(tmp_path: Path, thorough: bool) -> None:
    """One picture shows what the query shows, from the side, and something else beside it. What shows the first of them
    from further aside is found by it; what shows the other has nothing of the query."""
    aside, further = (warp(photo("cat"), np.diag([k, 1, 1]), (int(451 * k), 300)) for k in (0.5, 0.3))
    scene = np.concatenate([aside, photo("coffee")[:300]], axis=1)
    Image.fromarray(scene).save(tmp_path / "scene.png")
    Image.fromarray(further).save(tmp_path / "further.png")
    other = warp(scene[:, 260:], turned(5, 0.9, (200, 150), (20, 20)), SIZE)
    Image.fromarray(other).save(tmp_path / "other.png")
    write_photos(tmp_path / "smooth", 14)
    with ImageSearch.create(tmp_path / ".cooc", recipe=RECIPE, descriptor=descriptor()) as search:
        search.index([tmp_path], workers=0)
        by_vector = [match.path for match in search.search(photo("cat"), k=17, verify=False).matches]
        assert by_vector.index("further.png") > 1
        found = search.search(photo("cat"), k=17, thorough=thorough).matches
        assert [match.path for match in found[:2]] == ["scene.png", "further.png"]
        assert [match.verified for match in found[:3]] == [True, False, False]  # they agree with the scene alone
        place = [match.path for match in found].index("other.png")
        assert place >= min(by_vector.index("other.png"), 2)  # the scene's other half leads nowhere
        led = search.search(photo("coffee")[:300], k=17, thorough=thorough).matches
        assert {match.path for match in led[:2]} == {"scene.png", "other.png"}  # asked for, it is found


def test_no_picture_is_asked_by_two_witnesses(search: ImageSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three views of a thing ask for the others. A thorough search lets each ask for all that it leads to."""
    asked_by: list[list[set[str]]] = []

    def verify_each(store: Any, pairs: Any, *options: Any) -> Any:
        asked_by.append([set(names) for _, names in pairs])
        return real(store, pairs, *options)

    real = verified_search._verify_each
    monkeypatch.setattr(verified_search, "_verify_each", verify_each)
    views = {match.id for match in search.search(asked("cat"), k=3).matches}
    _, onward, *_ = asked_by
    assert len(onward) == 3
    assert len(set.union(*onward)) == sum(map(len, onward)) > 0
    assert not set.union(*onward) & views  # they are sure
    asked_by.clear()
    search.search(asked("cat"), k=3, thorough=True)
    _, onward, *_ = asked_by
    assert len(set.union(*onward)) < sum(map(len, onward))
    assert not set.union(*onward) & views


def test_thorough_needs_what_it_verifies_by(search: ImageSearch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leave out verify=False"):
        search.search(asked("cat"), verify=False, thorough=True)
    with pytest.raises(InputError, match="a vector has no local features"):
        search.search_vector(np.ones(search.meta.dim, np.float32), thorough=True)
    with (
        ImageSearch.create(tmp_path / ".cooc", recipe=RECIPE, descriptor=descriptor(), features="") as plain,
        pytest.raises(InputError, match="Add them: cooc index --verify sift"),
    ):
        plain.search(asked("cat"), thorough=True)


def test_pages_follow_one_another(search: ImageSearch) -> None:
    whole = search.search(asked("coffee"), k=26).matches
    pages = [search.search(asked("coffee"), k=4, offset=offset).matches for offset in range(0, 28, 4)]
    assert [match.id for page in pages for match in page] == [match.id for match in whole]
    assert len({match.id for match in whole}) == 26
    late = search.search(asked("coffee"), k=4, offset=8)
    assert not late.no_match  # there is one, on the first page


def test_least_score_is_for_what_is_not_verified(search: ImageSearch) -> None:
    """Geometry proves more than a vector: what is verified stays."""
    matches = search.search(asked("coffee"), k=26, min_score=0.99999).matches
    assert things(matches) == ["coffee"] * 3
    assert all(match.verified for match in matches)


def test_a_picture_of_the_index(search: ImageSearch) -> None:
    by_path = {record.path: record.id for record in search.store.records()}
    id = by_path["rocket/near.png"]
    results = search.search_id(id, k=25)
    assert sorted(match.path for match in results.matches[:2]) == ["rocket/far.png", "rocket/slanted.png"]
    assert [match.verified for match in results.matches] == [True] * 2 + [False] * 23
    part = search.search_id(id, k=2, box=(60, 60, 420, 380))
    assert sorted(match.path for match in part.matches) == ["rocket/far.png", "rocket/slanted.png"]
    for match in results.matches[:2]:  # the same numbers, asked for one pair
        agreement = search.agreement(match.id, query_id=id)
        assert agreement is not None
        assert match.agreement is not None
        assert agreement.inliers == match.agreement.inliers
    apart = search.agreement(by_path["cat/near.png"], query_id=id)
    assert apart is not None
    assert apart.inliers < 8


def test_nothing_verified_is_no_match(search: ImageSearch) -> None:
    other = np.asarray(Image.effect_noise((500, 400), 60).convert("RGB"))
    results = search.search(other, k=26)
    assert results.checked
    assert results.no_match
    assert len(results.matches) == 26
    assert not any(match.verified for match in results.matches)


def test_a_query_without_texture(search: ImageSearch, photos: Path) -> None:
    """Of a few points nothing is claimed but the picture itself; the nearest are still shown."""
    results = search.search(photos / "smooth/00.jpg", k=5)
    assert results.matches[0].path == "smooth/00.jpg"
    assert results.checked
    assert [match.verified for match in results.matches] == [True] + [False] * 4
    assert not results.no_match
    flat = search.search(np.full((300, 400, 3), (90, 140, 200), np.uint8), k=5)
    assert flat.checked
    assert flat.no_match
    assert len(flat.matches) == 5
    scores = [match.score for match in flat.matches]
    assert scores == sorted(scores, reverse=True)  # nothing leads: the order is that of the vectors


def test_without_verification_vectors_decide(search: ImageSearch, tmp_path: Path) -> None:
    results = search.search(asked("cat"), k=26, verify=False)
    vectors = search.vectors([match.id for match in results.matches])
    scores = vectors @ results.query_vector
    assert (np.diff(scores) <= 1e-6).all()
    assert not results.checked
    assert not any(match.verified for match in results.matches)
    write_photos(tmp_path, 3)
    with ImageSearch.create(tmp_path / ".cooc", recipe=RECIPE, features="", descriptor=descriptor()) as plain:
        plain.index([tmp_path], workers=0)
        assert not plain.search(tmp_path / "00.jpg").checked
        assert plain.agreement(next(plain.store.records()).id, image=tmp_path / "00.jpg") is None
        with pytest.raises(InputError, match="cooc index --verify sift"):
            plain.search(tmp_path / "00.jpg", verify=True)


def test_pictures_that_have_no_features_yet(photos: Path, tmp_path: Path) -> None:
    """An index that got its features later, and not of all: those without are merely similar."""
    root = tmp_path / "some"
    shutil.copytree(photos / "cat", root)
    with ImageSearch.create(root / ".cooc", recipe=RECIPE, features="", descriptor=descriptor()) as search:
        search.index([root], workers=0)
        search.keep_features("sift")
        results = search.search(asked("cat"))
        assert [match.verified for match in results.matches] == [False] * 3
        assert results.no_match
        search.index([root], workers=0)
        assert [match.verified for match in search.search(asked("cat")).matches] == [True] * 3


def test_removed_by_another_process(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the shortlist and the verification a picture goes: the others are found all the same."""
    root = tmp_path / "copy"
    shutil.copytree(photos / "cat", root)
    with ImageSearch.create(root / ".cooc", recipe=RECIPE, descriptor=descriptor()) as writer:
        writer.index([root], workers=0)
        with ImageSearch.open(root / ".cooc", descriptor=descriptor()) as reader:
            features = reader.store.features

            def meanwhile(ids: list[str]) -> list[bytes | None]:
                writer.store.remove(["near.png"])
                return features(ids)

            monkeypatch.setattr(reader.store, "features", meanwhile)
            found = reader.search(asked("cat"))
    assert sorted(match.path for match in found.matches) == ["far.png", "slanted.png"]
    assert all(match.verified for match in found.matches)
