"""Maps -> unit vectors: mask, co-occurrence and pooling, joined as a recipe says.

The option `sqrt` takes the signed square root of what was pooled: the few channels that fire most no longer decide.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cooc import kernels
from cooc.cooccurrence import Cooccurrence, shih_cooccurrence
from cooc.pooling import POOLINGS, l2_normalise, mask, shapes, signed_sqrt
from cooc.recipes import DescriptorConfig, find_filter

LINEAR = {"chco-sct": (True, True), "sct": (True, False), "chco": (False, True)}  # alpha counts, beta counts


class Pooler(nn.Module):
    """A (B, C, H, W) -> (B, D) unit vectors: mask, co-occurrence, pooling, square root, L2. Works in float32 or better.

    `sizes` (B, 2): rows and columns that count, for maps of different shapes that were padded to one. Each vector is
    then that of its map alone. `options` take the place of the config's, such as an exponent that is being learned.
    """

    def __init__(self, config: DescriptorConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        pooling, options = POOLINGS[config.pooling], dict(config.options)
        self.root = bool(options.pop("sqrt", False))
        self.pool = pooling.build(channels, **options)
        self.cooccurrence = _cooccurrence(config) if pooling.cooccurrence else None

    def forward(self, A: Tensor, sizes: Tensor | None = None, **options: Tensor) -> Tensor:
        A = A.to(torch.promote_types(A.dtype, torch.float32))
        A = mask(A, self.config.mask, sigma=self.config.sigma, sizes=sizes)
        pooled = None if sizes is not None or options else self._without_tensor(A)
        if pooled is None:
            C = None if self.cooccurrence is None else self.cooccurrence(A, sizes)
            pooled = self._pooled(A, C, sizes, options)
        return l2_normalise(signed_sqrt(pooled) if self.root else pooled)

    def _pooled(self, A: Tensor, C: Tensor | None, sizes: Tensor | None, options: dict[str, Tensor]) -> Tensor:
        """Zeros beyond a map change only the length of a vector, unless its pooling sees where the map ends."""
        if sizes is None or not POOLINGS[self.config.pooling].border:
            return self.pool(A, C, **options)
        parts, order = [], []
        for rows, h, w in shapes(sizes):
            inner = A[rows, :, :h, :w], None if C is None else C[rows, :, :h, :w]
            parts.append(self.pool(*inner, **options))
            order.append(rows)
        return torch.cat(parts)[torch.cat(order).argsort()]

    def _without_tensor(self, A: Tensor) -> Tensor | None:
        """Linear pooling of the direct tensor by a GPU kernel that never makes C_T, where there is one; else None."""
        layer, options = self.cooccurrence, {"a": 2, "b": 2, "eps": 1e-5} | dict(self.config.options)
        if self.config.pooling not in LINEAR or (options["a"], options["b"]) != (2, 2):
            return None
        if type(layer) is not Cooccurrence or (layer.form, layer.threshold) != ("direct", "mean"):
            return None
        spatial, rarity = LINEAR[self.config.pooling]
        size = A, layer.radius, layer.eps, max(A.shape[1] - 1, 1)
        return kernels.linear_pooling(*size, rarity_eps=options["eps"], spatial=spatial, rarity=rarity)


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

    def forward(self, A: Tensor, sizes: Tensor | None = None) -> Tensor:
        return shih_cooccurrence(A, self.radius)  # zeros beyond a map correlate with nothing
