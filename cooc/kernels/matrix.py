"""One matrix product for all kernels, with float32 sums.

Triton's interpreter, in which the tests run where there is no GPU, takes bfloat16 operands for integers: there, and
only there, they are widened first. Their products are the same numbers.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["dot"]

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(left, right, total, PRECISION: tl.constexpr):
    """total + left @ right. Of float32 operands, "tf32x3" keeps the accuracy on the matrix units, "ieee" without."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:  # noqa: RET505 - Triton compiles one of two branches
        return tl.dot(left, right, total, input_precision=PRECISION)
