"""Every pooling against loops written from its paper, and against libraries that know its formula."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.kernel_approximation import PolynomialCountSketch
from torch import Tensor

from cooc.cooccurrence import cooccurrence
from cooc.errors import InputError, UnknownNameError
from cooc.pooling import (
    MASKS,
    POOLINGS,
    CompactBilinear,
    GeM,
    bilinear,
    bilinear_matrix,
    centre_mask,
    chco,
    chco_sct,
    compact_bilinear,
    crow,
    gem,
    l2_normalise,
    mac,
    mask,
    rmac,
    rmac_regions,
    sct,
    signed_sqrt,
    sketch_hashes,
    spoc,
    top_down_mask,
    ucrow,
)
from tests.reference import pooling as naive

C = 6
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
Loop = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


def maps(
    B: int = 3, channels: int = C, H: int = 5, W: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(B, channels, H, W, generator=generator, dtype=torch.float64).relu()
    A[:, -1] = 0  # a channel that never fires, as most images have
    return A.to(dtype)


def every(name: str, channels: int = C) -> Callable[[Tensor], Tensor]:
    """The pooling of that name as a function of A alone."""
    pool = POOLINGS[name].build(channels, **({"dim": 64} if name == "compact-bilinear" else {}))
    return lambda A: pool(A, cooccurrence(A, 2) if POOLINGS[name].cooccurrence else None)


LOOPS: dict[str, tuple[Callable[..., Tensor], Loop]] = {
    "ucrow": (ucrow, lambda A, C_T: naive.ucrow(A)),
    "spoc": (spoc, lambda A, C_T: naive.spoc(A)),
    "mac": (mac, lambda A, C_T: naive.mac(A)),
    "rmac": (rmac, lambda A, C_T: naive.rmac(A)),
    "gem": (gem, lambda A, C_T: naive.gem(A)),
    "crow": (crow, lambda A, C_T: naive.crow(A)),
    "chco-sct": (chco_sct, naive.chco_sct),
    "chco": (chco, lambda A, C_T: naive.chco_sct(A, C_T, spatial=False)),
    "sct": (sct, lambda A, C_T: naive.chco_sct(A, C_T, channel=False)),
    "bilinear": (bilinear, naive.bilinear),
}
ALL = pytest.mark.parametrize("name", POOLINGS)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(("H", "W"), [(5, 7), (9, 4), (6, 6), (1, 1), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_loops(name: str, H: int, W: int, dtype: torch.dtype) -> None:
    A = maps(H=H, W=W, seed=2)
    C_T = cooccurrence(A, 1, threshold=0.1)
    function, loop = LOOPS[name]
    wanted = np.stack([loop(a, c) for a, c in zip(A.numpy(), C_T.numpy(), strict=True)])
    out = function(A.to(dtype), C_T.to(dtype))
    assert out.dtype == dtype
    close(out.double(), torch.from_numpy(wanted))
    assert torch.from_numpy(wanted).any()


def test_no_pooling_is_left_out() -> None:
    assert set(POOLINGS) == {*LOOPS, "compact-bilinear"}  # which has tests of its own below


# The spatial and channel weights


def test_options_of_the_linear_poolings() -> None:
    A = maps(1)
    C_T = cooccurrence(A, 1)
    a, c = A[0].numpy(), C_T[0].numpy()
    alpha = naive.spatial_weights(c.sum(0), a=1.0, b=3.0)
    close(sct(A, C_T, a=1.0, b=3.0)[0], torch.from_numpy((a * alpha).sum((1, 2))))
    close(chco(A, C_T, eps=1e-2)[0], torch.from_numpy(naive.chco_sct(a, c, spatial=False, eps=1e-2)))
    close(spoc(A, sigma=0.2)[0], torch.from_numpy(naive.spoc(a, 0.2)))


def test_negative_cooccurrences_count_for_nothing() -> None:
    """A learned filter may give them; logarithms and roots must not see them."""
    A = maps(1)
    C_T = torch.randn(A.shape, generator=torch.Generator().manual_seed(0), dtype=A.dtype)
    for pool in (chco, sct, chco_sct):
        assert pool(A, C_T).isfinite().all()
        assert pool(A, -C_T.abs()).isfinite().all()


@pytest.mark.parametrize("pool", [chco, sct, chco_sct])
def test_cooccurrences_are_asked_for(pool: Callable[..., Tensor]) -> None:
    for C_T in (None, maps(H=4)):
        with pytest.raises(InputError, match="co-occurrence tensor of A's shape"):
            pool(maps(), C_T)


# GeM


@pytest.mark.parametrize("p", [1.0, 2.5, 3.0, 4, 10.0])
def test_gem_is_scipys_power_mean(p: float) -> None:
    A = maps() + 1e-3  # scipy's mean takes logarithms
    close(gem(A, p=p), torch.from_numpy(scipy.stats.pmean(A.numpy(), p, axis=(2, 3))))


def test_gem_between_mean_and_maximum() -> None:
    A = maps()
    close(gem(A, p=1.0), A.mean((2, 3)))
    close(gem(A, p=200.0), mac(A), rtol=0.03, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-5, 1e4])
def test_gem_of_any_power_in_float32(scale: float) -> None:
    """(1e4)^30 is no float32, and neither is (1e-5)^30."""
    A = scale * (maps() + 0.1)
    close(gem(A.float(), p=30.0, eps=1e-12).double() / scale, gem(A, p=30.0, eps=1e-12) / scale)


def test_learnable_gem() -> None:
    A = maps()
    layer = GeM(p=2.0)
    assert [name for name, _ in layer.named_parameters()] == ["p"]
    close(layer(A), gem(A, p=2.0))
    layer(A).sum().backward()
    h = 1e-4
    slope = (gem(A, p=2.0 + h).sum() - gem(A, p=2.0 - h).sum()).item() / (2 * h)
    assert layer.p.grad is not None
    assert layer.p.grad.item() == pytest.approx(slope, rel=1e-4)
    assert slope > 0.1  # the mean grows with p


def test_gem_has_finite_gradients_at_zero() -> None:
    A = torch.zeros(1, C, 3, 3, requires_grad=True)
    p = torch.tensor(0.5, requires_grad=True)
    gem(A, p=p).sum().backward()
    for grad in (A.grad, p.grad):
        assert grad is not None
        assert grad.isfinite().all()


# R-MAC


def test_rmac_region_counts() -> None:
    """l x (l + m - 1) regions at scale l: 1 + 4 + 9 in a square; two side by side in 24 x 32, hence 2 + 6 + 12."""
    assert len(rmac_regions(20, 20)) == 14
    assert len(rmac_regions(24, 32)) == len(rmac_regions(32, 24)) == 20
    assert len(rmac_regions(20, 20, levels=1)) == 1
    assert rmac_regions(7, 7, levels=1) == [(0, 0, 7)]
    assert rmac_regions(24, 32, levels=1) == [(0, 0, 24), (0, 8, 24)]
    assert rmac_regions(54, 30, levels=1) == [(0, 0, 30), (24, 0, 30)]  # overlap 1/5; a third one makes it 3/5: a tie
    assert rmac_regions(8, 24, levels=1) == [(0, x, 8) for x in (0, 5, 10, 16)]  # 4: overlap 1/3; 5 would have 1/2


@settings(max_examples=200, deadline=None)
@given(H=st.integers(1, 140), W=st.integers(1, 140), levels=st.integers(1, 4))
def test_rmac_regions_of_any_map(H: int, W: int, levels: int) -> None:
    regions = rmac_regions(H, W, levels)
    assert regions == naive.rmac_regions(H, W, levels)
    for top, left, side in regions:
        assert side >= 1
        assert 0 <= top <= H - side
        assert 0 <= left <= W - side
    assert max(top + side for top, _, side in regions) == H  # the far ends are reached
    assert max(left + side for _, left, side in regions) == W


def test_rmac_options() -> None:
    A = maps(1, H=6, W=9)
    a = A[0].numpy()
    close(rmac(A, levels=2, whole=False)[0], torch.from_numpy(naive.rmac(a, 2, whole=False)))
    assert not torch.allclose(rmac(A), rmac(A, whole=False))


# Bilinear and its sketch


def hashes(channels: int, dim: int, seed: int) -> tuple[NDArray[np.int64], ...]:
    """h1, h2, s1, s2 back from what is kept for each pair: up to a shift and a sign that cancel."""
    bins, signs = (x.reshape(channels, channels).numpy() for x in sketch_hashes(channels, dim, seed))
    return bins[:, 0], (bins[0] - bins[0, 0]) % dim, signs[:, 0], signs[0] * signs[0, 0]


@pytest.mark.parametrize("other", ["A", "C_T"])
@pytest.mark.parametrize("dim", [7, 64, 8192])
def test_scatter_is_the_fft_sketch(other: str, dim: int) -> None:
    A = maps(2, H=3, W=4)
    second = A if other == "A" else cooccurrence(A, 1)
    wanted = [naive.tensor_sketch(a, c, hashes(C, dim, 3), dim) for a, c in zip(A.numpy(), second.numpy(), strict=True)]
    out = CompactBilinear(C, dim=dim, seed=3)(A, None if other == "A" else second)
    assert out.shape == (2, dim)
    torch.testing.assert_close(out, torch.from_numpy(np.stack(wanted)), rtol=1e-4, atol=1e-6)


def test_sketch_is_scikit_learns() -> None:
    """PolynomialCountSketch of degree 2 with our hashes, summed over positions, is BP(AA) in compact form."""
    A, dim = maps(1, H=3, W=4), 128
    h1, h2, s1, s2 = hashes(C, dim, 0)
    peer = PolynomialCountSketch(degree=2, n_components=dim, random_state=0).fit(np.zeros((1, C)))
    peer.indexHash_, peer.bitHash_ = np.stack([h1, h2]), np.stack([s1, s2])
    wanted = peer.transform(A[0].flatten(1).T.numpy()).sum(0)
    close(CompactBilinear(C, dim=dim)(A)[0], torch.from_numpy(wanted))


def test_sketch_inner_products_are_unbiased() -> None:
    """<sketch x, sketch y> is <x, y> on average over seeds; its spread falls with the dimension."""
    A = maps(2, 16)
    x, y = bilinear(A)
    wanted = float(x @ y)
    spread = {}
    for dim in (64, 1024):
        products = np.array(
            [float(torch.prod(CompactBilinear(16, dim=dim, seed=seed)(A), 0).sum()) for seed in range(200)]
        )
        standard_error = products.std() / np.sqrt(len(products))
        assert abs(products.mean() - wanted) < 4 * standard_error
        spread[dim] = products.std() / wanted
    assert spread[1024] < spread[64] / 2
    assert spread[1024] < 0.1


def test_hashes_are_the_same_for_ever() -> None:
    """An index outlives the version that wrote it. If this fails, every compact bilinear vector has changed."""
    bins, signs = sketch_hashes(3, 1000, seed=7)
    assert bins.tolist() == [372, 713, 497, 695, 36, 820, 490, 831, 615]
    assert signs.tolist() == [-1, -1, 1, 1, 1, -1, 1, 1, -1]
    bins, signs = sketch_hashes(512)
    assert bins[[0, 1, 1000, 262143]].tolist() == [2415, 4236, 1189, 1404]
    digest = hashlib.sha256((bins * signs).numpy().astype("<i8").tobytes()).hexdigest()
    assert digest == "f8898efe0461fcf699d7f3bee11d43fb98b6e3f0b2b2da36d6b7de4b7dfec84c"


def test_hashes_are_spread_evenly() -> None:
    bins, signs = sketch_hashes(512, 64)
    counts = torch.bincount(bins, minlength=64).double() * 64 / 512**2
    assert counts.min() > 0.8
    assert counts.max() < 1.2
    assert abs(signs.double().mean()) < 0.05
    assert set(signs.tolist()) == {-1, 1}
    other, _ = sketch_hashes(512, 64, seed=1)
    assert (other == bins).double().mean() < 0.05


def test_sketch_keeps_its_hashes_in_the_state_dict() -> None:
    one, two = CompactBilinear(C, dim=32, seed=1), CompactBilinear(C, dim=32, seed=2)
    A = maps()
    assert not torch.equal(one(A), two(A))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(A), two(A))


def test_sketch_for_other_channels() -> None:
    with pytest.raises(InputError, match="for 4 channels, the activations have 6"):
        CompactBilinear(4, dim=32)(maps())
    for dim in (0, 2**20 + 1):
        with pytest.raises(InputError, match="sketch"):
            sketch_hashes(C, dim)


def test_signed_sqrt_has_a_finite_gradient_at_zero() -> None:
    x = torch.tensor([-4.0, -1e-30, 0.0, 1e-30, 4.0, 0.0], requires_grad=True)
    signed_sqrt(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad[[0, 4]].tolist() == [0.25, 0.25]
    assert signed_sqrt(x)[[0, 2, 4]].tolist() == [-2.0, 0.0, 2.0]


def test_bilinear_matrix_is_not_symmetric_in_its_maps() -> None:
    A = maps(1)
    C_T = cooccurrence(A, 1)
    close(bilinear_matrix(A, C_T).mT, bilinear_matrix(C_T, A))
    assert not torch.allclose(bilinear_matrix(A, C_T), bilinear_matrix(C_T, A))
    with pytest.raises(InputError, match="co-occurrence tensor of A's shape"):
        bilinear(A, C_T[:, :-1])


# Masks


@pytest.mark.parametrize(("H", "W"), [(1, 1), (1, 4), (4, 1), (5, 7), (8, 3)])
def test_masks_against_loops(H: int, W: int) -> None:
    close(top_down_mask(H, W).double(), torch.from_numpy(naive.top_down(H, W)))
    for sigma in (0.5, 1 / 6, 2.0):
        close(centre_mask(H, W, sigma=sigma).double(), torch.from_numpy(naive.centre(H, W, sigma)))
    for make in MASKS.values():
        assert make(H, W).shape == (H, W)


def test_masks_multiply_the_maps() -> None:
    A = maps()
    assert mask(A, "none") is A
    close(mask(A, "top-down"), A * torch.from_numpy(naive.top_down(5, 7)))
    close(mask(A, "centre", sigma=0.3), A * torch.from_numpy(naive.centre(5, 7, 0.3)))
    assert mask(A, "top-down")[:, :, -1].eq(0).all()
    assert mask(A, "top-down")[:, :, 0].equal(A[:, :, 0])
    for name in MASKS:
        assert mask(A.float(), name).dtype == torch.float32
    with pytest.raises(UnknownNameError, match="'top-down'"):
        mask(A, "topdown")
    with pytest.raises(InputError, match="sigma"):
        mask(A, "centre", sigma=0.0)


# What all of them must do


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_maps_give_zero_vectors(name: str, dtype: torch.dtype) -> None:
    """A black picture has no direction; it must not get NaN, nor a score."""
    pool = every(name)
    vector = pool(torch.zeros(2, C, 4, 3, dtype=dtype))
    assert vector.dtype == dtype
    assert vector.eq(0).all()
    assert l2_normalise(vector).eq(0).all()


@ALL
def test_zero_maps_beside_others(name: str) -> None:
    A = maps()
    A[1] = 0
    out = every(name)(A)
    assert out.isfinite().all()
    assert out[1].eq(0).all()
    assert out[[0, 2]].any(1).all()


@ALL
def test_finite_gradients(name: str) -> None:
    A = maps()
    A[1] = 0
    A.requires_grad_()
    l2_normalise(every(name)(A)).sum().backward()
    assert A.grad is not None
    assert A.grad.isfinite().all()


@ALL
def test_gradcheck(name: str) -> None:
    A, C_T = torch.rand(2, 1, 3, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.05
    A, C_T = A.requires_grad_(), C_T.requires_grad_()
    pool = POOLINGS[name].build(3, **({"dim": 16} if name == "compact-bilinear" else {}))
    assert torch.autograd.gradcheck(pool, (A, C_T) if POOLINGS[name].cooccurrence else (A, None))


@ALL
def test_batch_invariance(name: str) -> None:
    A = maps(4, dtype=torch.float32)
    together = every(name)(A)
    for i in range(4):
        torch.testing.assert_close(every(name)(A[i : i + 1])[0], together[i], rtol=1e-6, atol=1e-6)


@ALL
@settings(max_examples=15, deadline=None)
@given(shape=st.tuples(*(st.integers(1, n) for n in (2, 3, 9, 9))), seed=st.integers(0, 10**6))
def test_any_shape(name: str, shape: tuple[int, int, int, int], seed: int) -> None:
    A = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).relu()
    out = every(name, shape[1])(A)
    assert out.shape[0] == shape[0]
    assert out.isfinite().all()


@ALL
def test_registry_names_its_options(name: str) -> None:
    row = POOLINGS[name]
    assert row.source
    wanted = {"sqrt"} | {
        "spoc": {"sigma"},
        "rmac": {"levels", "whole"},
        "gem": {"p", "eps"},
        "chco-sct": {"a", "b", "eps"},
        "chco": {"eps"},
        "sct": {"a", "b"},
        "compact-bilinear": {"dim", "seed"},
    }.get(name, set())
    assert set(row.options) == wanted


def test_l2_normalise() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-12, 0.0]], requires_grad=True)
    out = l2_normalise(x)
    close(out, torch.tensor([[0.6, 0.8], [0.0, 0.0], [1.0, 0.0]]))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_compact_bilinear_function_is_the_module() -> None:
    A = maps()
    bins, signs = sketch_hashes(C, 32, 5)
    assert compact_bilinear(A, bins=bins, signs=signs, dim=32).equal(CompactBilinear(C, dim=32, seed=5)(A))
