"""What a GPU does with many pictures at once gives what `agree` gives for each. Here torch runs it on the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from cooc.verification.agreement import Agreement
from cooc.verification.engines import ENGINES, extract
from cooc.verification.features import LocalFeatures
from cooc.verification.geometry import agree
from cooc.verification.geometry_on_device import agree_on_device
from cooc.verification.matching import match
from tests.verification.pictures import SLANTED, photo, seen_at, turned, warp

MIRRORED = np.array([[-1.0, 0, 511], [0, 1, 0], [0, 0, 1]])
NAMES = ["cat", "astronaut", "coffee", "astronaut", "rocket", "astronaut"]


@cache
def best_of(engine: str, name: str) -> LocalFeatures:
    return extract(engine, photo(name), limit=800, longest=seen_at(engine))[0]


@cache
def seen_as(engine: str, view: str) -> LocalFeatures:
    transform = {"turned": turned(12, 0.8, (256, 256)), "slanted": SLANTED, "mirrored": MIRRORED}[view]
    return extract(engine, warp(photo("astronaut"), transform, (560, 600)), limit=800, longest=seen_at(engine))[0]


def on_device(query: LocalFeatures, pictures: list[LocalFeatures], *, screened: bool = False) -> list[Agreement]:
    with ThreadPoolExecutor(2) as pool:
        return agree_on_device(query, pictures, "cpu", pool, [screened] * len(pictures))


def assert_same(found: Agreement, expected: Agreement) -> None:
    assert (found.engine, found.inliers, found.strength) == (expected.engine, expected.inliers, expected.strength)
    assert (found.query_size, found.picture_size) == (expected.query_size, expected.picture_size)
    if not expected.inliers:
        return
    assert (found.tentative, found.support) == (expected.tentative, expected.support)
    assert found.evidence == pytest.approx(expected.evidence, rel=1e-6)
    assert found.inside == pytest.approx(expected.inside, rel=1e-6)
    np.testing.assert_allclose(found.transform, expected.transform, rtol=1e-6)
    np.testing.assert_allclose(pairs(found), pairs(expected), rtol=1e-6)
    for name in ("query_region", "picture_region"):
        np.testing.assert_allclose(ordered(getattr(found, name)), ordered(getattr(expected, name)), rtol=1e-6)


def pairs(agreement: Agreement) -> np.ndarray:
    """The points that agree, in an order of their own: equally certain matches have none."""
    return ordered(np.hstack([agreement.query_points, agreement.picture_points]))


def ordered(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", ["turned", "slanted", "mirrored"])
@pytest.mark.parametrize("coded", [False, True])
def test_as_each_picture_by_itself(engine: str, view: str, coded: bool) -> None:
    query = seen_as(engine, view)
    pictures = [best_of(engine, name).take(slice(300 + 100 * n)) for n, name in enumerate(NAMES)]
    if coded:
        pictures = [LocalFeatures.from_bytes(picture.to_bytes()) for picture in pictures]
    expected = [agree(query, picture, match(query, picture)) for picture in pictures]
    enough = 20 if engine == "activations" else 50  # fewer positions than keypoints
    assert (max(one.inliers for one in expected) > enough) == (view != "mirrored")
    for one, other in zip(on_device(query, pictures), expected, strict=True):
        assert_same(one, other)


def test_of_features_at_one_spot_one_counts() -> None:
    """Each feature four times, with other descriptors: `agree` and the GPU keep the same ones."""
    (features,) = extract("sift", photo("cat"), limit=150)
    chance = np.random.default_rng(0)
    four = features.take(np.repeat(np.arange(len(features)), 4))
    moved = four.descriptors.astype(int) + chance.integers(-9, 10, four.descriptors.shape)
    crowd = LocalFeatures(
        four.points, four.scales, four.angles, np.clip(moved, 0, 255).astype(np.uint8), *four.size, "sift"
    )
    expected = agree(crowd, crowd, match(crowd, crowd))
    assert 0 < expected.inliers < expected.tentative
    assert_same(on_device(crowd, [crowd])[0], expected)


def test_transforms_that_no_camera_makes_are_refused_alike() -> None:
    """Squeezed by six, on one line, a point beside itself: matches agree, and nothing is claimed."""
    (features,) = extract("sift", photo("coffee"), limit=400)

    def changed(points: np.ndarray) -> LocalFeatures:
        return LocalFeatures(
            points.astype(np.float32), features.scales, features.angles, features.descriptors, *features.size, "sift"
        )

    others = [
        changed(features.points * np.array([1, 1 / 6])),
        changed(np.stack([features.points[:, 0], np.full(len(features), 200.0)], 1)),
        changed(np.full_like(features.points, 100.0)),
        changed(features.points),
    ]
    expected = [agree(features, other, match(features, other)) for other in others]
    assert [one.inliers > 0 for one in expected] == [False, False, False, True]
    for one, other in zip(on_device(features, others), expected, strict=True):
        assert_same(one, other)


def test_pictures_without_features_or_matches() -> None:
    (query,) = extract("sift", photo("cat"), limit=300)
    none = query.take(slice(0))
    assert [a.inliers for a in on_device(query, [none, query.take(slice(1)), query.take(slice(3)), none])] == [0] * 4
    assert [a.inliers for a in on_device(none, [query, none])] == [0, 0]
    assert on_device(query, []) == []
