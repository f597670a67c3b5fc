"""Fused GPU kernels (Triton) for what the torch forms do in several passes. Inference only.

Each function gives a tensor, or None: then the caller computes its torch form, which stays the reference. Kernels are
used for CUDA tensors that need no gradient, outside torch.compile and torch.export, when Triton is installed.
COOC_KERNELS=0 in the environment turns them off. One that fails (a compiler that cannot build it, say) is reported by a
warning and not tried again.

    direct.py     C_T by the closed form
    linear.py     linear pooling of it, without making it
    factored.py   C_T with the direct filter plus low rank
    sketch.py     compact bilinear pooling

Those are what a Descriptor reaches, which pools float32 maps. A full filter is a convolution, and cuDNN has that.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Any, cast

import torch
from torch import Tensor

from cooc.errors import first_line

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_failed: set[str] = set()


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """May kernels work on these?"""
    if torch.compiler.is_compiling():
        return False
    if any(x.device.type != "cuda" or x.dtype not in DTYPES or x.numel() == 0 for x in tensors):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return os.environ.get("COOC_KERNELS", "1") != "0" and _triton()


def _attempt(name: str, function: str, tensors: tuple[Tensor, ...], *options: Any, **named: Any) -> Any:
    """A function of one of the files, which import Triton, and so are imported when a kernel is wanted."""
    if not usable(*tensors) or name in _failed:
        return None
    try:
        with torch.cuda.device(tensors[0].device):
            return getattr(importlib.import_module(f"cooc.kernels.{name}"), function)(*tensors, *options, **named)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel's compiler says: the torch form gives the same result
        _failed.add(name)
        reason = first_line(error)[:200]
        logging.getLogger("cooc").warning("GPU kernel %r failed (%s); torch's own operations are used.", name, reason)
        return None


def cooccurrence(A: Tensor, radius: int, threshold: Tensor | None, eps: float, divisor: float) -> Tensor | None:
    """C_T by the closed form. Thresholds are (B,) or (1,), None for the mean of each image."""
    found: tuple[Tensor, Tensor] | None = _attempt("direct", "tensor", (A,), radius, threshold, eps, divisor)
    return None if found is None else found[0]


def linear_pooling(
    A: Tensor, radius: int, eps: float, divisor: float, *, rarity_eps: float, spatial: bool, rarity: bool
) -> Tensor | None:
    """ChCO-SC_T (spatial and rarity), SC_T (spatial) or ChCO (rarity) of the direct tensor, which is never made."""
    weights = {"rarity_eps": rarity_eps, "spatial": spatial, "rarity": rarity}
    return cast(Tensor | None, _attempt("linear", "linear_pooling", (A,), radius, eps, divisor, **weights))


def cooccurrence_factored(
    A: Tensor, left: Tensor, right: Tensor, threshold: Tensor | None, eps: float, divisor: float
) -> Tensor | None:
    """C_T with the direct filter plus left @ right, of float32 maps."""
    return cast(Tensor | None, _attempt("factored", "factored", (A, left, right), threshold, eps, divisor))


def compact_bilinear(A: Tensor, other: Tensor, bins: Tensor, signs: Tensor, dim: int) -> Tensor | None:
    """Tensor Sketch of the sum over positions of A_p other_p^T; signs are 1 or -1."""
    return cast(Tensor | None, _attempt("sketch", "compact_bilinear", (A, other), bins, signs, dim))
