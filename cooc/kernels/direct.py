"""The direct tensor C_T, and linear pooling that never makes it, as fused kernels.

Both are bound by memory, so what counts is how often A is read. C_T: once for the mean of each image, once for the sum
over channels, once for the box sums; the output is written once. A batch goes through the passes in groups of images
that the L2 cache holds, in alternating order: what one pass read last is what the next finds there first. Linear
pooling needs only

    S(p)   = sum_k C_T(k,p)  = (n(p) box(s)(p) - (1-eps) D(p)) / (C-1),   n = sum_k rho_k,  D = sum_k rho_k box(a_k)
    C_V(k) = sum_p C_T(k,p)  = (sum_p rho_k box(s) - (1-eps) E(k)) / (C-1),                 E(k) = sum_p rho_k box(a_k)

so s, n, D and E come from one pass that needs the mean alone, and C_V and the weighted sum of A from another.

A box sum runs down the rows of a plane: the window's columns are kept as running sums, which are then summed along the
row. All sums are taken in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["LARGEST", "linear_pooling", "tensor"]

LARGEST = 64  # rows and columns of a map; larger ones, and radii past 16, are left to torch
PARTS = 64  # partial sums of an image for its mean
WIDTH = 32  # positions that one program sums over channels
GROUP = 1 << 40  # bytes of the images that go through all passes together: all, groups for the L2 cache were slower


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
def _channel_sum(A, sums, scale, t_out, s_out, C, P, PARTS: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """The threshold of each image, t (B,), and the sum of a over its channels, s (B, P)."""
    image = tl.num_programs(1) - 1 - tl.program_id(1)
    t = tl.sum(tl.load(sums + image * PARTS + tl.arange(0, PARTS)), 0) * scale
    if tl.program_id(0) == 0:
        tl.store(t_out + image, t)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    base = A + image.to(tl.int64) * C * P + p[None, :]
    total = tl.zeros([BC, BP], tl.float32)
    for start in range(0, C, BC):
        k = start + tl.arange(0, BC)
        a = tl.load(base + k[:, None] * P, (k < C)[:, None] & (p < P)[None, :], 0).to(tl.float32)
        total += tl.where(a > t, a, 0)
    tl.store(s_out + image * P + p, tl.sum(total, 0), p < P)


@triton.jit
def _row(base, row, inside, H, W):
    """One row of every plane of a tile; zeros outside the map."""
    here = row + tl.zeros(inside.shape, tl.int32)
    return tl.load(base + row * W, inside & (here >= 0) & (here < H), 0).to(tl.float32)


@triton.jit
def _others(a, s, row, columns, t, keep, H, W):
    """The sum of all channels, less most of channel k itself, along one row."""
    here = row + tl.zeros(columns.shape, tl.int32)
    total = tl.load(s + row * W + columns, (columns < W) & (here >= 0) & (here < H), 0)
    return total[None, :] - keep * tl.where(a > t, a, 0)


@triton.jit
def _beside(x, STEP: tl.constexpr):
    """x[:, j + STEP], zeros outside."""
    j = tl.arange(0, x.shape[1]) + STEP
    inside = (j >= 0) & (j < x.shape[1])
    moved = tl.gather(x, tl.broadcast_to(tl.where(inside, j, 0)[None, :], x.shape), 1)
    return tl.where(inside[None, :], moved, 0)


@triton.jit
def _nine(x):
    """Sums over columns w-4 .. w+4. A thread has four columns: it needs the ends of its neighbours' four, two shuffles
    for each value; by prefix sums it would be nine."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
    e0, e2 = tl.split(even)
    e1, e3 = tl.split(odd)
    low, high = e0 + e1, e2 + e3
    four = low + high
    o0 = _beside(four, -1) + four + _beside(e0, 1)
    o1 = _beside(e1 + high, -1) + four + _beside(low, 1)
    o2 = _beside(high, -1) + four + _beside(low + e2, 1)
    o3 = _beside(e3, -1) + four + _beside(four, 1)
    return tl.reshape(tl.join(tl.join(o0, o2), tl.join(o1, o3)), x.shape)


@triton.jit
def _window(x, columns, RADIUS: tl.constexpr):
    """Sums over columns w-r .. w+r of each row of x."""
    if RADIUS == 4:
        return _nine(x)
    else:  # noqa: RET505 - Triton compiles one of two branches
        prefix = tl.cumsum(x, 1)
        last = tl.minimum(columns + RADIUS, x.shape[1] - 1)
        before = tl.maximum(columns - RADIUS - 1, 0)
        upper = tl.gather(prefix, tl.broadcast_to(last[None, :], x.shape), 1)
        lower = tl.gather(prefix, tl.broadcast_to(before[None, :], x.shape), 1)
        return upper - tl.where((columns > RADIUS)[None, :], lower, 0)


@triton.jit
def _box(
    A, s, t_in, out, keep, scale, C, H, W, rows,
    RADIUS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """C_T of BC channels of one image, `rows` rows of them."""
    image = tl.program_id(2)
    k, columns = tl.program_id(0) * BC + tl.arange(0, BC), tl.max_contiguous(tl.arange(0, BW), 4)
    P = H * W
    start = image.to(tl.int64) * C * P
    at = k[:, None] * P + columns[None, :]
    inside = (k < C)[:, None] & (columns < W)[None, :]
    base, s = A + start + at, s + image * P
    t = tl.load(t_in + image)
    first = tl.program_id(1) * rows
    ahead = _row(base, first + RADIUS, inside, H, W)
    beyond = _row(base, first + RADIUS + 1, inside, H, W)
    window = tl.zeros([BC, BW], tl.float32)
    for pair in range(0, 2 * RADIUS, 2):  # more loads at once would take the registers of other programs
        for step in tl.static_range(2):
            row = first + pair + (step - RADIUS)
            window += _others(_row(base, row, inside, H, W), s, row, columns, t, keep, H, W)
    for step in range(tl.minimum(rows, H - first)):
        row = first + step
        entering, ahead = ahead, beyond
        beyond = _row(base, row + RADIUS + 2, inside, H, W)  # asked for two rows early: it is on its way meanwhile
        window += _others(entering, s, row + RADIUS, columns, t, keep, H, W)
        rho = _row(base, row, inside, H, W) > t
        found = tl.where(rho, _window(window, columns, RADIUS), 0) * scale
        tl.store(out + start + at + row * W, found.to(out.dtype.element_ty), inside)
        leaving = _row(base, row - RADIUS, inside, H, W)
        window -= _others(leaving, s, row - RADIUS, columns, t, keep, H, W)


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
    t = tl.sum(tl.load(sums + image * PARTS + tl.arange(0, PARTS)), 0) * mean_scale
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(t_out + image, t)
    k, columns = tl.program_id(0) * BC + tl.arange(0, BC), tl.max_contiguous(tl.arange(0, BW), 4)
    P = H * W
    inside = (k < C)[:, None] & (columns < W)[None, :]
    base = A + image.to(tl.int64) * C * P + k[:, None] * P + columns[None, :]
    maps += (image * tl.num_programs(0) + tl.program_id(0)) * 3 * P + columns
    first = tl.program_id(1) * rows
    ahead = _row(base, first + RADIUS, inside, H, W)
    beyond = _row(base, first + RADIUS + 1, inside, H, W)
    window = tl.zeros([BC, BW], tl.float32)
    mine = tl.zeros([BC, BW], tl.float32)
    for pair in range(0, 2 * RADIUS, 2):
        for step in tl.static_range(2):
            a = _row(base, first + pair + (step - RADIUS), inside, H, W)
            window += tl.where(a > t, a, 0)
    for step in range(tl.minimum(rows, H - first)):
        row = first + step
        entering, ahead = ahead, beyond
        beyond = _row(base, row + RADIUS + 2, inside, H, W)
        window += tl.where(entering > t, entering, 0)
        a = _row(base, row, inside, H, W)
        rho = (a > t) & inside
        own_box = tl.where(rho, _window(window, columns, RADIUS), 0)
        mine += own_box
        s, n, D = tl.reduce((tl.where(rho, a, 0), rho.to(tl.float32), own_box), 0, _each)  # warps meet once, not thrice
        tl.store(maps + row * W, s, columns < W)
        tl.store(maps + P + row * W, n, columns < W)
        tl.store(maps + 2 * P + row * W, D, columns < W)
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


def _groups(A: Tensor, most: int) -> list[slice]:
    """Images that go through all passes together, evenly many, in at most `most` bytes where more than one does."""
    B = A.shape[0]
    size = triton.cdiv(B, triton.cdiv(B, max(1, most // A[0].nbytes)))
    return [slice(start, min(start + size, B)) for start in range(0, B, size)]


def tensor(
    A: Tensor,
    radius: int,
    threshold: Tensor | None,
    eps: float,
    divisor: float,
    group: int = GROUP,
    planes: int = 16,
    registers: int = 64,
) -> tuple[Tensor, Tensor] | None:
    """C_T (B, C, H, W) in A's dtype, and the thresholds (B,); None for maps that the kernels do not cover."""
    if not _fits(A, radius):
        return None
    A = A.contiguous()
    B, C, H, W = A.shape
    t = A.new_empty(B, dtype=torch.float32)
    s = A.new_empty(B, H * W, dtype=torch.float32)
    out = torch.empty_like(A)
    for some in _groups(A, group):
        maps = A[some]
        n, rows = len(maps), _rows(maps, planes)
        sums, factor, parts = _mean(maps, threshold if threshold is None or len(threshold) == 1 else threshold[some])
        _channel_sum[triton.cdiv(H * W, WIDTH), n](
            maps, sums, factor, t[some], s[some], C, H * W, PARTS=parts, BC=128, BP=WIDTH, num_warps=4
        )  # fmt: skip
        _box[triton.cdiv(C, planes), triton.cdiv(H, rows), n](
            maps, s[some], t[some], out[some], 1 - eps, 1 / divisor, C, H, W, rows,
            RADIUS=radius, BC=planes, BW=_power(W), num_warps=planes // 4, maxnreg=registers,
        )  # fmt: skip
    return out, t


def linear_pooling(
    A: Tensor,
    radius: int,
    eps: float,
    divisor: float,
    *,
    rarity_eps: float,
    spatial: bool,
    rarity: bool,
    group: int = GROUP,
    warps: int = 0,
    segments: int = 0,
) -> Tensor | None:
    """ChCO-SC_T, or one of its halves, without C_T. (B, C) float32; None for maps that the kernels do not cover."""
    if not _fits(A, radius):
        return None
    A = A.contiguous()
    C, H, W = A.shape[1:]
    warps = warps or (4 if A.shape[:2].numel() >= 8192 else 1)  # few planes: a program on every multiprocessor
    planes = 4 * warps * (4 if W <= 32 else 2)  # as many as the registers hold
    blocks = triton.cdiv(C, planes)
    out = A.new_empty(A.shape[:2], dtype=torch.float32)
    for some in _groups(A, group):
        maps = A[some]
        n, rows = len(maps), triton.cdiv(H, segments) if segments else _rows(maps, planes)
        slices = triton.cdiv(H, rows)
        sums, factor, parts = _mean(maps, None)
        t, totals = A.new_empty(2, n, dtype=torch.float32).unbind()
        moments = A.new_empty(n, blocks, 3, H * W, dtype=torch.float32)
        own = A.new_empty(n, slices, C, dtype=torch.float32)
        _moments[blocks, slices, n](
            maps, sums, factor, t, moments, own, C, H, W, rows,
            PARTS=parts, RADIUS=radius, BC=planes, BW=_power(W), num_warps=warps, maxnreg=128 if W <= 32 else 200,
        )  # fmt: skip
        weights = A.new_empty(n, 2, H * W, dtype=torch.float32)
        _weights[(n,)](
            moments, weights, totals, 1 - eps, 1 / divisor, blocks, H, W,
            RADIUS=radius, BH=_power(H), BW=_power(W), UNROLL=8 if H * W <= 1024 else 2, num_warps=8,
        )  # fmt: skip
        _pool[triton.cdiv(C, 8), n](
            maps, t, weights, totals, own, out[some], 1 - eps, 1 / divisor, rarity_eps, C, H * W,
            SEGMENTS=slices, SPATIAL=spatial, RARITY=rarity, BC=8, BP=256, num_warps=4,
        )  # fmt: skip
    return out
