"""Networks against plain functional forwards written here from their papers, with random and with the real weights."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import skimage.data
import torch
import torch.nn.functional as F
from torch import Tensor

from cooc.activations import (
    BACKBONES,
    CAFFE_MEAN,
    CAFFE_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    build_backbone,
    resolve_device,
    resolve_dtype,
)
from cooc.errors import InputError, UnknownNameError, WeightsError
from cooc.networks import SameConv2d
from cooc.weights.readers import read_keras_resnet50
from tests.reference import keras_resnet50

LAYERS = [(name, layer) for name, backbone in BACKBONES.items() for layer in backbone.layers]


@functools.cache
def random_weights(name: str) -> Mapping[str, Tensor]:
    """Weights that keep activations alive through any depth: He's, and batch norms near the identity."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    with torch.device("meta"):  # names and shapes only
        layout = BACKBONES[name].build(next(iter(BACKBONES[name].layers))).state_dict()
    for key, value in layout.items():
        noise = torch.randn(value.shape, generator=generator)
        if value.dim() == 4:
            weights[key] = noise * (2 / value[0].numel()) ** 0.5
        elif key.endswith("running_var"):
            weights[key] = 1 + 0.1 * noise.abs()
        elif key.endswith("num_batches_tracked"):
            weights[key] = torch.tensor(1)
        else:
            weights[key] = 0.1 * noise + (1 if "bn" in key and key.endswith("weight") else 0)
    return MappingProxyType(weights)


def pictures(B: int = 2, H: int = 64, W: int = 96) -> Tensor:
    return torch.randint(0, 256, (B, 3, H, W), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def normalised(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    channels = [(images[:, i].double() / 255 - mean[i]) / std[i] for i in range(3)]
    return torch.stack(channels, 1).float()


def vgg16(x: Tensor, weights: Mapping[str, Tensor], last_pool: bool = True) -> Tensor:
    """Configuration D of Simonyan and Zisserman: 2, 2, 3, 3, 3 convolutions, a maximum after each group."""
    numbers = iter((0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28))  # of the convolutions in torchvision's file
    for group, depth in enumerate((2, 2, 3, 3, 3)):
        for _ in range(depth):
            n = next(numbers)
            x = F.relu(F.conv2d(x, weights[f"features.{n}.weight"], weights[f"features.{n}.bias"], padding=1))
        if group < 4 or last_pool:
            x = F.max_pool2d(x, 2)
    return x


# Layouts


@pytest.mark.parametrize("name", ["vgg16", "vgg16-caffe"])
def test_vgg16_is_the_plain_forward(name: str) -> None:
    weights, images = random_weights(name), pictures()
    mean, std = (CAFFE_MEAN, CAFFE_STD) if name == "vgg16-caffe" else (IMAGENET_MEAN, IMAGENET_STD)
    wanted = vgg16(normalised(images, mean, std), weights)
    out = build_backbone(name, weights=weights)(images)
    assert out.shape == (2, 512, 2, 3)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_conv5_3_pooled_is_pool5() -> None:
    weights, images = random_weights("vgg16"), pictures()
    conv = build_backbone("vgg16", "conv5_3", weights=weights)(images)
    assert conv.shape == (2, 512, 4, 6)
    assert conv.min() == 0  # after ReLU
    torch.testing.assert_close(F.max_pool2d(conv, 2), build_backbone("vgg16", "pool5", weights=weights)(images))
    torch.testing.assert_close(
        conv, vgg16(normalised(images, IMAGENET_MEAN, IMAGENET_STD), weights, last_pool=False), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("name", "depths"), [("resnet50", (3, 4, 6, 3)), ("resnet101", (3, 4, 23, 3))])
def test_resnet_is_the_plain_forward(name: str, depths: tuple[int, ...]) -> None:
    """He et al. 2016 with the stride in the 3x3 convolution, as torchvision trains it."""
    weights, images = random_weights(name), pictures(1, 64, 64)

    def conv_bn(x: Tensor, conv: str, bn: str, stride: int = 1) -> Tensor:
        kernel = weights[f"{conv}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        statistics = (weights[f"{bn}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *statistics, training=False, eps=1e-5)

    x = normalised(images, IMAGENET_MEAN, IMAGENET_STD)
    x = F.max_pool2d(F.relu(conv_bn(x, "conv1", "bn1", 2)), 3, 2, 1)
    for stage, block in ((s, b) for s in range(4) for b in range(depths[s])):
        at, stride = f"layer{stage + 1}.{block}", 2 if stage > 0 and block == 0 else 1
        y = F.relu(conv_bn(x, f"{at}.conv1", f"{at}.bn1"))
        y = F.relu(conv_bn(y, f"{at}.conv2", f"{at}.bn2", stride))
        y = conv_bn(y, f"{at}.conv3", f"{at}.bn3")
        x = F.relu(y + (conv_bn(x, f"{at}.downsample.0", f"{at}.downsample.1", stride) if block == 0 else x))
    out = build_backbone(name, weights=weights)(images)
    torch.testing.assert_close(out, x, rtol=1e-3, atol=1e-4 * float(x.abs().max()))


CAFFE_LAYERS = {"conv3": "res3d", "conv4": "res4f", "conv5": "res5c"}
CAFFE_LAYERS |= {
    "conv4_3x3": "res4f_branch2b",
    "conv5_3x3": "res5c_branch2b",
}  # by the names of the authors and of Keras


def test_resnet50_caffe_is_keras_forward(tmp_path: Path) -> None:
    """From shards in Keras' names and layout, through our reader, at sides that no stride divides."""
    arrays, images = keras_resnet50.random_arrays(), pictures(1, 97, 130)
    keras_resnet50.write_shards(tmp_path / "ResNet50", arrays)
    weights = read_keras_resnet50(tmp_path / "ResNet50")
    maps = keras_resnet50.forward(images, arrays)
    assert BACKBONES["resnet50-caffe"].layers.keys() == CAFFE_LAYERS.keys()
    for layer, name in CAFFE_LAYERS.items():
        out, wanted = build_backbone("resnet50-caffe", layer, weights=weights)(images), maps[name].float()
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5 * float(wanted.max()))


@pytest.mark.parametrize(
    ("name", "width", "depth"), [("efficientnet-lite0", 1.0, 1.0), ("efficientnet-lite2", 1.1, 1.2)]
)
def test_efficientnet_lite_is_the_plain_forward(name: str, width: float, depth: float) -> None:
    """EfficientNet-B0's table (Tan and Le 2019), scaled; Lite drops squeeze-and-excitation and fixes stem and head."""
    weights, images = random_weights(name), pictures(1, 64, 96)
    table = [(1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)]
    table += [(6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)]  # expansion, kernel, stride, channels, blocks

    def conv_bn(x: Tensor, conv: str, bn: str, stride: int = 1) -> Tensor:
        kernel = weights[f"{conv}.weight"]
        pad = []
        for n in (x.shape[3], x.shape[2]):
            total = max((-(-n // stride) - 1) * stride + kernel.shape[-1] - n, 0)
            pad += [total // 2, total - total // 2]
        groups = x.shape[1] // kernel.shape[1]
        x = F.conv2d(F.pad(x, pad), kernel, stride=stride, groups=groups)
        statistics = (weights[f"{bn}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *statistics, training=False, eps=1e-3)

    x = F.relu6(conv_bn((images.float() - 127) / 128, "_conv_stem", "_bn0", 2))
    number = 0
    for row, (expand, kernel, stride, channels, blocks) in enumerate(table):
        channels = max(8, int(channels * width + 4) // 8 * 8)  # to the nearest multiple of 8
        for block in range(blocks if row in (0, 6) else math.ceil(blocks * depth)):
            at, step, y = f"_blocks.{number}.", stride if block == 0 else 1, x
            if expand > 1:
                y = F.relu6(conv_bn(y, f"{at}_expand_conv", f"{at}_bn0"))
            assert weights[f"{at}_depthwise_conv.weight"].shape == (expand * x.shape[1], 1, kernel, kernel)
            y = F.relu6(conv_bn(y, f"{at}_depthwise_conv", f"{at}_bn1", step))
            y = conv_bn(y, f"{at}_project_conv", f"{at}_bn2")
            assert y.shape[1] == channels
            x = x + y if step == 1 and x.shape[1] == channels else y
            number += 1
    x = F.relu6(conv_bn(x, "_conv_head", "_bn1"))
    torch.testing.assert_close(build_backbone(name, weights=weights)(images), x, rtol=1e-3, atol=1e-4)
    assert 0 < x.count_nonzero() < x.numel()


@pytest.mark.parametrize(("n", "kernel", "stride"), [*itertools.product((1, 2, 5, 8), (3, 5), (1, 2))])
def test_same_padding_against_loops(n: int, kernel: int, stride: int) -> None:
    """TensorFlow's SAME: ceil(n / stride) outputs; of the padding that needs, the smaller half lies before."""
    x = torch.randn(1, 1, n, n, generator=torch.Generator().manual_seed(0))
    layer = SameConv2d(1, 1, kernel, stride, bias=False)
    weight = layer.weight.detach()[0, 0]
    outputs = -(-n // stride)
    before = max((outputs - 1) * stride + kernel - n, 0) // 2
    wanted = torch.zeros(outputs, outputs)
    for i, j, u, v in itertools.product(range(outputs), range(outputs), range(kernel), range(kernel)):
        y, z = i * stride + u - before, j * stride + v - before
        if 0 <= y < n and 0 <= z < n:
            wanted[i, j] += weight[u, v] * x[0, 0, y, z]
    torch.testing.assert_close(layer(x)[0, 0], wanted)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_table_of_channels_and_strides(name: str, layer: str) -> None:
    """A picture of n x m strides has n x m positions, of as many channels as the table says."""
    backbone = build_backbone(name, layer, weights=random_weights(name))
    channels, stride = BACKBONES[name].layers[layer]
    assert (backbone.channels, backbone.stride, backbone.layer) == (channels, stride, layer)
    out = backbone(pictures(1, 2 * stride, 3 * stride))
    assert out.shape == (1, channels, 2, 3)
    assert out.min() >= 0
    assert out.any()
    assert backbone(pictures(1, stride, stride)).shape == (1, channels, 1, 1)


# Input


@pytest.mark.parametrize("name", ["vgg16", "vgg16-caffe", "efficientnet-lite0"])
def test_bytes_and_floats_are_the_same(name: str) -> None:
    backbone, images = build_backbone(name, weights=random_weights(name)), pictures(1)
    torch.testing.assert_close(backbone(images), backbone(images.float() / 255))
    torch.testing.assert_close(backbone(images), backbone(images.double() / 255))


def test_caffe_preprocessing() -> None:
    """Kernels kept for RGB give what the original BGR kernels give on BGR 0..255 minus the mean."""
    weights, images = random_weights("vgg16-caffe"), pictures(1)
    original = dict(weights) | {"features.0.weight": weights["features.0.weight"].flip(1)}
    bgr = images.flip(1).float() - torch.tensor([103.939, 116.779, 123.68]).reshape(1, 3, 1, 1)
    wanted = vgg16(bgr, original)
    out = build_backbone("vgg16-caffe", weights=weights)(images)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5 * float(wanted.max()))


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 1, 64, 64), (1, 64, 64, 3), (1, 3, 0, 64), (1, 3, 64, 31)])
def test_images_of_other_shapes(shape: tuple[int, ...]) -> None:
    backbone = build_backbone("vgg16", weights=random_weights("vgg16"))
    with pytest.raises(InputError, match=r"\(B, 3, H, W\)"):
        backbone(torch.zeros(shape))


def test_batch_invariance() -> None:
    backbone, images = build_backbone("efficientnet-lite0", weights=random_weights("efficientnet-lite0")), pictures(3)
    together = backbone(images)
    for i in range(3):
        torch.testing.assert_close(backbone(images[i : i + 1])[0], together[i], rtol=1e-4, atol=1e-4)


# Frozen


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "efficientnet-lite0"])
def test_frozen(name: str) -> None:
    backbone, images = build_backbone(name, weights=random_weights(name)), pictures(1)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    wanted = backbone(images)
    assert backbone.train() is backbone
    torch.nn.Sequential(backbone).train()  # as a training loop would
    assert not any(module.training for module in backbone.network.modules())
    out = backbone(images)
    assert not out.requires_grad
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    for key, value in backbone.state_dict().items():
        assert value.equal(before[key])


def test_bfloat16() -> None:
    weights, images = random_weights("vgg16"), pictures(1)
    wanted = build_backbone("vgg16", weights=weights)(images)
    out = build_backbone("vgg16", weights=weights, dtype=torch.bfloat16)(images)
    assert out.dtype == torch.bfloat16
    assert (out.float() - wanted).norm() < 0.03 * wanted.norm()


# Weights and names


def test_wrong_weights() -> None:
    weights = dict(random_weights("vgg16"))
    with pytest.raises(WeightsError, match=r"not for efficientnet-lite0: .* missing, first '_blocks"):
        build_backbone("efficientnet-lite0", weights=weights)
    del weights["features.14.bias"]
    with pytest.raises(WeightsError, match=r"1 tensors are missing, first 'features\.14\.bias'"):
        build_backbone("vgg16", weights=weights)
    weights["features.14.bias"] = torch.zeros(7)
    with pytest.raises(WeightsError, match=r"(?s)not for vgg16.*features\.14\.bias"):
        build_backbone("vgg16", weights=weights)


def test_more_weights_than_needed_are_left_out() -> None:
    """A torchvision file has a classifier too."""
    weights = {**random_weights("vgg16"), "classifier.0.weight": torch.zeros(4, 4)}
    assert "classifier.0.weight" not in build_backbone("vgg16", weights=weights).network.state_dict()


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'vgg16-caffe'"):
        build_backbone("vgg16-cafe", weights={})
    with pytest.raises(UnknownNameError, match="Did you mean 'conv5_3'"):
        build_backbone("vgg16", "conv5-3", weights={})
    with pytest.raises(UnknownNameError, match="Did you mean 'bfloat16'"):
        resolve_dtype("bfloat")


def test_devices_and_dtypes() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
    with pytest.raises(InputError, match=r"cannot be used here.*Usable: cpu"):
        resolve_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="'cuda:1' cannot be used here"):
            resolve_device("cuda:1")
    assert resolve_dtype("float32") == torch.float32
    assert resolve_dtype("auto", torch.device("cpu")) in (torch.float32, torch.bfloat16)


# The real weights


def test_real_vgg16_on_a_photograph(real_weights: Callable[[str], dict[str, Tensor]]) -> None:
    """The numbers were computed once by the plain forward above, in float64; both ways must still give them."""
    photo = torch.from_numpy(np.ascontiguousarray(skimage.data.astronaut()[:128, 128:288])).permute(2, 0, 1)[None]
    weights = real_weights("vgg16-caffe")
    plain = vgg16(
        normalised(photo, CAFFE_MEAN, CAFFE_STD).double(), {key: value.double() for key, value in weights.items()}
    )
    for A in (plain, build_backbone("vgg16-caffe", weights=weights)(photo).double()):
        assert A.shape == (1, 512, 4, 5)
        strongest = A[0].amax((1, 2)).topk(3)
        assert strongest.indices.tolist() == [485, 220, 228]
        summary = [
            A.mean().item(),
            A.std().item(),
            A.max().item(),
            (A > 0).double().mean().item(),
            A[0, 100].sum().item(),
        ]
        assert summary == pytest.approx([1.165893, 6.834611, 114.61898, 0.0571289, 275.36166], rel=1e-4)


# Sum and maximum of each layer and its strongest channel, as TensorFlow.js 4.22 computes them from the package.
TENSORFLOW_JS = {
    "conv3": (91280.2, 14.56279, 511),
    "conv4": (31903.52, 12.17328, 949),
    "conv5": (14265.09, 49.31582, 507),
    "conv4_3x3": (5552.765, 8.549736, 159),
    "conv5_3x3": (1529.877, 4.68229, 459),
}


@pytest.mark.parametrize("layer", CAFFE_LAYERS)
def test_real_resnet50_caffe_on_a_photograph(real_weights: Callable[[str], dict[str, Tensor]], layer: str) -> None:
    photo = torch.from_numpy(np.ascontiguousarray(skimage.data.astronaut()[:97, 128:258])).permute(2, 0, 1)[None]
    A = build_backbone("resnet50-caffe", layer, weights=real_weights("resnet50-caffe"))(photo)
    total, largest, strongest = TENSORFLOW_JS[layer]
    assert A.sum().item() == pytest.approx(total, rel=1e-4)
    assert A.max().item() == pytest.approx(largest, rel=1e-4)
    assert A[0].sum((1, 2)).argmax() == strongest
