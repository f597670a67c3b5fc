"""Local features out of the maps that the descriptor's network makes anyway: no second network, nothing to install.

    projection = Projection.fit(np.concatenate([positions(maps)[2] for maps in many]), 128)     # once
    features = activation_features(maps, projection, size=(4000, 3000))

`maps` are (A, step) pairs: A (C, H, W) is a map of the whole picture, at one of a few scales, and `step` the distance of
its positions in full-size pixels (stride / scale). Places of one building are found well (ROxford, pilot); positions
are coarse, and neither rotation nor a print seen at a slant is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cooc.errors import InputError
from cooc.verification.coding import Projection, quantise, unit
from cooc.verification.features import LocalFeatures

__all__ = ["activation_features", "positions"]

Floats = NDArray[np.float32]
Map = NDArray[np.float32] | torch.Tensor

FIELD = 4.0  # size of a feature, in steps


def positions(maps: Sequence[tuple[Map, float]]) -> tuple[Floats, Floats, Floats, Floats]:
    """x, y (N, 2), scale (N,), unit vector (N, C) and length (N,) of every position of the maps that is not all zero."""
    parts = []
    for values, step in maps:
        A = (
            values.detach().float().cpu().numpy()
            if isinstance(values, torch.Tensor)
            else np.asarray(values, np.float32)
        )
        if A.ndim != 3 or step <= 0:
            raise InputError(f"A map must be (C, H, W) with a step over 0, not {A.shape} with step {step}.")
        row, column = np.indices(A.shape[1:]).reshape(2, -1)
        points = (np.stack([column, row], 1) + 0.5) * step - 0.5
        vectors = A.reshape(len(A), -1).T
        parts.append((points, np.full(len(points), FIELD * step), vectors, np.linalg.norm(vectors, axis=1)))
    if not parts:
        raise InputError("No maps: local features by activations need at least one.")
    points, scales, vectors, length = (np.concatenate(side).astype(np.float32) for side in zip(*parts, strict=True))
    there = length > 0
    return points[there], scales[there], unit(vectors[there]), length[there]


def activation_features(
    maps: Sequence[tuple[Map, float]], projection: Projection, *, size: tuple[int, int], limit: int = 1200
) -> LocalFeatures:
    """The `limit` positions with the longest vectors, over all maps."""
    points, scales, vectors, length = positions(maps)
    order = np.argsort(-length, kind="stable")[:limit]
    return LocalFeatures(
        points=points[order],
        scales=scales[order],
        angles=np.zeros(len(order), np.float32),
        descriptors=quantise(projection(vectors[order])),
        width=size[0],
        height=size[1],
        engine="activations",
    )
