"""Photographs that packages carry, and views of them by known transforms."""

from __future__ import annotations

from functools import cache

import cv2
import numpy as np
import skimage.data

from cooc.verification.engines import LONGEST, extract
from cooc.verification.features import LocalFeatures

PHOTOS = {
    "astronaut": skimage.data.astronaut,
    "cat": skimage.data.chelsea,
    "coffee": skimage.data.coffee,
    "rocket": skimage.data.rocket,
}


def photo(name: str) -> np.ndarray:
    return np.ascontiguousarray(PHOTOS[name]()[..., :3])


def seen_at(engine: str) -> int:
    """Pixels of the longer side at which tests look: VGG16, three times, takes as long as all else at full size."""
    return 320 if engine == "activations" else LONGEST


@cache
def features_of(engine: str, name: str) -> LocalFeatures:
    """Of a whole photo: nobody changes them, and many compare with them."""
    return extract(engine, photo(name), longest=seen_at(engine))[0]


def warp(pixels: np.ndarray, transform: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The picture as the transform shows it, on grey."""
    return cv2.warpPerspective(pixels, np.asarray(transform, float), size, borderValue=(127, 127, 127))


def turned(
    degrees: float, scale: float, centre: tuple[float, float], shift: tuple[float, float] = (0, 0)
) -> np.ndarray:
    matrix = np.vstack([cv2.getRotationMatrix2D(centre, degrees, scale), (0, 0, 1)])
    matrix[:2, 2] += shift
    return matrix


SLANTED = np.array([[0.9, 0.15, 20.0], [-0.1, 1.0, 60.0], [3e-4, 2e-4, 1.0]])
