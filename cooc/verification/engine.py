"""What the files of the engines have in common: pixels in, features in the pixels of that array out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (H, W, 3), RGB


class Detected(NamedTuple):
    """The strongest features of an array of pixels, the strongest first."""

    points: NDArray[np.float32]  # (N, 2): x, y; the centre of the first pixel is (0, 0)
    scales: NDArray[np.float32]  # (N,)
    angles: NDArray[np.float32]  # (N,)
    descriptors: NDArray[np.uint8]  # (N, D)

    def take(self, which: NDArray[np.int64]) -> Detected:
        return Detected(self.points[which], self.scales[which], self.angles[which], self.descriptors[which])


@dataclass(frozen=True)
class Engine:
    """One way to find local features, and what must be known to match them."""

    detect: Callable[[Pixels, int, str], Detected]  # pixels, how many at most, device
    source: str
    licence: str
    rotation: bool  # a turned picture gives the same features
    scale: bool  # and a picture of another size
    weights: str | None  # the set that it needs
    dim: int
    turn: float  # degrees, and
    octaves: float  # by which a match's own rotation and size may differ from what the transform does there
    ratio: float | None = None  # a match is nearer than this times the second nearest
    similarity: float | None = None  # a match is at least this similar
    alike: float = 0.5  # similarity of two features at one place that look alike
    weight: float = 1.0  # of an inlier beside those of other engines
