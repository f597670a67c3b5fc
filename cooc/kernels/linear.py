"""ChCO-SC_T, or one of its halves, without making C_T. Of the tensor it needs only

    S(p)   = sum_k C_T(k,p)  = (n(p) box(s)(p) - (1-eps) D(p)) / (C-1),   n = sum_k rho_k,  D = sum_k rho_k box(a_k)
    C_V(k) = sum_p C_T(k,p)  = (sum_p rho_k box(s) - (1-eps) E(k)) / (C-1),                 E(k) = sum_p rho_k box(a_k)

so s, n, D and E come from one pass over A that needs the mean alone, and C_V and the weighted sum of A from another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cooc.kernels.direct import fits, map_row, part_sum, parts_of, power, rows_of, threshold, window_sums


@triton.jit
def _sums(A, sums, n, chunk, BLOCK: tl.constexpr):
    """Partial sums of each image: sums (B, parts)."""
    image = tl.program_id(1)
    part_sum(A + image.to(tl.int64) * n, sums + image * tl.num_programs(0), tl.program_id(0), n, chunk, BLOCK)


@triton.jit
def _each(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _moments(
    A, sums, mean_scale, t_out, maps, own, C, H, W, rows,
    PARTS: tl.constexpr, RADIUS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """s, n and D of BC channels: maps (B, blocks, 3, P); E of each channel: own (B, segments, C); t (B,)."""
    image = tl.num_programs(2) - 1 - tl.program_id(2)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    t = threshold(sums + image * PARTS, t_out + image, mean_scale, first, PARTS)
    k, columns = tl.program_id(0) * BC + tl.arange(0, BC), tl.max_contiguous(tl.arange(0, BW), 4)
    P = H * W
    inside = (k < C)[:, None] & (columns < W)[None, :]
    base = A + image.to(tl.int64) * C * P + k[:, None] * P + columns[None, :]
    maps += (image * tl.num_programs(0) + tl.program_id(0)) * 3 * P + columns
    top = tl.program_id(1) * rows
    ahead = map_row(base, top + RADIUS, inside, H, W)
    beyond = map_row(base, top + RADIUS + 1, inside, H, W)
    window = tl.zeros([BC, BW], tl.float32)
    mine = tl.zeros([BC, BW], tl.float32)
    for pair in range(0, 2 * RADIUS, 2):
        for step in tl.static_range(2):
            a = map_row(base, top + pair + (step - RADIUS), inside, H, W)
            window += tl.where(a > t, a, 0)
    for step in range(tl.minimum(rows, H - top)):
        row = top + step
        entering, ahead = ahead, beyond
        beyond = map_row(base, row + RADIUS + 2, inside, H, W)
        window += tl.where(entering > t, entering, 0)
        a = map_row(base, row, inside, H, W)
        rho = (a > t) & inside
        own_box = tl.where(rho, window_sums(window, columns, RADIUS), 0)
        mine += own_box
        s, n, D = tl.reduce((tl.where(rho, a, 0), rho.to(tl.float32), own_box), 0, _each)  # warps meet once, not thrice
        tl.store(maps + row * W, s, columns < W)
        tl.store(maps + P + row * W, n, columns < W)
        tl.store(maps + 2 * P + row * W, D, columns < W)
        leaving = map_row(base, row - RADIUS, inside, H, W)
        window -= tl.where(leaving > t, leaving, 0)
    tl.store(own + (image * tl.num_programs(1) + tl.program_id(1)) * C + k, tl.sum(mine, 1), k < C)


@triton.jit
def _weights(
    maps, weights, totals, keep, scale, blocks, H, W,
    RADIUS: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """box(s) and alpha of each image: weights (B, 2, P); the sum of S: totals (B,)."""
    image = tl.program_id(0)
    y, x = tl.arange(0, BH), tl.arange(0, BW)
    P = H * W
    at, inside = y[:, None] * W + x[None, :], (y < H)[:, None] & (x < W)[None, :]
    maps += image * blocks * 3 * P + at
    s = tl.zeros([BH, BW], tl.float32)
    n = tl.zeros([BH, BW], tl.float32)
    D = tl.zeros([BH, BW], tl.float32)
    for start in range(0, blocks, UNROLL):
        for step in tl.static_range(UNROLL):  # many loads on their way at once
            block = start + step
            here = inside & (block + tl.zeros([BH, BW], tl.int32) < blocks)
            s += tl.load(maps + block * 3 * P, here, 0)
            n += tl.load(maps + block * 3 * P + P, here, 0)
            D += tl.load(maps + block * 3 * P + 2 * P, here, 0)
    down = (tl.abs(y[:, None] - y[None, :]) <= RADIUS).to(tl.float32)
    along = (tl.abs(x[:, None] - x[None, :]) <= RADIUS).to(tl.float32)
    box = tl.dot(tl.dot(down, s, input_precision="ieee"), along, input_precision="ieee")
    S = tl.where(inside, tl.maximum(n * box - keep * D, 0), 0) * scale
    norm = tl.sqrt(tl.sum(tl.sum(S * S, 1), 0))
    alpha = tl.sqrt(S / tl.where(norm > 0, norm, 1))
    tl.store(weights + image * 2 * P + at, box, inside)
    tl.store(weights + image * 2 * P + P + at, alpha, inside)
    tl.store(totals + image, tl.sum(tl.sum(S, 1), 0))


@triton.jit
def _pool(
    A, t_in, weights, totals, own, out, keep, scale, eps, C, P,
    SEGMENTS: tl.constexpr, SPATIAL: tl.constexpr, RARITY: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """f(k) = beta(k) sum_p alpha(p) A(k,p), where SPATIAL and RARITY say whether alpha and beta count."""
    image = tl.program_id(1)
    k = tl.program_id(0) * BC + tl.arange(0, BC)
    t = tl.load(t_in + image)
    base = A + image.to(tl.int64) * C * P
    weights += image * 2 * P
    together = tl.zeros([BC, BP], tl.float32)
    pooled = tl.zeros([BC, BP], tl.float32)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        a = tl.load(base + k[:, None] * P + p[None, :], (k < C)[:, None] & (p < P)[None, :], 0).to(tl.float32)
        if RARITY:
            box = tl.load(weights + p, p < P, 0)
            together += tl.where(a > t, box[None, :], 0)
        if SPATIAL:
            alpha = tl.load(weights + P + p, p < P, 0)
            pooled += a * alpha[None, :]
        else:
            pooled += a
    f = tl.sum(pooled, 1)
    if RARITY:
        E = tl.zeros([BC], tl.float32)
        for segment in tl.static_range(SEGMENTS):
            E += tl.load(own + (image * SEGMENTS + segment) * C + k, k < C, 0)
        C_V = tl.maximum(tl.sum(together, 1) - keep * E, 0) * scale
        total = tl.load(totals + image)
        f *= -tl.log(eps + C_V / tl.where(total > 0, total, 1))
    tl.store(out + image * C + k, f, k < C)


def linear_pooling(
    A: Tensor, radius: int, eps: float, divisor: float, *, rarity_eps: float, spatial: bool, rarity: bool
) -> Tensor | None:
    """ChCO-SC_T, or one of its halves, without C_T. (B, C) float32; None for maps that the kernels do not cover."""
    if not fits(A, radius):
        return None
    A = A.contiguous()
    B, C, H, W = A.shape
    warps = 4 if B * C >= 8192 else 1  # few planes: a program on every multiprocessor
    planes = 4 * warps * (4 if W <= 32 else 2)  # as many as the registers hold
    blocks = triton.cdiv(C, planes)
    rows = rows_of(A, planes)
    slices = triton.cdiv(H, rows)

    def floats(*shape: int) -> Tensor:
        return A.new_empty(shape, dtype=torch.float32)

    t, totals, out = floats(B), floats(B), floats(B, C)
    maps, own, weights = floats(B, blocks, 3, H * W), floats(B, slices, C), floats(B, 2, H * W)
    parts, n = parts_of(A), A[0].numel()
    means = floats(B, parts)
    _sums[parts, B](A, means, n, triton.cdiv(n, parts), BLOCK=2048, num_warps=4)
    _moments[blocks, slices, B](
        A, means, 1 / n, t, maps, own, C, H, W, rows,
        PARTS=parts, RADIUS=radius, BC=planes, BW=power(W), num_warps=warps, maxnreg=128 if W <= 32 else 200,
    )  # fmt: skip
    _weights[(B,)](
        maps, weights, totals, 1 - eps, 1 / divisor, blocks, H, W,
        RADIUS=radius, BH=power(H), BW=power(W), UNROLL=8 if H * W <= 1024 else 2, num_warps=8,
    )  # fmt: skip
    _pool[triton.cdiv(C, 8), B](
        A, t, weights, totals, own, out, 1 - eps, 1 / divisor, rarity_eps, C, H * W,
        SEGMENTS=slices, SPATIAL=spatial, RARITY=rarity, BC=8, BP=256, num_warps=4,
    )  # fmt: skip
    return out
