"""A transform put to the test: where both pictures have features at the same place, do they look alike?

`agree` finds a transform from the few matches that are certain. If it is true, then whatever else lies at one place in
both pictures, alike in size and direction, looks alike as well: those pairs are the *support*. Covers of one series
share a band and a logo and agree there in a hundred points; yet all of those lie in a few spots, and between them
nothing looks alike. Two photos of one building agree in thirty points, but all over it. So two numbers count:

    evidence = points that, dealt at random over what both pictures show, would fill as many cells of it as the support
    inside   = of the cells between the points of the support, those that have some / those that should have

The first is large where much of the two pictures agrees, however many points crowd in one spot. The second is about 1
for the same thing, however small it is in the two pictures, and about a half where its parts are shared and what lies
between them is not. What should have some is told by the *rate*, the share of features that are supported where any
are: of a print beside the same print nearly all, so that a cell without support is strange; of a building in other
light one in ten, so that a cell with a few features says little (measured: docs/verification.md).
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from cooc.verification.coding import vectors
from cooc.verification.engine import Engine
from cooc.verification.features import LocalFeatures
from cooc.verification.transforms import Matrix, Points, distances, moved, project

Indices = NDArray[np.int64]
Counts = NDArray[np.float64]

GRID = 10  # cells across what both pictures show,
INSIDE = 5  # and across what the support spans
WHOLE = 6.0  # how much more than its points support may count for, where it fills all there is


def support(query: LocalFeatures, picture: LocalFeatures, transform: Matrix, near: float, engine: Engine) -> Points:
    """The picture's points (N, 2) at which the query has a feature that looks alike."""
    place, scale, angle = moved(transform, query)
    mine, other = near_pairs(place, picture.points, near)
    good = np.abs(scale[mine] - np.log2(picture.scales[other])) <= engine.octaves
    good &= np.abs((angle[mine] - picture.angles[other] + 180) % 360 - 180) <= engine.turn
    mine, other = mine[good], other[good]
    alike = np.einsum("nd,nd->n", vectors(query.descriptors[mine]), vectors(picture.descriptors[other]))
    return np.asarray(picture.points[np.unique(other[alike > engine.alike])])


def near_pairs(here: Points, there: Points, near: float) -> tuple[Indices, Indices]:
    """All pairs (i, j) of points no more than `near` apart: each looks only into the cells around its own."""
    if not len(here) or not len(there):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    low, high = there.min(0) - 2 * near, there.max(0) + 2 * near  # so that the cells at the edges are empty
    across, down = ((high - low) / near).astype(np.int64) + 1
    column, row = ((there - low) / near).astype(np.int64).T
    cells = column * down + row
    order = np.argsort(cells, kind="stable")
    before = np.append(0, np.cumsum(np.bincount(cells, minlength=across * down)))  # of `order`, those of earlier cells
    inside = np.flatnonzero(_between(here, low + near, high - near))
    column, row = ((here[inside] - low) / near).astype(np.int64).T
    cell = column * down + row + down * np.array([[-1], [0], [1]])  # with those above and below, all cells around it
    first, last = before[cell - 1].ravel(), before[cell + 2].ravel()
    count = last - first
    start = np.repeat(first - np.cumsum(count) + count, count)
    i, j = np.repeat(np.tile(inside, 3), count), order[start + np.arange(count.sum())]
    close = distances(here[i], there[j]) <= near
    return i[close], j[close]


def evidence(query: LocalFeatures, picture: LocalFeatures, transform: Matrix, points: Points) -> float:
    """How many points, dealt at random over what both pictures show, fill as much of it as `points` of the picture."""
    mine = project(transform, query.points)
    mine = mine[_shown(mine, picture)]
    other = picture.points[_shown(project(np.asarray(np.linalg.inv(transform), np.float64), picture.points), query)]
    if not len(points) or not len(mine) or not len(other):
        return 0.0
    low, high = np.maximum(mine.min(0), other.min(0)), np.minimum(mine.max(0), other.max(0))
    return float(filling(len(points), *(_count(some, low, high, GRID) for some in (points, mine, other))))


def filling(points: int | Indices, there: Counts, mine: Counts, other: Counts) -> Counts:
    """`evidence` (...) of so many points, by how many of them and of both pictures' features are in a cell (..., C)."""
    filled = (there > 0).sum(-1)
    chance = np.sqrt(np.maximum(mine, there) * np.maximum(other, there))  # where both have features
    dealt = _dealt(chance / np.maximum(chance.sum(-1, keepdims=True), 1), filled)
    return np.where(filled > 0, np.minimum(dealt, WHOLE * points), 0)  # all cells filled: no number is too large


def inside(query: LocalFeatures, picture: LocalFeatures, transform: Matrix, points: Points) -> float:
    """Of the cells between `points` of the picture, those that have one, as a share of those that should.

    A cell in which each picture has n features should have one with a chance of 1 - (1 - rate)^n, the rate being that
    of the cells that have one.
    """
    if not len(points):
        return 0.0
    low, high = points.min(0), points.max(0)
    mine, other = (_count(one, low, high, INSIDE) for one in (project(transform, query.points), picture.points))
    return density(points, _count(points, low, high, INSIDE), mine, other)


def density(points: Points, there: Counts, mine: Counts, other: Counts) -> float:
    """`inside` of the points, by how many of them and of each picture's features lie in each cell of their extent."""
    could = np.maximum(np.minimum(mine, other), there)
    between = _within(np.asarray(cv2.convexHull(points)[:, 0], np.float32), points.min(0), points.max(0))
    rate = there.sum() / could[there > 0].sum()
    should = (1 - (1 - rate) ** could)[between | (there > 0)].sum()
    return min(float((there > 0).sum() / should), 1.0)


def _count(points: Points, low: Points, high: Points, cells: int) -> Counts:
    """How many of the points lie in each of cells x cells between two corners, both of which count."""
    inner = points[_between(points, low, high)]
    column, row = np.minimum((inner - low) * cells / np.maximum(high - low, 1e-6), cells - 1).astype(np.int64).T
    return np.bincount(column * cells + row, minlength=cells * cells).astype(np.float64)


def _within(hull: Points, low: Points, high: Points) -> NDArray[np.bool_]:
    """Which of the cells have their middle inside a convex hull (K, 2)."""
    step = (np.arange(INSIDE) + 0.5) / INSIDE
    middle = low + (high - low) * np.stack(np.meshgrid(step, step, indexing="ij"), -1).reshape(-1, 2)
    along, to = np.roll(hull, -1, 0) - hull, middle[:, None] - hull
    side = along[:, 0] * to[..., 1] - along[:, 1] * to[..., 0]
    return np.asarray((side >= 0).all(1) | (side <= 0).all(1))


def _shown(points: Points, picture: LocalFeatures) -> NDArray[np.bool_]:
    return _between(points, np.zeros(2), np.array(picture.size))


def _between(points: Points, low: NDArray[np.floating], high: NDArray[np.floating]) -> NDArray[np.bool_]:
    (x, y), (left, top), (right, bottom) = points.T, low, high
    return np.asarray((x >= left) & (y >= top) & (x <= right) & (y <= bottom))


def _dealt(chance: Counts, filled: Indices) -> Counts:
    """How many points (...), dealt to cells by `chance` (..., C), fill `filled` (...) of them on average."""
    few, many = np.full(filled.shape, 0.1), np.full(filled.shape, 1e5)
    with np.errstate(divide="ignore"):
        missed = np.log1p(-chance)  # by one point; -inf where a cell has all of them
    for _ in range(40):  # the mean number of cells filled grows with the points: halve the (logarithmic) range
        middle = np.sqrt(few * many)
        more = chance.shape[-1] - np.exp(middle[..., None] * missed).sum(-1) < filled
        few, many = np.where(more, middle, few), np.where(more, many, middle)
    return few
