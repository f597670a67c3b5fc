from __future__ import annotations

import numpy as np
import pytest

from cooc.vectors import unit_rows
from tests.reference.reranking import unit


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_have_length_one_and_zeros_stay(dtype: type) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 7)).astype(dtype)
    rows[3] = 0
    found = unit_rows(rows)
    assert found.dtype == np.float32
    assert not found[3].any()
    for row, one in zip(rows, found, strict=True):
        if row.any():
            np.testing.assert_allclose(one, unit(row.astype(np.float64)), atol=2e-3 if dtype == np.float16 else 1e-6)
