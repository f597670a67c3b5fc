from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from cooc.errors import InputError
from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.engines import ENGINES, extract
from cooc.verification.probability import (
    FILE,
    Calibration,
    fit_calibration,
    load_calibration,
    reliability,
    same_thing,
)
from tests.verification.pictures import photo


def pairs(truth: Calibration, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    inliers, spread = np.exp(rng.uniform(1.4, 6, count)), np.exp(rng.uniform(-3, 0.5, count))
    odds = [truth.log_odds(n, s) for n, s in zip(inliers, spread, strict=True)]
    return inliers, spread, rng.random(count) < 1 / (1 + np.exp(-np.array(odds)))


def some_agreement(engine: str, inliers: int, spread: float) -> Agreement:
    (features,) = extract("sift", photo("cat"), limit=5)
    return dataclasses.replace(no_agreement(features), engine=engine, inliers=inliers, spread=spread)


def test_known_parameters_are_recovered() -> None:
    truth = Calibration(bias=-4.0, inliers=1.8, spread=1.2)
    found = fit_calibration(*pairs(truth, 20_000), ridge=0)
    for name, value in truth.as_dict().items():
        assert found.as_dict()[name] == pytest.approx(value, abs=0.2)


def test_weights_count_as_repetitions_do() -> None:
    inliers, spread, same = pairs(Calibration(-4.0, 1.8, 1.2), 400)
    times = np.random.default_rng(1).integers(1, 4, 400)
    repeated = fit_calibration(*(np.repeat(a, times) for a in (inliers, spread, same)), ridge=0)
    weighted = fit_calibration(inliers, spread, same, times, ridge=0)
    assert list(weighted.as_dict().values()) == pytest.approx(list(repeated.as_dict().values()), abs=1e-4)


def test_more_never_counts_less() -> None:
    """Pairs in which a smaller spread happens to be right: the slope is 0, not negative."""
    inliers, spread, same = pairs(Calibration(-4.0, 1.8, -1.0), 5000)
    found = fit_calibration(inliers, spread, same)
    assert found.spread == 0
    assert found.inliers > 0


def test_pairs_that_are_told_apart_perfectly_still_have_a_fit() -> None:
    found = fit_calibration([4, 5, 6, 50, 60, 70], [1] * 6, [False] * 3 + [True] * 3)
    assert np.isfinite(list(found.as_dict().values())).all()


@pytest.mark.parametrize("same", [[True, True], [False, False], [True]])
def test_pairs_of_one_kind_cannot_be_fitted(same: list[bool]) -> None:
    with pytest.raises(InputError, match="both kinds"):
        fit_calibration([5, 6], [1, 1], same)


def test_reliability_counts_bins() -> None:
    rows = reliability([0.05, 0.15, 0.17, 0.95, 1.0], [False, False, True, True, True])
    assert rows == [
        {"pairs": 1, "said": 0.05, "true": 0.0},
        {"pairs": 2, "said": pytest.approx(0.16), "true": 0.5},
        {"pairs": 2, "said": pytest.approx(0.975), "true": 1.0},
    ]


# ---- what ships ----------------------------------------------------------------------------------------------------


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
