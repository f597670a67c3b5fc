"""How the embedded engine writes a vector: what SQLite keeps and what is searched are the same bytes.

    float32     4 bytes for each number, as described
    float16     2
    int8        1: 256 levels from -12 to 12 standard deviations of a whitened vector's numbers
    int4        1/2: 16 levels, one third of a standard deviation apart
    pq          1/4: product quantisation, 256 centroids for every four numbers

Nothing is learned from an index: whitening makes the numbers of a vector alike, close to normal with variance 1/D, so
levels and centroids are those of the normal distribution, for the first picture as for the millionth. faiss reads these
codes as they are. Products with coarse codes come out too small by the share of a vector that is lost; `GAIN` puts
that right, so that scores mean the same whatever the storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import faiss
import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError, UnknownNameError
from cooc.store import STORAGES, Vectors

Codes = NDArray[np.uint8]  # (n, width)

KINDS = {"float16": "QT_fp16", "int8": "QT_8bit_uniform", "int4": "QT_4bit_uniform"}
RANGES = {"float16": (), "int8": (-12.0, 24.0), "int4": (-8 * 0.3352, 15 * 0.3352)}  # lowest, width; of unit variance
GAIN = {"int4": 1 / 0.98925, "pq": 1 / 0.90235}  # by 1 - the mean square error for normal numbers
LEAST = {"float32": 0.999, "float16": 0.999, "int8": 0.99, "int4": 0.95, "pq": 0.9}  # cosine of a vector and its code
GROUP = 4  # numbers that share a centroid


@dataclass(frozen=True)
class Coding:
    """Vectors of `dim` numbers -> codes (n, width), and back."""

    name: str
    dim: int

    def __post_init__(self) -> None:
        if self.name not in STORAGES:
            raise UnknownNameError("storage", self.name, STORAGES)
        if self.name == "pq" and self.dim % GROUP:
            raise InputError(f"Storage pq needs vectors of 4, 8, 12, ... numbers, not of {self.dim}: choose int4.")

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
        return int(self._encoder.sa_code_size())

    @property
    def blank(self) -> int:
        """The byte that slots of removed images are filled with: near the zero vector, to stay out of the way."""
        return {"int8": 128, "int4": 0x88}.get(self.name, 0)

    def encode(self, vectors: Vectors) -> Codes:
        if self.plain:
            return vectors.astype("<f4", copy=False).view(np.uint8)
        codes: Codes = self._encoder.sa_encode(vectors)
        decoded = self.unit(codes)
        if len(codes) and (worst := float(np.einsum("nd,nd->n", vectors, decoded).min())) < LEAST[self.name]:
            raise InputError(
                f"These vectors are too uneven to be stored as {self.name}: one has a cosine of {worst:.3f} with its "
                "code. Use a recipe with whitening, or --storage float16."
            )
        return codes

    def decode(self, codes: Codes) -> Vectors:
        """As they are searched: of length 1 but for the rounding."""
        if self.plain:
            return codes.view("<f4").astype(np.float32, copy=False)
        vectors: Vectors = self._decoder.sa_decode(np.ascontiguousarray(codes))
        return vectors

    def unit(self, codes: Codes) -> Vectors:
        vectors = self.decode(codes)
        return vectors if self.plain else vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def borrow(self, codes: Codes) -> faiss.IndexFlatCodes:
        """A faiss index over these codes where they lie. They must outlive it."""
        index = _quantiser(self.name, self.dim, GAIN.get(self.name, 1.0))
        index.codes = faiss.MaybeOwnedVectorUInt8.create_view(faiss.swig_ptr(codes), codes.nbytes, index.codes.owner)
        index.ntotal = len(codes)
        return index

    @cached_property
    def _encoder(self) -> faiss.IndexFlatCodes:
        return _quantiser(self.name, self.dim, 1.0)

    @cached_property
    def _decoder(self) -> faiss.IndexFlatCodes:
        return _quantiser(self.name, self.dim, GAIN.get(self.name, 1.0))


def _quantiser(name: str, dim: int, gain: float) -> faiss.IndexFlatCodes:
    """An empty faiss index that needs no training any more."""
    scale = gain / np.sqrt(dim)
    if name == "float32":
        return faiss.IndexFlatIP(dim)
    if name == "pq":
        index = faiss.IndexPQ(dim, dim // GROUP, 8, faiss.METRIC_INNER_PRODUCT)
        centroids = np.tile(_centroids().ravel() * scale, dim // GROUP).astype(np.float32)
        faiss.copy_array_to_vector(centroids, index.pq.centroids)
    else:
        kind = getattr(faiss.ScalarQuantizer, KINDS[name])
        index = faiss.IndexScalarQuantizer(dim, kind, faiss.METRIC_INNER_PRODUCT)
        faiss.copy_array_to_vector(np.array(RANGES[name], np.float32) * np.float32(scale), index.sq.trained)
    index.is_trained = True
    return index


def _centroids() -> NDArray[np.float32]:
    """256 centroids of the normal distribution in 4 dimensions, the one nearest to zero first."""
    with resources.files("cooc").joinpath("data/centroids.npy").open("rb") as file:
        loaded: NDArray[np.float32] = np.load(file)
    return loaded
