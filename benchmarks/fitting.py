"""Parameters of verification that ship with cooc, fitted once: probabilities, and the projection of RootSIFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError
from cooc.verification.coding import Projection
from cooc.verification.probability import LEAST, Calibration

SEEN = "inliers", "evidence", "inside"  # what a probability may be made of


def fit_calibration(
    seen: Sequence[tuple[float, float, float]] | NDArray[np.floating],
    same: Sequence[bool] | NDArray[np.bool_],
    weights: Sequence[float] | NDArray[np.floating] | None = None,
    used: Sequence[str] = SEEN,
    *,
    ridge: float = 1e-3,
) -> Calibration:
    """Logistic regression (Newton's method) on pairs that agree in something; slopes are held at 0 or more.

    `seen` (N, 3) are inliers, evidence and inside of each; those that are not `used` get no slope.
    """
    x = np.column_stack([np.ones(len(seen)), np.log(np.maximum(seen, LEAST))])
    y = np.asarray(same, np.float64)
    if len(x) != len(y) or not 0 < y.sum() < len(y):
        raise InputError("Probabilities are fitted on pairs of both kinds, with what was seen of each.")
    w = np.ones(len(y)) if weights is None else np.asarray(weights, np.float64)
    w = w / w.mean()
    free = [0, *(1 + SEEN.index(name) for name in used)]
    while True:
        theta = np.zeros(x.shape[1])
        theta[free] = _newton(x[:, free], y, w, ridge)
        negative = [k for k in free[1:] if theta[k] < 0]
        if not negative:
            return Calibration(*(float(v) for v in theta))
        free.remove(min(negative, key=lambda k: theta[k]))


def _newton(
    x: NDArray[np.float64], y: NDArray[np.float64], w: NDArray[np.float64], ridge: float
) -> NDArray[np.float64]:
    theta = np.zeros(x.shape[1])
    penalty = ridge * len(y) * np.diag([0.0] + [1.0] * (x.shape[1] - 1))
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(x @ theta, -500, 500)))
        gradient = x.T @ (w * (y - p)) - penalty @ theta
        curvature = (x * (w * p * (1 - p))[:, None]).T @ x + penalty + 1e-9 * np.eye(len(theta))
        step = np.linalg.solve(curvature, gradient)
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))  # no leap where the curve is flat
        theta = theta + step
        if np.abs(step).max() < 1e-8:
            break
    return theta


def reliability(
    probabilities: Sequence[float] | NDArray[np.floating], same: Sequence[bool] | NDArray[np.bool_], bins: int = 10
) -> list[dict[str, float]]:
    """For each bin of probabilities: how many pairs, the mean probability said, and the share that is true."""
    p, y = np.asarray(probabilities, np.float64), np.asarray(same, np.float64)
    place = np.minimum((p * bins).astype(int), bins - 1)
    rows = []
    for number in range(bins):
        there = place == number
        if there.any():
            rows.append({"pairs": int(there.sum()), "said": float(p[there].mean()), "true": float(y[there].mean())})
    return rows


def fit_projection(samples: NDArray[np.floating], dim: int) -> Projection:
    """From descriptors of many pictures (N, D), N at least D + 1; in float64."""
    count, size = samples.shape
    if not 0 < dim <= size or count <= size:
        raise InputError(f"{count} samples of {size} values cannot be projected on {dim}: take more than {size}.")
    samples = np.asarray(samples, np.float64)
    mean = samples.mean(0)
    variance, directions = np.linalg.eigh(np.cov(samples.T))
    variance, directions = variance[::-1][:dim], directions[:, ::-1][:, :dim]
    if variance[-1] <= variance[0] * 1e-9:
        raise InputError(f"The samples span fewer than {dim} directions: take more, or more varied ones.")
    directions = directions * np.where(directions.sum(0) < 0, -1, 1)  # the same signs on every machine
    return Projection(mean.astype(np.float32), (directions * variance**-0.25).T.astype(np.float32))


def save_projection(projection: Projection, path: Path) -> None:
    np.save(path, np.vstack([projection.mean, projection.axes]).astype(np.float16))


def fit_activations(photos: Sequence[Path], dim: int = 64, of_each: int = 450) -> Projection:
    """The projection of `cooc.verification.activations`, from some of the features of each photo before it."""
    from PIL import Image

    from cooc.verification.activations import find_features
    from cooc.verification.engines import LONGEST

    chance = np.random.default_rng(0)
    samples = []
    for path in photos:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
        rgb.thumbnail((LONGEST, LONGEST))
        rows = find_features(np.array(rgb))[3].numpy()
        samples.append(rows[chance.permutation(len(rows))[:of_each]])
    return fit_projection(np.concatenate(samples), dim)
