"""The direct tensor C_T, and linear pooling that never makes it, as fused kernels.

Both are bound by memory, so what counts is how often A is read. C_T: once for the mean of each image, once for the sum
over channels, once for the box sums; the output is written once. Passes run through the images in alternating order:
what one pass read last is what the next finds in the L2 cache. Linear pooling needs only

    S(p)   = sum_k C_T(k,p)  = (n(p) box(s)(p) - (1-eps) D(p)) / (C-1),   n = sum_k rho_k,  D = sum_k rho_k box(a_k)
    C_V(k) = sum_p C_T(k,p)  = (sum_p rho_k box(s) - (1-eps) E(k)) / (C-1),                 E(k) = sum_p rho_k box(a_k)

so s, n, D and E come from one pass that needs the mean alone, and C_V and the weighted sum of A from another.

A box sum runs down the rows of a plane: the window's columns are kept as running sums, and one prefix sum over a row
turns them into windows. All sums are taken in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["LARGEST", "linear_pooling", "tensor"]

LARGEST = 64  # rows and columns of a map; larger ones, and radii past 16, are left to torch
PARTS = 64  # partial sums of an image for its mean
WIDTH = 128  # positions that one program sums over channels


@triton.jit
def _sum(A, sums, n, chunk, BLOCK: tl.constexpr):
    """Partial sums of each image: sums (B, PARTS)."""
    part, image = tl.program_id(0), tl.program_id(1)
    base = A + image.to(tl.int64) * n
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunk, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(base + part * chunk + at, (at < chunk) & (part * chunk + at < n), 0).to(tl.float32)
    tl.store(sums + image * tl.num_programs(0) + part, tl.sum(total, 0))


@triton.jit
def _channel_sum(A, sums, scale, t_out, s_out, C, P, per, PARTS: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """The threshold of each image, t (B,), and the sum of a over `per` channels at a time, s (B, blocks, P)."""
    block, image = tl.program_id(1), tl.num_programs(2) - 1 - tl.program_id(2)
    t = tl.sum(tl.load(sums + image * PARTS + tl.arange(0, PARTS)), 0) * scale
    if (tl.program_id(0) == 0) & (block == 0):
        tl.store(t_out + image, t)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    base = A + image.to(tl.int64) * C * P + p[None, :]
    end = tl.minimum((block + 1) * per, C)
    total = tl.zeros([BC, BP], tl.float32)
    for start in range(block * per, end, BC):
        k = start + tl.arange(0, BC)
        a = tl.load(base + k[:, None] * P, (k < end)[:, None] & (p < P)[None, :], 0).to(tl.float32)
        total += tl.where(a > t, a, 0)
    tl.store(s_out + (image * tl.num_programs(1) + block) * P + p, tl.sum(total, 0), p < P)


@triton.jit
def _row(base, row, inside, H, W):
    """One row of every plane of a tile; zeros outside the map."""
    here = row + tl.zeros(inside.shape, tl.int32)
    return tl.load(base + row * W, inside & (here >= 0) & (here < H), 0).to(tl.float32)


@triton.jit
def _others(a, s, row, columns, t, keep, H, W, P, BLOCKS: tl.constexpr):
    """The sum of all channels, less most of channel k itself, along one row."""
    here = row + tl.zeros(columns.shape, tl.int32)
    total = tl.zeros(columns.shape, tl.float32)
    for block in tl.static_range(BLOCKS):
        total += tl.load(s + block * P + row * W + columns, (columns < W) & (here >= 0) & (here < H), 0)
    return total[None, :] - keep * tl.where(a > t, a, 0)


@triton.jit
def _window(x, columns, RADIUS: tl.constexpr):
    """Sums over columns w-r .. w+r of each row of x."""
    prefix = tl.cumsum(x, 1)
    last = tl.minimum(columns + RADIUS, x.shape[1] - 1)
    before = tl.maximum(columns - RADIUS - 1, 0)
    upper = tl.gather(prefix, tl.broadcast_to(last[None, :], x.shape), 1)
    lower = tl.gather(prefix, tl.broadcast_to(before[None, :], x.shape), 1)
    return upper - tl.where((columns > RADIUS)[None, :], lower, 0)


@triton.jit(do_not_specialize=["W"])
def _box(
    A, s, t_in, out, keep, scale, C, H, W, rows,
    BLOCKS: tl.constexpr, RADIUS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """C_T of BC channels of one image, `rows` rows of them."""
    image = tl.program_id(2)
    k, columns = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BW)
    P = H * W
    start = image.to(tl.int64) * C * P
    at = k[:, None] * P + columns[None, :]
    inside = (k < C)[:, None] & (columns < W)[None, :]
    base, s = A + start + at, s + image * BLOCKS * P
    t = tl.load(t_in + image)
    first = tl.program_id(1) * rows
    window = tl.zeros([BC, BW], tl.float32)
    for step in tl.static_range(2 * RADIUS):
        row = first + (step - RADIUS)
        window += _others(_row(base, row, inside, H, W), s, row, columns, t, keep, H, W, P, BLOCKS)
    ahead = _row(base, first + RADIUS, inside, H, W)
    for step in range(tl.minimum(rows, H - first)):
        row = first + step
        entering = ahead
        ahead = _row(base, row + RADIUS + 1, inside, H, W)  # asked for one row early: it is on its way meanwhile
        window += _others(entering, s, row + RADIUS, columns, t, keep, H, W, P, BLOCKS)
        rho = _row(base, row, inside, H, W) > t
        found = tl.where(rho, _window(window, columns, RADIUS), 0) * scale
        tl.store(out + start + at + row * W, found.to(out.dtype.element_ty), inside)
        leaving = _row(base, row - RADIUS, inside, H, W)
        window -= _others(leaving, s, row - RADIUS, columns, t, keep, H, W, P, BLOCKS)


@triton.jit(do_not_specialize=["W"])
def _moments(
    A, sums, mean_scale, t_out, maps, own, C, H, W, rows,
    PARTS: tl.constexpr, RADIUS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """s, n and D of BC channels: maps (B, blocks, 3, P); E of each channel: own (B, segments, C); t (B,)."""
    image = tl.num_programs(2) - 1 - tl.program_id(2)
    t = tl.sum(tl.load(sums + image * PARTS + tl.arange(0, PARTS)), 0) * mean_scale
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(t_out + image, t)
    k, columns = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BW)
    P = H * W
    inside = (k < C)[:, None] & (columns < W)[None, :]
    base = A + image.to(tl.int64) * C * P + k[:, None] * P + columns[None, :]
    maps += (image * tl.num_programs(0) + tl.program_id(0)) * 3 * P + columns
    first = tl.program_id(1) * rows
    window = tl.zeros([BC, BW], tl.float32)
    mine = tl.zeros([BC, BW], tl.float32)
    for step in tl.static_range(2 * RADIUS):
        a = _row(base, first + (step - RADIUS), inside, H, W)
        window += tl.where(a > t, a, 0)
    ahead = _row(base, first + RADIUS, inside, H, W)
    for step in range(tl.minimum(rows, H - first)):
        row = first + step
        entering = ahead
        ahead = _row(base, row + RADIUS + 1, inside, H, W)
        window += tl.where(entering > t, entering, 0)
        a = _row(base, row, inside, H, W)
        rho = (a > t) & inside
        own_box = tl.where(rho, _window(window, columns, RADIUS), 0)
        mine += own_box
        tl.store(maps + row * W, tl.sum(tl.where(rho, a, 0), 0), columns < W)
        tl.store(maps + P + row * W, tl.sum(rho.to(tl.float32), 0), columns < W)
        tl.store(maps + 2 * P + row * W, tl.sum(own_box, 0), columns < W)
        leaving = _row(base, row - RADIUS, inside, H, W)
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


def _fits(A: Tensor, radius: int) -> bool:
    return max(A.shape[2:]) <= LARGEST and radius <= 16 and A.shape[0] <= 65535 and A.shape[1] > 1


def _rows(A: Tensor, planes: int) -> int:
    """Rows of a plane for one program: all of them in a large batch, fewer where too few planes would be at work."""
    B, C, H, _ = A.shape
    programs = B * triton.cdiv(C, planes)
    segments = min(max(1, 512 // programs), triton.cdiv(H, 6), 4)
    return int(triton.cdiv(H, segments))


def _power(n: int, least: int = 16) -> int:
    return max(least, int(triton.next_power_of_2(n)))


def _mean(A: Tensor, threshold: Tensor | None) -> tuple[Tensor, float, int]:
    """What the threshold of each image is summed from: (B, parts), its factor, and parts."""
    if threshold is not None:
        return threshold.to(A.device, torch.float32).expand(A.shape[0]).contiguous(), 1.0, 1
    B, n = A.shape[0], A[0].numel()
    sums = A.new_empty(B, PARTS, dtype=torch.float32)
    _sum[PARTS, B](A, sums, n, triton.cdiv(n, PARTS), BLOCK=2048, num_warps=4)
    return sums, 1.0 / n, PARTS


def tensor(
    A: Tensor, radius: int, threshold: Tensor | None, eps: float, divisor: float
) -> tuple[Tensor, Tensor] | None:
    """C_T (B, C, H, W) in A's dtype, and the thresholds (B,); None for maps that the kernels do not cover."""
    if not _fits(A, radius):
        return None
    A = A.contiguous()
    B, C, H, W = A.shape
    sums, factor, parts = _mean(A, threshold)
    tiles = triton.cdiv(H * W, WIDTH)
    blocks = 4 if B * tiles * 2 < 512 else 2
    per = triton.cdiv(C, blocks)
    t = A.new_empty(B, dtype=torch.float32)
    s = A.new_empty(B, blocks, H * W, dtype=torch.float32)
    _channel_sum[tiles, blocks, B](
        A, sums, factor, t, s, C, H * W, per, PARTS=parts, BC=16, BP=WIDTH, num_warps=4
    )  # fmt: skip
    planes = 16
    rows = _rows(A, planes)
    out = torch.empty_like(A)
    _box[triton.cdiv(C, planes), triton.cdiv(H, rows), B](
        A, s, t, out, 1 - eps, 1 / divisor, C, H, W, rows,
        BLOCKS=blocks, RADIUS=radius, BC=planes, BW=_power(W), num_warps=4,
    )  # fmt: skip
    return out, t


def linear_pooling(
    A: Tensor, radius: int, eps: float, divisor: float, *, rarity_eps: float, spatial: bool, rarity: bool
) -> Tensor | None:
    """ChCO-SC_T, or one of its halves, without C_T. (B, C) float32; None for maps that the kernels do not cover."""
    if not _fits(A, radius):
        return None
    A = A.contiguous()
    B, C, H, W = A.shape
    sums, factor, parts = _mean(A, None)
    planes = 16 if W <= 32 else 8  # as many as the registers of one warp hold
    blocks, rows = triton.cdiv(C, planes), _rows(A, planes)
    segments = triton.cdiv(H, rows)
    t, totals = A.new_empty(2, B, dtype=torch.float32).unbind()
    maps = A.new_empty(B, blocks, 3, H * W, dtype=torch.float32)
    own = A.new_empty(B, segments, C, dtype=torch.float32)
    _moments[blocks, segments, B](
        A, sums, factor, t, maps, own, C, H, W, rows,
        PARTS=parts, RADIUS=radius, BC=planes, BW=_power(W), num_warps=1,
    )  # fmt: skip
    weights = A.new_empty(B, 2, H * W, dtype=torch.float32)
    _weights[(B,)](
        maps, weights, totals, 1 - eps, 1 / divisor, blocks, H, W,
        RADIUS=radius, BH=_power(H), BW=_power(W), UNROLL=8 if H * W <= 1024 else 2, num_warps=8,
    )  # fmt: skip
    out = A.new_empty(B, C, dtype=torch.float32)
    _pool[triton.cdiv(C, 8), B](
        A, t, weights, totals, own, out, 1 - eps, 1 / divisor, rarity_eps, C, H * W,
        SEGMENTS=segments, SPATIAL=spatial, RARITY=rarity, BC=8, BP=256, num_warps=4,
    )  # fmt: skip
    return out
