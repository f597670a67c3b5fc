"""Images -> activations A (B, C, H, W) of a frozen convolutional network.

`BACKBONES` says for every network how it is built, which weight set it takes, how its input is normalised and which
layers can be asked for. Networks keep torchvision's own state-dict names, so that its files load, without torchvision.
Images go in as uint8 RGB (or floats in 0..1); normalisation happens here, on the device, so that a quarter of the bytes
travels there.

The Caffe networks (`vgg16-caffe`, `resnet50-caffe`) were trained on BGR 0..255 minus (103.939, 116.779, 123.68). Their
first kernels are kept flipped to RGB (cooc.weights), and 0..255 minus a mean is (x - mean/255) / (1/255): the same code
serves all weight sets, exactly. Batch norms are folded into the convolutions when a network is built, with the biases
that these may have: `fold_batch_norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cooc.errors import InputError, UnknownNameError, WeightsError, check_name, first_line
from cooc.networks import VGG16, EfficientNetLite, ResNet
from cooc.timm_models import timm_model
from cooc.tuning import tune

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CAFFE_MEAN, CAFFE_STD = (123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,) * 3
LITE_MEAN, LITE_STD = (127 / 255,) * 3, (128 / 255,) * 3


@dataclass(frozen=True)
class Backbone:
    """One row of BACKBONES. `layers` maps a layer's name to (channels, stride); the first one is the default."""

    build: Callable[[str], nn.Module]
    weights: str  # the name in weights.WEIGHTS
    layers: Mapping[str, tuple[int, int]]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    depthwise: bool = False  # convolutions that do little with large maps: see `cooc.pictures.malloc`
    blocks: Mapping[str, str] = field(default_factory=dict)  # that can be trained, and the layer before each


class Activations(nn.Module):
    """A frozen network up to one layer: uint8 RGB, or floats in 0..1, (B, 3, H, W) -> A (B, C, H', W')."""

    def __init__(self, network: nn.Module, backbone: Backbone, layer: str) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.grouped = any(isinstance(module, nn.Conv2d) and module.groups > 1 for module in network.modules())
        self._arrange()
        self.layer = layer
        self.channels, self.stride = backbone.layers[layer]
        self.register_buffer("mean", torch.tensor(backbone.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(backbone.std).view(1, 3, 1, 1), persistent=False)

    mean: Tensor
    std: Tensor

    def train(self, mode: bool = True) -> Activations:
        return self  # frozen: batch norm must never see "training"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Activations:
        """.to(), .half(), .cuda(): another device may want another layout; input is normalised in float32 or better."""
        normal = self.mean, self.std
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        wide = torch.promote_types(next(self.network.parameters()).dtype, torch.float32)
        self.mean, self.std = (x.to(self.mean.device, wide) for x in normal)
        self._arrange()
        return self

    def _arrange(self) -> None:
        """Channels-last is the faster layout, but for depthwise convolutions on a GPU: there PyTorch gives them to
        cuDNN, whose kernels for them are slow and planned again for each shape; in the other it has its own."""
        on_gpu = any(parameter.is_cuda for parameter in self.network.parameters())
        self.layout = torch.contiguous_format if on_gpu and self.grouped else torch.channels_last
        for parameter in self.network.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=self.layout)

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1] != 3 or min(images.shape[2:]) < self.stride:
            shape = f"(B, 3, H, W) with sides of at least {self.stride}, one position"
            raise InputError(f"Images must be {shape}; got {tuple(images.shape)}. Pad smaller ones.")
        x = images.to(self.mean)
        x = x / 255 if images.dtype == torch.uint8 else x
        x = ((x - self.mean) / self.std).to(next(self.network.parameters()).dtype)
        out: Tensor = self.network(x.contiguous(memory_format=self.layout))
        return out.contiguous()  # (B, C, H', W')


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """ "auto" is a CUDA GPU where there is one, else the CPU; "cpu", "cuda:1", "mps", "xpu" are taken at their word."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).cpu()
        return chosen
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # as many ways as backends
        here = ["cpu", *(str(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))]
        if (other := torch.accelerator.current_accelerator()) is not None and other.type != "cuda":
            here.append(other.type)
        reason = first_line(error).partition(". ")[0]  # torch goes on and on
        raise InputError(f"The device {device!r} cannot be used here ({reason}). Usable: {', '.join(here)}.") from error


def resolve_dtype(dtype: str = "auto", device: torch.device | None = None) -> torch.dtype:
    """ "auto" is bfloat16 where the machine multiplies it natively (recent GPUs, CPUs with AMX or AVX512-BF16)."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if dtype == "auto":
        if device is not None and device.type == "cuda":
            native = torch.cuda.get_device_capability(device) >= (8, 0)
        else:
            checks = (getattr(torch.cpu, n, None) for n in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
            native = any(check() for check in checks if check is not None)
        return torch.bfloat16 if native else torch.float32
    if dtype not in names:
        raise UnknownNameError("dtype", dtype, ["auto", *names])
    return names[dtype]


def build_backbone(
    name: str,
    layer: str | None = None,
    *,
    weights: Mapping[str, Tensor] | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tuning: Mapping[str, Tensor] | None = None,
) -> Activations:
    """The named network with the given state dict; None leaves random weights, as measuring its speed needs.

    `tuning` is what training changed in it (cooc.tuning). `timm:NAME` is any model of timm, with the weights of the
    whole model; its layers have the names that timm gives.
    """
    if name.startswith("timm:"):
        if weights is None:
            raise InputError(
                f"{name} needs weights: `cooc.weights.load_weights({name!r})` has those that timm publishes."
            )
        model = timm_model(name.removeprefix("timm:"), layer)
        network, layer = model.network, model.layer
        layers = {layer: (model.channels, model.stride)}
        backbone = Backbone(lambda layer: model.network, name, layers, model.mean, model.std)
        weights = model.rename(weights)
    elif name in BACKBONES:
        backbone = BACKBONES[name]
        layer = layer or next(iter(backbone.layers))
        check_name(f"layer of {name}", layer, backbone.layers)
        with torch.device("cpu" if weights is None else "meta"):  # random numbers are made only where they stay
            network = backbone.build(layer)
    else:
        raise UnknownNameError("backbone", name, [*BACKBONES, "timm:NAME"])
    if weights is not None:
        _load(network, weights, name)
    if name in BACKBONES:
        fold_batch_norms(network)
    if tuning:
        tune(network, tuning, partial=layer in backbone.blocks.values())
    return Activations(network.to(device, dtype), backbone, layer).to(device)


def _load(network: nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    """What the network has must be there; what it does not have (a classifier) may be."""
    wanted = network.state_dict()
    missing = {key for key in wanted.keys() - weights.keys() if not key.endswith("num_batches_tracked")}
    if missing:
        raise WeightsError(
            f"These weights are not for {name}: {len(missing)} tensors are missing, first {min(missing)!r}. "
            f"Fetch the right ones with `cooc weights fetch`."
        )
    try:
        own = {key: weights[key].to(like.dtype, copy=True) for key, like in wanted.items() if key in weights}
        network.load_state_dict(own, strict=False, assign=True)
    except RuntimeError as error:
        raise WeightsError(f"These weights are not for {name}: {error}") from error


def fold_batch_norms(network: nn.Module) -> None:
    """Put every batch norm into the convolution before it: the same function, and one pass over the maps less.

    In `cooc.networks` a batch norm always follows, as a child of the same module, the convolution that feeds it.
    """
    for module in network.modules():
        before: nn.Module | None = None
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d) and isinstance(before, nn.Conv2d):
                assert child.running_mean is not None
                assert child.running_var is not None
                scale = child.weight.data / (child.running_var + child.eps).sqrt()
                before.weight.data *= scale[:, None, None, None]
                shift = -child.running_mean if before.bias is None else before.bias.data - child.running_mean
                before.bias = nn.Parameter(child.bias.data + shift * scale)
                setattr(module, name, nn.Identity())
            before = child


VGG_LAYERS = {"pool5": (512, 32), "conv5_3": (512, 16), "pool4": (512, 16), "pool3": (256, 8)}
VGG_BLOCKS = {"block5": "pool4", "block4": "pool3"}
RESNET_LAYERS = {"layer4": (2048, 32), "layer3": (1024, 16)}
CAFFE_LAYERS = {  # conv5 is He et al.'s name of torchvision's layer4; conv5_3x3 is inside its last block (see ResNet)
    "conv5": (2048, 32),
    "conv4": (1024, 16),
    "conv3": (512, 8),
    "conv5_3x3": (512, 32),
    "conv4_3x3": (256, 16),
}
RESNET_BLOCKS, CAFFE_BLOCKS = {"block5": "layer3"}, {"block5": "conv4", "block4": "conv3"}
LITE_LAYERS = {"head": (1280, 32)}

BACKBONES: dict[str, Backbone] = {
    "vgg16-caffe": Backbone(VGG16, "vgg16-caffe", VGG_LAYERS, CAFFE_MEAN, CAFFE_STD, blocks=VGG_BLOCKS),
    "vgg16": Backbone(VGG16, "vgg16", VGG_LAYERS, blocks=VGG_BLOCKS),
    "resnet50-caffe": Backbone(
        lambda layer: ResNet((3, 4, 6, 3), int(layer[4]) - 1, caffe=True, inner=layer.endswith("_3x3")),
        "resnet50-caffe",
        CAFFE_LAYERS,
        CAFFE_MEAN,
        CAFFE_STD,
        blocks=CAFFE_BLOCKS,
    ),
    "resnet50": Backbone(
        lambda layer: ResNet((3, 4, 6, 3), int(layer[-1])), "resnet50", RESNET_LAYERS, blocks=RESNET_BLOCKS
    ),
    "resnet101": Backbone(
        lambda layer: ResNet((3, 4, 23, 3), int(layer[-1])), "resnet101", RESNET_LAYERS, blocks=RESNET_BLOCKS
    ),
    "efficientnet-lite0": Backbone(
        lambda layer: EfficientNetLite((16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)),
        "efficientnet-lite0",
        LITE_LAYERS,
        LITE_MEAN,
        LITE_STD,
        depthwise=True,
    ),
    "efficientnet-lite2": Backbone(
        lambda layer: EfficientNetLite((16, 24, 48, 88, 120, 208, 352), (1, 3, 3, 4, 4, 5, 1)),
        "efficientnet-lite2",
        LITE_LAYERS,
        LITE_MEAN,
        LITE_STD,
        depthwise=True,
    ),
}
