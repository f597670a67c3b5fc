"""Compact bilinear pooling: one batched product and one sum over sorted lists, without atomics.

The pairs (i, j) of channels are sorted by their bin once for each set of hashes. Then a bin is the sum of a list of
entries of the matrix B = A C^T, read in a fixed order: two runs give the same bits, which a scatter does not promise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cooc.kernels.memory import derived

BINS = 128  # of one program


@triton.jit
def _product(A, other, out, C, P, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[i, j] = sum_p A[i, p] other[j, p] of each image. "tf32x3" keeps float32's accuracy on the matrix units."""
    tiles = tl.cdiv(C, BN)
    i = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    j = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    image = tl.program_id(1).to(tl.int64)
    A += image * C * P
    other += image * C * P
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, P, BK):
        p = start + tl.arange(0, BK)
        left = tl.load(A + i[:, None] * P + p[None, :], (i < C)[:, None] & (p < P)[None, :], 0)
        right = tl.load(other + j[None, :] * P + p[:, None], (j < C)[None, :] & (p < P)[:, None], 0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    tl.store(out + image * C * C + i[:, None] * C + j[None, :], total, (i < C)[:, None] & (j < C)[None, :])


@triton.jit
def _segments(matrix, entries, lengths, out, pairs, dim, width, BD: tl.constexpr, BL: tl.constexpr):
    """Each bin: the signed sum of its list. entries (longest, width): 2 * pair + (sign is minus), -1 past its end."""
    image = tl.program_id(1).to(tl.int64)
    matrix += image * pairs
    bins = tl.program_id(0) * BD + tl.arange(0, BD)
    total = tl.zeros([BL, BD], tl.float32)
    for start in range(0, tl.load(lengths + tl.program_id(0)), BL):
        at = start + tl.arange(0, BL)
        entry = tl.load(entries + at[:, None] * width + bins[None, :])
        value = tl.load(matrix + (entry >> 1), entry >= 0, 0)
        total += tl.where(entry % 2 == 0, value, -value)
    tl.store(out + image * dim + bins, tl.sum(total, 0), bins < dim)


LIST = 16  # entries of each bin that a program reads at once


def _lists(bins: Tensor, signs: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """entries (longest list, dim) and the longest list of each group of BINS bins, both padded to whole groups."""
    width = triton.cdiv(dim, BINS) * BINS
    order = bins.argsort(stable=True)
    ordered = bins[order]
    counts = torch.bincount(bins, minlength=width)
    rank = torch.arange(len(bins), device=bins.device) - (counts.cumsum(0) - counts)[ordered]
    longest = triton.cdiv(max(int(counts.max()), 1), LIST) * LIST
    entries = torch.full((longest, width), -1, dtype=torch.int32, device=bins.device)
    entries[rank, ordered] = (2 * order + (signs[order] < 0)).int()
    return entries, counts.view(-1, BINS).amax(1).int()


def compact_bilinear(A: Tensor, other: Tensor, bins: Tensor, signs: Tensor, dim: int) -> Tensor | None:
    """The sketch of the sum over positions of A_p other_p^T. (B, dim) float32; None for what is not covered."""
    B, C, H, W = A.shape
    if B > 65535 or 2 * C * C >= 2**31:
        return None
    A, other = A.float().contiguous(), other.float().contiguous()
    entries, lengths = derived(bins, f"lists of {dim}", lambda: _lists(bins, signs, dim))
    matrix, out = A.new_empty(B, C * C), A.new_empty(B, dim)
    BM, BN = 64, 128
    _product[triton.cdiv(C, BM) * triton.cdiv(C, BN), B](
        A, other, matrix, C, H * W, BM=BM, BN=BN, BK=32, num_warps=4, num_stages=3
    )  # fmt: skip
    _segments[len(lengths), B](
        matrix, entries, lengths, out, C * C, dim, entries.shape[1], BD=BINS, BL=LIST, num_warps=4
    )  # fmt: skip
    return out
