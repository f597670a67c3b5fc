"""What two pictures agree on: the result of verification, as plain numbers and arrays."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from cooc.verification.features import LocalFeatures
from cooc.verification.transforms import Matrix, Points

__all__ = ["Agreement", "no_agreement"]

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Agreement:
    """What two pictures agree on; `inliers` 0 and empty arrays where that is nothing."""

    engine: str
    inliers: int  # matches that agree with the transform
    strength: float  # inliers, weighted so that those of different engines compare
    tentative: int  # matches before geometry
    support: int  # features of the picture at whose place the query looks alike
    cells: int  # of 12 x 12 over what both pictures show, those with support
    spread: float  # how evenly it is spread over that: 1 as chance would, near 0 in one spot
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

    @property
    def query_share(self) -> float:
        """Of the query's area, how much its region covers (0..1)."""
        return _area(self.query_region) / (self.query_size[0] * self.query_size[1])

    @property
    def picture_share(self) -> float:
        return _area(self.picture_region) / (self.picture_size[0] * self.picture_size[1])


def no_agreement(query: LocalFeatures, picture: LocalFeatures | None = None, tentative: int = 0) -> Agreement:
    none = np.zeros((0, 2), np.float32)
    size = picture.size if picture else (1, 1)
    return Agreement(query.engine, 0, 0.0, tentative, 0, 0, 0.0, np.eye(3), none, none, none, none, query.size, size)


def _box(region: Points) -> Box | None:
    if not len(region):
        return None
    (x0, y0), (x1, y1) = region.min(0).tolist(), region.max(0).tolist()
    return x0, y0, x1, y1


def _area(region: Points) -> float:
    return float(cv2.contourArea(region)) if len(region) > 2 else 0.0
