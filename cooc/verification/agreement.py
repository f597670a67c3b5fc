"""What two pictures agree on: the result of verification, as plain numbers and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cooc.verification.features import LocalFeatures
from cooc.verification.transforms import Matrix, Points, project

Box = tuple[float, float, float, float]

NONE = np.zeros((0, 2), np.float32)
SAME = np.eye(3)
BEYOND = 0.1  # of what the query's features span, beyond which a place is no longer shown by it


@dataclass(frozen=True)
class Agreement:
    """What two pictures agree on; `inliers` 0 and empty arrays where that is nothing."""

    engine: str
    inliers: int  # matches that agree with the transform
    strength: float  # inliers, weighted so that those of different engines compare
    tentative: int  # matches before geometry
    support: int  # features of the picture at whose place the query looks alike
    evidence: float  # points that, dealt at random over what both pictures show, would fill as much of it
    inside: float  # of what lies between those features in both pictures, the share that looks alike
    transform: Matrix  # (3, 3), query -> picture
    query_points: Points  # (inliers, 2), in full-size pixels of each picture
    picture_points: Points
    query_region: Points  # (K, 2): the inliers' convex hull
    picture_region: Points
    query_size: tuple[int, int]
    picture_size: tuple[int, int]

    @property
    def query_box(self) -> Box | None:
        return _box(self.query_region)

    @property
    def picture_box(self) -> Box | None:
        return _box(self.picture_region)

    def as_dict(self) -> dict[str, Any]:
        """For programs: numbers and lists, rounded to a tenth of a pixel."""
        return {
            "engine": self.engine,
            "inliers": self.inliers,
            "transform": self.transform.tolist(),
            "query": _side(self.query_region, self.query_box, self.query_size),
            "picture": _side(self.picture_region, self.picture_box, self.picture_size),
        }

    def pairs(self, most: int) -> list[tuple[float, float, float, float]]:
        """x and y in the query, x and y in the picture, of at most so many of the points that agree."""
        both = np.hstack([self.query_points, self.picture_points])[evenly(self.inliers, most)]
        return [(x, y, u, v) for x, y, u, v in both.round(1).tolist()]


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """At most so many of 0 .. count - 1."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def no_agreement(query: LocalFeatures, picture: LocalFeatures | None = None, tentative: int = 0) -> Agreement:
    size = picture.size if picture else (1, 1)
    return Agreement(query.engine, 0, 0.0, tentative, 0, 0.0, 0.0, SAME, NONE, NONE, NONE, NONE, query.size, size)


def on_what_is_shown(
    picture: Sequence[LocalFeatures], query: Sequence[LocalFeatures], agreement: Agreement
) -> tuple[LocalFeatures, ...]:
    """The picture's features on what the query shows: those that lie, taken back by the transform, among the query's.

    The rest of the picture may show other things, and what agrees with those has nothing of the query.
    """
    points = np.concatenate([features.points for features in query])
    edge = BEYOND * (points.max(0) - points.min(0))
    low, high = points.min(0) - edge, points.max(0) + edge
    back = np.asarray(np.linalg.inv(agreement.transform), np.float64)

    def shown(features: LocalFeatures) -> NDArray[np.bool_]:
        there = project(back, features.points)
        return np.asarray(((there >= low) & (there <= high)).all(1))

    return tuple(features.take(shown(features)) for features in picture)


def _side(region: Points, box: Box | None, size: tuple[int, int]) -> dict[str, Any]:
    corners = [[round(x, 1), round(y, 1)] for x, y in region.tolist()]
    return {"region": corners, "box": box and [round(n, 1) for n in box], "size": list(size)}


def _box(region: Points) -> Box | None:
    if not len(region):
        return None
    (x0, y0), (x1, y1) = region.min(0).tolist(), region.max(0).tolist()
    return x0, y0, x1, y1
