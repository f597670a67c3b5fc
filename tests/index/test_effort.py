"""How far to look: the rule of all engines, against a search that finds as many as its effort."""

from __future__ import annotations

import numpy as np
import pytest

from cooc.index import effort


@pytest.mark.parametrize(("efforts", "chosen"), [((10, 50, 97, 100), 97), ((96, 98, 100), 98), ((10, 50), 50), ((), 0)])
def test_the_least_effort_that_finds_enough(efforts: tuple[int, ...], chosen: int) -> None:
    expected, tried = [range(100)] * 3, list[int]()

    def search(far: int) -> list[range]:
        tried.append(far)
        return [range(far)] * 3

    assert effort.least(efforts, expected, search) == chosen
    assert tried == [far for far in efforts if far <= chosen]


def test_nothing_to_measure_takes_no_effort() -> None:
    assert effort.least((10, 20), [], lambda _: []) == 10


def test_more_results_take_more() -> None:
    assert [effort.scaled(150, k) for k in (1, 100, 200)] == [150, 150, 300]


def test_views_are_unit_vectors_near_to_what_they_show() -> None:
    vectors = np.eye(5, 64, dtype=np.float32)
    views = effort.views(vectors)
    assert views.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(views, axis=1), 1, atol=1e-6)
    assert np.diag(views @ vectors.T).min() > 0.8
    np.testing.assert_array_equal(views, effort.views(vectors))
