"""Fitting a whitening: from vectors alone (PCA), from matching pairs (learned), or from another one (adapted)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cooc.errors import WhiteningError
from cooc.whitening.layer import Whitening, unit

Vectors = Tensor | NDArray[Any]
Indices = Tensor | NDArray[Any] | Sequence[int]

CHUNK = 4096  # rows taken to float64 at once

logger = logging.getLogger("cooc")


def fit_pca(
    vectors: Vectors, dim: int, *, exponent: float = 0.5, shrinkage: float = 0.0, meta: Mapping[str, str] | None = None
) -> Whitening:
    """PCA whitening from (N, D) vectors, through the N x N or the D x D matrix, whichever is smaller.

    shrinkage: so much of the mean variance is added to every variance. Few samples make weak directions look weaker
    than they are, and whitening would blow them up; with it, `dim` may also exceed what the samples span.
    """
    count, columns = _shape(vectors)
    if count >= columns:
        fitter = PCAFitter()
        fitter.update(vectors)
        return fitter.fit(dim, exponent=exponent, shrinkage=shrinkage, meta=meta)
    _refuse_nonfinite(vectors)
    x = _drop_zeros(_unit_rows(vectors))  # (N, D)
    _check_dim(dim, len(x), columns, exponent, shrinkage)
    mean = x.mean(dim=0)
    x = x - mean
    values, sides = _largest(x @ x.T / (len(x) - 1), min(dim, len(x) - 1), len(x), singular=shrinkage > 0)
    real = values > _noise(values, len(x))  # none along one direction where a picture is there twice
    values, axes = values[real], F.normalize(sides[real] @ x, dim=1)
    if dim > len(axes):
        axes, values = _completed(axes, dim), F.pad(values, (0, dim - len(values)))
    values = values + shrinkage * float(x.square().sum()) / (len(x) - 1) / columns
    return _assemble("pca", mean, axes, values, exponent, len(x), _with(shrinkage, meta))


def _completed(axes: Tensor, dim: int) -> Tensor:
    """Orthonormal rows, and as many more as it takes: directions in which no sample varies."""
    generator = torch.Generator().manual_seed(0)
    more = torch.randn(axes.shape[1], dim - len(axes), generator=generator, dtype=axes.dtype).to(axes.device)
    for _ in range(2):  # once leaves rounding errors along the axes
        more, _ = torch.linalg.qr(more - axes.T @ (axes @ more))
    return torch.cat([axes, more.T])


def _with(shrinkage: float, meta: Mapping[str, str] | None) -> dict[str, str]:
    return ({"shrinkage": repr(float(shrinkage))} if shrinkage else {}) | dict(meta or {})


class PCAFitter:
    """PCA whitening from batches (n, D), in D x D memory however many there are: their mean and scatter matrix.

    Each chunk is centred on its own mean and then merged (Chan, Golub and LeVeque 1979), so that no large sums are
    subtracted from one another. A batch that is refused leaves the fitter as it was.
    """

    def __init__(self) -> None:
        self.count = 0  # vectors used
        self._seen = 0  # vectors given, for messages
        self._mean: Tensor | None = None  # (D,)
        self._scatter: Tensor | None = None  # (D, D)

    def update(self, vectors: Vectors) -> None:
        columns = _shape(vectors)[1]
        if self._mean is not None and columns != len(self._mean):
            raise WhiteningError(
                f"A batch of {columns}-d vectors after {len(self._mean)}-d ones: fit one recipe at a time."
            )
        _refuse_nonfinite(vectors, self._seen)
        for chunk in _chunks(vectors):
            self._merge(_drop_zeros(_unit_rows(chunk)))
            self._seen += len(chunk)

    def _merge(self, x: Tensor) -> None:
        if self._mean is None or self._scatter is None:
            self._mean, self._scatter = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1], x.shape[1])
        if not len(x):
            return
        x = x.to(self._mean.device)
        mean = x.mean(dim=0)
        shift, total = mean - self._mean, self.count + len(x)
        x = x - mean
        self._scatter.addmm_(x.T, x).addr_(shift, shift, alpha=self.count * len(x) / total)
        self._mean = self._mean + shift * (len(x) / total)
        self.count = total

    def fit(
        self, dim: int, *, exponent: float = 0.5, shrinkage: float = 0.0, meta: Mapping[str, str] | None = None
    ) -> Whitening:
        """May be called at any time, and again after more batches."""
        if self._mean is None or self._scatter is None:
            raise WhiteningError(f"Whitening to {dim} dimensions needs at least {dim + 1} vectors, and there are none.")
        _check_dim(dim, self.count, len(self._mean), exponent, shrinkage)
        covariance = self._scatter / (self.count - 1)
        values, axes = _largest(covariance, dim, self.count, singular=shrinkage > 0)
        values = values + shrinkage * float(covariance.trace()) / len(covariance)
        return _assemble("pca", self._mean, axes, values, exponent, self.count, _with(shrinkage, meta))


def fit_learned(
    vectors: Vectors,
    query_idx: Indices,
    positive_idx: Indices,
    dim: int,
    *,
    exponent: float = 0.0,
    meta: Mapping[str, str] | None = None,
) -> Whitening:
    """Learned whitening Lw (Radenovic et al. 2016) from (N, D) vectors and matching pairs of rows.

    Pair i is (query_idx[i], positive_idx[i]). Directions in which matching pictures differ are shrunk. Classic Lw
    leaves the eigenvalues of the projected vectors alone (exponent 0); a soft exponent evens them out too.
    """
    _refuse_nonfinite(vectors)
    x = _unit_rows(vectors)  # (N, D)
    queries, positives = _pairs(query_idx, positive_idx, x)
    used = x[(x != 0).any(dim=1)]
    _check_dim(dim, len(used), x.shape[1], exponent)
    mean = queries.mean(dim=0)
    difference = queries - positives
    factor = _cholesky(difference.T @ difference / len(difference))
    centred = torch.linalg.solve_triangular(factor, (used - mean).T, upper=False)  # P1 (x - m): (D, N)
    values, axes = _largest(centred @ centred.T / len(used), dim, len(used))
    projection = torch.linalg.solve_triangular(factor, axes, upper=False, left=False)  # V^T P1: (d, D)
    extra = {"pairs": str(len(queries))} | dict(meta or {})
    return _assemble("learned", mean, projection, values, exponent, len(used), extra)


def adapt(
    whitening: Whitening,
    vectors: Vectors,
    query_idx: Indices,
    positive_idx: Indices,
    *,
    meta: Mapping[str, str] | None = None,
) -> Whitening:
    """A whitening that is there, turned to another kind of pictures by their (N, D) vectors and matching pairs of them.

    The mean is theirs: what all pictures of a kind have in common tells none of them from another. Then Lw of what the
    whitening gives, for as few as some hundred pairs: the covariance of their differences is shrunk towards a multiple
    of the identity, which would leave all as it is, the more so the fewer they are (OAS, Chen et al. 2010). Pairs that
    share pictures are no independent samples: at most as many count as there are pictures in them.
    """
    _refuse_nonfinite(vectors)
    x = _unit_rows(vectors)
    mean = x[(x != 0).any(dim=1)].mean(dim=0)
    centred = Whitening(mean, whitening.projection.detach().to(x))
    queries, positives = _pairs(query_idx, positive_idx, centred(x))
    difference = queries - positives  # (pairs, d)
    once = {frozenset((int(q), int(p))) for q, p in zip(query_idx, positive_idx, strict=True)}
    samples = min(len(once), len(frozenset().union(*once)))
    covariance = difference.T @ difference / len(difference)
    dim, trace, square = len(covariance), float(covariance.trace()), float(covariance.square().sum())
    uneven = (samples + 1) * (square - trace**2 / dim)
    share = min(1.0, (square + trace**2) / uneven) if uneven > 0 else 1.0
    values, axes = torch.linalg.eigh((1 - share) * covariance + share * trace / dim * torch.eye(dim).to(covariance))
    turn = (axes * (values * dim / trace).rsqrt()) @ axes.T
    own = {"kind": "adapted", "pairs": str(len(once)), "shrinkage": f"{share:.4f}"}
    projection = (turn @ centred.projection).float()
    return Whitening(mean.float(), projection, dict(whitening.meta) | own | dict(meta or {}))


def _pairs(query_idx: Indices, positive_idx: Indices, x: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors of both sides; pairs with a zero vector are left out."""
    sides = [i if isinstance(i, Tensor) else torch.from_numpy(np.array(i)) for i in (query_idx, positive_idx)]
    if any(side.ndim != 1 or side.is_floating_point() for side in sides) or len(sides[0]) != len(sides[1]):
        raise WhiteningError("Pairs are two lists of row numbers of the same length: query_idx and positive_idx.")
    both = torch.stack(sides).to(x.device, torch.int64)  # (2, pairs)
    if both.numel() and (int(both.min()) < 0 or int(both.max()) >= len(x)):
        raise WhiteningError(f"Pairs name rows {int(both.min())} to {int(both.max())}, but there are {len(x)} vectors.")
    queries, positives = x[both[0]], x[both[1]]
    real = (queries != 0).any(dim=1) & (positives != 0).any(dim=1)
    queries, positives = queries[real], positives[real]
    if bool((queries == positives).all()):  # true without pairs as well
        raise WhiteningError("Learned whitening needs matching pairs of different pictures, and none were given.")
    return queries, positives


def _cholesky(matrix: Tensor) -> Tensor:
    """Lower factor, with the least of 0, 1e-10, 1e-9, ... on the diagonal that makes the matrix positive definite.

    Fewer pairs than dimensions leave it singular; a pivot that is only rounding noise counts as zero.
    """
    floor = len(matrix) * torch.finfo(matrix.dtype).eps * float(matrix.diagonal().max())
    jitter = 0.0
    while True:
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(matrix + jitter * torch.eye(len(matrix)).to(matrix))
        if not int(failed) and float(factor.diagonal().min()) ** 2 > floor:
            return factor
        jitter = max(1e-10, jitter * 10)


def _largest(matrix: Tensor, dim: int, samples: int, singular: bool = False) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues (dim,) in decreasing order, and their eigenvectors as rows.

    Directions in which the vectors do not vary would be rounding noise blown up: they are refused, not floored, unless
    the caller sees to them (`singular`).
    """
    values, axes = torch.linalg.eigh(matrix)  # increasing
    values, axes = values.flip(0)[:dim], axes.T.flip(0)[:dim]
    if singular:
        return values.clamp_min(0), axes
    if (rank := int((values > _noise(values, max(samples, len(matrix)))).sum())) < dim:
        raise WhiteningError(
            f"These vectors vary in only {rank} directions, too few to whiten to {dim}: "
            f"add pictures that differ, or whiten to at most {rank}."
        )
    return values, axes


def _noise(values: Tensor, count: int) -> Tensor:
    """What rounding leaves of a variance that is 0, for unit rows."""
    return (1 + values[0] * count) * torch.finfo(values.dtype).eps


def _assemble(
    kind: str, mean: Tensor, axes: Tensor, values: Tensor, exponent: float, samples: int, meta: Mapping[str, str] | None
) -> Whitening:
    """Scales the axes, and turns each so that its largest component is positive: equal fits give equal signs."""
    projection = axes * values.pow(-exponent)[:, None]
    largest = projection.gather(1, projection.abs().argmax(dim=1, keepdim=True))
    projection = projection * largest.sign()
    own = {"kind": kind, "samples": str(samples), "exponent": repr(float(exponent))}
    return Whitening(mean.float(), projection.float().contiguous(), own | dict(meta or {}), values.float())


# What goes in


def _shape(vectors: Vectors) -> tuple[int, int]:
    if vectors.ndim != 2 or not vectors.shape[1]:
        raise WhiteningError(f"Whitening is fitted on an array (N, D), not on one of shape {tuple(vectors.shape)}.")
    return vectors.shape[0], vectors.shape[1]


def _chunks(vectors: Vectors) -> Iterator[Vectors]:
    _shape(vectors)
    return (vectors[start : start + CHUNK] for start in range(0, max(len(vectors), 1), CHUNK))


def _unit_rows(vectors: Vectors) -> Tensor:
    """Unit rows in float64; an array may be read-only, or lie on disk."""
    if isinstance(vectors, Tensor):
        return unit(vectors.detach().double())
    return unit(torch.from_numpy(np.array(vectors, dtype=np.float64)))


def _drop_zeros(x: Tensor) -> Tensor:
    real = (x != 0).any(dim=1)
    if missing := int((~real).sum()):
        logger.warning("Whitening: %d of %d vectors are zero and were left out of the fit.", missing, len(x))
        return x[real]
    return x


def _refuse_nonfinite(vectors: Vectors, first: int = 0) -> None:
    for number, chunk in enumerate(_chunks(vectors)):
        finite = chunk.isfinite() if isinstance(chunk, Tensor) else torch.from_numpy(np.isfinite(chunk))
        if not bool(finite.all()):
            row = first + number * CHUNK + int(finite.all(dim=1).logical_not().nonzero()[0])
            raise WhiteningError(
                f"NaN or infinity in row {row}: describe that picture again, or leave it out of the fit."
            )


def _check_dim(dim: int, samples: int, columns: int, exponent: float, shrinkage: float = 0.0) -> None:
    if not (math.isfinite(exponent) and exponent >= 0):
        raise WhiteningError(f"The whitening exponent is 0 (PCA only) to 0.5 (full), not {exponent}.")
    if not 1 <= dim <= columns:
        raise WhiteningError(f"Vectors of {columns} dimensions can be whitened to 1 to {columns}, not to {dim}.")
    if not (math.isfinite(shrinkage) and shrinkage >= 0):
        raise WhiteningError(f"Shrinkage is 0 (none) or more, of the mean variance, not {shrinkage}.")
    if samples < 2 or (dim > samples - 1 and not shrinkage):
        raise WhiteningError(
            f"Whitening to {dim} dimensions needs at least {dim + 1} vectors (better several times as many), "
            f"and there are {samples}: add pictures, or whiten to at most {max(samples - 1, 0)}."
        )
