"""Where an image's co-occurrences are: the spatial weights alpha of Eq. 8, as numbers and drawn over the picture.

    alpha = spatial_cooccurrences(descriptor, "photo.jpg")          # (H, W), one value for each position of A
    picture = overlay(pixels, alpha, stride=32)                     # (H', W', 3) uint8, the heat over the photograph

Colours come from one ramp whose lightness rises evenly (it is laid out in OKLab), so that it can be read without colour
vision and in print; no plotting library is needed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from cooc.cooccurrence import Cooccurrence
from cooc.descriptor import Descriptor
from cooc.pictures.decode import Picture
from cooc.pooling import mask, power_normalise

Pixels = NDArray[np.uint8]  # (H, W, 3)
INK, PAPER, MARGIN = (40, 40, 44), (255, 255, 255), 12


@torch.inference_mode()
def spatial_cooccurrences(
    descriptor: Descriptor, image: Picture | Tensor, cooccurrence: nn.Module | None = None
) -> NDArray[np.float32]:
    """alpha (Eq. 8, 9) of one picture, with the recipe's network, mask and radius. (H, W)

    cooccurrence: a layer to take in the place of the direct one, such as `Cooccurrence.load("filter.safetensors")`.
    """
    config = descriptor.config
    layer = (cooccurrence or Cooccurrence(radius=config.radius)).to(descriptor.device)
    A = descriptor.backbone(descriptor.load(image)[None]).float()  # (1, C, H, W)
    A = mask(A, config.mask, sigma=config.sigma)
    alpha: NDArray[np.float32] = power_normalise(layer(A).sum(1))[0].cpu().numpy()
    return alpha


def upsample(alpha: NDArray[Any], width: int, height: int, stride: int) -> NDArray[np.float32]:
    """alpha at every pixel, scaled to 0..1: a position sits in the middle of its stride x stride pixels. (H', W')"""
    rows, columns = alpha.shape
    image = Image.fromarray(np.ascontiguousarray(alpha, dtype=np.float32))
    fine = np.asarray(image.resize((columns * stride, rows * stride), Image.Resampling.BICUBIC))
    below, beside = max(0, height - fine.shape[0]), max(0, width - fine.shape[1])  # pixels past the last whole stride
    fine = np.pad(fine, ((0, below), (0, beside)), mode="edge")[:height, :width]
    heat: NDArray[np.float32] = np.clip(fine / max(float(alpha.max(initial=0)), 1e-30), 0, 1)
    return heat


def _ramp() -> Pixels:
    """256 colours from near black over purple, red and orange to pale yellow: lightness even, hue turning one way."""
    t = np.linspace(0, 1, 256)
    lightness = 0.16 + 0.80 * t
    chroma = np.interp(t, [0, 0.35, 0.65, 1], [0.05, 0.19, 0.19, 0.11])
    hue = np.radians(np.interp(t, [0, 0.35, 0.65, 1], [285, 355, 405, 465]))
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    # OKLab -> linear sRGB -> sRGB (Ottosson 2020)
    to_cone = np.array(
        [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = np.clip((np.stack([lightness, a, b], 1) @ to_cone.T) ** 3 @ to_rgb.T, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    colours: Pixels = np.rint(encoded * 255).astype(np.uint8)  # (256, 3)
    return colours


RAMP = _ramp()


def colour(heat: NDArray[Any]) -> Pixels:
    """0..1 -> colours. (H, W) -> (H, W, 3) uint8"""
    colours: Pixels = RAMP[np.rint(np.clip(heat, 0, 1) * 255).astype(np.intp)]
    return colours


def overlay(pixels: Pixels, alpha: NDArray[Any], stride: int) -> Pixels:
    """The picture in grey under its heat; the more co-occurrences, the stronger the colour. (H', W', 3) -> same"""
    heat = upsample(alpha, pixels.shape[1], pixels.shape[0], stride)
    grey = np.asarray(Image.fromarray(pixels).convert("L"), dtype=np.float32)[:, :, None]
    share = 0.45 + 0.25 * heat[:, :, None]
    blend: Pixels = np.rint((1 - share) * grey + share * colour(heat)).astype(np.uint8)
    return blend


def sheet(panels: Mapping[str, Pixels]) -> Image.Image:
    """Panels of one size side by side, each under its caption; a legend of the ramp below the last one."""
    height, width = next(iter(panels.values())).shape[:2]
    column = max(width, 200)  # a caption needs that
    text = max(13, min(22, column // 28))
    font = ImageFont.load_default(text)
    top, bar = MARGIN + text + 4, 8
    bottom = top + height + MARGIN
    page = Image.new("RGB", ((column + MARGIN) * len(panels) + MARGIN, bottom + bar + text + 2 * MARGIN), PAPER)
    draw = ImageDraw.Draw(page)
    for i, (caption, pixels) in enumerate(panels.items()):
        left = MARGIN + i * (column + MARGIN)
        draw.text((left, MARGIN // 2), caption, INK, font)
        page.paste(Image.fromarray(pixels), (left, top))
    legend = Image.fromarray(RAMP[None]).resize((width, bar))
    page.paste(legend, (left, bottom))
    draw.text((left, bottom + bar + 4), "few", INK, font)
    draw.text((left + width, bottom + bar + 4), "many", INK, font, anchor="ra")
    return page
