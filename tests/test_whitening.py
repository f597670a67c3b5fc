from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sklearn.covariance import OAS
from sklearn.decomposition import PCA
from torch import Tensor

from cooc.errors import UnknownNameError, WhiteningError
from cooc.whitening import STORAGE, PCAFitter, Whitening, adapt, fit_learned, fit_pca, load, save
from cooc.whitening.fitting import CHUNK
from tests.reference import whitening as reference


def spectrum(count: int, columns: int, decay: float = 0.5, seed: int = 0) -> Tensor:
    """Vectors like pooled ones: off the origin, standard deviations fall as a power of the component's number."""
    generator = torch.Generator().manual_seed(seed)
    deviations = torch.arange(1, columns + 1, dtype=torch.float64) ** -decay
    turn = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64))[0]
    x = torch.randn(count, columns, generator=generator, dtype=torch.float64) * deviations
    return (x @ turn + 2 * turn[0]).float()


def same_up_to_sign(a: Any, b: Any, **tolerance: float) -> None:
    a, b = np.asarray(a), np.asarray(b)
    signs = np.sign((a * b).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(a * signs, b, **tolerance)


def whitened(x: Tensor, fitted: Whitening) -> Tensor:
    """Before the second L2."""
    return (F.normalize(x.double(), dim=1) - fitted.mean.double()) @ fitted.projection.double().T


# --- applying ---


def test_whiten_equals_the_loop() -> None:
    x = spectrum(30, 12)
    x[4] = 0
    fitted = fit_pca(spectrum(50, 12, seed=1), 7)
    expected = reference.whiten(x.double().numpy(), fitted.mean.double().numpy(), fitted.projection.double().numpy())
    np.testing.assert_allclose(fitted(x.double()), expected, atol=1e-12)
    np.testing.assert_allclose(fitted(x), expected, atol=2e-6)
    torch.testing.assert_close(fitted(x[2]), fitted(x)[2])
    torch.testing.assert_close(fitted(x.reshape(5, 6, 12)), fitted(x).reshape(5, 6, 7))


def test_whiten_gives_unit_float32_and_keeps_zero_vectors() -> None:
    fitted = fit_pca(spectrum(50, 12), 7)
    x = spectrum(6, 12, seed=1)
    x[2] = 0
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        out = fitted(x.to(dtype))
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.norm(dim=1), torch.tensor([1.0, 1, 0, 1, 1, 1]))
    assert fitted(x[:0]).shape == (0, 7)


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e30])
def test_whiten_does_not_depend_on_length(factor: float) -> None:
    fitted, x = fit_pca(spectrum(50, 12), 7), spectrum(6, 12, seed=1)
    torch.testing.assert_close(fitted(x * factor), fitted(x), atol=2e-6, rtol=0)


def test_gradient_through_whiten() -> None:
    fitted, x = fit_pca(spectrum(50, 6), 4), spectrum(3, 6, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: fitted(v), (x,))


def test_another_exponent_equals_another_fit() -> None:
    x = spectrum(60, 16)
    hard, soft = fit_pca(x, 8), fit_pca(x, 8, exponent=0.3)
    assert np.allclose(hard.with_exponent(0.3).projection, soft.projection, rtol=1e-4)
    assert hard.with_exponent(0.3).meta == soft.meta
    with pytest.raises(WhiteningError, match="does not keep its eigenvalues"):
        Whitening(hard.mean, hard.projection, hard.meta).with_exponent(0.3)


def test_truncate_equals_a_smaller_fit() -> None:
    x = spectrum(100, 16)
    large, small = fit_pca(x, 12).truncate(5), fit_pca(x, 5)
    torch.testing.assert_close(large.projection, small.projection)
    torch.testing.assert_close(large(x), small(x))
    assert (large.dim, large.input_dim) == (5, 16)
    assert large.eigenvalues is not None
    assert large.eigenvalues.shape == (5,)
    for dim in (0, 6):
        with pytest.raises(WhiteningError, match=f"1 to 5 dimensions, not {dim}"):
            large.truncate(dim)


def test_to_keeps_everything() -> None:
    fitted = fit_pca(spectrum(30, 8), 4)
    assert Whitening(fitted.mean, fitted.projection).to("cpu").eigenvalues is None
    meta = dict(fitted.meta)
    moved = fitted.to("meta")
    assert {moved.mean.device.type, moved.projection.device.type} == {"meta"}
    assert moved.meta == meta


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(WhiteningError, match="another recipe"):
        fit_pca(spectrum(30, 8), 4)(torch.ones(2, 9))
    with pytest.raises(WhiteningError, match="needs mean"):
        Whitening(torch.zeros(3), torch.zeros(2, 4))
    with pytest.raises(WhiteningError, match="as many eigenvalues"):
        Whitening(torch.zeros(4), torch.zeros(2, 4), eigenvalues=torch.ones(3))


# --- PCA ---


@pytest.mark.parametrize(("count", "columns", "dim"), [(400, 24, 24), (40, 96, 39), (64, 64, 20)])
def test_full_whitening_gives_identity_covariance(count: int, columns: int, dim: int) -> None:
    x = spectrum(count, columns)
    z = whitened(x, fit_pca(x, dim))
    torch.testing.assert_close(z.mean(dim=0), torch.zeros(dim).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cov(z.T), torch.eye(dim).double(), atol=1e-6, rtol=0)


@given(
    count=st.integers(3, 40),
    columns=st.integers(1, 40),
    exponent=st.sampled_from([0.0, 0.25, 0.5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_pca_equals_svd(count: int, columns: int, exponent: float, seed: int) -> None:
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, columns + 1)))
    dim = max(1, min(count - 1, columns) // 2)  # the last direction of few unit vectors may be next to nothing
    fitted = fit_pca(x, dim, exponent=exponent)
    mean, projection, values = reference.pca(x.numpy(), dim, exponent)
    np.testing.assert_allclose(fitted.mean, mean, atol=1e-7)
    same_up_to_sign(fitted.projection, projection, atol=1e-5 * np.abs(projection).max())
    assert fitted.eigenvalues is not None
    np.testing.assert_allclose(fitted.eigenvalues, values, rtol=1e-5)


@pytest.mark.parametrize(("count", "columns", "dim"), [(200, 20, 12), (30, 80, 12)])
def test_pca_equals_scikit_learn(count: int, columns: int, dim: int) -> None:
    x = spectrum(count, columns)
    unit = F.normalize(x.double(), dim=1).numpy()
    expected = PCA(dim, whiten=True, svd_solver="full").fit_transform(unit)
    same_up_to_sign(whitened(x, fit_pca(x, dim)).T, expected.T, atol=1e-5)


def streamed(batches: Iterable[torch.Tensor], dim: int) -> Whitening:
    fitter = PCAFitter()
    for batch in batches:
        fitter.update(batch)
    return fitter.fit(dim)


def test_gram_form_equals_covariance_form() -> None:
    x = spectrum(30, 50)
    gram, covariance = fit_pca(x, 20), streamed([x], 20)
    torch.testing.assert_close(gram.mean, covariance.mean)
    torch.testing.assert_close(gram.projection, covariance.projection, atol=1e-5, rtol=1e-5)
    assert gram.meta == covariance.meta == {"kind": "pca", "samples": "30", "exponent": "0.5"}


@given(cuts=st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=20, deadline=None)
def test_streaming_equals_batch(cuts: list[int]) -> None:
    x = spectrum(200, 16)
    bounds = [0, *sorted(cuts), 200]
    batches = [x[a:b] for a, b in pairwise(bounds)]
    parts, whole = streamed(batches, 10), fit_pca(x, 10)
    torch.testing.assert_close(parts.mean, whole.mean, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(parts.projection, whole.projection, atol=1e-8, rtol=1e-5)


def test_streaming_moments_in_float64() -> None:
    """Tight clusters far from the origin: sums of squares minus squared sums would lose the small one."""
    x = torch.tensor([[1.0, 0, 0]]).double() + 1e-6 * spectrum(300, 3).double()
    _, _, values = reference.pca(x.numpy(), 2, 0.5)
    fitted = streamed(x.split(7), 2).eigenvalues
    assert fitted is not None
    np.testing.assert_allclose(fitted, values, rtol=1e-4)


def test_more_rows_than_a_chunk_from_a_read_only_array(tmp_path: Path) -> None:
    x = spectrum(CHUNK + 500, 6).numpy()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    _, projection, _ = reference.pca(x.astype(np.float64), 4, 0.5)
    same_up_to_sign(fit_pca(mapped, 4).projection, projection, rtol=1e-5, atol=1e-6)


def test_fitter_may_go_on_after_a_fit() -> None:
    x, fitter = spectrum(120, 8), PCAFitter()
    fitter.update(x[:60])
    torch.testing.assert_close(fitter.fit(5).projection, fit_pca(x[:60], 5).projection)
    fitter.update(x[60:])
    torch.testing.assert_close(fitter.fit(5).projection, fit_pca(x, 5).projection)
    assert fitter.count == 120


def test_float32_vectors_are_fitted_in_float64() -> None:
    x = spectrum(100, 16)
    torch.testing.assert_close(fit_pca(x, 8).projection, fit_pca(x.double(), 8).projection, atol=0, rtol=0)


def test_signs_do_not_depend_on_the_order_of_rows() -> None:
    x = spectrum(100, 16)
    torch.testing.assert_close(fit_pca(x, 8).projection, fit_pca(x.flip(0), 8).projection, atol=1e-5, rtol=1e-5)
    largest = fit_pca(x, 8).projection
    assert bool((largest.gather(1, largest.abs().argmax(dim=1, keepdim=True)) > 0).all())


@pytest.mark.parametrize("columns", [8, 60])
def test_zero_vectors_are_left_out_and_said(columns: int, caplog: pytest.LogCaptureFixture) -> None:
    x = spectrum(40, columns)
    padded = torch.cat([x[:10], torch.zeros(3, columns), x[10:]])
    with caplog.at_level(logging.WARNING, "cooc"):
        fitted = fit_pca(padded, 5)
    assert "3 of 43 vectors are zero" in caplog.text
    assert fitted.meta["samples"] == "40"
    torch.testing.assert_close(fitted.projection, fit_pca(x, 5).projection)


def test_provenance_of_the_caller_is_kept() -> None:
    fitted = fit_pca(spectrum(30, 8), 4, exponent=0.3, meta={"source": "landmarks", "recipe": "ab12"})
    assert fitted.meta == {"kind": "pca", "samples": "30", "exponent": "0.3", "source": "landmarks", "recipe": "ab12"}


@pytest.mark.parametrize(("count", "columns"), [(10, 40), (10, 10)])
def test_too_few_vectors(count: int, columns: int) -> None:
    with pytest.raises(WhiteningError, match=r"needs at least 11 vectors .* there are 10: .* at most 9"):
        fit_pca(spectrum(count, columns), 10)


def test_no_vectors() -> None:
    with pytest.raises(WhiteningError, match="needs at least 5 vectors, and there are none"):
        streamed([], 4)
    for columns in (3, 0):
        with pytest.raises(WhiteningError):
            fit_pca(torch.zeros(0, columns), 1)


@pytest.mark.parametrize("dim", [0, 9])
def test_impossible_dimensions(dim: int) -> None:
    with pytest.raises(WhiteningError, match=f"1 to 8, not to {dim}"):
        fit_pca(spectrum(30, 8), dim)


@pytest.mark.parametrize("exponent", [-0.1, float("nan"), float("inf")])
def test_impossible_exponents(exponent: float) -> None:
    with pytest.raises(WhiteningError, match="exponent"):
        fit_pca(spectrum(30, 8), 4, exponent=exponent)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("columns", [8, 60])
def test_bad_numbers_are_named_by_row(bad: float, columns: int) -> None:
    x = spectrum(40, columns)
    x[17, 3] = bad
    for vectors in (x, x.numpy()):
        with pytest.raises(WhiteningError, match="row 17:"):
            fit_pca(vectors, 4)
        with pytest.raises(WhiteningError, match="row 17:"):
            fit_learned(vectors, [0], [1], 4)


def test_a_refused_batch_leaves_the_fitter_as_it_was() -> None:
    x, fitter = spectrum(60, 8), PCAFitter()
    fitter.update(x)
    with pytest.raises(WhiteningError, match="row 65:"):
        fitter.update(torch.full((9, 8), torch.nan).index_fill_(0, torch.arange(5), 1.0))
    with pytest.raises(WhiteningError, match="9-d vectors after 8-d"):
        fitter.update(torch.ones(4, 9))
    with pytest.raises(WhiteningError, match="shape"):
        fitter.update(torch.ones(8))
    torch.testing.assert_close(fitter.fit(4).projection, fit_pca(x, 4).projection)


@pytest.mark.parametrize("columns", [10, 80])
def test_vectors_that_do_not_vary_enough(columns: int) -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)) @ torch.eye(3, columns)
    with pytest.raises(WhiteningError, match="only 3 directions, too few to whiten to 5"):
        fit_pca(x, 5)
    with pytest.raises(WhiteningError, match="only 0 directions"):
        fit_pca(x[:1].repeat(60, 1), 5)


# --- learned ---


def pairs(count: int, columns: int, seed: int = 0) -> tuple[Tensor, list[int], list[int]]:
    """Row 2i and 2i + 1 are two views of one thing."""
    things = spectrum(count, columns, seed=seed).repeat_interleave(2, dim=0)
    noise = torch.randn(2 * count, columns, generator=torch.Generator().manual_seed(seed + 1))
    deviations = torch.linspace(0.05, 0.5, columns)
    return things + noise * deviations, list(range(0, 2 * count, 2)), list(range(1, 2 * count, 2))


@pytest.mark.parametrize("dim", [3, 12])
def test_learned_equals_the_loop(dim: int) -> None:
    x, queries, positives = pairs(60, 12)
    fitted = fit_learned(x, queries, torch.tensor(positives), dim)
    mean, projection = reference.learned(x.double().numpy(), queries, positives, dim)
    np.testing.assert_allclose(fitted.mean, mean, atol=1e-7)
    same_up_to_sign(fitted.projection, projection, rtol=1e-5, atol=1e-5)
    assert fitted.meta == {"kind": "learned", "samples": "120", "pairs": "60", "exponent": "0.0"}


def test_learned_makes_pair_differences_white() -> None:
    x, queries, positives = pairs(100, 10)
    fitted = fit_learned(x, queries, positives, 10)
    difference = whitened(x[queries], fitted) - whitened(x[positives], fitted)
    torch.testing.assert_close(difference.T @ difference / 100, torch.eye(10).double(), atol=1e-5, rtol=0)


def test_learned_soft_exponent_scales_the_rows() -> None:
    x, queries, positives = pairs(60, 12)
    classic, soft = (fit_learned(x, queries, positives, 6, exponent=e) for e in (0.0, 0.25))
    assert classic.eigenvalues is not None
    torch.testing.assert_close(soft.projection, classic.projection * classic.eigenvalues[:, None] ** -0.25)


def test_learned_finds_pairs_that_pca_confuses() -> None:
    """The point of it: the directions in which views differ count less."""
    x, queries, positives = pairs(200, 16)
    train, test = slice(0, 200), slice(200, 400)

    def right(fitted: Whitening) -> float:
        z = fitted(x[test])
        return (z[0::2] @ z[1::2].T).argmax(dim=1).eq(torch.arange(100)).double().mean().item()

    assert right(fit_learned(x[train], queries[:100], positives[:100], 16)) > right(fit_pca(x[train], 16, exponent=0))


def test_learned_with_fewer_pairs_than_dimensions() -> None:
    x, queries, positives = pairs(60, 40)
    fitted = fit_learned(x, queries[:10], positives[:10], 20)
    assert bool(fitted.projection.isfinite().all())
    torch.testing.assert_close(fitted(x).norm(dim=1), torch.ones(120))


def test_learned_leaves_zero_vectors_out() -> None:
    x, queries, positives = pairs(60, 12)
    padded = torch.cat([x, torch.zeros(1, 12)])
    fitted = fit_learned(padded, [*queries, 120, 0], [*positives, 3, 120], 6)
    torch.testing.assert_close(fitted.projection, fit_learned(x, queries, positives, 6).projection)


@pytest.mark.parametrize("pairs", [20, 400])
def test_adapted_is_lw_of_what_the_whitening_gives_shrunk_as_sklearn_does(pairs: int) -> None:
    x = spectrum(2 * pairs, 12)
    x[pairs:] = x[:pairs] + 0.3 * spectrum(pairs, 12, decay=1.5, seed=2)
    given = fit_pca(spectrum(50, 12, seed=1), 7)
    adapted = adapt(given, x, range(pairs), range(pairs, 2 * pairs))
    mean = F.normalize(x.double(), dim=1).mean(0)  # of the pictures it is adapted to
    centred = Whitening(mean, given.projection.double())
    z = centred(x.double())
    oas = OAS(assume_centered=True).fit((z[:pairs] - z[pairs:]).numpy())
    values, axes = np.linalg.eigh(oas.covariance_)
    expected = whitened(x, centred).numpy() @ (axes / np.sqrt(values)) @ axes.T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(adapted(x.double()).numpy(), expected, atol=1e-5)
    assert float(adapted.meta["shrinkage"]) == pytest.approx(oas.shrinkage_, abs=1e-4)
    assert (adapted.meta["kind"], adapted.meta["pairs"]) == ("adapted", str(pairs))
    alone = adapt(given, x, [0], [pairs])  # one pair tells nothing
    np.testing.assert_allclose(alone(x).numpy(), z.numpy(), atol=1e-5)
    every = np.triu_indices(20, 1)  # 190 pairs, but of 20 pictures: no more is known than from 20 pairs
    z = z[:20][every[0]] - z[:20][every[1]]
    S = (z.T @ z / len(z)).numpy()
    known = ((S * S).sum() + S.trace() ** 2) / (21 * ((S * S).sum() - S.trace() ** 2 / 7))  # Chen et al., eq. 23
    assert float(adapt(given, x, *every).meta["shrinkage"]) == pytest.approx(min(1.0, known), abs=0.02)


def test_learned_bad_pairs() -> None:
    x, queries, positives = pairs(20, 6)
    with pytest.raises(WhiteningError, match="same length"):
        fit_learned(x, queries, positives[:-1], 4)
    with pytest.raises(WhiteningError, match="same length"):
        fit_learned(x, [0.5], [1.5], 4)
    with pytest.raises(WhiteningError, match="rows 0 to 40, but there are 40"):
        fit_learned(x, [0], [40], 4)
    for nothing in (np.zeros(0, dtype=int), np.array([3])):
        with pytest.raises(WhiteningError, match="different pictures"):
            fit_learned(x, nothing, nothing, 4)
    with pytest.raises(WhiteningError, match="needs at least 5 vectors"):
        fit_learned(x[:4], [0], [1], 4)


# --- files ---


@pytest.mark.parametrize("eigenvalues", [True, False])
def test_round_trip(tmp_path: Path, eigenvalues: bool) -> None:
    fitted = fit_pca(spectrum(60, 16), 12, meta={"source": "größer"}).truncate(8)
    if not eigenvalues:
        fitted = Whitening(fitted.mean, fitted.projection, fitted.meta)
    path = tmp_path / "w.safetensors"
    save(fitted, path)
    again = load(path)
    assert torch.equal(again.mean, fitted.mean)
    assert torch.equal(again.projection, fitted.projection)
    assert (again.eigenvalues is not None) == eigenvalues
    assert again.meta == fitted.meta | {"storage": "float32"}
    save(again, path, "int8")  # over itself
    assert load(path).meta["storage"] == "int8"
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(("count", "columns", "dim"), [(600, 128, 128), (150, 256, 128)])
@pytest.mark.parametrize(
    ("storage", "decay", "cosine", "part"),
    [
        ("float16", 0.5, 0.99999, 0.55),
        ("int8", 0.5, 0.9998, 0.35),
        ("float16", 1.0, 0.9999, 0.55),
        ("int8", 1.0, 0.999, 0.35),
    ],
)
def test_small_storage_changes_little(
    tmp_path: Path, count: int, columns: int, dim: int, storage: Any, decay: float, cosine: float, part: float
) -> None:
    """Eigenvalues that span two to three (decay 0.5) and four to five decades (1.0)."""
    x = spectrum(count + 50, columns, decay)
    fitted = fit_pca(x[:count], dim)
    for name in ("float32", storage):
        save(fitted, tmp_path / name, name)
    assert (tmp_path / storage).stat().st_size < part * (tmp_path / "float32").stat().st_size
    again = load(tmp_path / storage)
    assert again.projection.dtype == torch.float32
    assert F.cosine_similarity(again(x), fitted(x)).min().item() > cosine


def test_int8_of_learned_whitening_and_of_an_empty_row(tmp_path: Path) -> None:
    x, queries, positives = pairs(100, 48)
    fitted = fit_learned(x, queries, positives, 48)
    fitted.projection[40] = 0
    for storage in ("float16", "int8"):
        save(fitted, tmp_path / storage, storage)
        again = load(tmp_path / storage)
        assert not again.projection[40].any()
        assert F.cosine_similarity(again(x), fitted(x)).min().item() > 0.9995


def test_files_that_are_no_whitening(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(WhiteningError, match=r"no whitening file .*w\.safetensors: fit one"):
        load(path)
    with pytest.raises(WhiteningError, match="not a readable whitening file"):
        load(tmp_path)
    for content in (b"", b"not a tensor in sight", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(WhiteningError, match=r"w\.safetensors is not a readable whitening file"):
            load(path)
    save_file({"mean": torch.zeros(3)}, path)
    with pytest.raises(WhiteningError, match="holds no whitening"):
        load(path)
    save_file({"mean": torch.zeros(3), "projection": torch.ones(1, 3)}, path, {"format": "cooc-whitening/999"})
    with pytest.raises(WhiteningError, match=r"cooc-whitening/999.*update cooc"):
        load(path)


@pytest.mark.parametrize("storage", STORAGE)
def test_damaged_files(tmp_path: Path, storage: Any) -> None:
    path = tmp_path / "w.safetensors"
    save(fit_pca(spectrum(60, 16), 8), path, storage)
    content = path.read_bytes()
    for length in range(0, len(content), len(content) // 20):
        path.write_bytes(content[:length])
        with pytest.raises(WhiteningError, match="fetch or fit it again"):
            load(path)
    path.write_bytes(content[:-7] + bytes([content[-7] ^ 1]) + content[-6:])
    with pytest.raises(WhiteningError, match="checksum"):
        load(path)


def test_saving_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    fitted = fit_pca(spectrum(30, 8), 4)
    with pytest.raises(WhiteningError, match="Cannot write"):
        save(fitted, tmp_path / "missing" / "w.safetensors")
    with pytest.raises(UnknownNameError, match="Did you mean 'int8'"):
        save(fitted, tmp_path / "w.safetensors", "int")
    (tmp_path / "folder").mkdir()
    with pytest.raises(WhiteningError, match="Cannot write"):
        save(fitted, tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("count", [30, 200])  # fewer and more samples than dimensions
def test_shrinkage_whitens_by_the_lengthened_variances(count: int) -> None:
    """Against the definition: (covariance + share of its mean variance)^(-1/2), up to a rotation of the result."""
    x = np.random.default_rng(1).normal(size=(count, 40)) * np.linspace(2, 0.1, 40)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    covariance = np.cov(x.T)
    values, axes = np.linalg.eigh(covariance + 0.1 * np.trace(covariance) / 40 * np.eye(40))
    wanted = (x - x.mean(0)) @ (axes * values**-0.5) @ axes.T
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    fitted = fit_pca(x, 40, shrinkage=0.1)
    found = fitted(torch.from_numpy(x)).numpy()
    assert fitted.dim == 40
    assert fitted.meta["shrinkage"] == "0.1"
    assert np.allclose(found @ found.T, wanted @ wanted.T, atol=1e-5)
    fewer = fit_pca(x, 12, shrinkage=0.1)
    assert np.allclose(fewer.projection, fitted.truncate(12).projection, atol=1e-4)


def test_two_pictures_that_are_the_same_leave_shrinkage_a_direction_less() -> None:
    x = np.random.default_rng(0).normal(size=(12, 40))
    x[7] = x[3]
    with pytest.raises(WhiteningError, match="vary in only 10 directions"):
        fit_pca(x, 11)
    fitted = fit_pca(x, 40, shrinkage=0.1)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    covariance = np.cov(unit.T)
    expected = np.linalg.inv(covariance + 0.1 * np.trace(covariance) / 40 * np.eye(40))
    projection = fitted.projection.double().numpy()
    np.testing.assert_allclose(projection.T @ projection, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("shrinkage", [-0.1, float("nan")])
def test_shrinkage_is_no_negative_number(shrinkage: float) -> None:
    with pytest.raises(WhiteningError, match="Shrinkage"):
        fit_pca(np.eye(8), 4, shrinkage=shrinkage)
