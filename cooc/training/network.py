"""CoOcNet (section 5 of the paper): activations -> co-occurrences with a learned filter -> pooled unit vectors.

Only what is learned differs from `descriptor.Pooler`; with the filter that comes out, both give the same vectors.

The filter is F = direct + delta, and delta is what is trained: the convolution is linear, so the direct part keeps its
closed form in float32, and delta may be multiplied in bfloat16 with all of its digits. (Beside the ones of the direct
filter, bfloat16 would not see a change below 0.004.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cooc.cooccurrence import (
    Cooccurrence,
    cooccurrence,
    cooccurrence_factored,
    cooccurrence_learned,
    direct_filter,
)
from cooc.errors import InputError, UnknownNameError
from cooc.pooling import POOLINGS, l2_normalise
from cooc.recipes import DescriptorConfig
from cooc.training.cache import ActivationCache, PaddedBatch
from cooc.whitening import Whitening, whiten

__all__ = ["EXPONENTS", "FORMS", "TRAINABLE", "CoOcNet", "describe"]

FORMS = ("learned", "factored")
EXPONENTS = {"gem": "p", "sct": "b", "chco-sct": "b"}  # the exponent that each pooling has
TRAINABLE = ("filter", "exponent", "whitening")
UNPADDED = ("rmac", "spoc")  # their regions and weights follow the map's border, which padding hides


class WhiteningLayer(nn.Module):
    """A fitted whitening as the last layer of a network."""

    mean: Tensor

    def __init__(self, whitening: Whitening, trained: bool) -> None:
        super().__init__()
        self.meta = whitening.meta
        self.register_buffer("mean", whitening.mean)
        self.projection = nn.Parameter(whitening.projection, requires_grad=trained)  # (d, D)

    def forward(self, vectors: Tensor) -> Tensor:
        return whiten(vectors, Whitening(self.mean, self.projection))


class CoOcNet(nn.Module):
    """Padded activations -> unit vectors (B, D). Starts as the direct form, whatever is trained.

    form: "learned", a full delta (C, C, S, S), or "factored", delta = left @ right of the given rank.
    train: any of "filter", "exponent" (of the pooling: GeM's p, b of Eq. 8) and "whitening" (the layer given).
    whitening: a last layer, so that the loss sees vectors as a search does; fixed unless it is trained.
    """

    def __init__(
        self,
        config: DescriptorConfig,
        channels: int,
        *,
        form: str = "learned",
        rank: int = 32,
        train: Sequence[str] = ("filter",),
        whitening: Whitening | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.channels, self.form, self.dtype = config, channels, form, dtype
        pooling = POOLINGS[config.pooling]
        if form not in FORMS:
            raise UnknownNameError("form of a filter", form, FORMS)
        for name in train:
            if name not in TRAINABLE:
                raise UnknownNameError("part to train", name, TRAINABLE)
        if config.pooling in UNPADDED:
            raise InputError(
                f"Pooling {config.pooling} looks at the border of the map: it cannot be trained in batches."
            )
        if "filter" in train and not pooling.cooccurrence:
            raise InputError(f"Pooling {config.pooling} does not look at co-occurrences: there is no filter to train.")
        if "exponent" in train and config.pooling not in EXPONENTS:
            raise InputError(f"Pooling {config.pooling} has no exponent to train; these have: {', '.join(EXPONENTS)}.")
        if "whitening" in train and whitening is None:
            raise InputError("There is no whitening layer to train; say how many dimensions it has (--layer DIM).")
        self.pool = pooling.build(channels, **dict(config.options))
        self.parts = tuple(train)
        side = 2 * config.radius + 1
        if "filter" in train and form == "learned":
            delta = torch.zeros(channels, channels, side, side)
            self.delta = nn.Parameter(delta.contiguous(memory_format=torch.channels_last))  # as batches are
        elif "filter" in train:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                start = Cooccurrence("factored", channels=channels, radius=config.radius, rank=rank)
            self.left, self.right = start.left, start.right
        if "exponent" in train:
            start_at = dict(config.options).get(EXPONENTS[config.pooling], 3.0 if config.pooling == "gem" else 2.0)
            self.exponent = nn.Parameter(torch.tensor(float(start_at)))
        self.layer = None if whitening is None else WhiteningLayer(whitening, trained="whitening" in train)

    def forward(self, batch: PaddedBatch) -> Tensor:
        vectors = self.raw(batch)
        return vectors if self.layer is None else torch.as_tensor(self.layer(vectors))

    def raw(self, batch: PaddedBatch) -> Tensor:
        """Before the whitening layer. (B, D')"""
        A = batch.A
        C = self.cooccurrence(A, batch.mean) if POOLINGS[self.config.pooling].cooccurrence else None
        options = {EXPONENTS[self.config.pooling]: self.exponent} if "exponent" in self.parts else {}
        return l2_normalise(self.pool(A, C, **options))

    def cooccurrence(self, A: Tensor, threshold: Tensor) -> Tensor:
        """C_T with the filter as it is now; the threshold is the mean of the picture without its padding."""
        radius = self.config.radius
        if "filter" not in self.parts:
            return cooccurrence(A, radius, threshold)
        if self.form == "factored":
            return cooccurrence_factored(A, self.left, self.right, threshold)
        with torch.autocast(A.device.type, self.dtype, enabled=self.dtype != torch.float32):
            change = cooccurrence_learned(A, self.delta, threshold)
        return cooccurrence(A, radius, threshold) + change

    def filter(self) -> Cooccurrence:
        """What was learned, as the layer that a recipe loads."""
        if "filter" not in self.parts:
            raise InputError("No filter was trained here.")
        radius = self.config.radius
        if self.form == "learned":
            full = direct_filter(self.channels, radius) + self.delta.detach().float().cpu()
            return Cooccurrence("learned", filter=full)
        layer = Cooccurrence("factored", channels=self.channels, radius=radius, rank=len(self.right))
        layer.load_state_dict({"left": self.left.detach().cpu(), "right": self.right.detach().cpu()})
        return layer

    @torch.no_grad()
    def load_filter(self, layer: Cooccurrence) -> None:
        """Go on with a filter that was saved, rounded or compressed."""
        if self.form == "learned":
            full = layer.full_filter()
            self.delta.copy_(full - direct_filter(self.channels, self.config.radius))
        else:
            self.left.copy_(layer.left)
            self.right.copy_(layer.right)


def describe(
    net: CoOcNet, cache: ActivationCache, pictures: Sequence[int] | Tensor, *, positions: int, raw: bool = False
) -> Tensor:
    """Vectors of pictures in the cache, in groups of like shape; with gradients if they are on. (n, D)

    On a GPU all are padded to one shape: for each new one cuDNN plans its convolutions anew, which takes longer than
    the padding.
    """
    chosen = torch.as_tensor(pictures, dtype=torch.int64)
    parts: list[Tensor] = []
    order: list[Tensor] = []
    shape = cache.largest if cache.device.type == "cuda" else None
    groups = cache.groups(chosen, positions)
    if shape is not None:
        most, every = max(1, positions // (shape[0] * shape[1])), torch.arange(len(chosen))
        groups = (every[first : first + most] for first in range(0, len(chosen), most))
    for group in groups:
        batch = cache.batch(chosen[group], net.config.mask, net.config.sigma, shape)
        parts.append(net.raw(batch) if raw else net(batch))
        order.append(group)
    return torch.cat(parts)[torch.cat(order).argsort().to(parts[0].device)]
