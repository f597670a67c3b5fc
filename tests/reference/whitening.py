"""Whitening, written from the equations: explicit loops, and scipy's factorisations. Vectors are rows, float64."""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

Array = NDArray[np.float64]


def unit(x: Array) -> Array:
    out = np.zeros_like(x)
    for i, row in enumerate(x):
        length = np.sqrt(sum(value * value for value in row))
        if length > 0:
            out[i] = row / length
    return out


def whiten(x: Array, mean: Array, projection: Array) -> Array:
    out = np.zeros((len(x), len(projection)))
    for i, row in enumerate(unit(x)):
        if row.any():
            for j, axis in enumerate(projection):
                out[i, j] = sum(axis * (row - mean))
    return unit(out)


def pca(x: Array, dim: int, exponent: float) -> tuple[Array, Array, Array]:
    """Mean, projection and eigenvalues by an SVD of the centred unit rows."""
    x = unit(x)
    mean = x.mean(axis=0)
    _, singular, axes = np.linalg.svd(x - mean, full_matrices=False)
    values = singular**2 / (len(x) - 1)
    projection = np.array([axes[i] * values[i] ** -exponent for i in range(dim)])
    return mean, projection, values[:dim]


def learned(x: Array, queries: list[int], positives: list[int], dim: int) -> tuple[Array, Array]:
    """Mean and projection of Lw, without jitter: the pair differences must span the space."""
    x = unit(x)
    mean = sum(x[q] for q in queries) / len(queries)
    covariance = np.zeros((x.shape[1], x.shape[1]))
    for q, p in zip(queries, positives, strict=True):
        difference = x[q] - x[p]
        covariance += np.outer(difference, difference) / len(queries)
    p1 = scipy.linalg.inv(scipy.linalg.cholesky(covariance, lower=True))
    moment = np.zeros_like(covariance)
    for row in x:
        projected = p1 @ (row - mean)
        moment += np.outer(projected, projected)
    values, vectors = scipy.linalg.eigh(moment)
    order = np.argsort(values)[::-1][:dim]
    return mean, vectors[:, order].T @ p1
