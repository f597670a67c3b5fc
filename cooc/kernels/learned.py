"""Learned filters: the convolution as one product on the matrix units, and the factored form as two thin ones.

Full filter, bfloat16: an implicit matrix product. Rows are the positions of all images, columns the output channels,
and the sum runs over S*S taps times the input channels; maps are laid out position by position with zeros around them,
so a tap is a shift by whole rows. The mask and the division are its epilogue.

Factored, direct + left @ right: a convolution to R channels would fetch its input S*S times for R columns, too few for
the matrix units. In 16 bits the taps of a row become columns: a convolution by S x 1 to (S-1)*R columns, which fetches
its input S times; the last taps of all rows are one plain product to S*R columns. The shifted results of both are added
up afterwards. Maps stay position by position, as networks give them there: what the convolution reads and the sum over
channels are made in one pass, and the box sums of the direct tensor, whose windows along a row are a product with a
band of ones, take up the sum widened to C channels before C_T is written, once. In float32 all taps are one plain
product, (S*S*R, C) @ (C, HW), and what is widened is added to C_T.
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

ENOUGH = 1.8e11  # operations, six maps of 512 x 24 x 32; below, cuDNN keeps more of the GPU at work
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


@triton.jit
def _lines(
    A, sums, t_out, maps, s, scale, C, H, W,
    PARTS: tl.constexpr, RADIUS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """a with RADIUS rows of zeros above and below, maps (B, H+2r, W, C), and its sum over channels, s (B, P).

    Thresholds t (B,) are sums (B, PARTS) times scale.
    """
    line, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x = tl.arange(0, BW)
    t = direct.threshold(sums + image * PARTS, t_out + image, scale, line == 0, PARTS)
    A += (image * H + line - RADIUS) * W * C
    maps += (image * (H + 2 * RADIUS) + line) * W * C
    total = tl.zeros([BW], tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        at, inside = x[:, None] * C + c[None, :], (x < W)[:, None] & (c < C)[None, :]
        here = line - RADIUS + tl.zeros([BW, BC], tl.int32)
        a = tl.load(A + at, inside & (here >= 0) & (here < H), 0)
        a = tl.where(a.to(tl.float32) > t, a, 0)
        tl.store(maps + at, a, inside)
        total += tl.sum(a.to(tl.float32), 1)
    if (line >= RADIUS) & (line < H + RADIUS):
        tl.store(s + (image * H + line - RADIUS) * W + x, total, x < W)


@triton.jit
def _columns(
    maps, taps, out, C, H, W, M, whole, parts,
    RADIUS: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The S x 1 convolution to N columns: taps (S*C, N), out (parts, M, N).

    Tiles come in whole waves of programs; those of the last, incomplete one are cut in `parts` along the sum.
    """
    SIDE: tl.constexpr = 2 * RADIUS + 1
    rest = tl.maximum(tl.program_id(0) - whole, 0)
    cut = tl.program_id(0) >= whole
    tile = tl.where(cut, whole + rest // parts, tl.program_id(0))
    part = tl.where(cut, rest % parts, 0)
    steps = C // BK
    first = tl.where(cut, part * SIDE // parts, 0) * steps
    last = tl.where(cut, (part + 1) * SIDE // parts, SIDE) * steps
    m, n, c = tile * BM + tl.arange(0, BM), tl.arange(0, N), tl.arange(0, BK)
    position = tl.minimum(m, M - 1)
    corner = (position // (H * W) * (H + 2 * RADIUS) * W + position % (H * W)).to(tl.int64) * C
    left = maps + corner[:, None] + c[None, :]
    right = taps + c[:, None] * N + n[None, :]
    total = tl.zeros([BM, N], tl.float32)
    for step in range(first, last):
        a = tl.load(left + (step // steps * W * C + step % steps * BK))
        total = dot(a, tl.load(right + step * BK * N), total, "tf32")
    to = out + (part * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), (m < M)[:, None])


@triton.jit
def _shift(
    columns, ends, narrow, H, W, M, whole,
    PARTS: tl.constexpr, TILE: tl.constexpr, RADIUS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The shifted sum of columns (PARTS, M, (S-1)*R) and ends (B*(H+2r)*W, S*R), the last taps: narrow (M, R)."""
    SIDE: tl.constexpr = 2 * RADIUS + 1
    m, r = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, RANK)
    low = tl.zeros([BM, RANK], tl.float32)
    for dx in tl.static_range(SIDE - 1):
        to, u = m + (dx - RADIUS), m % W + (dx - RADIUS)
        inside = (m < M) & (u >= 0) & (u < W)
        at = columns + to.to(tl.int64)[:, None] * ((SIDE - 1) * RANK) + dx * RANK + r[None, :]
        low += tl.load(at, inside[:, None], 0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            cut = inside & (to >= whole * TILE)
            low += tl.load(at + tl.cast(M, tl.int64) * (part * (SIDE - 1) * RANK), cut[:, None], 0).to(tl.float32)
    inside = (m < M) & (m % W + RADIUS < W)
    first = m // (H * W) * (H + 2 * RADIUS) * W + m % (H * W) + RADIUS
    at = ends + first.to(tl.int64)[:, None] * (SIDE * RANK) + r[None, :]
    for dy in tl.static_range(SIDE):
        low += tl.load(at + dy * (W * SIDE + 1) * RANK, inside[:, None], 0).to(tl.float32)
    tl.store(narrow + m[:, None] * RANK + r[None, :], low.to(narrow.dtype.element_ty), (m < M)[:, None])


@triton.jit
def _line(base, row, inside, H, stride):
    """One row of positions, all channels of a tile; zeros outside the map."""
    here = row + tl.zeros(inside.shape, tl.int32)
    return tl.load(base + row * stride, inside & (here >= 0) & (here < H), 0).to(tl.float32)


@triton.jit
def _others(a, s, row, x, t, keep, H, W):
    """The sum of all channels, less most of channel k itself, along one row."""
    here = row + tl.zeros(x.shape, tl.int32)
    total = tl.load(s + row * W + x, (x < W) & (here >= 0) & (here < H), 0)
    return total[:, None] - keep * tl.where(a > t, a, 0)


@triton.jit
def _box(
    A, s, t_in, narrow, left, out, keep, scale, C, H, W, rows,
    RADIUS: tl.constexpr, RANK: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """C_T of BC channels of one image, `rows` rows of them: rho * scale * (the direct sums + left @ narrow).

    A and out (B, P, C), narrow (B, P, R), left (C, R).
    """
    image = tl.program_id(2)
    c, x, r = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BW), tl.arange(0, RANK)
    inside = (x < W)[:, None] & (c < C)[None, :]
    start = image.to(tl.int64) * H * W * C + x[:, None] * C + c[None, :]
    base, stride = A + start, W * C
    s += image * H * W
    narrow += image * H * W * RANK + x[:, None] * RANK + r[None, :]
    t = tl.load(t_in + image)
    band = tl.where(tl.abs(x[:, None] - x[None, :]) <= RADIUS, 1.0, 0.0).to(tl.bfloat16)
    weights = tl.load(left + c[None, :] * RANK + r[:, None], (c < C)[None, :], 0)
    first = tl.program_id(1) * rows
    ahead = _line(base, first + RADIUS, inside, H, stride)
    window = tl.zeros([BW, BC], tl.float32)
    for pair in range(0, 2 * RADIUS, 2):
        for step in tl.static_range(2):
            row = first + pair + (step - RADIUS)
            window += _others(_line(base, row, inside, H, stride), s, row, x, t, keep, H, W)
    for step in range(tl.minimum(rows, H - first)):
        row = first + step
        here, leaving = _line(base, row, inside, H, stride), _line(base, row - RADIUS, inside, H, stride)
        low = tl.load(narrow + row * W * RANK, (x < W)[:, None], 0)
        window += _others(ahead, s, row + RADIUS, x, t, keep, H, W)
        ahead = _line(base, row + RADIUS + 1, inside, H, stride)  # on its way while this row is done
        found = dot(low, weights, tl.zeros([BW, BC], tl.float32), "tf32")
        found = dot(band, window.to(tl.bfloat16), found, "tf32")
        found = tl.where(here > t, found * scale, 0)
        tl.store(out + start + row * stride, found.to(out.dtype.element_ty), inside)
        window -= _others(leaving, s, row - RADIUS, x, t, keep, H, W)


@triton.jit
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
    narrow, t = low.to(left.dtype.element_ty), tl.load(t_in + image)
    for start in range(0, C, BC):
        k = start + tl.arange(0, BC)
        at = image * C * P + k[:, None] * P + p[None, :]
        inside = (k < C)[:, None] & (p < P)[None, :]
        a = tl.load(A + at, inside, 0).to(tl.float32)
        before = tl.load(out + at, inside, 0).to(tl.float32)
        weights = tl.load(left + k[:, None] * RANK + r[None, :], (k < C)[:, None] & (r < RANK)[None, :], 0)
        delta = dot(weights, narrow, tl.zeros([BC, BP], tl.float32), PRECISION) * scale
        tl.store(out + at, (before + tl.where(a > t, delta, 0)).to(out.dtype.element_ty), inside)


def _thresholds(A: Tensor, threshold: Tensor | None) -> Tensor:
    t = A.mean((1, 2, 3), dtype=torch.float32) if threshold is None else threshold.to(A.device, torch.float32)
    return t.expand(A.shape[0]).contiguous()


def full(
    A: Tensor, filter: Tensor, threshold: Tensor | None, divisor: float, tile: tuple[int, int, int] | None = None
) -> Tensor | None:
    """C_T with a full filter (C, C, S, S), channels-last, for bfloat16 and channels in multiples of 64; else None.

    None, too, for so little work that cuDNN is faster, unless a tile is asked for.
    """
    B, C, H, W = A.shape
    radius = filter.shape[2] // 2
    if tile is None and 2 * filter.numel() * B * H * W < ENOUGH:
        return None
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


def _processors(device: torch.device) -> int:
    """Multiprocessors; in the interpreter a few, so that small maps are cut like large ones."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def factored(
    A: Tensor,
    left: Tensor,
    right: Tensor,
    threshold: Tensor | None,
    eps: float,
    divisor: float,
    cut: int = 4,
    planes: int = 64,
    rows: int = 12,
) -> Tensor | None:
    """C_T with F = direct + left @ right: left (C, R), right (R, C, S, S); None for what is not covered.

    In 16 bits it is channels-last.
    """
    R, C, side, _ = right.shape
    radius, B, (H, W) = side // 2, len(A), A.shape[2:]
    if R > 64 or not direct.fits(A, radius):
        return None
    narrow = derived(left, f"narrow {A.dtype}", lambda: left.to(A.dtype).contiguous())
    wide = 2 * radius * R
    if A.dtype.itemsize == 2 and C % 64 == 0 and R in (16, 32) and 16 <= wide <= 256 and wide & (wide - 1) == 0:
        A = A.contiguous(memory_format=torch.channels_last)
        t, s = A.new_empty(B, dtype=torch.float32), A.new_empty(B, H * W, dtype=torch.float32)
        sums, factor = direct.sums(A, threshold)
        width = max(16, int(triton.next_power_of_2(W)))
        maps = A.new_empty(B, H + 2 * radius, W, C)
        _lines[H + 2 * radius, B](
            A, sums, t, maps, s, factor, C, H, W,
            PARTS=sums.shape[1], RADIUS=radius, BC=4096 // width, BW=width, num_warps=4,
        )  # fmt: skip

        def lines() -> tuple[Tensor, Tensor]:
            taps = right.to(A.dtype).permute(2, 1, 3, 0)  # (dy, c, dx, r)
            ends = taps[:, :, -1].transpose(0, 1).reshape(C, side * R)
            return taps[:, :, :-1].reshape(side * C, wide).contiguous(), ends.contiguous()

        taps, ends = derived(right, f"lines {A.dtype}", lines)
        BM, M = 128, B * H * W
        tiles, processors = triton.cdiv(M, BM), _processors(A.device)
        whole = tiles // processors * processors
        parts = min(cut, side, max(1, processors // (tiles - whole))) if tiles > whole else 1
        columns, thin = A.new_empty(parts, M, wide), A.new_empty(M, R)
        _columns[(whole + (tiles - whole) * parts,)](
            maps, taps, columns, C, H, W, M, whole, parts,
            RADIUS=radius, N=wide, BM=BM, BK=64, num_warps=8, num_stages=4,
        )  # fmt: skip
        _shift[(triton.cdiv(M, 64),)](
            columns, maps.view(-1, C) @ ends, thin, H, W, M, whole,
            PARTS=parts, TILE=BM, RADIUS=radius, RANK=R, BM=64, num_warps=4,
        )  # fmt: skip
        out = torch.empty_like(A, memory_format=torch.channels_last)
        _box[triton.cdiv(C, planes), triton.cdiv(H, rows), B](
            A, s, t, thin, narrow, out, 1 - eps, 1 / divisor, C, H, W, rows,
            RADIUS=radius, RANK=R, BC=planes, BW=width, num_warps=4,
        )  # fmt: skip
        return out
    done = direct.tensor(A, radius, threshold, eps, divisor)
    assert done is not None
    out, t = done
    A = A.contiguous()
    a = (A * A.gt(t[:, None, None, None])).flatten(2)
    taps = derived(right, f"taps {A.dtype}", lambda: right.to(A.dtype).permute(2, 3, 0, 1).reshape(-1, C).contiguous())
    thin = torch.matmul(taps, a)  # (B, S*S*R, HW)
    _widen[triton.cdiv(H * W, 64), B](
        thin, narrow, A, t, out, 1 / divisor, C, H, W,
        RADIUS=radius, RANK=R, BR=max(16, int(triton.next_power_of_2(R))), BP=64, BC=64,
        PRECISION="tf32x3" if A.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out
