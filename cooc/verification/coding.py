"""Descriptors as bytes: unit vectors to 8 bits a value and back, and the projection that makes them short before that.

RootSIFT has 128 values; they are projected on their 64 main directions, half-whitened (divided by the fourth root of
the variance: noise is not blown up, and no direction drowns the others), and L2-normalised.
Kept in 4 bits they find as many inliers as 128 floats do (docs/verification.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError
from cooc.vectors import unit_rows as unit

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

ZERO = 127.5  # between two codes, also between two of the 16 that 4 bits keep
SPREAD = 37.5  # codes for one standard deviation of a unit vector's value


def quantise(rows: NDArray[np.floating[Any]]) -> Bytes:
    """Unit vectors (N, D) as bytes; a value over 3.4 standard deviations is cut off, which one in a thousand is."""
    codes = np.round(ZERO + SPREAD * math.sqrt(rows.shape[1]) * rows)
    return np.clip(codes, 0, 255).astype(np.uint8)


def vectors(codes: Bytes) -> Floats:
    """Unit vectors out of bytes."""
    return unit(codes.astype(np.float32) - np.float32(ZERO))


@dataclass(frozen=True)
class Projection:
    """Half-whitened PCA, fitted once and kept."""

    mean: Floats  # (D,)
    axes: Floats  # (d, D)

    def __call__(self, rows: NDArray[np.floating[Any]]) -> Floats:
        """(N, D) -> unit vectors (N, d). In float64: float32 sums depend on the number of threads, by a code or two."""
        if rows.ndim != 2 or rows.shape[1] != len(self.mean):
            raise InputError(
                f"A projection for {len(self.mean)} values does not fit descriptors of shape {rows.shape}."
            )
        return unit((np.asarray(rows, np.float64) - self.mean) @ self.axes.T.astype(np.float64))

    @classmethod
    def load(cls, path: Path) -> Projection:
        rows = np.load(path, allow_pickle=False).astype(np.float32)
        return cls(rows[0], rows[1:])
