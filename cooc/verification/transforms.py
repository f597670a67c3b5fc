"""Plane transforms (3, 3): where they take points, and what they do to a feature there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cooc.verification.features import LocalFeatures

Points = NDArray[np.float32]
Matrix = NDArray[np.float64]

TINY = 1e-9


def project(transform: Matrix, points: Points) -> Points:
    """Where the transform takes points (N, 2); very far away, where it takes them to the horizon."""
    mapped = points.astype(np.float64) @ transform[:, :2].T + transform[:, 2]
    depth = np.where(np.abs(mapped[:, 2:]) < TINY, TINY, mapped[:, 2:])
    return (mapped[:, :2] / depth).astype(np.float32)


def local_maps(transform: Matrix, points: Points) -> Matrix:
    """(N, 2, 2): the transform's Jacobian at each point."""
    mapped = points.astype(np.float64) @ transform[:, :2].T + transform[:, 2]
    depth = np.where(np.abs(mapped[:, 2]) < TINY, TINY, mapped[:, 2])
    place = mapped[:, :2] / depth[:, None]
    return np.asarray((transform[:2, :2] - place[:, :, None] * transform[2, :2]) / depth[:, None, None])


def moved(transform: Matrix, features: LocalFeatures) -> tuple[Points, Matrix, Matrix]:
    """Features as the transform shows them: points (N, 2), log2 of scales (N,), angles in degrees (N,).

    A feature that the transform mirrors has no scale: -inf.
    """
    maps = local_maps(transform, features.points)
    area = np.linalg.det(maps)
    scale = np.log2(features.scales) + 0.5 * np.log2(
        np.maximum(area, 0), out=np.full(len(area), -np.inf), where=area > 0
    )
    radians = np.deg2rad(features.angles)
    direction = np.einsum("nij,nj->ni", maps, np.stack([np.cos(radians), np.sin(radians)], 1))
    return project(transform, features.points), scale, np.rad2deg(np.arctan2(direction[:, 1], direction[:, 0]))
