"""The end of a network, from a block on, in training: what lies before it is frozen, and its activations are kept.

Each convolution of the block learns a change of low rank (cooc.tuning), so that what ships is small, and so that a few
thousand photos cannot overwrite what millions taught.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cooc.activations import BACKBONES, Activations
from cooc.cooccurrence import inside
from cooc.descriptor import load_backbone
from cooc.errors import InputError, UnknownNameError
from cooc.recipes import DescriptorConfig

BLOCKS = ("block5", "block4")  # the last of the five that every such network has; from the fourth on


def layer_before(config: DescriptorConfig, block: str) -> str:
    """The layer whose activations a block starts from."""
    blocks = BACKBONES[config.backbone].blocks if config.backbone in BACKBONES else {}
    if block not in blocks:
        can = [name for name, row in BACKBONES.items() if block in row.blocks]
        raise InputError(f"{config.backbone} cannot be trained from {block} on; these can: {', '.join(can)}.")
    if config.layer not in (known := list(BACKBONES[config.backbone].layers)) or config.layer == blocks[block]:
        raise UnknownNameError(f"layer of {config.backbone} behind {block}", config.layer, known)
    return blocks[block]


class LowRank(nn.Module):
    """W -> W + up @ down. Starts as nothing: up is zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        columns = weight[0].numel()
        self.up = nn.Parameter(weight.new_zeros(len(weight), rank))
        self.down = nn.Parameter((torch.randn(rank, columns) / columns**0.5).to(weight))  # by the CPU's generator

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view_as(weight)


class Shift(nn.Module):
    """b -> b + shift."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros_like(bias))

    def forward(self, bias: Tensor) -> Tensor:
        return bias + self.shift


class Block(nn.Module):
    """Padded activations (B, C, H, W) of the layer before, sizes (B, 2) -> padded maps, and their sizes.

    A picture's maps are those that it has alone: convolutions see zeros beyond its edge, not what others put there.
    """

    def __init__(self, network: Activations, before: str, *, rank: int = 0, seed: int = 0) -> None:
        super().__init__()
        named: list[tuple[str, nn.Module]] = network.network.after(before)  # type: ignore[operator]
        self.end = nn.Sequential(*(module for _, module in named)).float()
        self.channels = network.channels
        self.dtype = next(network.network.parameters()).dtype
        self.convolutions: dict[str, nn.Conv2d] = {}
        self._sizes: dict[tuple[int, ...], Tensor] = {}
        for whole, module in named:
            for inner, part in module.named_modules():
                if isinstance(part, nn.Conv2d | nn.MaxPool2d):
                    part.register_forward_pre_hook(self._look)
                if isinstance(part, nn.Conv2d):
                    self.convolutions[".".join(filter(None, (whole, inner)))] = part
        if rank:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for part in self.convolutions.values():
                    assert part.bias is not None  # batch norms are folded
                    parametrize.register_parametrization(part, "weight", LowRank(part.weight, rank))
                    parametrize.register_parametrization(part, "bias", Shift(part.bias))

    def forward(self, A: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        self._sizes = {A.shape[2:]: sizes}
        with torch.autocast(A.device.type, self.dtype, enabled=self.dtype != torch.float32):
            maps: Tensor = self.end(A)
        sizes = self._sizes[maps.shape[2:]]
        return maps.float() * inside(maps, sizes), sizes

    def _look(self, module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        """Before a convolution or a pooling: nothing beyond the edges; and where the edges are behind it."""
        (x,) = given
        kernel, stride, padding = (
            value[0] if isinstance(value, tuple) else value  # kernels are square
            for value in (module.kernel_size, module.stride, module.padding)
        )
        sizes = self._sizes[x.shape[2:]]
        behind = tuple((n + 2 * padding - kernel) // stride + 1 for n in x.shape[2:])
        self._sizes[behind] = (sizes + 2 * padding - kernel) // stride + 1
        return (x * inside(x, sizes) if kernel > 1 and isinstance(module, nn.Conv2d) else x,)

    def change(self) -> dict[str, Tensor]:
        """What was learned, as `cooc.tuning` keeps it."""
        found: dict[str, Tensor] = {}
        for name, part in self.convolutions.items():
            parts: Any = part.parametrizations
            weight, bias = parts["weight"][0], parts["bias"][0]
            found |= {f"{name}.up": weight.up, f"{name}.down": weight.down, f"{name}.shift": bias.shift}
        return {name: tensor.detach() for name, tensor in found.items()}

    @torch.no_grad()
    def load_change(self, change: dict[str, Tensor]) -> None:
        """Go on with a change that was saved and rounded."""
        for name, tensor in self.change().items():
            tensor.copy_(change[name])


def build_block(config: DescriptorConfig, block: str, device: torch.device, *, rank: int = 0, seed: int = 0) -> Block:
    """The network's part behind `layer_before(config, block)`; of rank 0 it is frozen."""
    return Block(load_backbone(config, device), layer_before(config, block), rank=rank, seed=seed).to(device)
