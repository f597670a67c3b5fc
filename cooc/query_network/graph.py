"""A convolutional network -> ONNX, as far as few operators go.

torch's own exporter needs two packages more and half a minute. Of ONNX's format, protobuf, so little is needed here
(the numbers are from onnx.proto) that none is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from cooc.errors import InputError

WEIGHTS = "weights.bin"  # beside the graph: OpenCV reads them faster than out of it
INPUT, OUTPUT = "images", "maps"
IR_VERSION, OPSET = 8, 13
FLOAT = 1  # ONNX's name for float32
INT, INTS = 2, 7  # kinds of attributes
EXTERNAL = 1
METHODS = {"relu": "Relu", "relu_": "Relu", "add": "Add", "add_": "Add"}


@dataclass(frozen=True)
class Graph:
    """`onnx`: images (1, 3, H, W), normalised -> maps (1, C, H', W'), all float32. `weights`: what WEIGHTS holds."""

    onnx: bytes
    weights: bytes


def graph_of(network: nn.Module) -> Graph:
    """Convolutions, ReLU, maximum pooling and sums. A network that has anything else is refused."""
    try:
        traced = fx.symbolic_trace(network)
    except Exception as error:  # what a network does beside calling layers can fail in any way
        raise InputError(f"What this network does depends on its input ({error}).") from error
    names: dict[fx.Node, str] = {}
    nodes, tensors, weights = list[bytes](), list[bytes](), bytearray()

    def kept(name: str, tensor: Tensor) -> str:
        values = np.ascontiguousarray(tensor.detach().float().cpu().numpy(), "<f4").tobytes()
        place = {"location": WEIGHTS, "offset": str(len(weights)), "length": str(len(values))}
        pairs = b"".join(_field(13, _field(1, key) + _field(2, value)) for key, value in place.items())
        dims = b"".join(_field(1, n) for n in tensor.shape)
        tensors.append(dims + _field(2, FLOAT) + _field(8, name) + pairs + _field(14, EXTERNAL))
        weights.extend(values)
        return name

    for node in traced.graph.nodes:
        if node.op == "placeholder":
            names[node] = INPUT
            continue
        if node.op == "output":
            nodes.append(_node("Identity", [names[node.args[0]]], OUTPUT))
            continue
        inputs = [names[value] for value in node.args if isinstance(value, fx.Node)]
        layer = traced.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(layer, nn.Identity):
            names[node] = inputs[0]
            continue
        names[node] = node.name
        if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            inputs.append(kept(f"{node.name}.weight", layer.weight))
            inputs += [] if layer.bias is None else [kept(f"{node.name}.bias", layer.bias)]
            shape = _window(layer) | {"dilations": tuple(layer.dilation), "group": layer.groups}
            nodes.append(_node("Conv", inputs, node.name, **shape))
        elif isinstance(layer, nn.MaxPool2d) and layer.dilation == 1 and not layer.ceil_mode:
            nodes.append(_node("MaxPool", inputs, node.name, **_window(layer)))
        elif isinstance(layer, nn.ReLU):
            nodes.append(_node("Relu", inputs, node.name))
        elif layer is None and node.target in METHODS and len(inputs) == len(node.args) and not node.kwargs:
            nodes.append(_node(METHODS[node.target], inputs, node.name))
        else:
            raise InputError(f"{node.target} ({type(layer).__name__}) has no counterpart here.")
    body = b"".join(_field(1, node) for node in nodes) + _field(2, "network")
    body += b"".join(_field(5, tensor) for tensor in tensors)
    body += _field(11, _value(INPUT, [1, 3, "height", "width"])) + _field(12, _value(OUTPUT, [1, "c", "h", "w"]))
    return Graph(_field(1, IR_VERSION) + _field(7, body) + _field(8, _field(1, "") + _field(2, OPSET)), bytes(weights))


def _window(layer: Any) -> dict[str, int | tuple[int, ...]]:
    """Of a convolution or pooling; torch says one number where both sides have it."""
    size, stride, padding = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (layer.kernel_size, layer.stride, layer.padding)
    )
    return {"kernel_shape": size, "strides": stride, "pads": padding * 2}


def _node(kind: str, inputs: Iterable[str], output: str, **attributes: int | tuple[int, ...]) -> bytes:
    message = b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(3, output) + _field(4, kind)
    for name, value in attributes.items():
        if isinstance(value, int):
            message += _field(5, _field(1, name) + _field(3, value) + _field(20, INT))
        else:
            message += _field(5, _field(1, name) + b"".join(_field(8, n) for n in value) + _field(20, INTS))
    return message


def _value(name: str, shape: Iterable[int | str]) -> bytes:
    """An input or output; a side that is a name may have any length."""
    sides = b"".join(_field(1, _field(1 if isinstance(side, int) else 2, side)) for side in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, FLOAT) + _field(2, sides)))


def _field(number: int, value: int | str | bytes) -> bytes:
    """One field of a protobuf message: a number, or the length and bytes of a text or message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
