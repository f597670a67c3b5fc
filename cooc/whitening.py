"""Whitening: vectors of D dimensions -> L2 -> (x - mean) @ projection.T -> L2 -> vectors of d dimensions.

Channels that fire together count twice in an inner product. Whitening, fitted once on other pictures, undoes that:

    PCA      projection = diag(eigenvalue^-exponent) V^T     eigenvectors V of the covariance, decreasing order
    learned  projection = V^T P1                             P1 undoes the covariance of matching-pair differences,
                                                             V rotates what is left to its principal axes
    adapted  projection = P1 times that of another one       P1 as above, of its vectors, shrunk: for few pairs

Exponent 0.5 makes the covariance of the training vectors the identity, smaller ones are softer, 0 only rotates. Rows of
the projection are ordered, so the first d of them are the whitening to d (`Whitening.truncate`). Fits run in float64.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from cooc.errors import UnknownNameError, WhiteningError
from cooc.files import write_whole

Vectors = Tensor | NDArray[Any]
Indices = Tensor | NDArray[Any] | Sequence[int]
Storage = Literal["float32", "float16", "int8"]

STORAGE = ("float32", "float16", "int8")
FORMAT = "cooc-whitening/1"
CHUNK = 4096  # rows taken to float64 at once

logger = logging.getLogger("cooc")


class Whitening(nn.Module):
    """A fitted whitening, as the last layer of a network: (..., D) -> (..., d), unit length. See `whiten`.

    `meta` says where it comes from: kind, samples, exponent, and what the caller adds. It is fixed unless somebody
    trains it: whitening.requires_grad_().
    """

    mean: Tensor
    eigenvalues: Tensor | None

    def __init__(
        self,
        mean: Tensor,  # (D,)
        projection: Tensor,  # (d, D), most important row first
        meta: Mapping[str, str] | None = None,
        eigenvalues: Tensor | None = None,  # (d,), decreasing, before the exponent
    ) -> None:
        super().__init__()
        shapes = tuple(mean.shape), tuple(projection.shape)
        if mean.ndim != 1 or projection.ndim != 2 or projection.shape[1] != len(mean):
            raise WhiteningError(f"A whitening needs mean (D,) and projection (d, D), not {shapes[0]} and {shapes[1]}.")
        if eigenvalues is not None and eigenvalues.shape != (len(projection),):
            raise WhiteningError(f"A whitening to {len(projection)} needs as many eigenvalues, not {len(eigenvalues)}.")
        self.meta = dict(meta or {})
        self.register_buffer("mean", mean)
        self.projection = nn.Parameter(projection, requires_grad=False)
        self.register_buffer("eigenvalues", eigenvalues)

    @property
    def dim(self) -> int:
        return self.projection.shape[0]

    @property
    def input_dim(self) -> int:
        return self.projection.shape[1]

    def forward(self, vectors: Tensor) -> Tensor:
        return whiten(vectors, self.mean, self.projection)

    def truncate(self, dim: int) -> Whitening:
        """The whitening to fewer dimensions, equal to a fit at that size."""
        if not 1 <= dim <= self.dim:
            raise WhiteningError(f"This whitening gives 1 to {self.dim} dimensions, not {dim}; fit one with more.")
        values = None if self.eigenvalues is None else self.eigenvalues[:dim]
        return Whitening(self.mean, self.projection[:dim].detach(), self.meta, values)

    def extra_repr(self) -> str:
        return f"{self.input_dim} -> {self.dim}"


def whiten(vectors: Tensor, mean: Tensor, projection: Tensor) -> Tensor:
    """(..., D) -> (..., d), unit length, in float32 or better. A zero vector has no direction and stays zero."""
    if vectors.shape[-1] != projection.shape[1]:
        raise WhiteningError(
            f"Vectors of {vectors.shape[-1]} dimensions, but this whitening takes {projection.shape[1]}: "
            "it belongs to another recipe; use that recipe, or fit a whitening for this one."
        )
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    mean, projection = (t.to(vectors.device, dtype) for t in (mean, projection))
    x = _unit(vectors.to(dtype))  # (..., D)
    empty = (x == 0).all(dim=-1, keepdim=True)
    return _unit((x - mean) @ projection.T).masked_fill(empty, 0)  # (..., d)


# --- fitting ---------------------------------------------------------------------------------------------------------


def fit_pca(
    vectors: Vectors,
    dim: int,
    *,
    exponent: float = 0.5,
    shrinkage: float = 0.0,
    meta: Mapping[str, str] | None = None,
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
    vectors: Tensor,
    query_idx: Indices,
    positive_idx: Indices,
    *,
    meta: Mapping[str, str] | None = None,
) -> Whitening:
    """A whitening that is there, turned to another kind of pictures by matching pairs of its (N, D) vectors.

    Lw of what it gives, for as few as some hundred pairs: the covariance of their differences is shrunk towards a
    multiple of the identity, which would leave all as it is, the more so the fewer they are (OAS, Chen et al. 2010).
    """
    queries, positives = _pairs(query_idx, positive_idx, whitening(vectors.double()))
    difference = queries - positives  # (pairs, d)
    covariance = difference.T @ difference / len(difference)
    dim, trace, square = len(covariance), float(covariance.trace()), float(covariance.square().sum())
    uneven = (len(difference) + 1) * (square - trace**2 / dim)
    share = min(1.0, (square + trace**2) / uneven) if uneven > 0 else 1.0
    values, axes = torch.linalg.eigh((1 - share) * covariance + share * trace / dim * torch.eye(dim).to(covariance))
    turn = (axes * (values * dim / trace).rsqrt()) @ axes.T
    own = {"kind": "adapted", "pairs": str(len(difference)), "shrinkage": f"{share:.4f}"}
    projection = (turn @ whitening.projection.to(turn)).float()
    return Whitening(whitening.mean, projection, dict(whitening.meta) | own | dict(meta or {}))


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


# --- what goes in ----------------------------------------------------------------------------------------------------


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
        return _unit(vectors.detach().double())
    return _unit(torch.from_numpy(np.array(vectors, dtype=np.float64)))


def _unit(x: Tensor) -> Tensor:
    """Divides by the largest component first, so that squares neither overflow nor vanish; length is scale-free."""
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    return F.normalize(x / torch.where(largest > 0, largest, 1), dim=-1)


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


# --- files -----------------------------------------------------------------------------------------------------------


def save(whitening: Whitening, path: str | Path, storage: Storage = "float32") -> None:
    """Writes safetensors, atomically, with the projection in full, in half or in a quarter of the space."""
    if storage not in STORAGE:
        raise UnknownNameError("whitening storage", storage, STORAGE)
    tensors = {"mean": whitening.mean, "eigenvalues": whitening.eigenvalues, **_pack(whitening.projection, storage)}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    own = {"format": FORMAT, "storage": storage, "checksum": _checksum(plain)}
    try:
        write_whole(path, to_bytes(plain, metadata=whitening.meta | own))
    except OSError as error:
        raise WhiteningError(f"Cannot write whitening to {path} ({error}): check the folder and its space.") from error


def load(path: str | Path) -> Whitening:
    """Reads what `save` wrote, as float32 on the CPU. `meta["storage"]` says how exact the file was."""
    try:
        with safe_open(path, framework="pt") as file:
            meta: dict[str, str] = dict(file.metadata() or {})
            tensors: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise WhiteningError(f"There is no whitening file {path}: fit one and save it there.") from error
    except (OSError, SafetensorError) as error:
        raise WhiteningError(f"{path} is not a readable whitening file ({error}): fetch or fit it again.") from error
    version = meta.pop("format", "")
    if not version.startswith(FORMAT.split("/")[0]) or not {"mean", "projection"} <= tensors.keys():
        raise WhiteningError(f"{path} holds no whitening: give a file that a whitening was saved to.")
    if version != FORMAT:
        raise WhiteningError(f"{path} has format {version}, this cooc reads {FORMAT}: update cooc, or fit again.")
    if meta.pop("checksum", "") != _checksum(tensors):
        raise WhiteningError(f"{path} is damaged (its checksum does not match): fetch or fit it again.")
    return Whitening(tensors["mean"], _unpack(tensors), meta, tensors.get("eigenvalues"))


def _pack(projection: Tensor, storage: Storage) -> dict[str, Tensor]:
    """Rows with a float32 scale each, since whitening scales span decades.

    int8 rounding errors of a weak direction's row also meet the strong directions, where vectors have their energy, and
    would drown what that row is for. So the errors along the first sixteenth of the rows are kept too, as float16.
    """
    if storage == "float32":
        return {"projection": projection}
    scale = projection.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(projection.dtype).tiny)
    if storage == "float16":
        return {"projection": (projection / scale).half(), "scale": scale}
    scale = scale / 127
    rows = (projection / scale).round()
    strong = F.normalize(rows[: -(-projection.shape[1] // 16)], dim=1)  # (k, D)
    correction = (projection / scale - rows) @ torch.linalg.pinv(strong)  # (d, k)
    return {"projection": rows.to(torch.int8), "scale": scale, "correction": correction.half()}


def _unpack(tensors: Mapping[str, Tensor]) -> Tensor:
    rows = tensors["projection"].float()
    if "correction" in tensors:
        correction = tensors["correction"].float()
        rows = rows + correction @ F.normalize(rows[: correction.shape[1]], dim=1)
    return rows * tensors["scale"] if "scale" in tensors else rows


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
