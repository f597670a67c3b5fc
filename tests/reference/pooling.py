"""Every pooling, written from its paper: explicit loops over one image (C, H, W), float64.

R-MAC's regions follow the text of Tolias, Sicre and Jegou (2016, section 3.2) with exact fractions: at scale l, squares
of side 2 min(W, H) / (l + 1); at l = 1, m of them along the longer side, so many that the overlap of neighbours is as
close as possible to 40 percent; at scale l, l x (l + m - 1) of them, placed uniformly.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def unit(x: Array) -> Array:
    length = math.sqrt(sum(float(value) ** 2 for value in x))
    return x / length if length > 0 else x


def positions(A: Array) -> list[tuple[int, int]]:
    return [(i, j) for i in range(A.shape[1]) for j in range(A.shape[2])]


def ucrow(A: Array) -> Array:
    out = np.zeros(len(A))
    for i, j in positions(A):
        out += A[:, i, j]
    return out


def centre(H: int, W: int, sigma: float = 0.5) -> Array:
    out = np.zeros((H, W))
    for i in range(H):
        for j in range(W):
            distance = math.hypot(i - (H - 1) / 2, j - (W - 1) / 2)
            out[i, j] = math.exp(-0.5 * (distance / (sigma * min(H, W))) ** 2)
    return out


def top_down(H: int, W: int) -> Array:
    out = np.ones((H, W))
    for i in range(H):
        for j in range(W):
            out[i, j] = 1 - i / (H - 1) if H > 1 else 1
    return out


def spoc(A: Array, sigma: float = 0.5) -> Array:
    weight = centre(A.shape[1], A.shape[2], sigma)
    out = np.zeros(len(A))
    for i, j in positions(A):
        out += weight[i, j] * A[:, i, j]
    return out


def mac(A: Array) -> Array:
    return np.array([max(float(A[k, i, j]) for i, j in positions(A)) for k in range(len(A))])


def overlap(long: int, short: int, m: int) -> Fraction:
    """Of two neighbours among m squares spread from end to end: shared area over area."""
    return 1 - Fraction(long - short, m - 1) / short


def rmac_regions(H: int, W: int, levels: int = 3) -> list[tuple[int, int, int]]:
    """(top, left, side) in whole positions: sides and starts rounded down."""
    short, long = min(H, W), max(H, W)
    m = 1 if short == long else min(range(2, 8), key=lambda m: abs(overlap(long, short, m) - Fraction(2, 5)))
    regions = []
    for l in range(1, levels + 1):
        side = max(1, math.floor(Fraction(2 * short, l + 1)))
        across, along = l, l + m - 1
        rows, columns = (along, across) if H > W else (across, along)
        for i in range(rows):
            for j in range(columns):
                top = math.floor(Fraction(i * (H - side), rows - 1)) if rows > 1 else 0
                left = math.floor(Fraction(j * (W - side), columns - 1)) if columns > 1 else 0
                regions.append((top, left, side))
    return regions


def rmac(A: Array, levels: int = 3, whole: bool = True) -> Array:
    out = unit(mac(A)) if whole else np.zeros(len(A))
    for top, left, side in rmac_regions(A.shape[1], A.shape[2], levels):
        out = out + unit(mac(A[:, top : top + side, left : left + side]))
    return out


def gem(A: Array, p: float = 3.0) -> Array:
    out = np.zeros(len(A))
    for k in range(len(A)):
        out[k] = (sum(float(A[k, i, j]) ** p for i, j in positions(A)) / len(positions(A))) ** (1 / p)
    return out


def spatial_weights(S: Array, a: float = 2.0, b: float = 2.0) -> Array:
    """crow's spatial weights and the paper's Eq. 8: (S / ||S||_a)^(1/b)."""
    norm = sum(float(value) ** a for value in S.flat) ** (1 / a)
    out = np.zeros_like(S)
    for i, j in np.ndindex(*S.shape):
        if S[i, j] > 0:
            out[i, j] = (S[i, j] / norm) ** (1 / b)
    return out


def crow(A: Array) -> Array:
    """Kalantidis, Mellina and Osindero 2016: section 3.3 (spatial) and 3.4 (channel sparsity)."""
    C, H, W = A.shape
    alpha = spatial_weights(sum(A[k] for k in range(C)))
    nonzero = [sum(A[k, i, j] > 0 for i, j in positions(A)) / (H * W) for k in range(C)]
    out = np.zeros(C)
    for k in range(C):
        if nonzero[k] > 0:
            weight = math.log(sum(nonzero) / nonzero[k])
            out[k] = weight * sum(float(alpha[i, j] * A[k, i, j]) for i, j in positions(A))
    return out


def chco_sct(A: Array, C_T: Array, spatial: bool = True, channel: bool = True, eps: float = 1e-5) -> Array:
    """Eq. 7 to 10; without `spatial` alpha = 1, without `channel` beta = 1."""
    channels, H, W = A.shape
    alpha = spatial_weights(sum(C_T[k] for k in range(channels))) if spatial else np.ones((H, W))
    vector = [sum(float(C_T[k, i, j]) for i, j in positions(A)) for k in range(channels)]
    out = np.zeros(channels)
    for k in range(channels):
        beta = math.log(sum(vector) / (eps * sum(vector) + vector[k])) if channel else 1.0
        out[k] = beta * sum(float(alpha[i, j] * A[k, i, j]) for i, j in positions(A))
    return out


def bilinear(A: Array, C_T: Array) -> Array:
    """Eq. 11, flattened."""
    channels = len(A)
    out = np.zeros((channels, channels))
    for i, j in positions(A):
        for k in range(channels):
            for w in range(channels):
                out[k, w] += A[k, i, j] * C_T[w, i, j]
    return out.flatten()


def signed_sqrt(x: Array) -> Array:
    return np.array([math.copysign(math.sqrt(abs(value)), value) for value in x])


def count_sketch(x: Array, h: NDArray[np.int64], s: NDArray[np.int64], dim: int) -> Array:
    out = np.zeros(dim)
    for value, bin_, sign in zip(x, h, s, strict=True):
        out[bin_] += sign * value
    return out


def tensor_sketch(A: Array, C_T: Array, hashes: tuple[NDArray[np.int64], ...], dim: int) -> Array:
    """Gao et al. 2016, algorithm 2: at each position the circular convolution of two count sketches, by FFT."""
    h1, h2, s1, s2 = hashes
    out = np.zeros(dim)
    for i, j in positions(A):
        one = np.fft.fft(count_sketch(A[:, i, j], h1, s1, dim))
        two = np.fft.fft(count_sketch(C_T[:, i, j], h2, s2, dim))
        out += np.fft.ifft(one * two).real
    return out
