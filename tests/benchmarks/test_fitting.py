from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.fitting import fit_activations, fit_calibration, fit_projection, reliability, save_projection
from cooc.errors import InputError
from cooc.verification.coding import Projection
from cooc.verification.probability import Calibration
from tests.verification.pictures import photo


def pairs(truth: Calibration, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    seen = np.exp(rng.uniform((1.4, 1.4, -3), (6, 6, 0), (count, 3)))
    odds = [truth.log_odds(*row) for row in seen]
    return seen, rng.random(count) < 1 / (1 + np.exp(-np.array(odds)))


def test_known_parameters_are_recovered() -> None:
    truth = Calibration(bias=-8.0, inliers=1.8, evidence=0.9, inside=1.2)
    found = fit_calibration(*pairs(truth, 20_000), ridge=0)
    for name, value in truth.as_dict().items():
        assert found.as_dict()[name] == pytest.approx(value, abs=0.2)


def test_what_is_not_used_has_no_slope() -> None:
    seen, same = pairs(Calibration(-8.0, 1.8, 0.9, 1.2), 2000)
    found = fit_calibration(seen, same, used=["evidence", "inside"])
    assert found.inliers == 0
    assert min(found.evidence, found.inside) > 0


def test_weights_count_as_repetitions_do() -> None:
    seen, same = pairs(Calibration(-7.0, 1.8, 0.5, 1.2), 400)
    times = np.random.default_rng(1).integers(1, 4, 400)
    repeated = fit_calibration(np.repeat(seen, times, axis=0), np.repeat(same, times), ridge=0)
    weighted = fit_calibration(seen, same, times, ridge=0)
    assert list(weighted.as_dict().values()) == pytest.approx(list(repeated.as_dict().values()), abs=1e-4)


def test_more_never_counts_less() -> None:
    """Pairs in which a smaller inside happens to be right: the slope is 0, not negative."""
    found = fit_calibration(*pairs(Calibration(-8.0, 1.8, 0.5, -1.0), 5000))
    assert found.inside == 0
    assert found.inliers > 0


def test_pairs_that_are_told_apart_perfectly_still_have_a_fit() -> None:
    found = fit_calibration([(n, n, 1) for n in (4, 5, 6, 50, 60, 70)], [False] * 3 + [True] * 3)
    assert np.isfinite(list(found.as_dict().values())).all()


@pytest.mark.parametrize("same", [[True, True], [False, False], [True]])
def test_pairs_of_one_kind_cannot_be_fitted(same: list[bool]) -> None:
    with pytest.raises(InputError, match="both kinds"):
        fit_calibration([(5, 5, 1), (6, 6, 1)], same)


def test_reliability_counts_bins() -> None:
    rows = reliability([0.05, 0.15, 0.17, 0.95, 1.0], [False, False, True, True, True])
    assert rows == [
        {"pairs": 1, "said": 0.05, "true": 0.0},
        {"pairs": 2, "said": pytest.approx(0.16), "true": 0.5},
        {"pairs": 2, "said": pytest.approx(0.975), "true": 1.0},
    ]


def test_a_projection_half_whitens() -> None:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(10, 10)) * 3.0 ** np.arange(10)[:, None] / 1000
    samples = rng.normal(size=(5000, 10)) @ mixing + 4
    projection = fit_projection(samples, 4)
    rows = (samples - projection.mean) @ projection.axes.T
    variance = np.sort(np.linalg.eigvalsh(np.cov(samples.T)))[::-1][:4]
    np.testing.assert_allclose(np.cov(rows.T), np.diag(np.sqrt(variance)), rtol=1e-3, atol=1e-3 * variance[0] ** 0.5)
    np.testing.assert_allclose(np.linalg.norm(projection(samples[:9]), axis=1), 1, rtol=1e-5)


def test_a_projection_is_saved_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    projection = fit_projection(np.random.default_rng(0).normal(size=(50, 6)), 3)
    save_projection(projection, tmp_path / "p.npy")
    np.testing.assert_allclose(Projection.load(tmp_path / "p.npy").axes, projection.axes, rtol=2e-3, atol=1e-3)
    with pytest.raises(InputError, match="does not fit"):
        projection(np.zeros((2, 5), np.float32))
    with pytest.raises(InputError, match="samples"):
        fit_projection(np.zeros((5, 6)), 3)
    with pytest.raises(InputError, match="directions"):
        fit_projection(np.ones((50, 6)), 3)


def test_activations_are_projected_on_what_photos_differ_in(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.png" for name in ("cat", "coffee")]
    for file in files:
        small = Image.fromarray(photo(file.stem))
        small.thumbnail((320, 320))
        small.save(file)
    found = fit_activations(files, dim=8)
    assert found.axes.shape == (8, 512)
    assert (fit_activations(files, dim=8).axes == found.axes).all()
