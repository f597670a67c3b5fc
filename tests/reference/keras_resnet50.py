"""Keras' ResNet-50 by its own names: its arrays, how TensorFlow.js writes them, and what it computes with them.

Written from the graph in the package's model.json: ZeroPadding2D(3), a 7x7 convolution with stride 2, ZeroPadding2D(1),
a maximum over 3x3 with stride 2, then blocks of 1x1, 3x3 and 1x1 convolutions. Block `a` opens a stage, with the stride
in its first 1x1 and in its shortcut. Every convolution has a bias; the batch norms' epsilon is 1e-3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Arrays = Mapping[str, npt.NDArray[np.float32]]

STAGES = {2: "abc", 3: "abcd", 4: "abcdef", 5: "abc"}
BGR_MEAN = (103.939, 116.779, 123.68)


def random_arrays(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Kernels HWIO (He's, so that activations stay alive) and five vectors for each, in Keras' names and shapes."""
    generator = np.random.default_rng(seed)
    arrays: dict[str, npt.NDArray[np.float32]] = {}

    def convolution(name: str, norm: str, kernel: int, inputs: int, outputs: int) -> None:
        noise = generator.standard_normal((kernel, kernel, inputs, outputs), np.float32)
        arrays[f"{name}/kernel"] = noise * np.float32((2 / (kernel * kernel * inputs)) ** 0.5)
        for part, centre in (("gamma", 1), ("beta", 0), ("moving_mean", 0), ("moving_variance", 1)):
            noise = generator.standard_normal(outputs, np.float32)
            arrays[f"{norm}/{part}"] = centre + np.float32(0.1) * np.abs(noise)
        arrays[f"{name}/bias"] = generator.standard_normal(outputs, np.float32)

    convolution("conv1", "bn_conv1", 7, 3, 64)
    inputs = 64
    for stage, blocks in STAGES.items():
        width = 16 * 2**stage
        for block in blocks:
            at = f"{stage}{block}_branch"
            convolution(f"res{at}2a", f"bn{at}2a", 1, inputs, width)
            convolution(f"res{at}2b", f"bn{at}2b", 3, width, width)
            convolution(f"res{at}2c", f"bn{at}2c", 1, width, 4 * width)
            if block == "a":
                convolution(f"res{at}1", f"bn{at}1", 1, inputs, 4 * width)
            inputs = 4 * width
    return arrays


def write_shards(folder: Path, arrays: Arrays, shards: int = 3) -> None:
    """As TensorFlow.js' converter does: the numbers of all arrays as one stream, which is cut anywhere into files."""
    folder.mkdir(parents=True)
    stream = b"".join(array.tobytes() for array in arrays.values())
    size = len(stream) // shards + 1
    paths = [f"group1-shard{n + 1}of{shards}.bin" for n in range(shards)]
    for n, path in enumerate(paths):
        (folder / path).write_bytes(stream[n * size : (n + 1) * size])
    weights = [{"name": name, "shape": list(array.shape), "dtype": "float32"} for name, array in arrays.items()]
    manifest = [{"paths": paths, "weights": weights}]
    (folder / "model.json").write_text(json.dumps({"format": "layers-model", "weightsManifest": manifest}))


def forward(images: Tensor, arrays: Arrays) -> dict[str, Tensor]:
    """uint8 RGB (B, 3, H, W) -> the maps after the ReLUs: `res5c` at the end of a block, `res5c_branch2b` inside it."""
    x = images.flip(1).double() - torch.tensor(BGR_MEAN).double().reshape(1, 3, 1, 1)
    maps: dict[str, Tensor] = {}

    def convolution(x: Tensor, name: str, norm: str, stride: int = 1, padding: int = 0) -> Tensor:
        kernel = torch.from_numpy(arrays[f"{name}/kernel"]).double().permute(3, 2, 0, 1)
        x = F.conv2d(x, kernel, torch.from_numpy(arrays[f"{name}/bias"]).double(), stride, padding)
        gamma, beta, mean, variance = (
            torch.from_numpy(arrays[f"{norm}/{part}"]).double().reshape(1, -1, 1, 1)
            for part in ("gamma", "beta", "moving_mean", "moving_variance")
        )
        return gamma * (x - mean) / torch.sqrt(variance + 1e-3) + beta

    x = F.relu(convolution(F.pad(x, (3, 3, 3, 3)), "conv1", "bn_conv1", 2))
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
    for stage, blocks in STAGES.items():
        for block in blocks:
            at, stride = f"{stage}{block}_branch", 2 if block == "a" and stage > 2 else 1
            y = F.relu(convolution(x, f"res{at}2a", f"bn{at}2a", stride))
            y = maps[f"res{at}2b"] = F.relu(convolution(y, f"res{at}2b", f"bn{at}2b", padding=1))
            y = convolution(y, f"res{at}2c", f"bn{at}2c")
            x = F.relu(y + (convolution(x, f"res{at}1", f"bn{at}1", stride) if block == "a" else x))
            maps[f"res{stage}{block}"] = x
    return maps
