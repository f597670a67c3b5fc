"""Shih et al.'s co-occurrence on the matrix units: the best offset of each pair of channels, then the tensor.

Maps are laid out position by position with zeros around them, so that an offset is a shift by whole rows of channels.
A program owns a tile of pairs (k, w), computes its correlation for one offset after the other and keeps the best value
and its offset in registers; nothing of size offsets x C x C is stored. The tensor is then, again for each offset, the
product of the 0/1 matrix [o* = o] with the shifted maps.

Matrix units multiply bfloat16. A float32 map is the sum of two of them, high + low, and the product of the two low
parts, 2^-18 of the whole, is left out: about float32's own rounding over a whole map. Where two offsets are that close
to a tie, another of the two may win than in the torch form. Maps that are bfloat16 numbers (a bfloat16 network, no
mask) lose nothing at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cooc.kernels.matrix import dot

__all__ = ["shih_cooccurrence"]

BLOCK = 64  # positions, or channels, that one product sums over
TILE = 128  # channels are padded to a multiple of it


@triton.jit
def _best_offsets(
    high, low, best_out, where_out, C, lines, width, first, span,
    RADIUS: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c(k, w) and o*(k, w). high, low (B, lines, C); `first` is the line of row 0, `span` all lines of the map."""
    tiles = C // BN
    k = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    w = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    image = tl.program_id(1).to(tl.int64)
    start = image * lines * C
    best = tl.full([BM, BN], float("-inf"), tl.float32)
    where = tl.zeros([BM, BN], tl.int32)
    line = tl.arange(0, BK)
    SIDE: tl.constexpr = 2 * RADIUS + 1
    for offset in range(SIDE * SIDE):
        shift = (offset // SIDE - RADIUS) * width + offset % SIDE - RADIUS
        own = start + (first + line)[:, None] * C + k[None, :]
        other = start + (first + shift + line)[:, None] * C + w[None, :]
        total = tl.zeros([BM, BN], tl.float32)
        for step in range(0, span, BK):
            own_high = tl.trans(tl.load(high + own + step * C))
            other_high = tl.load(high + other + step * C)
            total = dot(own_high, other_high, total, "tf32")
            if SPLIT:
                total = dot(own_high, tl.load(low + other + step * C), total, "tf32")
                total = dot(tl.trans(tl.load(low + own + step * C)), other_high, total, "tf32")
        better = total > best
        best = tl.where(better, total, best)
        where = tl.where(better, offset, where)
    at = image * C * C + k[:, None] * C + w[None, :]
    tl.store(best_out + at, best)
    tl.store(where_out + at, where.to(tl.int16))


@triton.jit
def _partners(
    A, high, low, where_in, out, channels, C, H, W, lines, width, first,
    RADIUS: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """C''(p, k) = a_p^k sum_w a_(p + o*(k,w))^w. A, out (B, channels, P)."""
    P = H * W
    k = tl.program_id(0) * BM + tl.arange(0, BM)
    p = tl.program_id(1) * BN + tl.arange(0, BN)
    image = tl.program_id(2).to(tl.int64)
    here = tl.minimum(p, P - 1)
    line = first + here // W * width + here % W + RADIUS
    maps = image * lines * C + line[None, :] * C
    where_in += image * C * C
    total = tl.zeros([BM, BN], tl.float32)
    SIDE: tl.constexpr = 2 * RADIUS + 1
    for block in range(0, C, BK):
        w = block + tl.arange(0, BK)
        where = tl.load(where_in + k[:, None] * C + w[None, :])
        for offset in range(SIDE * SIDE):
            shift = (offset // SIDE - RADIUS) * width + offset % SIDE - RADIUS
            chosen = tl.where(where == offset, 1.0, 0.0).to(tl.bfloat16)
            total = dot(chosen, tl.load(high + maps + shift * C + w[:, None]), total, "tf32")
            if SPLIT:
                total = dot(chosen, tl.load(low + maps + shift * C + w[:, None]), total, "tf32")
    at = image * channels * P + k[:, None] * P + p[None, :]
    inside = (k < channels)[:, None] & (p < P)[None, :]
    own = tl.load(A + at, inside, 0).to(tl.float32)
    tl.store(out + at, (own * total).to(out.dtype.element_ty), inside)


def shih_cooccurrence(A: Tensor, radius: int, form: str) -> Tensor | None:
    """As `cooccurrence.shih_cooccurrence`; None for what is not covered."""
    B, C, H, W = A.shape
    if B > 65535 or radius > 16 or A.dtype == torch.float16:
        return None
    A = A.contiguous()
    padded, width = triton.cdiv(C, TILE) * TILE, W + 2 * radius
    span = H * width
    first = radius + radius * width  # a shift to the left of the first row needs `radius` lines before it
    lines = radius + (H + 2 * radius) * width + radius + BLOCK
    split = A.dtype == torch.float32

    def laid_out(maps: Tensor) -> Tensor:
        out = torch.zeros(B, lines, padded, dtype=torch.bfloat16, device=A.device)
        grid = out[:, first : first + span].view(B, H, width, padded)
        grid[:, :, radius : radius + W, :C] = maps.permute(0, 2, 3, 1)
        return out

    high = laid_out(A)
    low = laid_out(A - A.to(torch.bfloat16).to(A.dtype)) if split else high
    best = torch.empty(B, padded, padded, dtype=torch.float32, device=A.device)
    where = torch.empty(B, padded, padded, dtype=torch.int16, device=A.device)
    tiles = {"BM": 128, "BN": 128, "BK": BLOCK, "num_warps": 8, "num_stages": 3}
    _best_offsets[(padded // tiles["BM"]) * (padded // tiles["BN"]), B](
        high, low, best, where, padded, lines, width, first, span, RADIUS=radius, SPLIT=split, **tiles
    )  # fmt: skip
    if form == "vector":
        return best[:, :C, :C].to(A.dtype)
    out = torch.empty_like(A)
    tiles = {"BM": 128, "BN": 128, "BK": BLOCK, "num_warps": 8, "num_stages": 3}
    _partners[padded // tiles["BM"], triton.cdiv(H * W, tiles["BN"]), B](
        A, high, low, where, out, C, padded, H, W, lines, width, first, RADIUS=radius, SPLIT=split, **tiles
    )  # fmt: skip
    return out
