from __future__ import annotations

import numpy as np
import pytest

from cooc.verification.support import near_pairs
from cooc.verification.transforms import local_maps, moved, project
from tests.reference import verification as reference
from tests.verification.pictures import SLANTED, turned
from tests.verification.test_features import some


@pytest.mark.parametrize("transform", [np.eye(3), SLANTED, turned(30, 0.5, (100, 50))])
def test_points_and_local_maps_are_those_of_the_definition(transform: np.ndarray) -> None:
    points = np.random.default_rng(0).uniform(0, 500, (20, 2)).astype(np.float32)
    for point, there, jacobian in zip(points, project(transform, points), local_maps(transform, points), strict=True):
        np.testing.assert_allclose(there, reference.map_point(transform, *point.astype(float)), rtol=1e-5)
        np.testing.assert_allclose(jacobian, reference.numeric_map(transform, *point.astype(float)), atol=1e-5)


def test_features_turn_and_grow_with_the_picture() -> None:
    features = some(20)
    _, scales, angles = moved(turned(-40, 2.0, (0, 0)), features)  # OpenCV turns against the clock
    np.testing.assert_allclose(scales, np.log2(features.scales) + 1, atol=1e-5)
    np.testing.assert_allclose((angles - features.angles - 40 + 180) % 360 - 180, 0, atol=1e-3)


def test_a_mirrored_feature_has_no_size() -> None:
    assert (moved(np.diag([-1.0, 1.0, 1.0]), some(5))[1] == -np.inf).all()


def test_points_on_the_horizon_are_far_away() -> None:
    transform = np.array([[1, 0, 0], [0, 1, 0], [-0.01, 0, 1.0]])
    assert np.isfinite(project(transform, np.array([[100, 5]], np.float32))).all()
    assert np.abs(project(transform, np.array([[100, 5]], np.float32))).max() > 1e6


@pytest.mark.parametrize(
    ("n", "m", "near"), [(80, 60, 40.0), (1, 9, 200.0), (9, 1, 5.0), (30, 30, 5000.0), (0, 4, 9.0)]
)
def test_near_pairs_are_those_of_two_loops(n: int, m: int, near: float) -> None:
    rng = np.random.default_rng(n)
    here = rng.uniform(-80, 1100, (n, 2)).astype(np.float32)
    there = rng.uniform(0, 1024, (m, 2)).astype(np.float32)
    found = list(zip(*(side.tolist() for side in near_pairs(here, there, near)), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == reference.close_pairs(here.tolist(), there.tolist(), near)
