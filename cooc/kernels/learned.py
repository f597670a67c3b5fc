"""Learned filters: the convolution as one product on the matrix units, and the factored form as two thin ones.

Full filter, bfloat16: an implicit matrix product. Rows are the positions of all images, columns the output channels,
and the sum runs over S*S taps times the input channels; maps are laid out position by position with zeros around them,
so a tap is a shift by whole rows. The mask and the division are its epilogue.

Factored, direct + left @ right: a convolution to R channels would fetch its input S*S times for R columns, too few for
the matrix units. In 16 bits the S taps of a row become columns: a convolution by S x 1 to S*R columns, which fetches
its input S times; the S shifted results are added up afterwards. In float32 all taps are one plain product,
(S*S*R, C) @ (C, HW). What is left is to widen the sum to C channels and add it to the direct tensor: one pass over C_T.
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
def _lines(A, t_in, maps, C, H, W, RADIUS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr):
    """a, position by position, with RADIUS rows of zeros above and below: maps (B, H+2r, W, C)."""
    line, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c, x = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BW)
    y = line - RADIUS + tl.zeros([BC, BW], tl.int32)
    inside = (c < C)[:, None] & (x < W)[None, :]
    a = tl.load(A + ((image * C + c[:, None]) * H + y) * W + x[None, :], inside & (y >= 0) & (y < H), 0)
    a = tl.where(a.to(tl.float32) > tl.load(t_in + image), a, 0).to(maps.dtype.element_ty)
    to = maps + ((image * (H + 2 * RADIUS) + line) * W + x[:, None]) * C + c[None, :]
    tl.store(to, tl.trans(a), tl.trans(inside))


@triton.jit
def _columns(
    maps, taps, out, C, H, W, M, whole, parts,
    RADIUS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The S x 1 convolution: taps (S*C, S*R), out (parts, M, S*R).

    Tiles come in whole waves of programs; those of the last, incomplete one are cut in `parts` along the sum.
    """
    SIDE: tl.constexpr = 2 * RADIUS + 1
    BN: tl.constexpr = 2 * RADIUS * RANK  # a power of two; the last RANK columns are a second, thin product
    N: tl.constexpr = SIDE * RANK
    rest = tl.maximum(tl.program_id(0) - whole, 0)
    cut = tl.program_id(0) >= whole
    tile = tl.where(cut, whole + rest // parts, tl.program_id(0))
    part = tl.where(cut, rest % parts, 0)
    steps = C // BK
    first = tl.where(cut, part * SIDE // parts, 0) * steps
    last = tl.where(cut, (part + 1) * SIDE // parts, SIDE) * steps
    m, n, r, c = tile * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, RANK), tl.arange(0, BK)
    position = tl.minimum(m, M - 1)
    corner = (position // (H * W) * (H + 2 * RADIUS) * W + position % (H * W)).to(tl.int64) * C
    left = maps + corner[:, None] + c[None, :]
    right = taps + c[:, None] * N
    most = tl.zeros([BM, BN], tl.float32)
    others = tl.zeros([BM, RANK], tl.float32)
    for step in range(first, last):
        a = tl.load(left + (step // steps * W * C + step % steps * BK))
        most = dot(a, tl.load(right + step * BK * N + n[None, :]), most, "tf32")
        others = dot(a, tl.load(right + step * BK * N + BN + r[None, :]), others, "tf32")
    to = out + (part * M + m).to(tl.int64)[:, None] * N
    tl.store(to + n[None, :], most.to(out.dtype.element_ty), (m < M)[:, None])
    tl.store(to + BN + r[None, :], others.to(out.dtype.element_ty), (m < M)[:, None])


@triton.jit
def _add(
    narrow, left, A, t, out, scale, image, p, r, first, last, C, P,
    RANK: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out += rho * scale * left @ narrow, for channels first .. last at positions p."""
    for start in range(first, last, BC):
        k = start + tl.arange(0, BC)
        at = image * C * P + k[:, None] * P + p[None, :]
        inside = (k < C)[:, None] & (p < P)[None, :]
        a = tl.load(A + at, inside, 0).to(tl.float32)
        before = tl.load(out + at, inside, 0).to(tl.float32)
        weights = tl.load(left + k[:, None] * RANK + r[None, :], (k < C)[:, None] & (r < RANK)[None, :], 0)
        delta = dot(weights, narrow, tl.zeros([BC, p.shape[0]], tl.float32), PRECISION) * scale
        tl.store(out + at, (before + tl.where(a > t, delta, 0)).to(out.dtype.element_ty), inside)


@triton.jit
def _widen_columns(
    columns, left, A, t_in, out, scale, C, H, W, M, whole, per,
    PARTS: tl.constexpr, TILE: tl.constexpr, RADIUS: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """out += rho * scale * left @ (the shifted sum of columns). columns (PARTS, M, S*R); A and out (B, C, P)."""
    SIDE: tl.constexpr = 2 * RADIUS + 1
    P = H * W
    p, r, image = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, RANK), tl.program_id(2).to(tl.int64)
    low = tl.zeros([BP, RANK], tl.float32)
    for dx in tl.static_range(SIDE):
        m, u = image * P + p + (dx - RADIUS), p % W + (dx - RADIUS)
        inside = (p < P) & (u >= 0) & (u < W)
        at = columns + m[:, None] * (SIDE * RANK) + dx * RANK + r[None, :]
        low += tl.load(at, inside[:, None], 0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            cut = inside & (m >= whole * TILE)
            low += tl.load(at + tl.cast(M, tl.int64) * (part * SIDE * RANK), cut[:, None], 0).to(tl.float32)
    narrow = tl.trans(low.to(left.dtype.element_ty))
    first = tl.program_id(1) * per
    _add(
        narrow, left, A, tl.load(t_in + image), out, scale, image, p, r, first, tl.minimum(first + per, C), C, P,
        RANK, BC, "tf32",
    )  # fmt: skip


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
    narrow = low.to(left.dtype.element_ty)
    _add(narrow, left, A, tl.load(t_in + image), out, scale, image, p, r, 0, C, C, P, RANK, BC, PRECISION)


def _thresholds(A: Tensor, threshold: Tensor | None) -> Tensor:
    t = A.float().mean((1, 2, 3)) if threshold is None else threshold.to(A.device, torch.float32)
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
    A: Tensor, left: Tensor, right: Tensor, threshold: Tensor | None, eps: float, divisor: float, cut: int = 4
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
    narrow = derived(left, f"narrow {A.dtype}", lambda: left.to(A.dtype).contiguous())
    radius, B, (H, W) = side // 2, len(A), A.shape[2:]
    wide = 2 * radius * R
    if A.dtype.itemsize == 2 and C % 64 == 0 and R in (16, 32) and 16 <= wide <= 256 and wide & (wide - 1) == 0:
        maps = A.new_empty(B, H + 2 * radius, W, C)
        _lines[H + 2 * radius, triton.cdiv(C, 128), B](
            A, t, maps, C, H, W, RADIUS=radius, BC=128, BW=max(16, int(triton.next_power_of_2(W))), num_warps=4
        )  # fmt: skip

        def rows() -> Tensor:
            return right.to(A.dtype).permute(2, 1, 3, 0).reshape(side * C, side * R).contiguous()  # (dy c, dx r)

        BM, M = 128, B * H * W
        tiles, processors = triton.cdiv(M, BM), _processors(A.device)
        whole = tiles // processors * processors
        parts = min(cut, side, max(1, processors // (tiles - whole))) if tiles > whole else 1
        columns = A.new_empty(parts, M, side * R)
        _columns[(whole + (tiles - whole) * parts,)](
            maps, derived(right, f"rows {A.dtype}", rows), columns, C, H, W, M, whole, parts,
            RADIUS=radius, RANK=R, BM=BM, BK=64, num_warps=8, num_stages=4,
        )  # fmt: skip
        per = triton.cdiv(C, 128) * 64
        _widen_columns[triton.cdiv(H * W, 64), triton.cdiv(C, per), B](
            columns, narrow, A, t, out, 1 / divisor, C, H, W, M, whole, per,
            PARTS=parts, TILE=BM, RADIUS=radius, RANK=R, BP=64, BC=64, num_warps=4,
        )  # fmt: skip
        return out
    a = (A * A.gt(t[:, None, None, None])).flatten(2)
    taps = derived(right, f"taps {A.dtype}", lambda: right.to(A.dtype).permute(2, 3, 0, 1).reshape(-1, C).contiguous())
    thin = torch.matmul(taps, a)  # (B, S*S*R, HW)
    _widen[triton.cdiv(H * W, 64), B](
        thin, narrow, A, t, out, 1 / divisor, C, H, W,
        RADIUS=radius, RANK=R, BR=max(16, int(triton.next_power_of_2(R))), BP=64, BC=64,
        PRECISION="tf32x3" if A.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out
