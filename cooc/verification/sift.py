"""SIFT (Lowe 2004) by OpenCV, with RootSIFT's normalisation (Arandjelovic and Zisserman 2012).

It needs no weights and knows size and rotation of each feature, so that a print upside down is found as well. What it
cannot do: mirrored pictures, views more than some 50 degrees apart, day and night.
"""

from __future__ import annotations

from functools import cache

import cv2
import numpy as np

from cooc.files import DATA
from cooc.verification.coding import Projection, quantise
from cooc.verification.engine import CANDIDATES, Detected, Pixels, best_of_all_parts

CONTRAST = 0.02  # half of OpenCV's default: facades in the shade have features as well
EMPTY = np.zeros((0, 128), np.float32)


@cache
def projection() -> Projection:
    """128 values to 64, by `benchmarks.fitting.fit_projection` on landmark photos."""
    return Projection.load(DATA / "rootsift.npy")


def root_sift(pixels: Pixels, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Keypoints (N, 5): x, y, size, angle, response; and RootSIFT (N, 128) of the best, at most `limit`.

    Only those that are taken are described, which is half of the work.
    """
    grey = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)
    sift = cv2.SIFT.create(nfeatures=CANDIDATES * limit, contrastThreshold=CONTRAST)
    found = sift.detect(grey)
    if not found:
        return np.zeros((0, 5), np.float32), EMPTY
    keypoints = np.array([(*k.pt, k.size, k.angle, k.response) for k in found], np.float32)
    order = np.argsort(-keypoints[:, 4], kind="stable")
    order = order[best_of_all_parts(keypoints[order, :2], grey.shape, limit)]
    _, histograms = sift.compute(grey, [found[n] for n in order.tolist()])
    return keypoints[order], np.sqrt(histograms / np.maximum(histograms.sum(1, keepdims=True), 1e-9))


def detect_sift(pixels: Pixels, limit: int, device: str = "cpu") -> Detected:
    """OpenCV's SIFT runs on the CPU, whatever the device."""
    keypoints, histograms = root_sift(pixels, limit)
    return Detected(keypoints[:, :2], keypoints[:, 2], keypoints[:, 3], quantise(projection()(histograms)))
