"""Local features from the maps of the paper's own network (VGG16's conv5_3), by passes of its own.

A recipe of VGG16 needs no other weights for it; beside one of ResNet-50, as the default is, it is a second network.
The picture is seen at three sizes, half an octave apart. A position of a map is a feature where some channels are at
their largest among the eight positions around it, as in D2-Net (Dusmanu et al., CVPR 2019). Positions are 16 pixels
apart; a parabola through each such channel says where between them its peak lies, and the mean of these places, the
strongest counting most, is the feature's. Its 512 activations there, of a patch of some 200 pixels, are projected on 64
values. Neither rotation beyond some 30 degrees nor a mirror is known. It proves less than SIFT, on the dev set and on
ROxford (docs/verification.md).
"""

from __future__ import annotations

from functools import cache

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from cooc.activations import Activations, build_backbone, resolve_dtype
from cooc.files import DATA
from cooc.verification.coding import Projection, quantise
from cooc.verification.engine import Detected, Pixels, best_of_all_parts
from cooc.weights import load_weights

NETWORK, LAYER = "vgg16-caffe", "conv5_3"
STRIDE = 16  # pixels from one position to the next
SIZES = 1.0, 2**-0.5, 0.5  # of the picture, at which it is seen
TEXTURE = 4.0  # standard deviation of the grey levels around a position, from which it shows something

Floats = NDArray[np.float32]


@cache
def projection() -> Projection:
    """512 values to 64, by `benchmarks.fitting.fit_activations` on landmark photos."""
    return Projection.load(DATA / "activations.npy")


@cache
def _network(device: str) -> Activations:
    place = torch.device(device)
    dtype = resolve_dtype("auto", place)
    return build_backbone(NETWORK, LAYER, weights=load_weights(NETWORK), device=place, dtype=dtype)


def detect_activations(pixels: Pixels, limit: int, device: str = "cpu") -> Detected:
    """Features of all sizes; `scales` are the pixels from one position to the next."""
    points, scales, strength, rows = find_features(pixels, device)
    order = np.argsort(-strength, kind="stable")
    order = order[best_of_all_parts(points[order], pixels.shape, limit)]
    chosen = rows[torch.from_numpy(order).to(rows.device)].cpu().numpy()
    return Detected(points[order], scales[order], np.zeros(len(order), np.float32), quantise(projection()(chosen)))


def find_features(pixels: Pixels, device: str = "cpu") -> tuple[Floats, Floats, Floats, Tensor]:
    """All of them, in no order: points (N, 2), scales (N,), strengths (N,) and activations (N, 512), L2-normalised, on
    the device: most are not kept."""
    found = [_seen_at(np.ascontiguousarray(pixels), size, device) for size in SIZES]
    points, scales, strength = (np.concatenate(part) for part in zip(*(one[:3] for one in found), strict=True))
    return points, scales, strength, F.normalize(torch.cat([one[3] for one in found]), dim=1)


def _seen_at(pixels: Pixels, size: float, device: str) -> tuple[Floats, Floats, Floats, Tensor]:
    height, width = pixels.shape[:2]
    down, across = (max(STRIDE, round(side * size)) for side in (height, width))
    seen = np.asarray(cv2.resize(pixels, (across, down), interpolation=cv2.INTER_AREA), np.uint8)
    with torch.inference_mode():
        images = torch.from_numpy(seen).permute(2, 0, 1)[None].to(device)
        maps = _network(device)(images).float()  # (1, 512, h, w)
        strength, places = find_peaks(maps[0])
        strength = strength * torch.from_numpy(_texture(seen) > TEXTURE).to(device)
        row, column = strength.nonzero(as_tuple=True)
        places = places[:, row, column].T + torch.stack([column, row], 1)  # (N, 2): x, y in positions
        last = torch.tensor([maps.shape[3] - 1, maps.shape[2] - 1], device=maps.device)
        grid = 2 * places / last.clamp_min(1) - 1
        rows = F.grid_sample(maps, grid[None, None], "bilinear", "border", align_corners=True)[0, :, 0].T
    per_pixel = np.array([width / across, height / down], np.float32)
    points = (places.cpu().numpy() + 0.5) * STRIDE * per_pixel - 0.5
    scales = np.full(len(points), STRIDE * np.sqrt(per_pixel.prod()), np.float32)
    return points.astype(np.float32), scales, strength[row, column].cpu().numpy(), rows


def find_peaks(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Of maps (C, h, w): how strongly channels peak at each position (h, w); x, y (2, h, w) of that, -0.5 to 0.5."""
    peaks = torch.where(maps == F.max_pool2d(maps, 3, 1, 1), maps, 0)
    around = F.pad(maps, (1, 1, 1, 1))
    sides = (around[:, 1:-1, :-2], around[:, 1:-1, 2:]), (around[:, :-2, 1:-1], around[:, 2:, 1:-1])
    total = peaks.sum(0).clamp_min(1e-6)
    means = []
    for before, after in sides:
        curvature = (2 * maps - before - after).clamp_min(1e-6)
        means.append(((after - before) / (2 * curvature)).clamp(-0.5, 0.5).mul(peaks).sum(0) / total)
    return peaks.square().sum(0).sqrt(), torch.stack(means)


def _texture(pixels: Pixels) -> Floats:
    """(h, w): how grey levels vary around each position. The network sees borders even in one colour."""
    height, width = (side // STRIDE for side in pixels.shape[:2])
    grey = cv2.cvtColor(pixels[: height * STRIDE, : width * STRIDE], cv2.COLOR_RGB2GRAY).astype(np.float32)
    cells = (cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA) for part in (grey, grey * grey))
    mean, square = (cv2.blur(part, (3, 3)) for part in cells)
    return np.sqrt(np.maximum(square - mean * mean, 0))
