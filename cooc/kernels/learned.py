"""Learned filters: the convolution as one product on the matrix units, and the factored form as two thin ones.

Full filter, bfloat16: an implicit matrix product. Rows are the positions of all images, columns the output channels,
and the sum runs over S*S taps times the input channels; maps are laid out position by position with zeros around them,
so a tap is a shift by whole rows. The mask and the division are its epilogue.

Factored, direct + left @ right: all taps of the R thin channels are one plain product, (S*S*R, C) @ (C, HW), which runs
at the matrix units' rate (a convolution to R channels would fetch its input S*S times for R columns). What is left is
to add up the S*S shifted results, widen them to C channels and add them to the direct tensor: one pass over C_T.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cooc.kernels import direct
from cooc.kernels.matrix import dot
from cooc.kernels.memory import derived

__all__ = ["TILES", "factored", "full"]

# Positions, channels and stages of a program: the first whose channels divide those of the filter is used.
TILES = ((128, 256, 4), (128, 256, 3), (256, 128, 3), (128, 128, 4), (128, 64, 4))


@triton.jit
def _convolve(
    maps, filter, A, t_in, out, scale, C, H, W, M,
    RADIUS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = rho * scale * sum over taps and channels. maps (B, H+2r, W+2r, C), filter (S*S*C, C), A and out NHWC."""
    SIDE: tl.constexpr = 2 * RADIUS + 1
    rows, columns = tl.cdiv(M, BM), tl.cdiv(C, BN)
    group = tl.program_id(0) // (GROUP * columns)  # programs that share maps and filters run at the same time
    size = tl.minimum(rows - group * GROUP, GROUP)
    row = group * GROUP + tl.program_id(0) % (GROUP * columns) % size
    column = tl.program_id(0) % (GROUP * columns) // size
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    position = tl.minimum(m, M - 1)
    image = position // (H * W)
    y, x = position % (H * W) // W, position % W
    width = W + 2 * RADIUS
    corner = ((image * (H + 2 * RADIUS) + y) * width + x).to(tl.int64) * C
    c = tl.arange(0, BK)
    left = maps + corner[:, None] + c[None, :]
    right = filter + c[:, None] * C + n[None, :]
    steps = C // BK
    total = tl.zeros([BM, BN], tl.float32)
    for step in range(SIDE * SIDE * steps):
        tap = step // steps
        shift = (tap // SIDE * width + tap % SIDE) * C + step % steps * BK
        total = dot(tl.load(left + shift), tl.load(right), total, "tf32")
        right += BK * C
    at = m.to(tl.int64)[:, None] * C + n[None, :]
    inside = (m < M)[:, None] & (n < C)[None, :]
    rho = tl.load(A + at, inside, 0).to(tl.float32) > tl.load(t_in + image)[:, None]
    tl.store(out + at, tl.where(rho, total * scale, 0).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["W"])
def _widen(
    thin, left, A, t_in, out, scale, C, H, W,
    RADIUS: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out += rho * scale * left @ (the shifted sum of thin). thin (B, S*S, R, P), left (C, R), A and out (B, C, P)."""
    SIDE: tl.constexpr = 2 * RADIUS + 1
    P = H * W
    p, r, image = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BR), tl.program_id(1).to(tl.int64)
    y, x = p // W, p % W
    thin += image * SIDE * SIDE * RANK * P
    low = tl.zeros([BR, BP], tl.float32)
    for dy in range(SIDE):
        for dx in tl.static_range(SIDE):
            v, u = y + dy - RADIUS, x + (dx - RADIUS)
            inside = (r < RANK)[:, None] & ((p < P) & (v >= 0) & (v < H) & (u >= 0) & (u < W))[None, :]
            line = (dy * SIDE + dx) * RANK + r
            low += tl.load(thin + line[:, None] * P + (v * W + u)[None, :], inside, 0).to(tl.float32)
    narrow = low.to(left.dtype.element_ty)
    t = tl.load(t_in + image)
    for start in range(0, C, BC):
        k = start + tl.arange(0, BC)
        weights = tl.load(left + k[:, None] * RANK + r[None, :], (k < C)[:, None] & (r < RANK)[None, :], 0)
        delta = dot(weights, narrow, tl.zeros([BC, BP], tl.float32), PRECISION) * scale
        at = image * C * P + k[:, None] * P + p[None, :]
        inside = (k < C)[:, None] & (p < P)[None, :]
        rho = tl.load(A + at, inside, 0).to(tl.float32) > t
        found = tl.load(out + at, inside, 0).to(tl.float32) + tl.where(rho, delta, 0)
        tl.store(out + at, found.to(out.dtype.element_ty), inside)


def _thresholds(A: Tensor, threshold: Tensor | None) -> Tensor:
    t = A.float().mean((1, 2, 3)) if threshold is None else threshold.to(A.device, torch.float32)
    return t.expand(A.shape[0]).contiguous()


def full(
    A: Tensor, filter: Tensor, threshold: Tensor | None, divisor: float, tile: tuple[int, int, int] | None = None
) -> Tensor | None:
    """C_T with a full filter (C, C, S, S), channels-last, for bfloat16 and channels in multiples of 64; else None."""
    B, C, H, W = A.shape
    radius = filter.shape[2] // 2
    if A.dtype != torch.bfloat16 or C % (tile[1] if tile else 64) or B * H * W * C >= 2**31:
        return None
    A = A.contiguous(memory_format=torch.channels_last)
    t = _thresholds(A, threshold)

    def taps() -> Tensor:
        return filter.to(torch.bfloat16).permute(2, 3, 1, 0).reshape(-1, C).contiguous()  # (S*S*C, C)

    maps = A.new_zeros(B, H + 2 * radius, W + 2 * radius, C)
    inner = maps[:, radius : radius + H, radius : radius + W]
    torch.mul(A.permute(0, 2, 3, 1), A.gt(t[:, None, None, None]).permute(0, 2, 3, 1), out=inner)
    out = torch.empty_like(A, memory_format=torch.channels_last)
    BM, BN, stages = tile or next(tile for tile in TILES if C % tile[1] == 0)
    _convolve[(triton.cdiv(B * H * W, BM) * triton.cdiv(C, BN),)](
        maps, derived(filter, "taps", taps), A, t, out, 1 / divisor, C, H, W, B * H * W,
        RADIUS=radius, BM=BM, BN=BN, BK=64, GROUP=8, num_warps=8, num_stages=stages,
    )  # fmt: skip
    return out


def factored(
    A: Tensor, left: Tensor, right: Tensor, threshold: Tensor | None, eps: float, divisor: float
) -> Tensor | None:
    """C_T with F = direct + left @ right: left (C, R), right (R, C, S, S); None for what is not covered."""
    R, C, side, _ = right.shape
    if R > 64:
        return None
    A = A.contiguous()
    done = direct.tensor(A, side // 2, threshold, eps, divisor)
    if done is None:
        return None
    out, t = done
    B, _, H, W = A.shape
    a = (A * A.gt(t[:, None, None, None])).flatten(2)
    taps = derived(right, f"taps {A.dtype}", lambda: right.to(A.dtype).permute(2, 3, 0, 1).reshape(-1, C).contiguous())
    narrow = derived(left, f"narrow {A.dtype}", lambda: left.to(A.dtype).contiguous())
    thin = torch.matmul(taps, a)  # (B, S*S*R, HW)
    _widen[triton.cdiv(H * W, 64), B](
        thin, narrow, A, t, out, 1 / divisor, C, H, W,
        RADIUS=side // 2, RANK=R, BR=max(16, int(triton.next_power_of_2(R))), BP=64, BC=64,
        PRECISION="tf32x3" if A.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out
