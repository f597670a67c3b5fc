"""Co-occurrence tensors, written from the paper's equations: explicit loops over one image, no tensor algebra.

Maps are nested (C, H, W) numpy arrays in float64, as few and small as loops in Python can bear.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mean(A: Array) -> float:
    return sum(float(value) for value in A.flat) / A.size


def cooccurrence(A: Array, radius: int, threshold: float | None = None, eps: float = 0.0) -> Array:
    """Eq. 2 and 3: six nested loops. `eps` is what an activation counts for itself (Algorithm 1; Eq. 3 has 0)."""
    C, H, W = A.shape
    t = mean(A) if threshold is None else threshold
    out = np.zeros_like(A)
    for k in range(C):
        for i in range(H):
            for j in range(W):
                if not A[k, i, j] > t:
                    continue
                for w in range(C):
                    for u in range(max(0, i - radius), min(H, i + radius + 1)):
                        for v in range(max(0, j - radius), min(W, j + radius + 1)):
                            if A[w, u, v] > t:
                                out[k, i, j] += A[w, u, v] * (eps if w == k else 1.0)
    return out / max(C - 1, 1)


def cooccurrence_filtered(A: Array, filter: Array, threshold: float | None = None) -> Array:
    """Algorithm 1 with any filter (C, C, S, S): F[k, w] weighs channel w around an activation of channel k."""
    C, H, W = A.shape
    r = filter.shape[2] // 2
    t = mean(A) if threshold is None else threshold
    out = np.zeros_like(A)
    for k in range(C):
        for i in range(H):
            for j in range(W):
                if not A[k, i, j] > t:
                    continue
                for w in range(C):
                    for dy in range(-r, r + 1):
                        for dx in range(-r, r + 1):
                            u, v = i + dy, j + dx
                            if 0 <= u < H and 0 <= v < W and A[w, u, v] > t:
                                out[k, i, j] += filter[k, w, dy + r, dx + r] * A[w, u, v]
    return out / max(C - 1, 1)


def cooccurrence_vector(tensor: Array) -> Array:
    """Eq. 4."""
    out = np.zeros(tensor.shape[0])
    for k, i, j in np.ndindex(*tensor.shape):
        out[k] += tensor[k, i, j]
    return out


def shih(A: Array, radius: int) -> tuple[Array, Array]:
    """Eq. 1: c(k, w) of the best offset; and section 6's tensor: that offset's products at (i, j), summed over w."""
    C, H, W = A.shape
    vector = np.full((C, C), -np.inf)
    tensor = np.zeros_like(A)
    for k in range(C):
        for w in range(C):
            best_map = np.zeros((H, W))
            for dy in range(-radius, radius + 1):
                for dx in range(-radius, radius + 1):
                    products = np.zeros((H, W))
                    for i in range(max(0, -dy), min(H, H - dy)):
                        for j in range(max(0, -dx), min(W, W - dx)):
                            products[i, j] = A[k, i, j] * A[w, i + dy, j + dx]
                    if products.sum() > vector[k, w]:
                        vector[k, w], best_map = products.sum(), products
            tensor[k] += best_map
    return vector, tensor
