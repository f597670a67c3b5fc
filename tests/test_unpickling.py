"""Arrays, numbers and containers come out of a pickle as they went in; nothing else does, and nothing is run."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cooc.unpickling import load_arrays


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_numbers_and_containers(protocol: int) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    content = {"arrays": [array, array.T, np.array(["a", "b"]), np.zeros((0, 2))], "raw": b"\x00\xff", "empty": b""}
    content |= {"numbers": (np.float64(1.5), np.int32(7), 3, 2.5, None, True)}
    read = load_arrays(io.BytesIO(pickle.dumps(content, protocol)))
    assert read.keys() == content.keys()
    for ours, theirs in zip(read["arrays"], content["arrays"], strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    assert (read["raw"], read["empty"], read["numbers"]) == (content["raw"], content["empty"], content["numbers"])


def test_an_array_that_python_2_pickled() -> None:
    """Protocol 0, as numpy 1 wrote it: `numpy.core`, and bytes as a text of Python 2."""
    code = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    code += b"(I1\n(I2\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\nS'\\x00\\xff'\ntb."
    np.testing.assert_array_equal(load_arrays(io.BytesIO(code)), np.array([0, 255], "u1"), strict=True)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("refused", [os.system, eval, np.load, np.memmap, Path(), np.random.default_rng(0)])
def test_objects_are_refused(refused: Any, protocol: int) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"asks for .*, which is not admitted"):
        load_arrays(io.BytesIO(pickle.dumps({"a": refused}, protocol)))
