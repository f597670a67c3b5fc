"""Feature maps -> one vector for each image. Every pooling is `pool(A, C, **options) -> (B, D)`, not yet normalised.

A (B, C, H, W) are the activations, C the co-occurrence tensor of the same shape. Poolings that do not look at
co-occurrences ignore C; the bilinear ones take any second map, so that bilinear(A, A) is BP(AA) and bilinear(A, C_T) is
BP(AC_T). `POOLINGS` is the table of all of them, `MASKS` that of the spatial masks that multiply A beforehand.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from cooc import kernels
from cooc.errors import InputError, check_name


def l2_normalise(x: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays zeros."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / _or_one(norm)


def _or_one(divisor: Tensor) -> Tensor:
    """Zeros become 1, so that what is all zeros stays so, with a finite gradient."""
    return torch.where(divisor > 0, divisor, torch.ones_like(divisor))


def power_mean(x: Tensor, p: float = 1.0) -> Tensor:
    """(mean of x^p)^(1/p) over the first dimension: how the vectors of several scales become one."""
    return (x**p).mean(0) ** (1 / p)


def signed_sqrt(x: Tensor) -> Tensor:
    """sign(x) sqrt(|x|), with a finite gradient at 0."""
    return torch.where(x == 0, x, x.sign() * x.abs().clamp_min(torch.finfo(x.dtype).tiny).sqrt())


# Masks: (H, W) weights, multiplied with A before anything else (section 4.3.1 of the paper)


def top_down_mask(H: int, W: int, device: torch.device | str | None = None) -> Tensor:
    """SpTD: 1 in the top row, falling linearly to 0 in the bottom row. (H, W)"""
    return (1 - torch.arange(H, device=device) / max(H - 1, 1))[:, None].expand(H, W)


def centre_mask(H: int, W: int, device: torch.device | str | None = None, sigma: float = 0.5) -> Tensor:
    """SpCt: a Gaussian around the centre; sigma in units of the shorter side. (H, W)"""
    if not sigma > 0:
        raise InputError(f"sigma, the width of the centre mask, must be more than 0; got {sigma}.")
    y, x = (torch.arange(n, device=device, dtype=torch.float32) for n in (H, W))
    distance = (y - y.mean())[:, None] ** 2 + (x - x.mean()) ** 2  # squared, to the centre
    return torch.exp(-distance / min(H, W) ** 2 / (2 * sigma**2))


def no_mask(H: int, W: int, device: torch.device | str | None = None) -> Tensor:
    return torch.ones(1, 1, device=device).expand(H, W)


MASKS: dict[str, Callable[..., Tensor]] = {"none": no_mask, "top-down": top_down_mask, "centre": centre_mask}


def mask(A: Tensor, name: str, *, sigma: float = 0.5, sizes: Tensor | None = None) -> Tensor:
    """A times the named mask. (B, C, H, W) -> same

    Of maps that were padded to one shape, sizes (B, 2) are the rows and columns that count: each is multiplied by the
    mask that it has alone, and is 0 beyond them.
    """
    check_name("mask", name, MASKS)
    options = {"sigma": sigma} if name == "centre" else {}
    if sizes is not None:
        weights = torch.zeros(len(A), 1, *A.shape[2:], device=A.device)
        for rows, h, w in shapes(sizes):
            weights[rows, 0, :h, :w] = MASKS[name](h, w, A.device, **options)
        return (A * weights.to(A.dtype)).masked_fill(weights == 0, 0)  # whatever the padding held
    if name == "none":
        return A
    return A * MASKS[name](A.shape[2], A.shape[3], A.device, **options).to(A.dtype)


def shapes(sizes: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Maps of one shape together: their rows in the batch, height and width. sizes (B, 2)"""
    found, which = torch.unique(sizes, dim=0, return_inverse=True)
    for i, (h, w) in enumerate(found.tolist()):
        yield (which == i).nonzero()[:, 0], h, w


# Baselines


def ucrow(A: Tensor, C: Tensor | None = None) -> Tensor:
    """The sum over positions (the paper's ucrow). (B, C)"""
    return A.sum((2, 3))


def spoc(A: Tensor, C: Tensor | None = None, *, sigma: float = 0.5) -> Tensor:
    """SPoC (Babenko and Lempitsky 2015): the sum with a Gaussian centre prior. (B, C)"""
    return mask(A, "centre", sigma=sigma).sum((2, 3))


def mac(A: Tensor, C: Tensor | None = None) -> Tensor:
    """MAC: the maximum over positions. (B, C)"""
    return A.amax((2, 3))


def rmac(A: Tensor, C: Tensor | None = None, *, levels: int = 3, whole: bool = True) -> Tensor:
    """R-MAC (Tolias et al. 2016): L2-normalised MAC vectors of square regions at several scales, summed. (B, C)

    whole=True counts the whole map as one more region, as most implementations do.
    """
    total = l2_normalise(mac(A)) if whole else torch.zeros_like(A[:, :, 0, 0])
    for y, x, side in rmac_regions(A.shape[2], A.shape[3], levels):
        total = total + l2_normalise(mac(A[:, :, y : y + side, x : x + side]))
    return total


def rmac_regions(H: int, W: int, levels: int = 3) -> list[tuple[int, int, int]]:
    """(top, left, side) of R-MAC's regions. At level l they are 2 min(H, W)/(l+1) wide, l along the shorter side and as
    many more along the longer one as bring the overlap of neighbours at level 1 nearest to 40 percent."""
    short, long = min(H, W), max(H, W)
    extra = 0
    if short < long:
        extra = min(range(1, 7), key=lambda m: abs(3 * short - 5 * (long - short) / m))  # overlap 2/5; ties are exact
    regions = []
    for level in range(1, levels + 1):
        side = max(2 * short // (level + 1), 1)
        rows = _starts(H, side, level + (extra if H > W else 0))
        columns = _starts(W, side, level + (extra if W > H else 0))
        regions += [(y, x, side) for y in rows for x in columns]
    return regions


def _starts(length: int, side: int, count: int) -> list[int]:
    """`count` starts spread evenly so that the first region begins at 0 and the last ends at `length`."""
    return [i * (length - side) // max(count - 1, 1) for i in range(count)]


def gem(A: Tensor, C: Tensor | None = None, *, p: float | Tensor = 3.0, eps: float = 1e-6) -> Tensor:
    """GeM (Radenovic et al. 2018): the generalised mean over positions, (mean of a^p)^(1/p). (B, C)"""
    largest = A.detach().amax((2, 3), keepdim=True)  # taken out: no power overflows or vanishes, whatever p
    scaled = A.clamp_min(eps) / largest.clamp_min(eps)
    mean = scaled.pow(p).mean((2, 3)).pow(1 / p) * largest[:, :, 0, 0]
    return mean.masked_fill(largest[:, :, 0, 0] <= eps, 0)  # a channel that never fires


def crow(A: Tensor, C: Tensor | None = None) -> Tensor:
    """crow (Kalantidis et al. 2016): positions weighted by their total activation, channels by rarity. (B, C)"""
    present = (A > 0).to(A.dtype).mean((2, 3))  # (B, C): fraction of positions where the channel fires
    rarity = torch.log(present.sum(1, keepdim=True) / present.masked_fill(present == 0, 1))
    return rarity.masked_fill(present == 0, 0) * _weighted_sum(A, power_normalise(A.sum(1)))


# The paper's linear pooling (Eq. 7 to 10)


def power_normalise(S: Tensor, a: float = 2.0, b: float = 2.0) -> Tensor:
    """Eq. 8: alpha = (S / ||S||_a)^(1/b) over the positions of each image; all zeros stay zeros. (B, H, W) -> same"""
    S = S.clamp_min(0)  # a learned filter may give negative totals: such positions count for nothing
    ratio = S / _or_one(torch.linalg.vector_norm(S.flatten(1), a, dim=1))[:, None, None]
    return torch.where(ratio > 0, ratio.clamp_min(torch.finfo(S.dtype).tiny) ** (1 / b), 0)


def channel_rarity(C_V: Tensor, eps: float = 1e-5) -> Tensor:
    """Eq. 10: beta_k = log(sum C_V / (eps + C_V(k))), eps relative to sum C_V. (B, C) -> same"""
    C_V = C_V.clamp_min(0)
    return -torch.log(eps + C_V / _or_one(C_V.sum(1, keepdim=True)))


def _weighted_sum(A: Tensor, alpha: Tensor) -> Tensor:
    return torch.einsum("bchw,bhw->bc", A, alpha)


def _cooccurrences(A: Tensor, C: Tensor | None) -> Tensor:
    if C is None or C.shape != A.shape:
        raise InputError(f"This pooling needs a co-occurrence tensor of A's shape {tuple(A.shape)}.")
    return C


def sct(A: Tensor, C: Tensor | None, *, a: float = 2.0, b: float = 2.0) -> Tensor:
    """SC_T alone: positions weighted by their spatial co-occurrences alpha (Eq. 8, 9). (B, C)"""
    return _weighted_sum(A, power_normalise(_cooccurrences(A, C).sum(1), a, b))


def chco(A: Tensor, C: Tensor | None, *, eps: float = 1e-5) -> Tensor:
    """ChCO alone: channels weighted by the rarity beta of their co-occurrences (Eq. 10). (B, C)"""
    return channel_rarity(_cooccurrences(A, C).sum((2, 3)), eps) * ucrow(A)


def chco_sct(A: Tensor, C: Tensor | None, *, a: float = 2.0, b: float = 2.0, eps: float = 1e-5) -> Tensor:
    """ChCO-SC_T (Eq. 7): f_k = beta_k * sum over positions of alpha_ij A_ijk. (B, C)"""
    return channel_rarity(_cooccurrences(A, C).sum((2, 3)), eps) * sct(A, C, a=a, b=b)


# Bilinear pooling (Eq. 11)


def bilinear_matrix(A: Tensor, C: Tensor | None = None) -> Tensor:
    """Eq. 11: the sum over positions of A_ij C_ij^T. (B, C, C)"""
    return A.flatten(2) @ (A if C is None else _cooccurrences(A, C)).flatten(2).mT


def bilinear(A: Tensor, C: Tensor | None = None) -> Tensor:
    """Bilinear pooling, whole: C*C dimensions for each image. Without C it is BP(AA). (B, C*C)"""
    return bilinear_matrix(A, C).flatten(1)


def sketch_hashes(channels: int, dim: int = 8192, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tensor Sketch's bins (h1[i] + h2[j]) mod dim and signs s1[i] s2[j] for every pair of channels. Each (C*C,)

    They come from a cryptographic digest of the seed, not from a random generator, so they are the same for ever.
    """
    if dim < 1 or dim > 2**20:
        raise InputError(f"A sketch has between 1 and 2^20 dimensions; got {dim}.")

    def draw(name: str) -> Tensor:
        digest = hashlib.shake_128(f"cooc sketch {seed} {name} {dim}".encode()).digest(8 * channels)
        return torch.from_numpy(np.frombuffer(digest, dtype="<u8").astype(np.uint64) >> np.uint64(1)).to(torch.int64)

    h1, h2 = draw("h1") % dim, draw("h2") % dim
    s1, s2 = 1 - 2 * (draw("s1") % 2), 1 - 2 * (draw("s2") % 2)
    bins = (h1[:, None] + h2[None, :]) % dim
    return bins.flatten(), (s1[:, None] * s2[None, :]).flatten()


def compact_bilinear(A: Tensor, C: Tensor | None = None, *, bins: Tensor, signs: Tensor, dim: int = 8192) -> Tensor:
    """Compact bilinear pooling (Gao et al. 2016) by Tensor Sketch. (B, dim)

    The sketch is linear, so the sketch of a sum of outer products is a signed scatter of the matrix B: one product and
    one scatter for each image, where the usual form needs two FFTs of length dim for each position. Exactly equal.
    On a GPU, where no gradient is needed, a kernel adds up sorted lists in the place of the scatter.
    """
    if A.shape[1] ** 2 != len(bins):
        raise InputError(f"This sketch is for {math.isqrt(len(bins))} channels, the activations have {A.shape[1]}.")
    other = A if C is None else _cooccurrences(A, C)
    out = kernels.compact_bilinear(A, other, bins, signs, dim)
    if out is None:
        B = bilinear_matrix(A, C).flatten(1)
        out = torch.zeros(B.shape[0], dim, dtype=B.dtype, device=B.device)
        out = out.scatter_add(1, bins.expand_as(B), B * signs.to(B.dtype))  # index_add in ONNX Runtime: threads race
    return out.to(A.dtype)


class GeM(nn.Module):
    """GeM with a learnable exponent."""

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p, self.eps = nn.Parameter(torch.tensor(float(p))), eps

    def forward(self, A: Tensor, C: Tensor | None = None) -> Tensor:
        return gem(A, p=self.p, eps=self.eps)


class CompactBilinear(nn.Module):
    """Compact bilinear pooling that keeps its hashes: seeded, and saved with the state dict."""

    bins: Tensor
    signs: Tensor

    def __init__(self, channels: int, *, dim: int = 8192, seed: int = 0) -> None:
        super().__init__()
        self.dim = dim
        bins, signs = sketch_hashes(channels, dim, seed)
        self.register_buffer("bins", bins)
        self.register_buffer("signs", signs)

    def forward(self, A: Tensor, C: Tensor | None = None) -> Tensor:
        return compact_bilinear(A, C, bins=self.bins, signs=self.signs, dim=self.dim)


@dataclass(frozen=True)
class Pooling:
    """One row of POOLINGS: `build(channels, **options)` gives `pool(A, C) -> (B, D)`.

    Every pooling has one option more, `sqrt`: the signed square root of what it gives (`Pooler` takes it).
    """

    build: Callable[..., Callable[..., Tensor]]
    cooccurrence: bool  # does it look at C_T?
    source: str
    border: bool = False  # does it see where a map ends, so that zeros beyond it would change more than the length?

    @property
    def options(self) -> list[str]:
        """The names that `build` takes, and `sqrt`."""
        parameters = inspect.signature(self.build).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY] + ["sqrt"]


def _plain(function: Callable[..., Tensor]) -> Callable[..., Callable[..., Tensor]]:
    @functools.wraps(function)  # for its signature
    def build(channels: int, **options: float) -> Callable[..., Tensor]:
        return functools.partial(function, **options)

    return build


POOLINGS: dict[str, Pooling] = {
    "ucrow": Pooling(_plain(ucrow), False, "sum pooling; the paper's table 1, row 1"),
    "spoc": Pooling(_plain(spoc), False, "Babenko and Lempitsky 2015", border=True),
    "mac": Pooling(_plain(mac), False, "Razavian et al. 2014, Tolias et al. 2016", border=True),
    "rmac": Pooling(_plain(rmac), False, "Tolias et al. 2016", border=True),
    "gem": Pooling(_plain(gem), False, "Radenovic et al. 2018"),
    "crow": Pooling(_plain(crow), False, "Kalantidis et al. 2016"),
    "chco-sct": Pooling(_plain(chco_sct), True, "the paper's Eq. 7 to 10"),
    "chco": Pooling(_plain(chco), True, "the paper's Eq. 10 alone"),
    "sct": Pooling(_plain(sct), True, "the paper's Eq. 8 and 9 alone"),
    "bilinear": Pooling(_plain(bilinear), True, "the paper's Eq. 11, whole"),
    "compact-bilinear": Pooling(CompactBilinear, True, "the paper's Eq. 11 with Tensor Sketch, Gao et al. 2016"),
}
