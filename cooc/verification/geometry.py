"""The one transform that most matches of two pictures agree on, and how much that proves.

    agreement = agree(query, picture, match(query, picture))
    agreement.inliers, agreement.evidence, agreement.transform, agreement.query_region

Two models are tried by OpenCV's USAC (PROSAC sampling, MSAC score, local optimisation, a fixed seed): an affine map,
which finds more of the true pairs of buildings and of small things (three good matches are enough), and a homography,
which keeps more of the inliers of a print seen at a slant. The one with more inliers stands.

A match is an inlier if the transform maps its point to within the engine's `tolerance` **and** turns and scales it
as the two features themselves are turned and scaled. Chance agrees in position, hardly ever in position,
size and direction: of wrong pairs, 99 in 100 then have 2 inliers or fewer, where position alone leaves them 7.
The number alone is no proof, though: see `support.py` for what `evidence` and `inside` add. For many pictures at once,
on a GPU, `geometry_on_device.py` does the same.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.engine import Engine
from cooc.verification.engines import ENGINES
from cooc.verification.features import LocalFeatures
from cooc.verification.matching import Matches
from cooc.verification.support import evidence, inside, support
from cooc.verification.transforms import Matrix, Points, areas, distances, local_maps, moved, project, stretches

Indices = NDArray[np.int64]

FEWEST = 4  # inliers below which nothing is claimed
ITERATIONS = 1000
NARROWEST = 5.0  # how much more a transform may stretch one direction than another
SPOTS = 400  # across the longer side: features at one of them are one point, such as one with two directions
LARGEST = 25.0  # how much larger a thing may be in one picture than in the other, as shares of their longer sides


def agree(query: LocalFeatures, picture: LocalFeatures, matches: Matches) -> Agreement:
    """The transform that most of `matches` agree on. The same features and matches give the same answer."""
    nothing = no_agreement(query, picture, len(matches.query))
    here, there = query.take(matches.query), picture.take(matches.picture)
    engine = ENGINES[query.engine]
    near = engine.tolerance * max(picture.size)
    best, transform = np.zeros(0, np.int64), nothing.transform
    for estimate in ESTIMATES:
        if (found := estimate(here.points, there.points, near)) is None:
            continue
        inliers = _inliers(here, there, found, near, engine)
        if len(inliers) > max(len(best), FEWEST - 1) and plausible(found, here.take(inliers), there.take(inliers)):
            best, transform = inliers, found
    if not len(best):
        return nothing
    mine, other = here.points[best], there.points[best]
    alike = support(query, picture, transform, near, engine)
    return Agreement(
        engine=query.engine,
        inliers=len(best),
        strength=engine.weight * len(best),
        tentative=len(matches.query),
        support=len(alike),
        evidence=evidence(query, picture, transform, alike),
        inside=inside(query, picture, transform, alike),
        transform=transform,
        query_points=mine,
        picture_points=other,
        query_region=hull(mine),
        picture_region=hull(other),
        query_size=query.size,
        picture_size=picture.size,
    )


def _usac(near: float) -> cv2.UsacParams:
    usac = cv2.UsacParams()
    usac.threshold = near
    usac.maxIterations = ITERATIONS
    usac.confidence = 0.999
    usac.sampler = cv2.SAMPLING_PROSAC  # matches come with the most certain first
    usac.score = cv2.SCORE_METHOD_MSAC
    usac.loMethod = cv2.LOCAL_OPTIM_INNER_LO
    usac.randomGeneratorState = 0
    return usac


def _affine(here: Points, there: Points, near: float) -> Matrix | None:
    if len(here) < FEWEST:
        return None
    try:
        found, _ = cv2.estimateAffine2D(here, there, _usac(near))
    except cv2.error:  # its solver met points on one line, or all in one
        return None
    return None if found is None else _sound(np.vstack([found, (0, 0, 1)]))


def _homography(here: Points, there: Points, near: float) -> Matrix | None:
    if len(here) < FEWEST + 1:
        return None
    try:
        found, _ = cv2.findHomography(here, there, _usac(near))
    except cv2.error:
        return None
    return None if found is None or abs(found[2, 2]) < 1e-9 else _sound(found / found[2, 2])


ESTIMATES = _affine, _homography  # that most of the matches agree on, or None


def _sound(transform: Matrix) -> Matrix | None:
    """None unless it can be inverted."""
    return transform if np.isfinite(transform).all() and abs(np.linalg.det(transform)) > 1e-12 else None


def _inliers(here: LocalFeatures, there: LocalFeatures, transform: Matrix, near: float, engine: Engine) -> Indices:
    """Matches that agree in place, size and direction; of several that share a point, one.

    Most pairs of pictures are wrong ones, and have too few already by their places: the rest is looked at for others.
    """
    kept = np.flatnonzero(distances(project(transform, here.points), there.points) <= near)
    if len(kept) < FEWEST:
        return kept
    mine, other = here.take(kept), there.take(kept)
    _, scale, angle = moved(transform, mine)
    good = np.abs(scale - np.log2(other.scales)) <= engine.octaves
    good &= np.abs((angle - other.angles + 180) % 360 - 180) <= engine.turn
    kept = kept[good]
    if len(kept) < FEWEST:
        return kept
    for points in (here.points / max(here.size), there.points / max(there.size)):
        across, down = np.round(points[kept].T * SPOTS).astype(np.int64)
        kept = kept[np.sort(np.unique(across << 32 | down, return_index=True)[1])]
    return kept


def plausible(transform: Matrix, here: LocalFeatures, there: LocalFeatures) -> bool:
    """False for a transform that no camera makes of a rigid thing, or that its inliers do not determine.

    It may not mirror, fold, or squeeze one direction by more than `NARROWEST`, nor change size by more than `LARGEST`;
    and the inliers may not lie within the tolerance of one line, in either picture.
    """
    maps = local_maps(transform, here.points)
    most, least = stretches(maps)
    if (areas(maps) <= 0).any() or (most > NARROWEST * least).any():
        return False
    growth = np.sqrt(most * least) * max(here.size) / max(there.size)
    if growth.max() > LARGEST or growth.min() < 1 / LARGEST:
        return False
    for side in (here, there):
        points = side.points.astype(np.float64)
        deviation = np.linalg.svd(points - points.mean(0), compute_uv=False)[1] / np.sqrt(len(points))
        if deviation < ENGINES[side.engine].tolerance * max(side.size):
            return False
    return True


def hull(points: Points) -> Points:
    return np.asarray(cv2.convexHull(points)[:, 0], np.float32)
