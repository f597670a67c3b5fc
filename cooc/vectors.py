"""Rows of length 1: what all that compares vectors by their inner product begins with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TINY = np.finfo(np.float32).tiny


def unit_rows(rows: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """(N, D) -> the same directions with length 1; rows of zeros stay as they are."""
    unit: NDArray[np.float32] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), TINY)
    return unit.astype(np.float32, copy=False)
