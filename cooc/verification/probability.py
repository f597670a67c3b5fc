"""How likely it is that two pictures that agree show the same thing: a percentage that can be believed.

    same_thing(agreement)                    # 0..1; 0 where nothing agrees

    log-odds = bias + a log(inliers) + b log(spread)        a, b >= 0, for each engine

Two numbers and no more: what they leave out (cosine, share of the area, matches before geometry) adds nothing on kinds
of pictures that were not fitted on. `data/verification.json` holds the parameters, what they were fitted on, and how
well they fit (benchmarks/verification.py fit).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError
from cooc.verification.agreement import Agreement

__all__ = ["PROVEN", "Calibration", "fit_calibration", "load_calibration", "reliability", "same_thing"]

PROVEN = 0.5  # from which two pictures are said to show the same thing
SMALLEST = 0.02  # spread is not taken for smaller
FILE = Path(__file__).parents[1] / "data" / "verification.json"


@dataclass(frozen=True)
class Calibration:
    bias: float
    inliers: float
    spread: float

    def log_odds(self, inliers: float, spread: float) -> float:
        return self.bias + self.inliers * math.log(inliers) + self.spread * math.log(max(spread, SMALLEST))

    def __call__(self, agreement: Agreement) -> float:
        if agreement.inliers == 0:
            return 0.0
        return 1 / (1 + math.exp(-self.log_odds(agreement.inliers, agreement.spread)))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@cache
def load_calibration(engine: str) -> Calibration:
    """The parameters that ship with the package."""
    known = json.loads(FILE.read_text())["engines"]
    if engine not in known:
        raise InputError(f"No probabilities were fitted for the engine {engine!r}. There are: {', '.join(known)}.")
    return Calibration(**known[engine])


def same_thing(agreement: Agreement) -> float:
    """The probability that the two pictures show the same thing."""
    return load_calibration(agreement.engine)(agreement)


def fit_calibration(
    inliers: Sequence[float] | NDArray[np.floating],
    spread: Sequence[float] | NDArray[np.floating],
    same: Sequence[bool] | NDArray[np.bool_],
    weights: Sequence[float] | NDArray[np.floating] | None = None,
    *,
    ridge: float = 1e-3,
) -> Calibration:
    """Logistic regression (Newton's method) on pairs that agree in something; slopes are held at 0 or more."""
    x = np.column_stack([np.ones(len(inliers)), np.log(inliers), np.log(np.maximum(spread, SMALLEST))])
    y = np.asarray(same, np.float64)
    if len(x) != len(y) or not 0 < y.sum() < len(y):
        raise InputError("Probabilities are fitted on pairs of both kinds, with inliers and spread of each.")
    w = np.ones(len(y)) if weights is None else np.asarray(weights, np.float64)
    w = w / w.mean()
    free = [0, 1, 2]
    while True:
        theta = np.zeros(3)
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
