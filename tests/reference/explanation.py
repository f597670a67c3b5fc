"""Shares of a score, position by position: each one's own vector is formed, whitened and multiplied, by loops."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tests.reference import pooling

Array = NDArray[np.float64]


def position_vectors(name: str, A: Array, C: Array, bins: Array | None = None, signs: Array | None = None) -> Array:
    """What each position puts into the pooled vector of A (C, H, W), with co-occurrences C. (H * W, D)"""
    channels, H, W = A.shape
    alpha, beta = np.ones((H, W)), np.ones(channels)
    if name == "spoc":
        alpha = pooling.centre(H, W)
    if name == "crow":
        alpha = pooling.spatial_weights(A.sum(0))
        present = [float((A[k] > 0).mean()) for k in range(channels)]
        beta = np.array([math.log(sum(present) / part) if part else 0.0 for part in present])
    if name in ("sct", "chco-sct"):
        alpha = pooling.spatial_weights(C.sum(0))
    if name in ("chco", "chco-sct"):
        totals = C.sum((1, 2))
        beta = np.array([-math.log(1e-5 + total / totals.sum()) for total in totals])
    rows = []
    for i, j in pooling.positions(A):
        if not name.endswith("bilinear"):
            rows.append(alpha[i, j] * beta * A[:, i, j])
            continue
        outer = np.outer(A[:, i, j], C[:, i, j]).ravel()
        if bins is not None and signs is not None:
            sketch = np.zeros(int(bins.max()) + 1)
            for value, bin_, sign in zip(outer, bins, signs, strict=True):
                sketch[int(bin_)] += sign * value
            outer = sketch
        rows.append(outer)
    return np.stack(rows)


def shares(vectors: Array, query: Array, mean: Array, projection: Array) -> Array:
    """q . P (v_p / |f| - rho_p m) / |y| for each row v_p of `vectors`, their sum being f. (N,)"""
    f = vectors.sum(0)
    length = math.sqrt(float(f @ f))
    whitened = projection @ (f / length - mean)
    out = np.zeros(len(vectors))
    for p, v in enumerate(vectors):
        rho = float(v @ f) / length**2
        out[p] = float(query @ (projection @ (v / length - rho * mean))) / math.sqrt(float(whitened @ whitened))
    return out


def densest_box(shares: Array, most: float) -> tuple[int, int, int, int]:
    """Every rectangle is tried."""
    positive = np.maximum(shares, 0)
    H, W = shares.shape
    found = []
    for y0 in range(H):
        for y1 in range(y0 + 1, H + 1):
            for x0 in range(W):
                for x1 in range(x0 + 1, W + 1):
                    inside = float(positive[y0:y1, x0:x1].sum())
                    if inside >= most * positive.sum() * (1 - 1e-9):
                        found.append(((y1 - y0) * (x1 - x0), -round(inside, 9), (x0, y0, x1, y1)))
    return min(found)[2]
