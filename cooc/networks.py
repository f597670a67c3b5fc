"""The networks themselves, up to one of their maps: VGG16, ResNet and EfficientNet-Lite in plain PyTorch.

Their state dicts have the names of the published files, which so load without torchvision or timm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class VGG16(nn.Module):
    """VGG16's features (Simonyan and Zisserman 2015) in torchvision's layout, to conv5_3 (after ReLU) or a pooling."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        modules: list[nn.Module] = []
        inputs = 3
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                modules += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = width
            modules.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*modules[: VGG_ENDS[layer]])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.features(x)
        return out

    def after(self, layer: str) -> list[tuple[str, nn.Module]]:
        return [(f"features.{i}", self.features[i]) for i in range(VGG_ENDS[layer], len(self.features))]


VGG_ENDS = {"pool5": 31, "conv5_3": 30, "pool4": 24, "pool3": 17}


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, and the sum with what came in. `caffe`: see ResNet. `inner`: only to the 3x3's map."""

    def __init__(self, inputs: int, width: int, stride: int, *, caffe: bool = False, inner: bool = False) -> None:
        super().__init__()
        outputs, eps = 4 * width, _RESNET_EPS[caffe]
        first, second = (stride, 1) if caffe else (1, stride)
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, first, bias=caffe), nn.BatchNorm2d(width, eps)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, second, 1, bias=caffe), nn.BatchNorm2d(width, eps)
        self.inner = inner
        self.downsample = None
        if inner:
            return
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=caffe), nn.BatchNorm2d(outputs, eps)
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=caffe)
            self.downsample = nn.Sequential(project, nn.BatchNorm2d(outputs, eps))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn1(self.conv1(x)).relu_()  # in place: on a CPU fresh pages cost as much as the sum itself
        y = self.bn2(self.conv2(y)).relu_()
        if self.inner:
            return y
        y = self.bn3(self.conv3(y))
        return y.add_(x if self.downsample is None else self.downsample(x)).relu_()


_RESNET_EPS = {False: 1e-5, True: 1e-3}  # of the batch norms: torchvision's, and Keras' copy of the Caffe network


class ResNet(nn.Module):
    """ResNet-50 and -101 (He et al. 2016) with torchvision's names, to the end of a stage.

    torchvision trained its own: the 3x3 of a stage's first block has the stride, and no convolution has a bias.
    `caffe` is the authors' network as Keras carries it: the stride is in the first 1x1, every convolution has a bias,
    and the batch norms' epsilon is 1e-3. Keras pads zeros before its maximum; here it is padded by the lowest number,
    which after a ReLU is the same. `inner` stops in the last block, at the map of its 3x3 after the ReLU: a quarter of
    the channels, before they are mixed and summed with what came in.
    """

    def __init__(self, depths: tuple[int, ...], stages: int = 4, *, caffe: bool = False, inner: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=caffe), nn.BatchNorm2d(64, _RESNET_EPS[caffe])
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.stages = [f"layer{i + 1}" for i in range(stages)]
        inputs = 64
        for i, name in enumerate(self.stages):
            width, blocks = 64 << i, nn.Sequential()
            for j in range(depths[i]):
                last = i == stages - 1 and j == depths[i] - 1
                stride = 2 if j == 0 < i else 1
                blocks.append(Bottleneck(inputs, width, stride, caffe=caffe, inner=inner and last))
                inputs = 4 * width
            self.add_module(name, blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu_())
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return x

    def after(self, layer: str) -> list[tuple[str, nn.Module]]:
        first = int(layer[-1]) - (1 if layer.startswith("conv") else 0)
        return [(name, self.get_submodule(name)) for name in self.stages[first:]]


class SameConv2d(nn.Conv2d):
    """TensorFlow's SAME padding, which EfficientNet-Lite was trained with: an odd pixel goes right and below.

    It is written so that a shape's parity, which torch.export keeps as a symbol, cancels out of the shapes that follow.
    """

    def forward(self, x: Tensor) -> Tensor:
        half = self.kernel_size[0] // 2
        if self.stride[0] == 2:  # even sides have one pixel less before them; its place behind them is not reached
            (above, below), (left, right) = ((half - (1 - n % 2), half + (1 - n % 2)) for n in x.shape[2:])
            x, half = nn.functional.pad(x, (left, right, above, below)), 0
        return nn.functional.conv2d(x, self.weight, self.bias, self.stride, half, self.dilation, self.groups)


class LiteBlock(nn.Module):
    """Mobile inverted bottleneck without squeeze-and-excitation, ReLU6."""

    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        width = inputs * expand
        self.skip = stride == 1 and inputs == outputs
        self.expands = expand != 1
        if self.expands:
            self._expand_conv, self._bn0 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width, eps=1e-3)
        self._depthwise_conv = SameConv2d(width, width, kernel, stride, groups=width, bias=False)
        self._bn1 = nn.BatchNorm2d(width, eps=1e-3)
        self._project_conv, self._bn2 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = nn.functional.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return torch.add(x, y) if self.skip else y


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite (Liu, Tan 2020), names as in the published PyTorch files, to the last convolutional map."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...]) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv2d(3, 32, 3, 2, bias=False), nn.BatchNorm2d(32, eps=1e-3)
        blocks: list[nn.Module] = []
        inputs = 32
        shapes = zip((1, 6, 6, 6, 6, 6, 6), (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1), widths, depths, strict=True)
        for expand, kernel, stride, width, depth in shapes:
            for i in range(depth):
                blocks.append(LiteBlock(inputs, width, expand, kernel, stride if i == 0 else 1))
                inputs = width
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = nn.Conv2d(inputs, 1280, 1, bias=False), nn.BatchNorm2d(1280, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return nn.functional.relu6(self._bn1(self._conv_head(x)))
