"""CoOcNet (section 5 of the paper): activations -> co-occurrences with a learned filter -> pooled unit vectors.

It is the `Pooler` of a recipe, in which the filter is a parameter; with the filter that comes out, a recipe gives the
same vectors. Where the network's last block is trained, too, it stands before the pooler (cooc/training/block.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cooc.cooccurrence import Cooccurrence, Threshold, cooccurrence, cooccurrence_learned, direct_filter
from cooc.errors import InputError, UnknownNameError
from cooc.pooler import Pooler
from cooc.pooling import POOLINGS
from cooc.recipes import DescriptorConfig
from cooc.training.block import BLOCKS, Block
from cooc.training.cache import ActivationCache
from cooc.whitening import Whitening

FORMS = ("learned", "factored")
EXPONENTS = {"gem": ("p", 3.0), "sct": ("b", 2.0), "chco-sct": ("b", 2.0)}  # of each pooling: its name and usual value
TRAINABLE = ("filter", *BLOCKS, "exponent", "whitening")


class Delta(Cooccurrence):
    """F = direct + delta, where delta is trained. The convolution is linear, so the direct part keeps its closed form
    in float32, and delta may be multiplied in bfloat16 with all of its digits. (Beside the ones of the direct filter,
    bfloat16 would not see a change below 0.004.)"""

    def __init__(self, channels: int, radius: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(radius=radius)
        self.dtype = dtype
        delta = torch.zeros(channels, channels, 2 * radius + 1, 2 * radius + 1)
        self.delta = nn.Parameter(delta.contiguous(memory_format=torch.channels_last))  # as batches are

    def tensor(self, A: Tensor, threshold: Threshold) -> Tensor:
        with torch.autocast(A.device.type, self.dtype, enabled=self.dtype != torch.float32):
            change = cooccurrence_learned(A, self.delta, threshold)
        return cooccurrence(A, self.radius, threshold) + change


class CoOcNet(nn.Module):
    """Padded activations A (B, C, H, W), sizes (B, 2) -> unit vectors (B, D). Starts as its recipe is.

    block: the end of the network, where activations are of a layer before the recipe's; it learns unless it is frozen.
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
        block: Block | None = None,
    ) -> None:
        super().__init__()
        self.config, self.form, self.parts, self.block = config, form, tuple(train), block
        self.channels = channels = channels if block is None else block.channels
        if form not in FORMS:
            raise UnknownNameError("form of a filter", form, FORMS)
        for name in train:
            if name not in TRAINABLE:
                raise UnknownNameError("part to train", name, TRAINABLE)
        if "filter" in train and not POOLINGS[config.pooling].cooccurrence:
            raise InputError(f"Pooling {config.pooling} does not look at co-occurrences: there is no filter to train.")
        if "exponent" in train and config.pooling not in EXPONENTS:
            raise InputError(f"Pooling {config.pooling} has no exponent to train; these have: {', '.join(EXPONENTS)}.")
        if "whitening" in train and whitening is None:
            raise InputError("There is no whitening layer to train; say how many dimensions it has (--layer DIM).")
        self.pooler = Pooler(config, channels)
        if "filter" in train and form == "learned":
            self.pooler.cooccurrence = Delta(channels, config.radius, dtype)
        elif "filter" in train:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.pooler.cooccurrence = Cooccurrence("factored", channels=channels, radius=config.radius, rank=rank)
        if "exponent" in train:
            name, usual = EXPONENTS[config.pooling]
            self.exponent = nn.Parameter(torch.tensor(float(dict(config.options).get(name, usual))))
        self.layer = None
        if whitening is not None:
            self.layer = Whitening(whitening.mean, whitening.projection.detach().clone(), whitening.meta)
            self.layer.projection.requires_grad_("whitening" in train)

    def forward(self, A: Tensor, sizes: Tensor | None = None) -> Tensor:
        vectors = self.raw(A, sizes)
        return vectors if self.layer is None else torch.as_tensor(self.layer(vectors))

    def raw(self, A: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Before the whitening layer. (B, D')"""
        A, sizes = self.maps(A, sizes)
        options = {EXPONENTS[self.config.pooling][0]: self.exponent} if "exponent" in self.parts else {}
        return torch.as_tensor(self.pooler(A, sizes, **options))

    def maps(self, A: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the pooler sees: activations of the recipe's layer."""
        if self.block is None:
            return A, sizes
        whole = torch.tensor(A.shape[2:], device=A.device).expand(len(A), 2)
        maps, sizes = self.block(A, whole if sizes is None else sizes)
        return maps, sizes

    def _learned(self) -> Cooccurrence:
        layer = self.pooler.cooccurrence
        if "filter" not in self.parts or not isinstance(layer, Cooccurrence):
            raise InputError("No filter was trained here.")
        return layer

    def filter(self) -> Cooccurrence:
        """What was learned, as the layer that a recipe loads."""
        layer = self._learned()
        if isinstance(layer, Delta):
            delta = layer.delta.detach().float().cpu()
            return Cooccurrence("learned", filter=direct_filter(self.channels, layer.radius) + delta)
        found = Cooccurrence("factored", channels=self.channels, radius=layer.radius, rank=len(layer.right))
        found.load_state_dict({name: value.cpu() for name, value in layer.state_dict().items()})
        return found

    @torch.no_grad()
    def load_filter(self, saved: Cooccurrence) -> None:
        """Go on with a filter that was saved, rounded or compressed."""
        layer = self._learned()
        if isinstance(layer, Delta):
            layer.delta.copy_(saved.full_filter() - direct_filter(self.channels, layer.radius))
        else:
            layer.load_state_dict(saved.state_dict())

    def options(self) -> dict[str, float]:
        """The options of the recipe's pooling, with the exponent as it was learned."""
        found = dict(self.config.options)
        if "exponent" in self.parts:
            found[EXPONENTS[self.config.pooling][0]] = float(self.exponent.detach())
        return found


def describe(
    net: CoOcNet, cache: ActivationCache, pictures: Sequence[int] | Tensor, *, raw: bool = False, positions: int = 0
) -> Tensor:
    """Vectors of pictures in the cache, in groups of like shape; with gradients if they are on. (n, D)

    A group has at most `positions` (0: what suits the device). On a GPU all are padded to one shape: for each new one
    cuDNN plans its convolutions again, which takes longer than the padding.
    """
    positions = positions or (1 << 13 if cache.device.type == "cpu" else 1 << 17)
    chosen = torch.as_tensor(pictures, dtype=torch.int64)
    parts: list[Tensor] = []
    order: list[Tensor] = []
    shape = cache.largest if cache.device.type == "cuda" else None
    groups = cache.groups(chosen, positions)
    if shape is not None:
        most, every = max(1, positions // (shape[0] * shape[1])), torch.arange(len(chosen))
        groups = (every[first : first + most] for first in range(0, len(chosen), most))
    for group in groups:
        A, sizes = cache.batch(chosen[group], shape)
        parts.append(net.raw(A, sizes) if raw else net(A, sizes))
        order.append(group)
    return torch.cat(parts)[torch.cat(order).argsort().to(parts[0].device)]
