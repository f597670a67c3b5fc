from __future__ import annotations

import numpy as np
import pytest

from cooc.verification.coding import vectors
from cooc.verification.engines import ENGINES, extract
from cooc.verification.features import LocalFeatures
from cooc.verification.matching import Matches, match
from cooc.verification.on_device import match_on_device
from cooc.verification.screening import ENOUGH, LOOSE, is_promising, rough_matches, sought
from cooc.verification.verifier import verify
from cooc.verification.words import SIDE
from tests.reference.verification import mutual_matches
from tests.verification.pictures import photo, turned, warp


@pytest.fixture(scope="module")
def query() -> LocalFeatures:
    (found,) = extract("sift", warp(photo("astronaut"), turned(12, 0.8, (256, 256)), (512, 512)), limit=2000)
    return found


@pytest.fixture(scope="module")
def pictures(query: LocalFeatures) -> list[LocalFeatures]:
    found = [extract("sift", photo(name), limit=400)[0] for name in ("cat", "astronaut", "rocket")]
    return [*found, found[0].take(slice(0))]


def pairs_of(query: LocalFeatures, pictures: list[LocalFeatures], near: int) -> list[set[tuple[int, int]]]:
    found = rough_matches(sought(query, near), pictures)
    return [set(zip(one.picture.tolist(), one.query.tolist(), strict=True)) for one in found]


def test_at_all_centres_it_finds_what_two_loops_find(query: LocalFeatures, pictures: list[LocalFeatures]) -> None:
    few = query.take(slice(150))
    for picture, pairs in zip(pictures, pairs_of(few, pictures, SIDE), strict=True):
        assert pairs >= mutual_matches(vectors(picture.descriptors), vectors(few.descriptors), ratio=0.9)
        assert len({mine for _, mine in pairs}) == len({other for other, _ in pairs}) == len(pairs)


def test_at_the_nearest_centres_it_finds_most_of_that(query: LocalFeatures, pictures: list[LocalFeatures]) -> None:
    (all_of_it,), (found,) = pairs_of(query, pictures[1:2], SIDE), pairs_of(query, pictures[1:2], 6)
    assert 0.8 * len(all_of_it) < len(all_of_it & found)


def test_a_picture_beside_others_has_the_matches_that_it_has_alone(
    query: LocalFeatures, pictures: list[LocalFeatures]
) -> None:
    assert pairs_of(query, pictures, 6) == [pairs_of(query, [picture], 6)[0] for picture in pictures]


def most_votes(query: LocalFeatures, picture: LocalFeatures, matches: Matches) -> int:
    """By three loops: a match turns, scales and moves the others; which of them land where they are?"""
    pairs = list(zip(matches.query.tolist(), matches.picture.tolist(), strict=True))
    best = 0
    for i, j in pairs:
        growth, turn = picture.scales[j] / query.scales[i], picture.angles[j] - query.angles[i]
        rotation = turned(-turn, growth, (0, 0))[:2, :2]
        votes = 0
        for m, n in pairs:
            way = rotation @ (query.points[m] - query.points[i])
            other = picture.scales[n] / query.scales[m], picture.angles[n] - query.angles[m]
            off = np.linalg.norm(picture.points[j] + way - picture.points[n])
            votes += bool(
                off <= 2 * ENGINES["sift"].tolerance * max(picture.size) + LOOSE * np.linalg.norm(way)
                and abs(np.log2(other[0] / growth)) <= 0.8
                and abs((other[1] - turn + 180) % 360 - 180) <= 35
            )
        best = max(best, votes)
    return best


def test_enough_matches_that_agree_with_one_of_them_are_promising(
    query: LocalFeatures, pictures: list[LocalFeatures]
) -> None:
    rough = rough_matches(sought(query), pictures)
    for picture, matches in zip(pictures, rough, strict=True):
        few = Matches(matches.query[:60], matches.picture[:60])
        assert is_promising(query, picture, few) == (most_votes(query, picture, few) >= ENOUGH)
    assert [is_promising(query, *pair) for pair in zip(pictures, rough, strict=True)] == [False, True, False, False]
    alone = Matches(rough[1].query[:4], rough[1].picture[:4])
    assert not is_promising(query, pictures[1], alone)  # whatever they agree in: four are not enough


@pytest.mark.parametrize("coded", [False, True])
def test_a_device_decodes_matches_and_votes_as_the_cpu_does(
    query: LocalFeatures, pictures: list[LocalFeatures], coded: bool
) -> None:
    kept = [LocalFeatures.from_bytes(picture.to_bytes()) for picture in pictures]
    given = kept if coded else [picture.take(slice(None)) for picture in kept]
    found = match_on_device(query, given, "cpu", screened=True)
    expected = [matches if is_promising(query, p, matches := match(query, p)) else None for p in kept]
    assert [matches is not None for matches in found] == [False, True, False, False]
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.query.tolist() == other.query.tolist()
            assert one.picture.tolist() == other.picture.tolist()
    assert match_on_device(query, given[3:], "cpu", screened=True) == [None]


def test_what_passes_agrees_as_it_does_in_full(query: LocalFeatures, pictures: list[LocalFeatures]) -> None:
    shortlist = [[picture] for picture in pictures * 5]
    full, screened = verify([query], shortlist), verify([query], shortlist, screened=True)
    assert [a.inliers for a in screened] == [a.inliers for a in full]
    assert [a.inliers > 0 for a in screened[:4]] == [False, True, False, False]
    by_torch = verify([query], shortlist, screened=True, device="cpu")
    assert [a.inliers > 0 for a in by_torch] == [a.inliers > 0 for a in full]
    np.testing.assert_array_equal(full[1].transform, screened[1].transform)


def test_of_few_features_none_is_missed(query: LocalFeatures, pictures: list[LocalFeatures]) -> None:
    """Where a centre has one feature of the query, there is no second nearest to tell by."""
    few = pictures[1].take(slice(9))
    assert len(rough_matches(sought(few), [few])[0].query) < 9
    full, screened = (verify([few], [[few]], screened=way)[0] for way in (False, True))
    assert screened.inliers == full.inliers > 0


def test_a_query_without_features_agrees_with_nothing(query: LocalFeatures, pictures: list[LocalFeatures]) -> None:
    assert [a.inliers for a in verify([query.take(slice(0))], [[p] for p in pictures], screened=True)] == [0] * 4
