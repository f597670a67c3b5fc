from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from cooc.errors import InputError
from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.engines import ENGINES, extract
from cooc.verification.probability import FILE, load_calibration, same_thing
from tests.verification.pictures import photo


def some_agreement(engine: str, inliers: int, spread: float) -> Agreement:
    (features,) = extract("sift", photo("cat"), limit=5)
    return dataclasses.replace(no_agreement(features), engine=engine, inliers=inliers, spread=spread)


def test_every_engine_has_a_calibration_and_an_unknown_one_is_named() -> None:
    assert set(json.loads(FILE.read_text())["engines"]) == set(ENGINES)
    with pytest.raises(InputError, match="surf"):
        load_calibration("surf")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_probability_grows_with_inliers_and_spread(engine: str) -> None:
    by_inliers = [same_thing(some_agreement(engine, n, 1.0)) for n in (0, 4, 8, 16, 64, 500)]
    assert by_inliers[0] == 0
    assert (np.diff(by_inliers) > 0).all()
    assert by_inliers[-1] > 0.95
    by_spread = [same_thing(some_agreement(engine, 30, s)) for s in (0.0, 0.05, 0.2, 1.0)]
    assert (np.diff(by_spread) >= 0).all()
    assert all(0 <= p <= 1 for p in by_inliers + by_spread)
