"""The paper against loops written from its equations, and everything that a layer of a network must be able to do."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from cooc.cooccurrence import (
    EPS,
    Cooccurrence,
    cooccurrence,
    cooccurrence_factored,
    cooccurrence_learned,
    cooccurrence_vector,
    direct_filter,
    inside,
    shih_cooccurrence,
)
from cooc.errors import InputError, UnknownNameError
from tests.reference import cooccurrence as naive

C, R = 5, 2  # channels and radius of most tests
exact = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def maps(
    B: int = 2, channels: int = C, H: int = 6, W: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Activations as a ReLU leaves them: half zeros, and a few large ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, channels, H, W, generator=generator, dtype=torch.float64).relu().pow(2).to(dtype)


def random_filter(channels: int = C, radius: int = R, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(channels, channels, 2 * radius + 1, 2 * radius + 1, generator=generator, dtype=torch.float64)


def factors(rank: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    left = torch.randn(C, rank, generator=generator, dtype=torch.float64)
    return left, torch.randn(rank, C, 2 * R + 1, 2 * R + 1, generator=generator, dtype=torch.float64)


def each(function: Callable[[NDArray[np.float64]], NDArray[np.float64]], A: Tensor) -> Tensor:
    """A reference for one image, on every image of a batch."""
    return torch.from_numpy(np.stack([function(image) for image in A.double().numpy()]))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "direct": lambda A: cooccurrence(A, R),
    "learned": lambda A: cooccurrence_learned(A, random_filter().to(A.dtype)),
    "factored": lambda A: cooccurrence_factored(A, *(f.to(A.dtype) for f in factors())),
    "vector": lambda A: cooccurrence_vector(cooccurrence(A, R)),
    "shih tensor": lambda A: shih_cooccurrence(A, R),
    "shih vector": lambda A: shih_cooccurrence(A, R, form="vector"),
}
ALL = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())


# The equations


@pytest.mark.parametrize("radius", [0, 1, 2, 4])
@pytest.mark.parametrize("eps", [0.0, EPS, 0.25, 1.0])
def test_equation_3(radius: int, eps: float) -> None:
    A = maps()
    wanted = each(lambda image: naive.cooccurrence(image, radius, eps=eps), A)
    assert wanted.abs().max() > (1 if radius else 0.1)
    exact(cooccurrence(A, radius, eps=eps), wanted)


def test_known_value() -> None:
    """Two channels, one activation each, side by side: each gets the other's value, and nothing comes from afar."""
    A = torch.zeros(1, 2, 3, 8)
    A[0, 0, 1, 1], A[0, 1, 1, 2], A[0, 1, 1, 7] = 3.0, 5.0, 7.0
    out = cooccurrence(A, radius=2, eps=0.0)
    wanted = torch.zeros_like(A)
    wanted[0, 0, 1, 1], wanted[0, 1, 1, 2] = 5.0, 3.0
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-6)


def test_threshold_is_strict() -> None:
    """rho = A > t: an activation equal to the threshold does not count."""
    A = torch.tensor([1.0, 2.0, 3.0, 2.0], dtype=torch.float64).reshape(1, 4, 1, 1)  # mean 2
    assert cooccurrence(A, 0, eps=0.0).eq(0).all()
    out = cooccurrence(A, 0, threshold=1.5, eps=0.0).flatten()
    torch.testing.assert_close(out, torch.tensor([0.0, 5.0, 4.0, 5.0], dtype=torch.float64) / 3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_closed_form_is_the_convolution(dtype: torch.dtype, tolerance: float) -> None:
    """Algorithm 1 as the paper runs it, at a size that six loops cannot do."""
    A = maps(3, 48, 16, 12, dtype=dtype)
    rho = A.gt(A.mean((1, 2, 3), keepdim=True)).to(dtype)
    wanted = rho * F.conv2d(A * rho, direct_filter(48, 4, dtype=dtype), padding=4) / 47
    out = cooccurrence(A)
    assert (out - wanted).norm() <= tolerance * wanted.norm()
    torch.testing.assert_close(out, wanted, rtol=10 * tolerance, atol=tolerance)
    torch.testing.assert_close(cooccurrence_learned(A, direct_filter(48, dtype=dtype)), wanted)


def test_direct_filter() -> None:
    filter = direct_filter(3, radius=1, eps=0.5)
    assert filter.shape == (3, 3, 3, 3)
    for k in range(3):
        for w in range(3):
            assert filter[k, w].eq(0.5 if k == w else 1.0).all()
    assert direct_filter(2).shape == (2, 2, 9, 9)
    assert direct_filter(2, dtype=torch.float64)[0, 0, 0, 0].item() == EPS


@pytest.mark.parametrize("threshold", [0.0, 0.7, -1.0])
def test_threshold_as_a_number(threshold: float) -> None:
    A = maps()
    wanted = each(lambda image: naive.cooccurrence(image, R, threshold, EPS), A)
    exact(cooccurrence(A, R, threshold), wanted)


def test_threshold_for_each_image() -> None:
    A, t = maps(3), torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    wanted = [naive.cooccurrence(image, R, float(each_t), EPS) for image, each_t in zip(A.numpy(), t, strict=True)]
    exact(cooccurrence(A, R, t), torch.from_numpy(np.stack(wanted)))
    torch.testing.assert_close(cooccurrence(A, R, torch.tensor(0.5)), cooccurrence(A, R, 0.5))
    for wrong in (torch.ones(2), torch.ones(4)):
        with pytest.raises(InputError, match="thresholds for"):
            cooccurrence(A, R, wrong)
    with pytest.raises(InputError, match="3 thresholds for 1 images"):  # would silently become three images
        cooccurrence(A[:1], R, t)


@pytest.mark.parametrize("function", [FUNCTIONS["direct"], FUNCTIONS["learned"], FUNCTIONS["factored"]])
def test_mean_threshold_is_each_images_own(function: Callable[[Tensor], Tensor]) -> None:
    """The authors' code takes the mean of the whole batch; then a bright neighbour changes a dark image's tensor."""
    dark, bright = maps(1), 100 * maps(1, seed=5)
    exact(function(torch.cat([dark, bright]))[:1], function(dark))
    assert function(dark).any()


def test_window_mean_divides_by_the_window() -> None:
    A, filter, (left, right) = maps(), random_filter(), factors()
    area = (2 * R + 1) ** 2
    exact(cooccurrence(A, R, window_mean=True) * area, cooccurrence(A, R))
    exact(cooccurrence_learned(A, filter, window_mean=True), cooccurrence_learned(A, filter / area))
    exact(cooccurrence_factored(A, left, right, window_mean=True) * area, cooccurrence_factored(A, left, right))


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_algorithm_1_with_any_filter(threshold: float | None) -> None:
    A, filter = maps(), random_filter()
    wanted = each(lambda image: naive.cooccurrence_filtered(image, filter.numpy(), threshold), A)
    exact(cooccurrence_learned(A, filter, "mean" if threshold is None else threshold), wanted)


def test_the_two_references_agree() -> None:
    A = maps(1)[0].numpy()
    filter = direct_filter(C, R, eps=0.25, dtype=torch.float64).numpy()
    np.testing.assert_allclose(naive.cooccurrence(A, R, eps=0.25), naive.cooccurrence_filtered(A, filter), rtol=1e-13)


def test_cooccurrence_vector() -> None:
    tensor = cooccurrence(maps(), R)
    exact(cooccurrence_vector(tensor), each(naive.cooccurrence_vector, tensor))


def test_zeros_around_a_map_neither_give_nor_get() -> None:
    """The edge of a map is no different from a wall of zeros, so padding a picture's map changes nothing inside."""
    A = maps()
    wide = F.pad(A, (3, 1, 2, 5))
    out = cooccurrence(wide, R, threshold=A.mean((1, 2, 3)))
    exact(out[:, :, 2:-5, 3:-1], cooccurrence(A, R))
    inside = torch.zeros_like(wide, dtype=torch.bool)
    inside[:, :, 2:-5, 3:-1] = True
    assert out[~inside].eq(0).all()


# Maps of different shapes in one batch

SIZES = [(6, 4), (3, 5), (1, 1), (4, 2)]


def padded(shift: float = 0.0, beyond: float = math.nan) -> tuple[list[Tensor], Tensor, Tensor]:
    """Maps of those sizes, alone; and in one batch, with whatever beyond them."""
    alone = [maps(1, H=h, W=w, seed=i) - shift for i, (h, w) in enumerate(SIZES)]
    together = torch.full((len(SIZES), C, 7, 6), beyond, dtype=torch.float64)
    for row, A in zip(together, alone, strict=True):
        row[:, : A.shape[2], : A.shape[3]] = A[0]
    return alone, together, torch.tensor(SIZES)


@pytest.mark.parametrize("form", ["direct", "learned", "factored"])
@pytest.mark.parametrize("threshold", ["mean", 0.3, -0.2])
@pytest.mark.parametrize("beyond", [0.0, 9.0, math.nan, math.inf])
@pytest.mark.parametrize("shift", [0.0, 1.5])  # a ReLU's maps, and others with a mean below 0
def test_padded_maps_are_each_as_alone(form: str, threshold: str | float, beyond: float, shift: float) -> None:
    layer = Cooccurrence(form, channels=C, radius=R, rank=3, threshold=threshold).double()
    for parameter, value in zip(
        layer.parameters(), [random_filter()] if form == "learned" else factors(), strict=False
    ):
        parameter.data = value
    alone, together, sizes = padded(shift, beyond)
    layer.requires_grad_(False)
    found = layer(together, sizes)
    for row, A in zip(found, alone, strict=True):
        h, w = A.shape[2:]
        exact(row[:, :h, :w], layer(A)[0])
        row[:, :h, :w] = 0
    assert found.eq(0).all()


def test_what_lies_beyond_a_map_has_no_gradient() -> None:
    _, together, sizes = padded(beyond=5.0)
    A = together.requires_grad_()
    Cooccurrence(radius=R)(A, sizes).sum().backward()
    within = inside(together, sizes).expand_as(together)
    assert A.grad is not None
    assert A.grad[~within].eq(0).all()
    assert A.grad[within].any()


def test_half_precision_maps_with_sizes() -> None:
    alone, together, sizes = padded(beyond=0.0)
    found = Cooccurrence(radius=R)(together.bfloat16(), sizes)
    assert found.dtype == torch.bfloat16
    for row, A in zip(found.float(), alone, strict=True):
        wanted = Cooccurrence(radius=R)(A.bfloat16())[0].float()
        torch.testing.assert_close(row[:, : A.shape[2], : A.shape[3]], wanted, rtol=0.02, atol=0.02)


def test_sizes_compile_and_export() -> None:
    torch.compiler.reset()
    layer, (_, together, sizes) = Cooccurrence(radius=R), padded(beyond=0.0)
    exact(torch.compile(layer, fullgraph=True, backend="aot_eager")(together, sizes), layer(together, sizes))
    batch, high, wide = (torch.export.Dim(name, min=2) for name in "BHW")
    shapes = {"A": {0: batch, 2: high, 3: wide}, "sizes": {0: batch}}
    program = torch.export.export(layer, (together, sizes), dynamic_shapes=shapes)
    A, other = F.pad(together[:3], (0, 2, 0, 1)), sizes[:3]
    exact(program.module()(A, other), layer(A, other))


def test_sizes_of_another_batch() -> None:
    with pytest.raises(InputError, match=r"\(2, 2\); got \(3, 2\)"):
        Cooccurrence()(maps(2), torch.ones(3, 2))


# Learned and factored


def test_factored_is_its_full_filter() -> None:
    A, (left, right) = maps(), factors()
    full = direct_filter(C, R, dtype=torch.float64) + torch.einsum("kr,rwyx->kwyx", left, right)
    wanted = cooccurrence_learned(A, full)
    torch.testing.assert_close(cooccurrence_factored(A, left, right), wanted, rtol=1e-11, atol=1e-11)

    layer = Cooccurrence("factored", channels=C, radius=R, rank=3).double()
    layer.load_state_dict({"left": left, "right": right})
    torch.testing.assert_close(layer.full_filter(), full)
    torch.testing.assert_close(cooccurrence_learned(A, layer.full_filter()), layer(A), rtol=1e-11, atol=1e-11)


def test_compression_is_exact_at_full_rank_and_better_with_rank() -> None:
    A, filter = maps(), random_filter()
    errors = []
    for rank in range(1, C + 1):
        layer = Cooccurrence("factored", radius=R, rank=rank, filter=filter)
        assert layer.left.shape == (C, rank)
        errors.append(float((layer.full_filter() - filter).norm() / filter.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.5
    assert errors[-1] < 1e-12
    torch.testing.assert_close(layer(A), cooccurrence_learned(A, filter), rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match="rank 6"):
        Cooccurrence("factored", rank=C + 1, filter=filter)
    with pytest.raises(InputError, match="rank"):
        Cooccurrence("factored", rank=0, filter=filter)


def test_compression_is_the_best_of_its_rank() -> None:
    """Eckart and Young: the error of the nearest rank-2 filter is what the other singular values hold."""
    filter = random_filter()
    delta = filter - direct_filter(C, R, dtype=torch.float64)
    wanted = torch.linalg.svdvals(delta.flatten(1))[2:].norm()
    layer = Cooccurrence("factored", rank=2, filter=filter)
    torch.testing.assert_close((layer.full_filter() - filter).norm(), wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("form", ["direct", "learned", "factored"])
@pytest.mark.parametrize("options", [{}, {"threshold": 0.4, "window_mean": True, "eps": 0.5}])
def test_module_is_the_function(form: str, options: dict[str, float]) -> None:
    A = maps()
    layer = Cooccurrence(form, channels=C, radius=R, rank=3, **options).double()  # type: ignore[arg-type]
    torch.testing.assert_close(layer(A), cooccurrence(A, R, **options), rtol=1e-7, atol=1e-7)  # all start direct
    if form == "learned":
        layer.load_state_dict({"weight": random_filter()})
        options.pop("eps", None)
        exact(layer(A), cooccurrence_learned(A, random_filter(), **options))
    if form == "factored":
        layer.load_state_dict(dict(zip(("left", "right"), factors(), strict=True)))
        exact(layer(A), cooccurrence_factored(A, *factors(), **options))


def test_module_says_what_it_is() -> None:
    assert [name for name, _ in Cooccurrence().named_parameters()] == []
    assert "'learned', radius=2" in repr(Cooccurrence("learned", filter=random_filter()))
    torch.testing.assert_close(Cooccurrence(radius=1).full_filter(4), direct_filter(4, 1))
    with pytest.raises(InputError, match="full_filter"):
        Cooccurrence().full_filter()


# Shih et al.


@pytest.mark.parametrize("radius", [0, 1, 2])
def test_shih(radius: int) -> None:
    A = maps(2, 4, 5, 3)
    vector, tensor = zip(*(naive.shih(image, radius) for image in A.numpy()), strict=True)
    exact(shih_cooccurrence(A, radius, "vector"), torch.from_numpy(np.stack(vector)))
    exact(shih_cooccurrence(A, radius), torch.from_numpy(np.stack(tensor)))


def test_shih_with_negative_activations() -> None:
    """An offset that leaves the map gives 0, which beats any negative correlation; larger radii change nothing."""
    A = maps(1, 3, 3, 3) + 0.1
    A[:, 1] *= -1
    vector, tensor = naive.shih(A[0].numpy(), 3)
    exact(shih_cooccurrence(A, 3, "vector")[0], torch.from_numpy(vector))
    exact(shih_cooccurrence(A, 3)[0], torch.from_numpy(tensor))
    exact(shih_cooccurrence(A, 200)[0], torch.from_numpy(tensor))


def test_shih_runs_at_2048_channels() -> None:
    """ResNet's width, where a D^2 x H x W tensor would hold 4 million maps. Its sums are those of the vector."""
    A = maps(1, 2048, 3, 4, dtype=torch.float32)
    tensor = shih_cooccurrence(A, 1)
    assert tensor.shape == A.shape
    torch.testing.assert_close(tensor.sum((2, 3)), shih_cooccurrence(A, 1, "vector").sum(2), rtol=1e-4, atol=1e-3)


# What every function must be able to do


@ALL
def test_batch_invariance(function: Callable[[Tensor], Tensor]) -> None:
    A = maps(4, dtype=torch.float32)
    together = function(A)
    for i in range(4):
        torch.testing.assert_close(function(A[i : i + 1])[0], together[i], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(function(A.flip(0)).flip(0), together, rtol=1e-6, atol=1e-6)


@ALL
def test_no_images_give_no_tensors(function: Callable[[Tensor], Tensor]) -> None:
    assert function(maps(0)).shape[0] == 0


@ALL
def test_dtype_and_memory_layout(function: Callable[[Tensor], Tensor]) -> None:
    A = maps()
    assert function(A).dtype == torch.float64
    assert function(A.float()).dtype == torch.float32
    exact(function(A.contiguous(memory_format=torch.channels_last)), function(A))
    before = A.clone()
    function(A)
    assert A.equal(before)


@pytest.mark.parametrize("name", ["direct", "learned", "factored", "shih vector"])
def test_bfloat16(name: str) -> None:
    A = maps(dtype=torch.bfloat16)
    out, wanted = FUNCTIONS[name](A), FUNCTIONS[name](A.float())
    assert out.dtype == torch.bfloat16
    assert (out.float() - wanted).norm() < 0.01 * wanted.norm()


def test_bfloat16_sums_in_float32() -> None:
    """512 channels of 81 positions cannot be counted in 8 bits of mantissa."""
    A = torch.ones(1, 512, 9, 9, dtype=torch.bfloat16)
    out = cooccurrence(A, threshold=0.0)
    assert out[0, 0, 4, 4].item() == 81.0


@pytest.mark.parametrize("name", ["direct", "shih tensor", "shih vector"])
def test_gradient_of_activations(name: str) -> None:
    """Shih's maximum has a kink where two offsets tie, as zeros do: its maps are moved off it."""
    A = (maps(2, 3, 3, 2, seed=3) + 0.1 * torch.rand(2, 3, 3, 2, dtype=torch.float64)).requires_grad_()
    function = {
        "direct": lambda A: cooccurrence(A, 1),
        "shih tensor": lambda A: shih_cooccurrence(A, 1),
        "shih vector": lambda A: shih_cooccurrence(A, 1, "vector"),
    }[name]
    assert torch.autograd.gradcheck(function, (A,))


def test_gradient_of_filters() -> None:
    A = maps(2, 3, 3, 2).requires_grad_()
    filter = random_filter(3, 1).requires_grad_()
    assert torch.autograd.gradcheck(cooccurrence_learned, (A, filter))
    left, right = random_filter(3, 0)[:, :2, 0, 0].requires_grad_(), random_filter(3, 1)[:2].requires_grad_()
    assert torch.autograd.gradcheck(cooccurrence_factored, (A, left, right))


@pytest.mark.parametrize("form", ["learned", "factored"])
def test_training_moves_the_filter(form: str) -> None:
    torch.manual_seed(0)
    A, target = maps(dtype=torch.float32), cooccurrence_learned(maps(), random_filter()).float()
    layer = Cooccurrence(form, channels=C, radius=R, rank=3)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(layer(A), target)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("form", ["direct", "learned", "factored"])
def test_compiles_to_one_graph(form: str) -> None:
    torch.compiler.reset()
    layer = Cooccurrence(form, channels=C, radius=R, rank=3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    A = maps(dtype=torch.float32)
    torch.testing.assert_close(compiled(A), layer(A))


def test_shih_compiles() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda A: shih_cooccurrence(A, 1), fullgraph=True, backend="eager")
    A = maps(dtype=torch.float32)
    torch.testing.assert_close(compiled(A), shih_cooccurrence(A, 1))


@pytest.mark.parametrize("form", ["direct", "learned", "factored"])
def test_exports_for_any_batch_and_size(form: str) -> None:
    layer = Cooccurrence(form, channels=C, radius=R, rank=3)
    dynamic = {
        0: torch.export.Dim("B", min=1, max=64),
        2: torch.export.Dim("H", min=2),
        3: torch.export.Dim("W", min=2),
    }
    program = torch.export.export(layer, (maps(3, dtype=torch.float32),), dynamic_shapes=(dynamic,))
    other = maps(2, H=9, W=7, seed=8, dtype=torch.float32)
    torch.testing.assert_close(program.module()(other), layer(other))


# Any shape


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (2, 4, 4, 4))),
    radius=st.integers(0, 6),
    seed=st.integers(0, 10**6),
    eps=st.sampled_from([0.0, EPS, 1.0]),
)
def test_any_shape(shape: tuple[int, int, int, int], radius: int, seed: int, eps: float) -> None:
    """1x1 maps, lone channels and radii far larger than the map included."""
    A = maps(*shape, seed=seed)
    wanted = each(lambda image: naive.cooccurrence(image, radius, eps=eps), A)
    exact(cooccurrence(A, radius, eps=eps), wanted)
    out = cooccurrence_learned(A, direct_filter(shape[1], radius, eps, torch.float64))
    exact(out, wanted)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (2, 3, 3, 3))), radius=st.integers(0, 4), seed=st.integers(0, 10**6)
)
def test_shih_of_any_shape(shape: tuple[int, int, int, int], radius: int, seed: int) -> None:
    A = maps(*shape, seed=seed)
    vectors = np.stack([naive.shih(image, radius)[0] for image in A.numpy()])
    exact(shih_cooccurrence(A, radius, "vector"), torch.from_numpy(vectors))
    exact(shih_cooccurrence(A, radius).sum((2, 3)), torch.from_numpy(vectors.sum(2)))


@settings(max_examples=30, deadline=None)
@given(shape=st.tuples(*(st.integers(1, n) for n in (3, 6, 6, 6))), value=st.sampled_from([0.0, 1.0, 7.0]))
def test_constant_maps_have_no_cooccurrences(shape: tuple[int, int, int, int], value: float) -> None:
    """Nothing exceeds the mean of a constant map, zeros included."""
    A = torch.full(shape, value)
    for function in (cooccurrence, lambda A: cooccurrence_learned(A, direct_filter(A.shape[1]))):
        assert function(A).eq(0).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_constant_map_above_a_threshold(channels: int) -> None:
    out = cooccurrence(torch.full((1, channels, 7, 7), 2.0), radius=1, threshold=1.0, eps=0.0)
    inside = 2.0 * 9 if channels > 1 else 0.0  # a lone channel has nothing to co-occur with
    assert out[0, 0, 3, 3].item() == pytest.approx(inside)
    assert out[0, 0, 0, 0].item() == pytest.approx(inside * 4 / 9)


# What is refused


@ALL
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(function: Callable[[Tensor], Tensor], value: float) -> None:
    A = maps()
    A[1, 2, 0, 3] = value
    with pytest.raises(InputError, match="NaN or infinity"):
        function(A)


def test_nan_is_refused_under_any_threshold() -> None:
    A = maps()
    A[0, 0, 0, 0] = math.nan
    for threshold in (0.5, torch.tensor([0.5, 0.5])):
        with pytest.raises(InputError, match="NaN or infinity"):
            cooccurrence(A, R, threshold)
    with pytest.raises(InputError, match="NaN or infinity"):
        cooccurrence(maps(), R, math.nan)


@ALL
@pytest.mark.parametrize(
    "A",
    [
        torch.zeros(C, 6, 4),
        torch.zeros(6),
        torch.zeros(1, 1, C, 6, 4),
        torch.zeros(1, C, 6, 4, dtype=torch.int64),
        torch.zeros(1, C, 6, 4, dtype=torch.complex64),
        torch.zeros(1, 0, 6, 4),
        torch.zeros(1, C, 0, 4),
    ],
    ids=lambda A: f"{tuple(A.shape)} {A.dtype}",
)
def test_only_floating_point_maps(function: Callable[[Tensor], Tensor], A: Tensor) -> None:
    with pytest.raises(InputError, match=r"floating-point \(B, C, H, W\)"):
        function(A)


@pytest.mark.parametrize("radius", [-1, 1.5, True, "4"])
def test_only_whole_radii(radius: object) -> None:
    for use in (cooccurrence, shih_cooccurrence):
        with pytest.raises(InputError, match="radius"):
            use(maps(), radius)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="radius"):
        Cooccurrence(radius=radius)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape", [(C, C, 3), (C, C, 3, 5), (C, C, 4, 4), (C, C + 1, 3, 3), (C + 1, C, 3, 3), (C, C, 0, 0)]
)
def test_only_square_odd_filters(shape: tuple[int, ...]) -> None:
    filter = torch.zeros(shape)
    with pytest.raises(InputError, match=r"\(C, C, S, S\)"):
        cooccurrence_learned(maps(dtype=torch.float32), filter)
    for form in ("learned", "factored"):
        with pytest.raises(InputError, match=r"\(C, C, S, S\)"):
            Cooccurrence(form, filter=filter)


def test_filter_for_other_channels() -> None:
    A = maps(channels=C + 1)
    with pytest.raises(InputError, match=f"for {C} channels, the activations have {C + 1}"):
        cooccurrence_learned(A, random_filter())
    with pytest.raises(InputError, match=f"for {C} channels, the activations have {C + 1}"):
        cooccurrence_factored(A, *factors())
    with pytest.raises(InputError, match=f"for {C} channels, the activations have {C + 1}"):
        Cooccurrence("learned", channels=C + 1, filter=random_filter())
    left, right = factors()
    with pytest.raises(InputError, match="left"):
        cooccurrence_factored(maps(), left[:, :2], right)


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'learned'"):
        Cooccurrence("lerned", channels=C)
    with pytest.raises(UnknownNameError, match="'tensor'"):
        shih_cooccurrence(maps(), form="tensors")
    with pytest.raises(UnknownNameError, match="'mean'"):
        cooccurrence(maps(), threshold="meen")
    with pytest.raises(InputError, match="channels="):
        Cooccurrence("learned")


# Files


def test_authors_layout_round_trip(tmp_path: Path) -> None:
    """A plain float32 array (C, C, S, S), as numpy writes it; the factored form writes the filter it stands for."""
    filter = random_filter().float()
    np.save(tmp_path / "authors.npy", filter.numpy())
    layer = Cooccurrence.load(tmp_path / "authors.npy")
    assert (layer.form, layer.radius) == ("learned", R)
    assert layer.full_filter().equal(filter)
    layer.save(tmp_path / "again.npy")
    assert np.load(tmp_path / "again.npy").dtype == np.float32
    np.testing.assert_array_equal(np.load(tmp_path / "again.npy"), filter.numpy())

    factored = Cooccurrence("factored", rank=2, filter=filter)
    factored.save(tmp_path / "factored.npy")
    assert Cooccurrence.load(tmp_path / "factored.npy").full_filter().equal(factored.full_filter())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.npy", "authors.npy", "factored.npy"]


def test_doubles_and_fortran_order_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.asfortranarray(random_filter().numpy()))
    assert Cooccurrence.load(tmp_path / "f.npy").full_filter().equal(random_filter().float())


@pytest.mark.parametrize("form", ["learned", "factored"])
@pytest.mark.parametrize("threshold", ["mean", 0.25])
def test_safetensors_round_trip(tmp_path: Path, form: str, threshold: str | float) -> None:
    filter = random_filter().float()
    layer = Cooccurrence(form, rank=3, threshold=threshold, eps=0.125, window_mean=True, filter=filter)
    layer.save(tmp_path / "filter.safetensors")
    again = Cooccurrence.load(tmp_path / "filter.safetensors")
    assert (again.form, again.radius, again.threshold, again.eps, again.window_mean) == (
        form,
        R,
        threshold,
        0.125,
        True,
    )
    for name, value in layer.state_dict().items():
        assert again.state_dict()[name].equal(value)
    A = maps(dtype=torch.float32)
    assert again(A).equal(layer(A))
    assert [p.name for p in tmp_path.iterdir()] == ["filter.safetensors"]


def test_half_precision_filters_are_saved(tmp_path: Path) -> None:
    layer = Cooccurrence("learned", filter=random_filter()).bfloat16()
    layer.save(tmp_path / "f.npy")
    assert Cooccurrence.load(tmp_path / "f.npy").full_filter().equal(layer.full_filter().float())


def test_direct_form_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to save"):
        Cooccurrence().save(tmp_path / "f.npy")


def test_failed_save_keeps_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "f.npy"
    path.mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError, match=r"f\.npy"):
        Cooccurrence("learned", filter=random_filter()).save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_files(tmp_path: Path) -> None:
    layer = Cooccurrence("factored", rank=3, filter=random_filter().float())
    for name in ("f.npy", "f.safetensors"):
        path = tmp_path / name
        layer.save(path)
        content = path.read_bytes()
        for wrong in (b"", content[: len(content) // 2], b"\0" * 100, b"PK\3\4" + content):
            path.write_bytes(wrong)
            with pytest.raises(InputError, match=name) as caught:
                Cooccurrence.load(path)
            assert "again" in str(caught.value)
        with pytest.raises(InputError, match="no such filter"):
            Cooccurrence.load(tmp_path / f"missing-{name}")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((C, C, 4, 4)),
        np.zeros((C, C)),
        np.zeros((C, C + 1, 3, 3)),
        np.array(["text"]),
        np.zeros((C, C, 3, 3), complex),
    ],
    ids=["even", "flat", "not square", "text", "complex"],
)
def test_arrays_that_are_no_filter(tmp_path: Path, array: NDArray[np.generic]) -> None:
    np.save(tmp_path / "f.npy", array)
    with pytest.raises(InputError, match=r"f\.npy"):
        Cooccurrence.load(tmp_path / "f.npy")


def test_pickles_and_archives_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "pickle.npy", np.array([{"a": 1}], dtype=object))
    np.savez(tmp_path / "archive.npz", a=np.zeros(3))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    for name in ("pickle.npy", "archive.npy"):
        with pytest.raises(InputError, match=name):
            Cooccurrence.load(tmp_path / name)


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [
        ({"weight": torch.zeros(C, C, 3, 3)}, {}),
        ({"weight": torch.zeros(())}, {"cooc_form": "learned"}),
        ({"other": torch.zeros(C, C, 3, 3)}, {"cooc_form": "learned"}),
        ({"weight": torch.zeros(C, C, 3, 3)}, {"cooc_form": "strange"}),
        ({"left": torch.zeros(C, 2), "right": torch.zeros(3, C, 3, 3)}, {"cooc_form": "factored"}),
    ],
    ids=["no form", "a number", "other names", "unknown form", "ranks differ"],
)
def test_safetensors_that_are_no_filter(tmp_path: Path, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    options = {"threshold": "mean", "eps": "1e-10", "window_mean": "False"}
    save_file(tensors, tmp_path / "f.safetensors", {**options, **meta})
    with pytest.raises(InputError, match=r"f\.safetensors: not a filter"):
        Cooccurrence.load(tmp_path / "f.safetensors")
