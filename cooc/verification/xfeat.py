"""XFeat (Potje et al., "XFeat: Accelerated Features for Lightweight Image Matching", CVPR 2024), from the paper.

A small network over the grey picture makes three maps: descriptors and their reliability at an eighth of the picture's
size, and, from each 8 x 8 block of pixels alone, where in the block a keypoint lies (64 places or none). Keypoints are
the local maxima of that map; their strength is its value times the reliability. Better than SIFT on photos of one place
in other light; it knows no rotation beyond some 30 degrees and no mirror.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cooc.verification.coding import quantise
from cooc.verification.engine import CANDIDATES, Detected, Pixels, best_of_all_parts
from cooc.weights import load_weights

Weights = Mapping[str, Tensor]

CELL = 8  # pixels of a block
STRIDE = 32  # of the coarsest map: sides are multiples of it
THRESHOLD = 0.05  # of a keypoint's probability
WINDOW = 5  # pixels: a keypoint is the largest in it
SCALE = 8.0  # what stands for the size of a feature: the network does not say

# block: the strides of its layers, as in table 1 of the paper's supplement
BACKBONE = {"block1": (1, 2, 1, 2), "block2": (1, 1), "block3": (2, 1, 1), "block4": (2, 1, 1), "block5": (2, 1, 1, 1)}


def prepare_weights(state: Weights) -> dict[str, Tensor]:
    """Convolutions with their batch normalisation folded in: `name` -> kernel, `name.bias`."""
    folded = {}
    for key, kernel in state.items():
        if not key.endswith("layer.0.weight"):
            continue
        name = key.removesuffix(".layer.0.weight")
        scale = (state[f"{name}.layer.1.running_var"] + 1e-5).rsqrt()
        folded[name] = kernel * scale[:, None, None, None]
        folded[f"{name}.bias"] = -state[f"{name}.layer.1.running_mean"] * scale
    for name in ("skip1.1", "block_fusion.2", "heatmap_head.2", "keypoint_head.3"):
        folded[name], folded[f"{name}.bias"] = state[f"{name}.weight"], state[f"{name}.bias"]
    return folded


def _layer(x: Tensor, w: Weights, name: str, stride: int = 1) -> Tensor:
    return F.conv2d(x, w[name], w[f"{name}.bias"], stride, padding=w[name].shape[-1] // 2)


def _block(x: Tensor, w: Weights, name: str, strides: tuple[int, ...]) -> Tensor:
    for number, stride in enumerate(strides):
        x = _layer(x, w, f"{name}.{number}", stride).relu_()
    return x


def xfeat_maps(grey: Tensor, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Descriptors (B, 64, h, w), reliability (B, 1, h, w) and log-odds of keypoints (B, 65, h, w); h = H / 8.

    `grey` is (B, 1, H, W), any range: each picture is normalised by its own mean and variance.
    """
    x = F.instance_norm(grey)
    early = _block(x, w, "block1", BACKBONE["block1"]) + _layer(F.avg_pool2d(x, 4), w, "skip1.1")
    x3 = _block(_block(early, w, "block2", BACKBONE["block2"]), w, "block3", BACKBONE["block3"])  # 1/8
    x4 = _block(x3, w, "block4", BACKBONE["block4"])  # 1/16
    x5 = _block(x4, w, "block5", BACKBONE["block5"])  # 1/32
    fused = x3 + sum(F.interpolate(coarse, x3.shape[-2:], mode="bilinear", align_corners=False) for coarse in (x4, x5))
    descriptors = _layer(_block(fused, w, "block_fusion", (1, 1)), w, "block_fusion.2")
    reliability = _layer(_block(descriptors, w, "heatmap_head", (1, 1)), w, "heatmap_head.2").sigmoid()
    blocks = F.pixel_unshuffle(x, CELL)  # (B, 64, h, w): the pixels of each block, row by row
    keypoints = _layer(_block(blocks, w, "keypoint_head", (1, 1, 1)), w, "keypoint_head.3")
    return descriptors, reliability, keypoints


def find_keypoints(keypoints: Tensor, reliability: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """x, y (N, 2) and strength (N,) of the `limit` strongest of one picture, the strongest first."""
    probability = F.pixel_shuffle(keypoints.softmax(1)[:, :-1], CELL)  # (1, 1, H, W); the 65th is "none"
    largest = F.max_pool2d(probability, WINDOW, 1, WINDOW // 2)
    y, x = ((probability == largest) & (probability > THRESHOLD))[0, 0].nonzero(as_tuple=True)
    points = torch.stack([x, y], 1).float()
    strength = probability[0, 0, y, x] * _sample(reliability, points, probability.shape[-2:], "bilinear")[:, 0]
    strength, order = strength.sort(descending=True, stable=True)
    return points[order[:limit]], strength[:limit]


def _sample(maps: Tensor, points: Tensor, size: tuple[int, ...], mode: str) -> Tensor:
    """Values (N, C) of maps (1, C, h, w) at x, y (N, 2) of a picture of `size`.

    The corners of the picture are taken for those of the map's outer edge: that is how the network was trained.
    """
    last = torch.tensor([size[1] - 1, size[0] - 1], dtype=points.dtype, device=points.device)
    grid = (2 * points / last - 1)[None, :, None]  # (1, N, 1, 2)
    return F.grid_sample(maps, grid, mode, align_corners=False)[0, :, :, 0].T


@cache
def _network(device: str) -> dict[str, Tensor]:
    kept = prepare_weights(load_weights("xfeat"))
    return {name: _channels_last(tensor.to(device)) for name, tensor in kept.items()}


def _channels_last(tensor: Tensor) -> Tensor:
    """A quarter faster on a CPU."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def detect_xfeat(pixels: Pixels, limit: int, device: str = "cpu") -> Detected:
    """Features of pixels whose sides are brought to multiples of 32 (at least 32)."""
    height, width = pixels.shape[:2]
    size = [max(STRIDE, side // STRIDE * STRIDE) for side in (height, width)]
    with torch.inference_mode():
        grey = torch.tensor(np.ascontiguousarray(pixels), device=device).float().mean(2)[None, None]
        grey = F.interpolate(grey, size, mode="bilinear", align_corners=False)
        descriptors, reliability, keypoints = xfeat_maps(_channels_last(grey), _network(device))
        points, _ = find_keypoints(keypoints, reliability, CANDIDATES * limit)
        points = points[best_of_all_parts(points.cpu().numpy(), (size[0], size[1]), limit)]
        rows = _sample(F.normalize(descriptors, dim=1), points, (size[0], size[1]), "bicubic")
        descriptors = F.normalize(rows, dim=1)
        places = points.cpu().numpy()
    places = (places + 0.5) * np.array([width / size[1], height / size[0]], np.float32) - 0.5
    count = len(places)
    scales, angles = np.full(count, SCALE, np.float32), np.zeros(count, np.float32)
    return Detected(places.astype(np.float32), scales, angles, quantise(descriptors.cpu().numpy()))
