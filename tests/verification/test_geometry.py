from __future__ import annotations

import cv2
import numpy as np
import pytest

from cooc.verification.agreement import on_what_is_shown
from cooc.verification.coding import quantise, unit
from cooc.verification.engines import ENGINES, extract
from cooc.verification.features import LocalFeatures
from cooc.verification.geometry import agree, plausible
from cooc.verification.matching import Matches, match
from cooc.verification.support import INSIDE, evidence, inside, support
from cooc.verification.transforms import moved, project
from tests.verification.pictures import SLANTED, photo, turned, warp

SIZE = (1000, 800)


def scattered(count: int, seed: int = 0, size: tuple[int, int] = SIZE) -> LocalFeatures:
    rng = np.random.default_rng(seed)
    return LocalFeatures(
        points=(rng.random((count, 2)) * size).astype(np.float32),
        scales=(2 ** rng.uniform(1, 5, count)).astype(np.float32),
        angles=rng.uniform(0, 360, count).astype(np.float32),
        descriptors=quantise(unit(rng.normal(size=(count, 64)))),
        width=size[0],
        height=size[1],
        engine="sift",
    )


def seen_through(features: LocalFeatures, transform: np.ndarray, noise: float = 0, seed: int = 0) -> LocalFeatures:
    """The same features as a camera with that transform shows them."""
    points, scales, angles = moved(transform, features)
    points = points + np.random.default_rng(seed).normal(0, noise, points.shape) if noise else points
    return LocalFeatures(
        points=points.astype(np.float32),
        scales=np.exp2(scales).astype(np.float32),
        angles=(angles % 360).astype(np.float32),
        descriptors=features.descriptors,
        width=features.width,
        height=features.height,
        engine="sift",
    )


def one_to_one(count: int) -> Matches:
    return Matches(np.arange(count), np.arange(count))


def shuffled(features: LocalFeatures, wrong: int, seed: int = 0) -> LocalFeatures:
    """The first `wrong` features lie elsewhere: their matches are wrong."""
    other = scattered(wrong, seed + 100)
    return LocalFeatures(
        points=np.concatenate([other.points, features.points[wrong:]]),
        scales=np.concatenate([other.scales, features.scales[wrong:]]),
        angles=np.concatenate([other.angles, features.angles[wrong:]]),
        descriptors=features.descriptors,
        width=features.width,
        height=features.height,
        engine="sift",
    )


TRANSFORMS = {
    "shift": turned(0, 1, (0, 0), (50, -30)),
    "turn": turned(75, 0.6, (500, 400)),
    "upside down": turned(180, 1.2, (500, 400)),
    "slant": np.array([[0.9, 0.1, 20.0], [-0.05, 0.8, 60.0], [2e-4, 1e-4, 1.0]]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_known_transform_is_recovered_to_a_pixel(name: str) -> None:
    query = scattered(60)
    picture = seen_through(query, TRANSFORMS[name], noise=0.5)
    agreement = agree(query, picture, one_to_one(60))
    assert agreement.inliers >= 58
    assert agreement.tentative == 60
    corners = np.array([(200, 200), (800, 200), (800, 600), (200, 600)], np.float32)
    assert np.abs(project(agreement.transform, corners) - project(TRANSFORMS[name], corners)).max() < 1


@pytest.mark.parametrize(
    ("count", "wrong", "noise", "told"),
    [(100, 50, 1.0, 0), (300, 250, 1.0, 0), (100, 80, 2.0, 1), (40, 30, 0.0, 1), (300, 280, 1.0, 1)],
)
def test_inliers_are_counted_under_noise_and_outliers(count: int, wrong: int, noise: float, told: float) -> None:
    """Matches come in any order, or (`told`), as `match` gives them, the likely ones rather first."""
    query = scattered(count)
    order = np.argsort(np.random.default_rng(1).random(count) + told * 0.5 * (np.arange(count) < wrong))
    picture = shuffled(seen_through(query, TRANSFORMS["turn"], noise), wrong).take(order)
    agreement = agree(query, picture, Matches(order, np.arange(count)))
    right = count - wrong
    assert right - max(1, 0.1 * right) <= agreement.inliers <= right + 1


def test_wrong_matches_agree_on_nothing() -> None:
    for seed in range(20):
        agreement = agree(scattered(100, seed), scattered(100, seed + 50), one_to_one(100))
        assert agreement.inliers <= 4
        assert len(agreement.query_points) == agreement.inliers


def test_a_match_must_agree_in_size_and_direction_too() -> None:
    query = scattered(60)
    picture = seen_through(query, TRANSFORMS["turn"])
    askew = LocalFeatures(**{**vars(picture), "angles": (picture.angles + 90) % 360})
    grown = LocalFeatures(**{**vars(picture), "scales": picture.scales * 2})
    assert agree(query, picture, one_to_one(60)).inliers >= 58
    assert agree(query, askew, one_to_one(60)).inliers <= 4
    assert agree(query, grown, one_to_one(60)).inliers <= 4


def test_the_same_input_gives_the_same_answer() -> None:
    query = scattered(80)
    picture = shuffled(seen_through(query, TRANSFORMS["slant"], 1.0), 40)
    first, again = (agree(query, picture, one_to_one(80)) for _ in range(2))
    assert (first.transform == again.transform).all()
    assert first.inliers == again.inliers


def test_regions_and_boxes_hold_the_inliers() -> None:
    query = scattered(50)
    agreement = agree(query, seen_through(query, TRANSFORMS["turn"]), one_to_one(50))
    for points, region, box in (
        (agreement.query_points, agreement.query_region, agreement.query_box),
        (agreement.picture_points, agreement.picture_region, agreement.picture_box),
    ):
        assert all(cv2.pointPolygonTest(region, tuple(map(float, p)), True) > -0.01 for p in points)
        assert box == (*points.min(0).tolist(), *points.max(0).tolist())
    share = cv2.contourArea(agreement.query_region) / np.prod(agreement.query_size)
    assert 0.5 < share < 1
    picture_share = cv2.contourArea(agreement.picture_region) / np.prod(agreement.picture_size)
    assert picture_share == pytest.approx(share * 0.36, rel=0.05)


# ---- transforms that prove nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        np.array([[-1, 0, 1000], [0, 1, 0], [0, 0, 1.0]]),  # mirrored
        np.diag([1.0, 0.1, 1.0]),  # squeezed
        np.diag([0.01, 0.01, 1.0]),  # collapsed
        np.diag([100.0, 100.0, 1.0]),  # blown up
        np.array([[1, 0, 0], [0, 1, 0], [-0.002, 0, 1.0]]),  # folded at a horizon within the picture
    ],
)
def test_degenerate_transforms_are_refused(transform: np.ndarray) -> None:
    query = scattered(60)
    points = project(transform, query.points)
    picture = LocalFeatures(**{**vars(query), "points": points})
    assert not plausible(transform, query, picture)
    assert agree(query, picture, one_to_one(60)).inliers <= 8  # another transform may fit a few


def test_inliers_on_one_line_prove_nothing() -> None:
    query = scattered(60)
    line = LocalFeatures(**{**vars(query), "points": (query.points * (1, 0.002) + (0, 300)).astype(np.float32)})
    assert not plausible(np.eye(3), line, line)
    assert agree(line, line, one_to_one(60)).inliers == 0


def test_many_matches_onto_one_point_count_once() -> None:
    query = scattered(60)
    gathered = query.points.copy()
    gathered[10:] = (500, 400)
    picture = LocalFeatures(**{**vars(query), "points": gathered})
    assert agree(query, picture, one_to_one(60)).inliers <= 11
    both = LocalFeatures(**{**vars(query), "points": gathered})
    assert agree(both, both, one_to_one(60)).inliers <= 11


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_too_few_matches_claim_nothing(count: int) -> None:
    query = scattered(10)
    assert agree(query, query, one_to_one(count)).inliers == 0


# ---- how much it proves --------------------------------------------------------------------------------------------


def test_support_is_what_looks_alike_at_one_place() -> None:
    query = scattered(300)
    picture = seen_through(query, TRANSFORMS["turn"])
    mixed = LocalFeatures(**{**vars(picture), "descriptors": picture.descriptors.copy()})
    mixed.descriptors[:200] = scattered(200, 9).descriptors
    found = support(query, mixed, TRANSFORMS["turn"], 10.0, ENGINES["sift"])
    expected = {tuple(p) for p in mixed.points[200:].tolist()}
    assert expected <= {tuple(p) for p in found.tolist()}
    assert len(found) < 110


def test_support_all_over_is_more_evidence_than_in_one_spot() -> None:
    query = scattered(1000)
    order = np.argsort(np.linalg.norm(query.points - (200, 200), axis=1))
    assert 0.8 * 60 < evidence(query, query, np.eye(3), query.points[:60]) < 1.3 * 60
    assert 0 < evidence(query, query, np.eye(3), query.points[order[:60]]) < 0.3 * 60
    assert evidence(query, query, np.eye(3), query.points[:0]) == 0


def test_points_dealt_at_random_are_as_much_evidence_as_they_are_points() -> None:
    query = scattered(2000)
    values = [evidence(query, query, np.eye(3), query.points[start : start + 50]) for start in range(0, 2000, 50)]
    assert np.mean(values) == pytest.approx(50, abs=5)


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_inside_is_counted_as_two_loops_over_cells_would(count: int) -> None:
    query, picture = scattered(300, 1), scattered(150, 2)
    transform = turned(5, 0.9, (200, 200))
    points = picture.points[np.argsort(np.linalg.norm(picture.points - (250, 200), axis=1))[1 : 3 * count : 3]]
    low, high = points.min(0), points.max(0)
    hull, width = cv2.convexHull(points), (high - low) / INSIDE

    def number(places: np.ndarray, corner: np.ndarray) -> int:
        return int(((places >= corner) & (places <= corner + width)).all(1).sum())

    filled, others = [], []  # how many points, of how many features that could be: of cells with points, and without
    for column in range(INSIDE):
        for row in range(INSIDE):
            corner = low + width * (column, row)
            there = number(points, corner)
            could = min(number(project(transform, query.points), corner), number(picture.points, corner))
            if there:
                filled.append((there, max(there, could)))
            elif cv2.pointPolygonTest(hull, (corner + width / 2).tolist(), False) >= 0:
                others.append(could)
    rate = sum(there for there, _ in filled) / sum(could for _, could in filled)
    should = sum(1 - (1 - rate) ** could for could in [*(could for _, could in filled), *others])
    expected = min(len(filled) / should, 1.0) if count > 1 else 1.0  # one point: one cell, without width
    assert inside(query, picture, transform, points) == pytest.approx(expected)
    assert inside(query, picture, transform, points[:0]) == 0


def test_a_shared_logo_is_little_evidence() -> None:
    """Two different pictures with the same corner: many inliers, in one spot."""
    one, two = cv2.resize(photo("cat"), (600, 400)), photo("coffee").copy()
    logo = cv2.resize(photo("astronaut"), (160, 160), interpolation=cv2.INTER_AREA)
    one[:160, :160] = two[:160, :160] = logo
    (a,), (b,), (c,) = (extract("sift", p) for p in (one, two, warp(two, turned(8, 0.9, (300, 200)), (600, 400))))
    logos, same = agree(a, b, match(a, b)), agree(b, c, match(b, c))
    assert logos.inliers > 30
    assert logos.evidence < logos.inliers
    assert same.evidence > same.inliers
    assert cv2.contourArea(logos.query_region) < 0.1 * np.prod(logos.query_size)


# ---- real photographs ----------------------------------------------------------------------------------------------


def test_a_print_at_a_slant_in_clutter_is_found_where_it_is() -> None:
    scene = cv2.resize(photo("coffee"), (900, 600))
    thing = photo("astronaut")
    transform = np.array([[0.5, 0.1, 250.0], [-0.08, 0.6, 120.0], [2e-4, 3e-4, 1.0]])
    mask = warp(np.full_like(thing, 255), transform, (900, 600))[..., :1] > 200
    view = np.where(mask, warp(thing, transform, (900, 600)), scene)
    (query,), (picture,) = extract("sift", view, limit=2000), extract("sift", thing)
    agreement = agree(query, picture, match(query, picture))
    assert agreement.inliers > 30
    corners = project(
        np.linalg.inv(agreement.transform), np.array([(0, 0), (511, 0), (511, 511), (0, 511)], np.float32)
    )
    expected = project(transform, np.array([(0, 0), (511, 0), (511, 511), (0, 511)], np.float32))
    assert np.abs(corners - expected).max() < 4
    (stranger,) = extract("sift", photo("rocket"))
    assert agree(query, stranger, match(query, stranger)).inliers == 0


def test_a_facade_of_equal_windows_is_not_taken_for_another() -> None:
    """Repeated patterns: the ratio refuses matches that could as well go elsewhere."""
    window = cv2.resize(photo("rocket")[:200, 200:400], (60, 60))
    facade = np.tile(window, (6, 9, 1))
    other = np.tile(cv2.resize(photo("cat")[:200, :200], (60, 60)), (6, 9, 1))
    (a,), (b,) = extract("sift", facade), extract("sift", other)
    assert agree(a, b, match(a, b)).inliers == 0


def test_a_slanted_view_needs_a_homography() -> None:
    query = scattered(80)
    agreement = agree(query, seen_through(query, SLANTED), one_to_one(80))
    assert abs(agreement.transform[2, 0]) > 1e-5
    assert agreement.inliers >= 78


def test_what_a_picture_shows_of_the_query() -> None:
    """A query of the middle of a plane, a picture of all of it: features beyond the query's own are left out."""
    query, everything = scattered(300), scattered(2000, 1, (3 * SIZE[0], 3 * SIZE[1]))
    transform = np.array([[1.0, 0, SIZE[0]], [0, 1, SIZE[1]], [0, 0, 1]])
    same = seen_through(query, transform)
    agreement = agree(query, same, one_to_one(300))
    (shown,) = on_what_is_shown([everything], [query], agreement)
    low, high = query.points.min(0), query.points.max(0)
    low, high = low - 0.1 * (high - low), high + 0.1 * (high - low)
    back = everything.points - SIZE
    inside = [bool((low <= point).all() and (point <= high).all()) for point in back]
    assert 0 < sum(inside) < 500
    assert shown.points.tolist() == everything.points[inside].tolist()
