"""Maps of different shapes, padded to one: each gives the vector that it gives alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cooc.cooccurrence import Cooccurrence, cooccurrence
from cooc.pooler import Pooler
from cooc.pooling import MASKS, POOLINGS
from cooc.recipes import DescriptorConfig
from tests.reference import pooling as naive

C = 6
SIZES = [(5, 3), (3, 5), (4, 4), (1, 1), (5, 3), (2, 7)]


def padded(beyond: float, shift: float = 0.0) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    alone = [torch.randn(1, C, h, w, generator=generator).relu() - shift for h, w in SIZES]
    together = torch.full((len(SIZES), C, 6, 8), beyond)
    for row, A in zip(together, alone, strict=True):
        row[:, : A.shape[2], : A.shape[3]] = A[0]
    return alone, together, torch.tensor(SIZES)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cooccurrence", ["direct", "shih", "none"])
@pytest.mark.parametrize("beyond", [3.0, math.nan])
def test_padded_maps_are_each_as_alone(pooling: str, mask: str, cooccurrence: str, beyond: float) -> None:
    if cooccurrence == "none" and POOLINGS[pooling].cooccurrence and "bilinear" not in pooling:
        return  # needs a tensor
    options = {"dim": 64} if pooling == "compact-bilinear" else {}
    config = DescriptorConfig(pooling=pooling, mask=mask, cooccurrence=cooccurrence, radius=1, options=options)
    pooler, (alone, together, sizes) = Pooler(config, C), padded(beyond)
    expected = torch.cat([pooler(A) for A in alone])
    torch.testing.assert_close(pooler(together, sizes), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(pooler(together.flip(0), sizes.flip(0)).flip(0), expected, rtol=0, atol=2e-6)


def test_the_largest_of_negative_activations() -> None:
    """Zeros beyond a map would be larger than all of it."""
    pooler, (alone, together, sizes) = Pooler(DescriptorConfig(pooling="mac"), C), padded(0.0, shift=9.0)
    torch.testing.assert_close(pooler(together, sizes), torch.cat([pooler(A) for A in alone]))


def test_maps_are_pooled_in_float32_or_better() -> None:
    pooler = Pooler(DescriptorConfig(radius=1), C)
    A = torch.rand(2, C, 4, 5)
    wanted = pooler(A)
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 2e-3), (torch.float64, 1e-6)):
        found = pooler(A.to(dtype))
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=tolerance)


def test_another_layer_in_its_place() -> None:
    """Whatever the config says, it is the layer that counts."""
    A = torch.rand(1, C, 4, 5)
    one, two = (Pooler(DescriptorConfig(radius=1), C) for _ in range(2))
    two.cooccurrence = Cooccurrence(radius=2)
    torch.testing.assert_close(two(A), Pooler(DescriptorConfig(radius=2), C)(A))
    assert not torch.allclose(one(A), two(A), atol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_square_root_of_what_was_pooled(pooling: str) -> None:
    A = torch.randn(2, C, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).relu()
    options = {"dim": 64} if pooling == "compact-bilinear" else {}
    plain, rooted = (
        Pooler(DescriptorConfig(pooling=pooling, radius=1, options=options | more), C) for more in ({}, {"sqrt": True})
    )
    pooled = plain.pool(A, cooccurrence(A, radius=1))
    wanted = torch.from_numpy(np.stack([naive.signed_sqrt(row) for row in pooled.numpy()]))
    assert (pooling == "compact-bilinear") == bool((wanted < 0).any())  # its sketch has signs
    torch.testing.assert_close(rooted(A), torch.nn.functional.normalize(wanted), rtol=0, atol=1e-9)
    torch.testing.assert_close(rooted(A, torch.tensor([[4, 5], [4, 5]])), rooted(A))
