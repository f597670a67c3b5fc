"""Rows of length 1, which all that compares vectors begins with, and arrays of strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError

TINY = np.finfo(np.float32).tiny
BLOCK = 4096  # rows that are checked at once


def unit_rows(rows: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """(N, D) -> the same directions with length 1; rows of zeros stay as they are."""
    unit: NDArray[np.float32] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), TINY)
    return unit.astype(np.float32, copy=False)


def read_array(file: Path, mmap_mode: Literal["r"] | None = None) -> NDArray[Any]:
    """One array of an .npy file that somebody else wrote; nothing in it is run."""
    try:
        array = np.load(file, mmap_mode, allow_pickle=False)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror or error}). Is the path right?") from error
    except (ValueError, EOFError) as error:
        raise InputError(f"{file} is no array of numpy ({error}). Write it with np.save.") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{file} holds several arrays. Write one of them with np.save.")
    return array


def read_vectors(file: Path, mmap_mode: Literal["r"] | None = None) -> NDArray[np.floating[Any]]:
    """The same for vectors (N, D), each of which has a direction."""
    array = read_array(file, mmap_mode)
    if array.ndim != 2 or not array.size or not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"{file} must hold floating-point vectors (N, D), not {array.dtype} {array.shape}.")
    for first in range(0, len(array), BLOCK):
        lengths = np.linalg.norm(array[first : first + BLOCK].astype(np.float64), axis=1)
        if len(wrong := np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))):
            row = first + int(wrong[0])
            raise InputError(f"{file}: row {row} is zero, or not finite: describe it again, or leave it out.")
    return array
