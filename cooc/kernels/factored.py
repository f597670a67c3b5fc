"""C_T with the factored filter, direct + left @ right, in float32.

A convolution to R channels would fetch its input S*S times for R columns, too few for the matrix units. So all taps are
one plain product, (S*S*R, C) @ (C, HW); its shifted results are added up, widened to C channels and added to the direct
tensor in one pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cooc.kernels import direct
from cooc.kernels.memory import derived


@triton.jit
def _widen(
    thin, left, A, t_in, out, scale, C, H, W,
    RADIUS: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
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
            low += tl.load(thin + line[:, None] * P + (v * W + u)[None, :], inside, 0)
    t = tl.load(t_in + image)
    for start in range(0, C, BC):
        k = start + tl.arange(0, BC)
        at = image * C * P + k[:, None] * P + p[None, :]
        inside = (k < C)[:, None] & (p < P)[None, :]
        a, before = tl.load(A + at, inside, 0), tl.load(out + at, inside, 0)
        weights = tl.load(left + k[:, None] * RANK + r[None, :], (k < C)[:, None] & (r < RANK)[None, :], 0)
        delta = tl.dot(weights, low, input_precision="tf32x3") * scale  # float32's accuracy on the matrix units
        tl.store(out + at, before + tl.where(a > t, delta, 0), inside)


def factored(
    A: Tensor, left: Tensor, right: Tensor, threshold: Tensor | None, eps: float, divisor: float
) -> Tensor | None:
    """C_T with F = direct + left @ right: left (C, R), right (R, C, S, S); None for what is not covered."""
    R, C, side, _ = right.shape
    radius, B, (H, W) = side // 2, len(A), A.shape[2:]
    if R > 64 or A.dtype != torch.float32:
        return None
    done = direct.tensor(A, radius, threshold, eps, divisor)
    if done is None:
        return None
    out, t = done
    A = A.contiguous()
    a = (A * A.gt(t[:, None, None, None])).flatten(2)
    taps = derived(right, "taps", lambda: right.float().permute(2, 3, 0, 1).reshape(-1, C).contiguous())
    thin = torch.matmul(taps, a)  # (B, S*S*R, HW)
    _widen[triton.cdiv(H * W, 64), B](
        thin, left.float().contiguous(), A, t, out, 1 / divisor, C, H, W,
        RADIUS=radius, RANK=R, BR=direct.power(R), BP=64, BC=64, num_warps=4,
    )  # fmt: skip
    return out
