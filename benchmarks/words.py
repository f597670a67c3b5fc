"""The vocabulary of `cooc.verification.words`, fitted on photos: python -m benchmarks fit-words PHOTOS -o FILE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from cooc.pictures.decode import load_image
from cooc.verification.coding import vectors
from cooc.verification.engines import LONGEST, extract
from cooc.verification.words import ENGINE, SIDE

Floats = NDArray[np.float32]

EACH = 400  # features of a photo
CODES = 127  # centres are kept in 8 bits


def sample_features(photos: Sequence[Path], seed: int = 0) -> Floats:
    """Some features of each photo, drawn at random."""
    chance = np.random.default_rng(seed)
    found = []
    for photo in photos:
        (features,) = extract(ENGINE, load_image(photo, size=LONGEST))
        rows = vectors(features.descriptors)
        found.append(rows[chance.permutation(len(rows))[:EACH]])
    return np.concatenate(found)


def fit_vocabulary(samples: Floats, seed: int = 0) -> dict[str, NDArray[np.generic]]:
    """k-means in two steps: 128 centres, and 128 in each of their cells."""
    coarse = centres(samples, SIDE, seed)
    cell = np.argmin((coarse**2).sum(1) - 2 * samples @ coarse.T, axis=1)
    fine = np.stack([centres(samples[cell == step], SIDE, seed) for step in range(SIDE)])
    scale = np.float32(max(np.abs(coarse).max(), np.abs(fine).max()) / CODES)
    turn, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(samples.shape[1],) * 2))
    return {
        "coarse": np.round(coarse / scale).astype(np.int8),
        "fine": np.round(fine / scale).astype(np.int8),
        "scale": np.asarray(scale),
        "turn": turn.astype(np.float32),
    }


def centres(samples: Floats, count: int, seed: int) -> Floats:
    cv2.setRNGSeed(seed)
    stop = (cv2.TERM_CRITERIA_MAX_ITER, 20, 0.0)
    _, _, found = cv2.kmeans(samples, count, None, stop, 1, cv2.KMEANS_RANDOM_CENTERS)  # type: ignore[call-overload]
    return np.asarray(found, np.float32)
