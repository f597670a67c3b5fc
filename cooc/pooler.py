"""Maps -> unit vectors: mask, co-occurrence and pooling, joined as a recipe says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cooc import kernels
from cooc.cooccurrence import EPS, Cooccurrence, shih_cooccurrence
from cooc.pooling import POOLINGS, l2_normalise, mask
from cooc.recipes import DescriptorConfig, find_filter

__all__ = ["Pooler"]

LINEAR = {"chco-sct": (True, True), "sct": (True, False), "chco": (False, True)}  # alpha counts, beta counts


class Pooler(nn.Module):
    """A (B, C, H, W) -> (B, D) unit vectors: mask, co-occurrence, pooling, L2. Works in float32 whatever A is.

    `sizes` (B, 2): rows and columns that count, for maps of different shapes that were padded to one. Each vector is
    then that of its map alone.
    """

    def __init__(self, config: DescriptorConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        pooling = POOLINGS[config.pooling]
        self.pool: Callable[[Tensor, Tensor | None], Tensor] = pooling.build(channels, **dict(config.options))
        self.cooccurrence = _cooccurrence(config) if pooling.cooccurrence else None

    def forward(self, A: Tensor, sizes: Tensor | None = None) -> Tensor:
        if sizes is not None:
            return self._of_sizes(A, sizes)
        A = A.float()
        A = mask(A, self.config.mask, **({"sigma": self.config.sigma} if self.config.mask == "centre" else {}))
        pooled = self._without_tensor(A)
        if pooled is None:
            pooled = self.pool(A, None if self.cooccurrence is None else self.cooccurrence(A))
        return l2_normalise(pooled)

    def _of_sizes(self, A: Tensor, sizes: Tensor) -> Tensor:
        """Masks, regions and thresholds depend on a map's own shape: maps of one shape are pooled together."""
        shapes, which = torch.unique(sizes, dim=0, return_inverse=True)
        groups = [(which == i).nonzero()[:, 0] for i in range(len(shapes))]
        parts = [self(A[rows, :, :h, :w]) for rows, (h, w) in zip(groups, shapes.tolist(), strict=True)]
        return torch.cat(parts)[torch.cat(groups).argsort()]

    def _without_tensor(self, A: Tensor) -> Tensor | None:
        """Linear pooling of the direct tensor by a GPU kernel that never makes C_T, where there is one; else None."""
        options = {"a": 2, "b": 2, "eps": 1e-5} | dict(self.config.options)
        if self.config.pooling not in LINEAR or self.config.cooccurrence != "direct":
            return None
        if (options["a"], options["b"]) != (2, 2):
            return None
        spatial, rarity = LINEAR[self.config.pooling]
        divisor, rare = max(A.shape[1] - 1, 1), options["eps"]
        return kernels.linear_pooling(
            A, self.config.radius, EPS, divisor, rarity_eps=rare, spatial=spatial, rarity=rarity
        )


def _cooccurrence(config: DescriptorConfig) -> nn.Module | None:
    if config.cooccurrence == "learned":
        return Cooccurrence.load(find_filter(config.filter)).requires_grad_(False)
    if config.cooccurrence == "shih":
        return Shih(config.radius)
    return Cooccurrence(radius=config.radius) if config.cooccurrence == "direct" else None


class Shih(nn.Module):
    """Shih et al.'s co-occurrence tensor in the place of C_T (the paper's table 5)."""

    def __init__(self, radius: int) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, A: Tensor) -> Tensor:
        return shih_cooccurrence(A, self.radius)
