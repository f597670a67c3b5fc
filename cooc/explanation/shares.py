"""Why two pictures match: their score as a sum over the positions of either one.

A pooled vector is a sum over positions, whitening is affine, and lengths are numbers, so the score needs no guess to be
taken apart. With f = sum_p v_p the pooled vector of a picture, r = f / |f|, y = P (r - m) and the score q . y / |y|:

    share_p = q . P (v_p / |f| - rho_p m) / |y|         rho_p = v_p . f / |f|^2, the part of f that p brings

The whitening's mean m is a constant that belongs to no position; rho, which adds up to 1, splits it. So a position
without activations has no share, and the shares add up to the score. With g = (P^T q - (q . P m) r) / |y| it is one
inner product, share_p = g . v_p / |f|. At several scales r is their mean, and shares of coarse positions are spread
over the fine ones that they cover.

What v_p is: everything that a pooling computes once for an image (alpha, beta, C_T) is a constant, and so v_p is the
derivative of f by a weight on position p. That is how it is computed, for all poolings by the same few lines: the
derivative pulls g back through the sketch into a C x C matrix G, and A_p^T G C_p is the share of a bilinear pooling.
For linear and bilinear poolings this is exact: the share is what the position put in. MAC, R-MAC, GeM and square roots
are no sums; there the derivative (gradient times activation, which for these adds up to the score too) is the usual
answer, and `Explanation.exact` is False.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from cooc.descriptor import Descriptor, rescale
from cooc.errors import InputError
from cooc.explanation.heatmaps import INK, MARGIN, PAPER, RAMP, overlay
from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture, image_info, scale_of
from cooc.pooling import crow, l2_normalise, mac, mask, power_mean, rmac_regions, sct, signed_sqrt

SUMS = {"ucrow", "spoc", "crow", "chco", "sct", "chco-sct", "bilinear", "compact-bilinear"}
MOST = 0.8  # of the positive shares lie in the box that says "it is here"
FRAME = (255, 176, 0)


@dataclass(frozen=True, eq=False)
class Shares:
    """One picture's side of a score. Boxes are x0, y0, x1, y1 in pixels of the upright, full-size picture."""

    map: NDArray[np.float32]  # (H, W); they add up to the score
    region: Box  # what the map covers, in equal cells; at the right and below it may end before or behind the picture
    box: Box | None  # "it is here": the smallest one with most of the positive shares; None if nothing speaks for it


@dataclass(frozen=True, eq=False)
class Explanation:
    score: float
    query: Shares
    match: Shares
    exact: bool  # False: shares by the pooling's derivative, since it is no sum over positions


def explain(
    descriptor: Descriptor, query: Picture | Tensor, match: Picture | Tensor, *, query_box: Box | None = None
) -> Explanation:
    """The score of `match` for `query` (or the part of it in `query_box`), taken apart over the positions of both."""
    sides = [_Side(descriptor, query, query_box), _Side(descriptor, match, None)]
    q, x = (side.vector for side in sides)
    return Explanation(float(q @ x), sides[0].shares(x), sides[1].shares(q), _is_sum(descriptor))


class _Side:
    """A picture described with a weight of 1 on every position, by which the pooled vectors can be derived."""

    def __init__(self, descriptor: Descriptor, image: Picture | Tensor, box: Box | None) -> None:
        self.descriptor = descriptor
        pixels = descriptor.load(image, box)[None]  # (1, 3, h, w)
        self.cell, self.picture = _geometry(descriptor, image, box)
        self.weights: list[Tensor] = []  # (H, W) of each scale
        self.pooled: list[Tensor] = []  # (D',), not normalised
        self.heights: list[tuple[float, float]] = []  # pixels of the first scale that a position of this one covers
        for scale in descriptor.config.scales:
            scaled = rescale(pixels, scale, descriptor.backbone.stride)
            with torch.no_grad():
                A = descriptor.backbone(scaled).float()
            weight = torch.ones(A.shape[2:], device=A.device, requires_grad=True)
            self.weights.append(weight)
            self.pooled.append(_weighted_pooling(descriptor, A)(weight)[0])
            self.heights.append((pixels.shape[2] / scaled.shape[2], pixels.shape[3] / scaled.shape[3]))
        with torch.no_grad():
            self.raw = descriptor.combine([l2_normalise(f)[None] for f in self.pooled])[0]  # (D',)
            whiten = descriptor.whitening or torch.nn.Identity()
            self.vector = whiten(self.raw[None])[0].clone()  # (D,)

    def shares(self, other: Tensor) -> Shares:
        """Of the score `self.vector . other`."""
        gradients = torch.autograd.grad(
            [torch.dot(g, f) for g, f in zip(self._directions(other), self.pooled, strict=True)],
            self.weights,
            retain_graph=True,
        )
        degree = 0.5 if self.descriptor.pooler.root else 1.0  # Euler: sum_p df/dw_p = degree * f
        fine = self.weights[0].shape
        total = torch.zeros(fine, dtype=torch.float64)
        for gradient, (high, wide) in zip(gradients, self.heights, strict=True):
            share = gradient.cpu().double() / degree
            total += _spread(fine[0], share.shape[0], high) @ share @ _spread(fine[1], share.shape[1], wide).T
        return self._in_pixels(total.float().numpy())

    @torch.no_grad()
    def _directions(self, other: Tensor) -> list[Tensor]:
        """g of the docstring for each scale: the inner product with its pooled vector is its part of the score."""
        config, whitening = self.descriptor.config, self.descriptor.whitening
        g = other
        if whitening is not None:
            projected = other @ whitening.projection  # P^T q
            y = torch.linalg.vector_norm(whitening.projection @ (self.raw - whitening.mean))
            g = (projected - torch.dot(projected, whitening.mean) * self.raw) / _or_one(y)
        units = torch.stack([l2_normalise(f) for f in self.pooled])  # (scales, D')
        p = config.scale_power if len(units) > 1 else 1.0
        joined = power_mean(units, p)
        slopes = (units / _or_one(joined)) ** (p - 1) / len(units)  # of the (power) mean over scales
        lengths = torch.stack([torch.linalg.vector_norm(f) for f in self.pooled])
        return list(g * slopes / _or_one(torch.linalg.vector_norm(joined)) / _or_one(lengths)[:, None])

    def _in_pixels(self, shares: NDArray[np.float32]) -> Shares:
        left, top, right, bottom = self.picture
        rows, columns = shares.shape
        region = (left, top, left + columns * self.cell, top + rows * self.cell)
        cells = densest_box(shares)
        if cells is None:
            return Shares(shares, region, None)
        x0, y0, x1, y1 = (n * self.cell for n in cells)
        # A network that pads its border may leave the last row or column short, or drop it: the edge is the picture's.
        x1 = right - left if cells[2] == columns else x1
        y1 = bottom - top if cells[3] == rows else y1
        return Shares(shares, region, (left + x0, top + y0, min(left + x1, right), min(top + y1, bottom)))


def _geometry(descriptor: Descriptor, image: Picture | Tensor, box: Box | None) -> tuple[float, Box]:
    """Pixels of the full-size picture that a position covers, and the part of the picture that is described."""
    stride = descriptor.backbone.stride
    if isinstance(image, Tensor):
        return stride, (0, 0, image.shape[-1], image.shape[-2])
    info = image_info(image)
    factor = scale_of(max(info.width, info.height), descriptor.config.size, descriptor.config.least)
    x0, y0, x1, y1 = box or (0, 0, info.width, info.height)
    return stride / factor, (max(x0, 0), max(y0, 0), min(x1, info.width), min(y1, info.height))


def _is_sum(descriptor: Descriptor) -> bool:
    config = descriptor.config
    return config.pooling in SUMS and not descriptor.pooler.root


def _weighted_pooling(descriptor: Descriptor, A: Tensor) -> Callable[[Tensor], Tensor]:
    """Weights (H, W) -> the pooled vector (1, D'), in which what an image has only once is a constant."""
    pool = _weighted_sum(descriptor, A)
    return (lambda weight: signed_sqrt(pool(weight))) if descriptor.pooler.root else pool


def _weighted_sum(descriptor: Descriptor, A: Tensor) -> Callable[[Tensor], Tensor]:
    config, pooler = descriptor.config, descriptor.pooler
    with torch.no_grad():
        A = mask(A, config.mask, sigma=config.sigma)
        C = None if pooler.cooccurrence is None else pooler.cooccurrence(A)
        if config.pooling == "crow":  # SC_T of A itself, times rarities that hold for the whole image
            plain = sct(A, A)
            rarity = crow(A) / _or_one(plain)
            return lambda weight: rarity * sct(A * weight, A)
        if config.pooling == "rmac":  # regions are normalised: their lengths are constants too
            options = dict(config.options)
            side = max(A.shape[2:])
            regions = [(0, 0, side)] * bool(options.get("whole", True))
            regions += rmac_regions(A.shape[2], A.shape[3], int(options.get("levels", 3)))
            parts = [(..., slice(y, y + n), slice(x, x + n)) for y, x, n in regions]
            lengths = [_or_one(torch.linalg.vector_norm(mac(A[part]))) for part in parts]
            return lambda weight: torch.stack(
                [mac((A * weight)[part]) / length for part, length in zip(parts, lengths, strict=True)]
            ).sum(0)
    second = A if C is None and config.pooling.endswith("bilinear") else C  # BP(AA): one of the two is the constant
    return lambda weight: pooler.pool(A * weight, second)


def _or_one(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def _spread(fine: int, coarse: int, factor: float) -> Tensor:
    """(fine, coarse): the part of coarse cell j, `factor` times as long, in fine cell i. Columns add up to 1."""
    i, j = torch.arange(fine, dtype=torch.float64)[:, None], torch.arange(coarse, dtype=torch.float64)[None, :]
    overlap = (torch.minimum(i + 1, (j + 1) * factor) - torch.maximum(i, j * factor)).clamp_min(0)
    overlap[-1] += (overlap.sum(0) == 0).double()  # a padded coarse cell may begin behind the last fine one
    return overlap / overlap.sum(0)


def densest_box(shares: NDArray[np.float32], most: float = MOST) -> tuple[int, int, int, int] | None:
    """x0, y0, x1, y1 in cells: the smallest rectangle with at least `most` of the positive shares; None without any.

    Among equals the one with the most in it, then the first. For every pair of rows the prefix sums of the columns
    never fall, so that the right edge which suffices for each left edge is found by bisection.
    """
    if not 0 < most <= 1:
        raise InputError(f"The box holds more than 0 and at most 1 of the shares, not {most}.")
    positive = np.maximum(shares.astype(np.float64), 0)
    if not positive.any():
        return None
    H, W = positive.shape
    down = np.concatenate([np.zeros((1, W)), positive.cumsum(0)])  # (H + 1, W)
    wanted = most * down[-1].sum() * (1 - 1e-9)
    best: tuple[int, float, tuple[int, int, int, int]] | None = None
    for y0 in range(H):
        for y1 in range(y0 + 1, H + 1):
            across = np.concatenate([[0.0], (down[y1] - down[y0]).cumsum()])  # (W + 1,)
            right = np.searchsorted(across, across[:-1] + wanted)
            for x0 in np.flatnonzero(right <= W):
                x1 = int(right[x0])
                found = ((y1 - y0) * (x1 - int(x0)), float(across[x0] - across[x1]), (int(x0), y0, x1, y1))
                best = found if best is None else min(best, found)
    return best[2] if best else (0, 0, W, H)


def draw(
    descriptor: Descriptor,
    query: Picture | Tensor,
    match: Picture | Tensor,
    explanation: Explanation,
    *,
    query_box: Box | None = None,
    names: tuple[str, str] = ("query", "match"),
    height: int = 420,
) -> Image.Image:
    """Both pictures with their boxes, and below them their shares as heat: a page for `cooc explain`."""
    font, small = ImageFont.load_default(17), ImageFont.load_default(14)
    columns = []
    for image, box, side in ((query, query_box, explanation.query), (match, None, explanation.match)):
        pixels = descriptor.load(image, box).permute(1, 2, 0).numpy()
        heat = overlay(pixels, side.map, descriptor.backbone.stride)
        columns.append([_framed(panel, side, descriptor.backbone.stride, height) for panel in (pixels, heat)])
    line, gap = 24, 2 * MARGIN
    width = sum(column[0].width for column in columns) + gap + 2 * MARGIN
    page = Image.new("RGB", (max(width, 680), MARGIN + line + 2 * (height + MARGIN) + 2 * line), PAPER)
    pen = ImageDraw.Draw(page)
    left = MARGIN
    for name, column in zip(names, columns, strict=True):
        pen.text((left, MARGIN), name, INK, font)
        for row, panel in enumerate(column):
            page.paste(panel, (left, MARGIN + line + row * (height + MARGIN)))
        left += column[0].width + gap
    bottom = MARGIN + line + 2 * (height + MARGIN)
    page.paste(Image.fromarray(RAMP[None]).resize((120, 8)), (MARGIN, bottom + 5))
    kind = "Shares" if explanation.exact else "Derivatives"
    text = f"{kind} add up to the score, {explanation.score:.3f}; the frame holds {MOST:.0%} of the positive ones."
    pen.text((MARGIN + 132, bottom), text, INK, small)
    return page


def _framed(pixels: NDArray[np.uint8], side: Shares, stride: int, height: int) -> Image.Image:
    image = Image.fromarray(pixels)
    scale = height / image.height
    image = image.resize((max(1, round(image.width * scale)), height), Image.Resampling.LANCZOS)
    if side.box is not None:
        left, top, right, _ = side.region
        factor = scale * stride * side.map.shape[1] / (right - left)  # full-size pixels -> drawn ones
        x0, y0, x1, y1 = ((n - o) * factor for n, o in zip(side.box, (left, top, left, top), strict=True))
        frame = (x0, y0, min(x1, image.width) - 1, min(y1, image.height) - 1)
        ImageDraw.Draw(image).rectangle(frame, outline=FRAME, width=3)
    return image
