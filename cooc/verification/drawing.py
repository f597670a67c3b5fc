"""Two pictures side by side, with what they agree on: the region in both, matched points and lines between them."""

from __future__ import annotations

import colorsys

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from cooc.verification.agreement import Agreement, evenly

REGION = (46, 204, 113)
GAP = 12
MOST = 120  # lines; more hide the pictures


def draw(
    query: Image.Image | NDArray[np.uint8],
    picture: Image.Image | NDArray[np.uint8],
    agreement: Agreement,
    *,
    query_size: tuple[int, int] | None = None,
    picture_size: tuple[int, int] | None = None,
    height: int = 480,
) -> Image.Image:
    """An RGB image `height` pixels high. The sizes are those of the full pictures, where smaller ones are given."""
    sides = [_image(query), _image(picture)]
    full = [query_size or sides[0].size, picture_size or sides[1].size]
    shown = [side.resize((max(1, round(side.width * height / side.height)), height)) for side in sides]
    canvas = Image.new("RGB", (shown[0].width + GAP + shown[1].width, height), "white")
    starts = (0, shown[0].width + GAP)
    points, regions = [], []
    for side, size, start, own, region in zip(
        shown,
        full,
        starts,
        (agreement.query_points, agreement.picture_points),
        (agreement.query_region, agreement.picture_region),
        strict=True,
    ):
        canvas.paste(side, (start, 0))
        scale = np.array([side.width / size[0], side.height / size[1]])
        points.append(own * scale + (start, 0))
        regions.append(region * scale + (start, 0))
    pen = ImageDraw.Draw(canvas, "RGBA")
    for region in regions:
        if len(region) > 2:
            corners = [tuple(corner) for corner in region.tolist()]
            pen.polygon(corners, fill=(*REGION, 40))
            pen.line([*corners, corners[0]], fill=REGION, width=3, joint="curve")
    for number in evenly(len(points[0]), MOST):
        a, b = points[0][number].tolist(), points[1][number].tolist()
        red, green, blue = colorsys.hsv_to_rgb(number * 0.618 % 1, 0.8, 1.0)  # neighbours differ
        colour = (round(255 * red), round(255 * green), round(255 * blue))
        pen.line([tuple(a), tuple(b)], fill=(*colour, 150), width=1)
        for x, y in (a, b):
            pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
    return canvas


def _image(picture: Image.Image | NDArray[np.uint8]) -> Image.Image:
    return (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).convert("RGB")
