"""Pickles of strangers, read without running anything: containers, numbers and numpy arrays, and nothing else."""

from __future__ import annotations

import pickle
import re
from typing import IO, Any

import numpy as np


def load_arrays(stream: IO[bytes]) -> Any:
    """What the pickle holds. `pickle.UnpicklingError` names whatever else it asks for. (Latin 1 is for the bytes of
    arrays that Python 2 pickled; newer ones do not care.)"""
    return _ArrayUnpickler(stream, encoding="latin1").load()


class _ArrayUnpickler(pickle.Unpickler):
    """Containers need no import; whatever does must be one of the few below."""

    def find_class(self, module: str, name: str) -> Any:
        place = f"{re.sub(r'^numpy[.]_?core[.]', 'numpy.', module)}.{name}"
        if place not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not admitted: no array needs it")
        return _ADMITTED[place]


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


def _reconstructor(value: Any, protocol: int) -> Any:
    """numpy has moved these functions before: it is asked where they are."""
    return value.__reduce_ex__(protocol)[0]


_ADMITTED: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.multiarray._reconstruct": _reconstructor(np.empty(0), 2),
    "numpy.numeric._frombuffer": _reconstructor(np.empty(0), 5),
    "numpy.multiarray.scalar": _reconstructor(np.float64(0), 2),
    "_codecs.encode": _latin1,  # how protocol 2 spells bytes
    "__builtin__.bytes": bytes,
}
