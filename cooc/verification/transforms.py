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
    return np.stack(_mapped(transform, points)[:2], 1).astype(np.float32)


def local_maps(transform: Matrix, points: Points) -> Matrix:
    """(N, 2, 2): the transform's Jacobian at each point."""
    x, y, depth = _mapped(transform, points)
    (a, b), (c, d), (e, f) = transform[:, :2]
    rows = ((a - x * e) / depth, (b - x * f) / depth), ((c - y * e) / depth, (d - y * f) / depth)
    return np.moveaxis(np.array(rows), 2, 0)


def _mapped(transform: Matrix, points: Points) -> tuple[Matrix, Matrix, Matrix]:
    """x and y (N,) of where points come to lie, and by what these were divided. A column at a time: rows are short."""
    x, y = points.T.astype(np.float64)
    across, down, depth = (row[0] * x + row[1] * y + row[2] for row in transform)
    depth = np.where(np.abs(depth) < TINY, TINY, depth)
    return across / depth, down / depth, depth


def distances(here: Points, there: Points) -> Points:
    """(N,): from each point to its partner."""
    across, down = (here - there).T
    return np.asarray(np.hypot(across, down))


def areas(maps: Matrix) -> Matrix:
    """(N,): how much each of maps (N, 2, 2) enlarges; negative for one that mirrors."""
    return np.asarray(maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0])


def stretches(maps: Matrix) -> tuple[Matrix, Matrix]:
    """By how much each of maps (N, 2, 2) stretches most and least: its singular values."""
    half = np.einsum("nij,nij->n", maps, maps) / 2
    area = np.abs(areas(maps))
    most = np.sqrt(half + np.sqrt(np.maximum(half**2 - area**2, 0)))
    return most, area / np.maximum(most, np.finfo(float).tiny)


def moved(transform: Matrix, features: LocalFeatures) -> tuple[Points, Matrix, Matrix]:
    """Features as the transform shows them: points (N, 2), log2 of scales (N,), angles in degrees (N,).

    A feature that the transform mirrors has no scale: -inf.
    """
    maps = local_maps(transform, features.points)
    area = areas(maps)
    scale = np.log2(features.scales) + 0.5 * np.log2(
        np.maximum(area, 0), out=np.full(len(area), -np.inf), where=area > 0
    )
    radians = np.deg2rad(features.angles)
    right, down = (maps[:, row, 0] * np.cos(radians) + maps[:, row, 1] * np.sin(radians) for row in (0, 1))
    return project(transform, features.points), scale, np.rad2deg(np.arctan2(down, right))
