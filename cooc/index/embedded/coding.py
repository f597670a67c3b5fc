"""How the embedded engine writes a vector: what SQLite keeps and what is searched are the same bytes.

    float32     4 bytes for each dimension, as described
    float16     2
    int8        1: 256 levels from -12 to 12 standard deviations of a whitened vector's values
    int4        1/2: 16 levels, 0.3352 standard deviations apart: the best for normal values (Max 1960)
    pq          1/4: product quantisation, 256 centroids for every four dimensions

Nothing is learned from an index. For int4 and pq a vector is turned first, by random signs and a Hadamard matrix: that
keeps products, and makes the values of any vector alike, close to normal with variance 1/D. So levels and centroids
are those of the normal distribution, for the first picture as for the millionth. faiss reads these codes as they are.
The product of a vector with its coarse code would be less than 1, by the share that is lost; so the vector is
lengthened by as much before it is coded, and scores mean the same whatever the storage.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError, check_name
from cooc.files import DATA
from cooc.index.records import STORAGES
from cooc.index.store import Vectors
from cooc.vectors import unit_rows

if TYPE_CHECKING:
    import faiss  # loaded where it is needed: a search among some ten thousand plain vectors does without

Codes = NDArray[np.uint8]  # (n, width)

KINDS = {"float16": "QT_fp16", "int8": "QT_8bit_uniform", "int4": "QT_4bit_uniform"}
RANGES = {"float16": (), "int8": (-12.0, 24.0), "int4": (-8 * 0.3352, 15 * 0.3352)}  # lowest, width; of unit variance
OFF = {"float16": 0.01, "int8": 0.02, "int4": 0.1, "pq": 0.3}  # that the product of a vector and its code may be
GROUP = 4  # dimensions that share a centroid
KEPT = 0.90235  # of a normal vector by its centroids; these are longer by as much


@dataclass(frozen=True)
class Coding:
    """Vectors of `dim` dimensions -> codes (n, width), and back."""

    name: str
    dim: int

    def __post_init__(self) -> None:
        check_name("storage", self.name, STORAGES)
        if self.name == "pq" and self.dim % GROUP:
            raise InputError(f"Storage pq needs vectors of 4, 8, 12, ... dimensions, not {self.dim}: choose int4.")

    @property
    def plain(self) -> bool:
        return self.name == "float32"

    @property
    def small(self) -> bool:
        """Whoever chooses these wants a small index: no second copy on disk, and no graph."""
        return self.name in ("int4", "pq")

    @cached_property
    def width(self) -> int:
        """Bytes of a vector."""
        return 4 * self.dim if self.plain else int(self._quantiser.sa_code_size())

    @property
    def blank(self) -> int:
        """The byte that slots of removed images are filled with: near the zero vector, to stay out of the way."""
        return {"int8": 128, "int4": 0x88}.get(self.name, 0)

    def encode(self, vectors: Vectors) -> Codes:
        if self.plain:
            return vectors.astype("<f4", copy=False).view(np.uint8)
        given, vectors = vectors, self.turn(vectors)
        kept: Vectors | float = KEPT
        if self.name != "pq":
            coarse = self._quantiser.sa_decode(self._quantiser.sa_encode(vectors))
            kept = np.maximum(np.einsum("nd,nd->n", vectors, coarse), 0.1)[:, None]
        codes: Codes = self._quantiser.sa_encode((vectors / kept).astype(np.float32))
        off = np.abs(np.einsum("nd,nd->n", given, self.decode(codes)) - 1)
        if len(off) and off.max() > OFF[self.name]:
            raise InputError(
                f"These vectors are too uneven to be stored as {self.name}: one has a product of "
                f"{1 - off.max():.2f} with its code. Use float16 or int4."
            )
        return codes

    def turn(self, vectors: Vectors) -> Vectors:
        """As the codes of int4 and pq see vectors and queries; products stay what they are."""
        return _hadamard(vectors * _signs(self.dim)) if self.small else vectors

    def decode(self, codes: Codes) -> Vectors:
        """As they are searched: of length 1 but for the rounding."""
        if self.plain:
            return codes.view("<f4").astype(np.float32, copy=False)
        vectors: Vectors = self._quantiser.sa_decode(np.ascontiguousarray(codes))
        return _hadamard(vectors) * _signs(self.dim) if self.small else vectors

    def unit(self, codes: Codes) -> Vectors:
        vectors = self.decode(codes)
        return vectors if self.plain else unit_rows(vectors)

    def borrow(self, codes: Codes) -> faiss.IndexFlatCodes:
        """A faiss index over these codes where they lie, for queries that are turned. They must outlive it."""
        import faiss

        index = quantiser(self.name, self.dim)
        index.codes = faiss.MaybeOwnedVectorUInt8.create_view(faiss.swig_ptr(codes), codes.nbytes, index.codes.owner)
        index.ntotal = len(codes)
        return index

    @cached_property
    def _quantiser(self) -> faiss.IndexFlatCodes:
        return quantiser(self.name, self.dim)


def quantiser(name: str, dim: int) -> faiss.IndexFlatCodes:
    """An empty faiss index that needs no training any more."""
    import faiss

    scale = dim**-0.5
    if name == "float32":
        return faiss.IndexFlatIP(dim)
    if name == "pq":
        index = faiss.IndexPQ(dim, dim // GROUP, 8, faiss.METRIC_INNER_PRODUCT)
        centroids = np.tile(_centroids().ravel() * scale / KEPT, dim // GROUP).astype(np.float32)
        faiss.copy_array_to_vector(centroids, index.pq.centroids)
    else:
        kind = getattr(faiss.ScalarQuantizer, KINDS[name])
        index = faiss.IndexScalarQuantizer(dim, kind, faiss.METRIC_INNER_PRODUCT)
        faiss.copy_array_to_vector(np.array(RANGES[name], np.float32) * np.float32(scale), index.sq.trained)
    index.is_trained = True
    return index


def _signs(dim: int) -> Vectors:
    bits = np.frombuffer(hashlib.shake_256(b"cooc").digest(-(-dim // 8)), np.uint8)
    return 1 - 2 * np.unpackbits(bits, count=dim).astype(np.float32)


def _hadamard(rows: Vectors) -> Vectors:
    """Orthogonal, its own inverse: in blocks of the largest power of two that divides the dimension. (n, D)"""
    count, dim = rows.shape
    block = dim & -dim
    step = 1
    while step < block:
        pairs = rows.reshape(count, dim // (2 * step), 2, step)
        rows = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
        step *= 2
    return np.ascontiguousarray(rows.reshape(count, dim) / np.float32(block**0.5), np.float32)


def _centroids() -> NDArray[np.float32]:
    """256 centroids of the normal distribution in 4 dimensions, the one nearest to zero first."""
    return np.asarray(np.load(DATA / "centroids.npy"), np.float32)
