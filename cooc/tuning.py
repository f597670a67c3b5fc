"""What fine-tuning changed in a network, small enough to ship: a low-rank change of some of its kernels.

    W' = W + up @ down        of a kernel, as a matrix (out, in * k * k); (Hu et al. 2022, LoRA)
    b' = b + shift

A file has the three tensors of each convolution under its name in the network, whose batch norms are folded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from cooc.errors import InputError
from cooc.files import replacing


@torch.no_grad()
def tune(network: nn.Module, change: Mapping[str, Tensor], *, partial: bool = False) -> None:
    """Add the change to the network's kernels and biases, in place. `partial`: it may end before what was changed."""
    there = dict(network.named_modules())
    for name in sorted({key.rpartition(".")[0] for key in change}):
        if partial and name not in there:
            continue
        try:
            convolution: Any = network.get_submodule(name)
            up, down, shift = (change[f"{name}.{part}"].float() for part in ("up", "down", "shift"))
            weight, bias = convolution.weight, convolution.bias
            weight += (up @ down).view_as(weight).to(weight)
            bias += shift.to(bias)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise InputError(f"This tuning is of another network or layer: {name} ({error}).") from error


def both(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One change that is as much as the two together."""
    found = dict(first)
    for key, tensor in second.items():
        part = key.rpartition(".")[2]
        if key not in found:
            found[key] = tensor
        elif part == "shift":
            found[key] = found[key].to(tensor) + tensor
        else:
            found[key] = torch.cat([found[key].to(tensor), tensor], dim=1 if part == "up" else 0)
    return found


def read_tuning(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = load(Path(path).read_bytes())
        return found
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file. `cooc train --train block5` writes one.") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path} is no tuning that cooc wrote ({error}). Copy it again.") from error


def write_tuning(path: str | os.PathLike[str], change: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """In float16: a change needs fewer digits than what it changes."""
    stored = {name: tensor.detach().cpu().half().contiguous() for name, tensor in change.items()}
    with replacing(path) as file:
        file.write(save(stored, {"about": json.dumps(dict(about))}))
