from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cooc.training.losses import LOSSES, contrastive, smooth_ap, triplet
from tests.reference import losses as reference

OPTIONS = {"contrastive": {"margin": 0.9}, "triplet": {"margin": 0.3}, "smooth-ap": {"temperature": 0.05}}


def tuples(T: int = 4, P: int = 2, N: int = 5, D: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, 1 + P + N, D, generator=generator, dtype=torch.float64)
    x = x / x.norm(dim=2, keepdim=True)
    return x[:, 0], x[:, 1 : 1 + P], x[:, 1 + P :]


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 1000), positives=st.integers(1, 3), negatives=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_equals_the_loops(name: str, seed: int, positives: int, negatives: int) -> None:
    query, positive, negative = tuples(3, positives, negatives, seed=seed)
    losses = LOSSES[name](query, positive, negative, **OPTIONS[name])
    naive = getattr(reference, name.replace("-", "_"))
    for i in range(3):
        expected = naive(query[i].tolist(), positive[i].tolist(), negative[i].tolist(), **OPTIONS[name])
        assert float(losses[i]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    inputs = tuple(t.clone().requires_grad_() for t in tuples(2, 2, 3, 4))
    assert torch.autograd.gradcheck(lambda *x: LOSSES[name](*x, **OPTIONS[name]), inputs)


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_and_no_nan_where_all_is_well(name: str) -> None:
    """Positives equal to the query, negatives opposite: nothing to learn, and the distance of 0 gives no NaN."""
    query = tuples()[0].requires_grad_()
    loss = LOSSES[name](query, query[:, None].detach(), -query[:, None].detach())
    assert float(loss.detach().abs().max()) < 1e-12
    (gradient,) = torch.autograd.grad(loss.sum(), query)
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) < 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_a_tuple_does_not_see_the_others(name: str) -> None:
    query, positive, negative = tuples()
    whole = LOSSES[name](query, positive, negative)
    alone = torch.cat([LOSSES[name](query[i : i + 1], positive[i : i + 1], negative[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-15)


def test_negatives_beyond_the_margin_do_not_count() -> None:
    query, _, negative = tuples()
    far = (query[:, None] - negative).norm(dim=2)
    loss = contrastive(query, query[:, None], negative, margin=float(far.min()) * 0.99)
    assert float(loss.abs().max()) == 0
    assert float(contrastive(query, query[:, None], negative, margin=float(far.max()) * 1.01).min()) > 0


def test_smooth_ap_tends_to_ap() -> None:
    query, positive, negative = tuples(5, 3, 6, seed=3)
    losses = smooth_ap(query, positive, negative, temperature=1e-6)
    for i in range(5):
        exact = reference.average_precision(query[i].tolist(), positive[i].tolist(), negative[i].tolist())
        assert float(losses[i]) == pytest.approx(1 - exact, abs=1e-9)


def test_triplet_is_zero_once_separated_by_the_margin() -> None:
    query, _, negative = tuples()
    gap = float(((query[:, None] - negative) ** 2).sum(2).min())
    assert float(triplet(query, query[:, None], negative, margin=gap).abs().max()) < 1e-12
    assert float(triplet(query, query[:, None], negative, margin=gap + 0.1).max()) == pytest.approx(0.1 / 5)
