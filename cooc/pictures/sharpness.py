"""How sharp a picture is. Decoding processes import this module, so it imports nothing heavy."""

from __future__ import annotations

import cv2
import numpy as np

from cooc.pictures.decode import Picture, load_image


def sharpness(picture: Picture, side: int) -> float:
    """How much changes from pixel to pixel, brought to `side` pixels: to compare copies of different sizes."""
    pixels = load_image(picture, size=side)
    scale = side / max(pixels.shape[:2])
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    if scale > 1:
        grey = cv2.resize(grey, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    return float(np.var(cv2.Laplacian(grey, cv2.CV_32F)))
