"""The direct tensor C_T, and linear pooling that never makes it, as fused kernels.

Both are bound by memory, so what counts is how often A is read. C_T: once for the mean of each image, once for the sum
over channels, once for the box sums; the output is written once. Linear pooling needs only

    S(p)   = sum_k C_T(k,p)  = (n(p) box(s)(p) - (1-eps) D(p)) / (C-1),   n = sum_k rho_k,  D = sum_k rho_k box(a_k)
    C_V(k) = sum_p C_T(k,p)  = (sum_p rho_k box(s) - (1-eps) E(k)) / (C-1),                 E(k) = sum_p rho_k box(a_k)

so s, n, D and E come from one pass that needs the mean alone, and C_V and the weighted sum of A from another.

The passes of C_T are one launch. Programs draw tickets, and tickets go through the batch image by image, where each
pass is a few images (`lag`) behind the one before: A comes from memory for the first pass and from the L2 cache for the
others. A program that needs what others make waits until enough of them have counted themselves as finished. Those have
lower tickets, so they have begun: somebody can always go on. (For linear pooling one launch was slower than four: what
its long pass needs leaves the short ones too few programs.)

A box sum runs down the rows of a plane: the window's columns are kept as running sums, which are then summed along the
row. All sums are taken in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["LARGEST", "fits", "linear_pooling", "sums", "tensor", "threshold"]

LARGEST = 64  # rows and columns of a map; larger ones, and radii past 16, are left to torch
PART = 12_288  # values of a partial sum for the mean, and how many of these there may be
PARTS = 32, 128
AHEAD = 6_400_000  # bytes of the images between two passes: what is made meanwhile, and less than the L2 cache
# Planes and registers of a program that sums boxes, in small and in large batches (from MANY planes on).
MANY = 32_768
SMALL, LARGE = (16, 128), (32, 96)


@triton.jit
def _finish(counter):
    """What all threads of this program have written is there for those who wait."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def _await(counter, programs):
    while tl.atomic_add(counter, 0, sem="acquire") < programs:
        pass
    tl.debug_barrier()


@triton.jit
def _sum(A, sums, part, n, chunk, BLOCK: tl.constexpr):
    """One of the partial sums of an image."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunk, 2 * BLOCK):
        for half in tl.static_range(2):  # two loads on their way at once
            at = start + half * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(A + part * chunk + at, (at < chunk) & (part * chunk + at < n), 0).to(tl.float32)
    tl.store(sums + part, tl.sum(total, 0))


@triton.jit
def threshold(sums, t_out, scale, first, PARTS: tl.constexpr):
    """The threshold of an image; the first program of a pass keeps it."""
    t = tl.sum(tl.load(sums + tl.arange(0, PARTS)), 0) * scale
    if first:
        tl.store(t_out, t)
    return t


@triton.jit
def _channel_sum(A, t, s_out, block, C, P, BC: tl.constexpr, BP: tl.constexpr):
    """The sum of a over all channels, s (P,), at BP positions."""
    p = block * BP + tl.arange(0, BP)
    total = tl.zeros([BC, BP], tl.float32)
    for start in range(0, C, BC):
        k = start + tl.arange(0, BC)
        a = tl.load(A + k[:, None] * P + p[None, :], (k < C)[:, None] & (p < P)[None, :], 0).to(tl.float32)
        total += tl.where(a > t, a, 0)
    tl.store(s_out + p, tl.sum(total, 0), p < P)


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
    A, s, t, out, keep, scale, block, slice, C, H, W, rows,
    RADIUS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """C_T of BC channels of an image, `rows` rows of them."""
    k, columns = block * BC + tl.arange(0, BC), tl.max_contiguous(tl.arange(0, BW), 4)
    at = k[:, None] * (H * W) + columns[None, :]
    inside = (k < C)[:, None] & (columns < W)[None, :]
    base = A + at
    first = slice * rows
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
        # what is not read again here should not drive A out of the cache
        tl.store(out + at + row * W, found.to(out.dtype.element_ty), inside, eviction_policy="evict_first")
        leaving = _row(base, row - RADIUS, inside, H, W)
        window -= _others(leaving, s, row - RADIUS, columns, t, keep, H, W)


@triton.jit
def _direct(
    A, state, sums, t_out, s, out, mean_scale, keep, scale, B, C, H, W, parts, chunk, sections, rows, slices, lag,
    PARTS: tl.constexpr, RADIUS: tl.constexpr, BLOCK: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    """C_T of a batch. state: the next ticket, and how many programs of each image have finished the first two passes.

    sums (B, PARTS), t (B,), s (B, P). `parts` is 0 where thresholds are given: they are the sums.
    """
    ticket = tl.atomic_add(state, 1, sem="relaxed")
    each = parts + sections + tl.cdiv(C, BC) * slices
    step, item = ticket // each, ticket % each
    image = step - ((item >= parts).to(tl.int32) + (item >= parts + sections).to(tl.int32)) * lag
    if (image >= 0) & (image < B):
        P = H * W
        start = image.to(tl.int64) * C * P
        summed, added = state + 1 + image, state + 1 + B + image
        if item < parts:
            _sum(A + start, sums + image * PARTS, item, C * P, chunk, BLOCK)
            _finish(summed)
        elif item < parts + sections:
            _await(summed, parts)
            t = threshold(sums + image * PARTS, t_out + image, mean_scale, item == parts, PARTS)
            _channel_sum(A + start, t, s + image * P, item - parts, C, P, 2 * BLOCK // BP, BP)
            _finish(added)
        else:
            _await(added, sections)
            item -= parts + sections
            _box(
                A + start, s + image * P, tl.load(t_out + image), out + start, keep, scale,
                item // slices, item % slices, C, H, W, rows, RADIUS, BC, BW,
            )  # fmt: skip


@triton.jit
def _sums(A, sums, n, chunk, BLOCK: tl.constexpr):
    """Partial sums of each image: sums (B, parts)."""
    image = tl.program_id(1)
    _sum(A + image.to(tl.int64) * n, sums + image * tl.num_programs(0), tl.program_id(0), n, chunk, BLOCK)


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


def fits(A: Tensor, radius: int) -> bool:
    """Do the kernels cover maps like these?"""
    return max(A.shape[2:]) <= LARGEST and radius <= 16 and A.shape[0] <= 65535 and A.shape[1] > 1


def _rows(A: Tensor, planes: int) -> int:
    """Rows of a plane for one program: all of them in a large batch, fewer where too few planes would be at work."""
    B, C, H, _ = A.shape
    programs = B * triton.cdiv(C, planes)
    segments = min(max(1, 512 // programs), triton.cdiv(H, 6), 4)
    return int(triton.cdiv(H, segments))


def _power(n: int, least: int = 16) -> int:
    return max(least, int(triton.next_power_of_2(n)))


def _parts(A: Tensor) -> int:
    return min(max(PARTS[0], _power(A[0].numel() // PART)), PARTS[1])


def sums(A: Tensor, threshold: Tensor | None) -> tuple[Tensor, float]:
    """What the threshold of each image is the sum of, (B, parts), and its factor. A is dense in any order."""
    B, n = len(A), A[0].numel()
    if threshold is not None:
        return threshold.to(A.device, torch.float32).expand(B).contiguous()[:, None], 1.0
    parts = _parts(A)
    out = A.new_empty(B, parts, dtype=torch.float32)
    _sums[parts, B](A, out, n, triton.cdiv(n, parts), BLOCK=2048, num_warps=4)
    return out, 1 / n


def tensor(
    A: Tensor,
    radius: int,
    threshold: Tensor | None,
    eps: float,
    divisor: float,
    lag: int | None = None,
    width: int = 32,
    planes: int = 0,
    registers: int = 0,
) -> tuple[Tensor, Tensor] | None:
    """C_T (B, C, H, W) in A's dtype, and the thresholds (B,); None for maps that the kernels do not cover.

    What the kernel may choose: images between two passes, positions of a program that sums over channels, channels of
    one that sums boxes, and its registers.
    """
    if not fits(A, radius):
        return None
    A = A.contiguous()
    B, C, H, W = A.shape
    lag = min(B - 1, int(triton.cdiv(AHEAD, A[0].nbytes)) if lag is None else lag)
    usual = SMALL if B * C < MANY else LARGE
    planes, registers = planes or usual[0], registers or usual[1]
    t, s, out = A.new_empty(B, dtype=torch.float32), A.new_empty(B, H * W, dtype=torch.float32), torch.empty_like(A)
    state = A.new_zeros(1 + 2 * B, dtype=torch.int32)
    if threshold is None:
        parts = _parts(A)
        means, factor = A.new_empty(B, parts, dtype=torch.float32), 1 / A[0].numel()
    else:
        parts, (means, factor) = 0, sums(A, threshold)
    rows, sections = _rows(A, planes), triton.cdiv(H * W, width)
    slices = triton.cdiv(H, rows)
    _direct[((B + 2 * lag) * (parts + sections + triton.cdiv(C, planes) * slices),)](
        A, state, means, t, s, out, factor, 1 - eps, 1 / divisor,
        B, C, H, W, parts, triton.cdiv(A[0].numel(), max(parts, 1)), sections, rows, slices, lag,
        PARTS=max(parts, 1), RADIUS=radius, BLOCK=128 * planes, BP=width, BC=planes, BW=_power(W),
        num_warps=planes // 4, maxnreg=registers,
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
    warps: int = 0,
    segments: int = 0,
) -> Tensor | None:
    """ChCO-SC_T, or one of its halves, without C_T. (B, C) float32; None for maps that the kernels do not cover."""
    if not fits(A, radius):
        return None
    A = A.contiguous()
    B, C, H, W = A.shape
    warps = warps or (4 if B * C >= 8192 else 1)  # few planes: a program on every multiprocessor
    planes = 4 * warps * (4 if W <= 32 else 2)  # as many as the registers hold
    blocks = triton.cdiv(C, planes)
    rows = triton.cdiv(H, segments) if segments else _rows(A, planes)
    slices = triton.cdiv(H, rows)

    def floats(*shape: int) -> Tensor:
        return A.new_empty(shape, dtype=torch.float32)

    t, totals, out = floats(B), floats(B), floats(B, C)
    maps, own, weights = floats(B, blocks, 3, H * W), floats(B, slices, C), floats(B, 2, H * W)
    means, factor = sums(A, None)
    _moments[blocks, slices, B](
        A, means, factor, t, maps, own, C, H, W, rows,
        PARTS=means.shape[1], RADIUS=radius, BC=planes, BW=_power(W), num_warps=warps, maxnreg=128 if W <= 32 else 200,
    )  # fmt: skip
    _weights[(B,)](
        maps, weights, totals, 1 - eps, 1 / divisor, blocks, H, W,
        RADIUS=radius, BH=_power(H), BW=_power(W), UNROLL=8 if H * W <= 1024 else 2, num_warps=8,
    )  # fmt: skip
    _pool[triton.cdiv(C, 8), B](
        A, t, weights, totals, own, out, 1 - eps, 1 / divisor, rarity_eps, C, H * W,
        SEGMENTS=slices, SPATIAL=spatial, RARITY=rarity, BC=8, BP=256, num_warps=4,
    )  # fmt: skip
    return out
