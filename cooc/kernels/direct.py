"""The direct tensor C_T as one fused kernel.

It is bound by memory, so what counts is how often A is read: once for the mean of each image, once for the sum over
channels, once for the box sums; the output is written once.

The passes are one launch. Programs draw tickets, and tickets go through the batch image by image, where each
pass is a few images (`lag`) behind the one before: A comes from memory for the first pass and from the L2 cache for the
others. A program that needs what others make waits until enough of them have counted themselves as finished. Those have
lower tickets, so they have begun: somebody can always go on.

A box sum runs down the rows of a plane: the window's columns are kept as running sums, which are then summed along the
row. All sums are taken in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 64  # rows and columns of a map; larger ones, and radii past 16, are left to torch
PART = 12_288  # values of a partial sum for the mean, and how many of these there may be
PARTS = 32, 128
POSITIONS = 32  # of a program that sums over channels
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
def part_sum(A, sums, part, n, chunk, BLOCK: tl.constexpr):
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
def map_row(base, row, inside, H, W):
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
def window_sums(x, columns, RADIUS: tl.constexpr):
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
    ahead = map_row(base, first + RADIUS, inside, H, W)
    beyond = map_row(base, first + RADIUS + 1, inside, H, W)
    window = tl.zeros([BC, BW], tl.float32)
    for pair in range(0, 2 * RADIUS, 2):  # more loads at once would take the registers of other programs
        for step in tl.static_range(2):
            row = first + pair + (step - RADIUS)
            window += _others(map_row(base, row, inside, H, W), s, row, columns, t, keep, H, W)
    for step in range(tl.minimum(rows, H - first)):
        row = first + step
        entering, ahead = ahead, beyond
        beyond = map_row(base, row + RADIUS + 2, inside, H, W)  # asked for two rows early: it is on its way meanwhile
        window += _others(entering, s, row + RADIUS, columns, t, keep, H, W)
        rho = map_row(base, row, inside, H, W) > t
        found = tl.where(rho, window_sums(window, columns, RADIUS), 0) * scale
        # what is not read again here should not drive A out of the cache
        tl.store(out + at + row * W, found.to(out.dtype.element_ty), inside, eviction_policy="evict_first")
        leaving = map_row(base, row - RADIUS, inside, H, W)
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
            part_sum(A + start, sums + image * PARTS, item, C * P, chunk, BLOCK)
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


def fits(A: Tensor, radius: int) -> bool:
    """Do the kernels cover maps like these?"""
    return max(A.shape[2:]) <= LARGEST and radius <= 16 and A.shape[0] <= 65535 and A.shape[1] > 1


def rows_of(A: Tensor, planes: int) -> int:
    """Rows of a plane for one program: all of them in a large batch, fewer where too few planes would be at work."""
    B, C, H, _ = A.shape
    programs = B * triton.cdiv(C, planes)
    segments = min(max(1, 512 // programs), triton.cdiv(H, 6), 4)
    return int(triton.cdiv(H, segments))


def power(n: int, least: int = 16) -> int:
    return max(least, int(triton.next_power_of_2(n)))


def parts_of(A: Tensor) -> int:
    return min(max(PARTS[0], power(A[0].numel() // PART)), PARTS[1])


def tensor(
    A: Tensor, radius: int, threshold: Tensor | None, eps: float, divisor: float
) -> tuple[Tensor, Tensor] | None:
    """C_T (B, C, H, W) in A's dtype, and the thresholds (B,); None for maps that the kernels do not cover."""
    if not fits(A, radius):
        return None
    A = A.contiguous()
    B, C, H, W = A.shape
    lag = min(B - 1, int(triton.cdiv(AHEAD, A[0].nbytes)))
    planes, registers = SMALL if B * C < MANY else LARGE
    t, s, out = A.new_empty(B, dtype=torch.float32), A.new_empty(B, H * W, dtype=torch.float32), torch.empty_like(A)
    state = A.new_zeros(1 + 2 * B, dtype=torch.int32)
    parts, factor = 0, 1.0
    if threshold is None:
        parts, factor = parts_of(A), 1 / A[0].numel()
        means = A.new_empty(B, parts, dtype=torch.float32)
    else:
        means = threshold.to(A.device, torch.float32).expand(B).contiguous()
    rows, sections = rows_of(A, planes), triton.cdiv(H * W, POSITIONS)
    slices = triton.cdiv(H, rows)
    _direct[((B + 2 * lag) * (parts + sections + triton.cdiv(C, planes) * slices),)](
        A, state, means, t, s, out, factor, 1 - eps, 1 / divisor,
        B, C, H, W, parts, triton.cdiv(A[0].numel(), max(parts, 1)), sections, rows, slices, lag,
        PARTS=max(parts, 1), RADIUS=radius, BLOCK=128 * planes, BP=POSITIONS, BC=planes, BW=power(W),
        num_warps=planes // 4, maxnreg=registers,
    )  # fmt: skip
    return out, t
