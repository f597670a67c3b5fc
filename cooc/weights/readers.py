"""One file, as somebody published it -> tensors, as our networks want them. Nothing in a file is ever run."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cooc.unpickling import load_arrays

Tensors = dict[str, torch.Tensor]

NORM_PARTS = ("weight", "bias", "running_mean", "running_var")  # of a batch norm
_VGG16_CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # their places in torchvision's `features`
_VGG16_BLOCKS = ("1_1", "1_2", "2_1", "2_2", "3_1", "3_2", "3_3", "4_1", "4_2", "4_3", "5_1", "5_2", "5_3")


def features(state: object) -> Tensors:
    """What a descriptor needs of a state dict: everything but classifiers and batch counters, as float32."""
    if not isinstance(state, Mapping) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ValueError("not a state dict (names with tensors)")
    return {
        name: tensor.detach().float().contiguous()
        for name, tensor in state.items()
        if not name.startswith(("classifier.", "fc.", "_fc.")) and not name.endswith("num_batches_tracked")
    }


def read_pth(file: Path) -> Tensors:
    try:
        return features(torch.load(file, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError:  # torch's own text would advise to load it unsafely
        raise ValueError(f"{file.name} holds more than tensors, or is no PyTorch file") from None


def read_keras_vgg16(file: Path) -> Tensors:
    """Keras' copy of the Caffe VGG16 out of an ONNX graph: kernels OIHW for BGR input, flipped here to RGB.

    The graph itself only transposes its input to (B, C, H, W): no mean and no channel order is folded into the kernels.
    """
    arrays = onnx_arrays(file)
    tensors: Tensors = {}
    for place, block in zip(_VGG16_CONVOLUTIONS, _VGG16_BLOCKS, strict=True):
        layer = "functional_1/block{}_conv{}_1".format(*block.split("_"))
        tensors[f"features.{place}.weight"] = arrays[f"{layer}/convolution/ReadVariableOp:0"]
        tensors[f"features.{place}.bias"] = arrays[f"{layer}/Squeeze:0"]
    tensors["features.0.weight"] = tensors["features.0.weight"].flip(1)
    return features(tensors)


def onnx_arrays(file: Path) -> Tensors:
    """The float32 constants of an ONNX graph. Its format is protobuf, of which so little is needed here (the numbers of
    six fields, from onnx.proto) that the onnx package need not be installed."""
    graph, initializer = 7, 5
    dims, data_type, float32, name, raw_data = 1, 2, 1, 8, 9
    arrays: Tensors = {}
    for part in _fields(memoryview(file.read_bytes()), graph):
        for tensor in _fields(part, initializer):
            if [*_fields(tensor, data_type)] == [float32]:
                (title,), (values,) = _fields(tensor, name), _fields(tensor, raw_data)
                array = np.frombuffer(values, "<f4").reshape([*_fields(tensor, dims)])
                arrays[str(title, "utf-8")] = torch.from_numpy(array.astype(np.float32))
    return arrays


def _fields(message: memoryview, wanted: int) -> Iterator[Any]:
    """The values of one field of a protobuf message: an int, or the bytes of a text, an array or a message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:  # seven bits a byte, the lowest first; the eighth says that more follow
            byte = message[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value

    while at < len(message):
        number, kind = divmod(
            varint(), 8
        )  # 0: an int; 1 and 5: of 8 and of 4 bytes; 2: of as many as the next int says
        value: int | memoryview
        if kind == 0:
            value = varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            value, at = message[at : at + size], at + size
        if number == wanted:
            yield value


def read_keras_resnet50(folder: Path) -> Tensors:
    """Keras' ResNet-50 as TensorFlow.js keeps it: model.json lists names and shapes, and the files that hold their
    float32 numbers one after the other. Kernels are HWIO for BGR input, flipped here to RGB."""
    manifest = json.loads((folder / "model.json").read_bytes())["weightsManifest"][0]
    data = b"".join((folder / Path(shard).name).read_bytes() for shard in manifest["paths"])
    arrays, offset = {}, 0
    for entry in manifest["weights"]:
        count = math.prod(entry["shape"])
        values = np.frombuffer(data, "<f4", count, offset).reshape(entry["shape"])
        arrays[entry["name"]] = torch.from_numpy(values.astype(np.float32))
        offset += 4 * count
    tensors: Tensors = {}
    for convolution, norm, keras, keras_norm in _resnet50_names():
        tensors[f"{convolution}.weight"] = arrays[f"{keras}/kernel"].permute(3, 2, 0, 1)
        tensors[f"{convolution}.bias"] = arrays[f"{keras}/bias"]
        for part, keras_part in zip(NORM_PARTS, ("gamma", "beta", "moving_mean", "moving_variance"), strict=True):
            tensors[f"{norm}.{part}"] = arrays[f"{keras_norm}/{keras_part}"]
    tensors["conv1.weight"] = tensors["conv1.weight"].flip(1)
    return features(tensors)


def _resnet50_names() -> Iterator[tuple[str, str, str, str]]:
    """A convolution and its batch norm, by torchvision's names and by Keras': layer3.0.conv2 is res4a_branch2b."""
    yield "conv1", "bn1", "conv1", "bn_conv1"
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            at, keras = f"layer{stage}.{block}", f"{stage + 1}{'abcdef'[block]}_branch"
            for number, branch in enumerate(("2a", "2b", "2c"), start=1):
                yield f"{at}.conv{number}", f"{at}.bn{number}", f"res{keras}{branch}", f"bn{keras}{branch}"
            if block == 0:
                yield f"{at}.downsample.0", f"{at}.downsample.1", f"res{keras}1", f"bn{keras}1"


def read_flax_vgg16(file: Path) -> Tensors:
    """torchvision's VGG16 as a pickle of numpy arrays, kernels HWIO."""
    with file.open("rb") as stream:
        layers = load_arrays(stream)["VGG16_0"]
    tensors: Tensors = {}
    for number, place in enumerate(_VGG16_CONVOLUTIONS):
        layer = layers[f"Conv_{number}"]
        tensors[f"features.{place}.weight"] = torch.tensor(layer["kernel"]).permute(3, 2, 0, 1)
        tensors[f"features.{place}.bias"] = torch.tensor(layer["bias"])
    return features(tensors)
