"""Models of timm, by name: up to one of their feature maps, and the weights that timm publishes. An optional extra."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from cooc.errors import InputError, UnknownNameError


@dataclass(frozen=True)
class TimmModel:
    network: nn.Module  # normalised images -> one map (B, C, H, W)
    layer: str
    channels: int
    stride: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def rename(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A whole model's weights under the names that they have here. To get at its maps, timm wraps a model, or takes
        it apart: `stages.3.norm` becomes `model.stages.3.norm` or `stages_3.norm`."""
        plain = {key.replace(".", "_"): tensor for key, tensor in weights.items()}
        places = {key: key.removeprefix("model.").replace(".", "_") for key in self.network.state_dict()}
        return {
            key: plain[found]
            for key, place in places.items()
            if (found := place if place in plain else place.removeprefix("model_")) in plain
        }


def timm_model(name: str, layer: str | None = None) -> TimmModel:
    """A model with random weights up to a feature map: `layer` is timm's name for it (`layer3`, `stages.2`), or its
    number from either end (`3`, `-1`). By default it is the last one."""
    timm = import_timm()
    info = _feature_maps(timm, name, -1).feature_info
    names = info.module_name([*range(len(info))])
    counted = {str(i): i % len(names) for i in range(-len(names), len(names))}
    if layer is not None and layer not in names and layer not in counted:
        raise UnknownNameError(f"layer of timm:{name}", layer, names)
    index = counted["-1"] if layer is None else counted[layer] if layer in counted else names.index(layer)
    model = _feature_maps(timm, name, index)
    config = model.pretrained_cfg or {}
    return TimmModel(
        network=_OneMap(model),
        layer=names[index],
        channels=info.channels(index),
        stride=info.reduction(index),
        mean=tuple(config.get("mean", (0.485, 0.456, 0.406))),
        std=tuple(config.get("std", (0.229, 0.224, 0.225))),
    )


def published_weights(name: str) -> dict[str, Tensor]:
    """The state dict of a whole model, which timm downloads (and keeps a copy of in a cache of its own)."""
    timm = import_timm()
    from huggingface_hub import constants, errors

    place = urlsplit(constants.ENDPOINT).hostname or ""
    talk = logging.getLogger("huggingface_hub")  # of each of its many attempts
    before = talk.level, constants.HF_HUB_OFFLINE
    try:
        talk.setLevel(logging.ERROR)
        constants.HF_HUB_OFFLINE |= not _reachable(place)  # or it would try for a minute
        state: dict[str, Tensor] = timm.create_model(name, pretrained=True).state_dict()
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise OSError(f"{place} cannot be reached, and timm's own cache does not have it") from error
    finally:
        talk.setLevel(before[0])
        constants.HF_HUB_OFFLINE = before[1]
    return state


def _reachable(place: str) -> bool:
    """Has a name an address, or is there a proxy that would know?"""
    try:
        return bool(getproxies() or socket.getaddrinfo(place, 443))
    except OSError:
        return False


class _OneMap(nn.Module):
    """After ReLU: co-occurrences are counts of what is there."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.channels_last = str(getattr(model, "output_fmt", "")).endswith("NHWC")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)[-1]
        return (out.permute(0, 3, 1, 2) if self.channels_last else out).relu()


def _feature_maps(timm: Any, name: str, index: int) -> Any:
    """The model with its map number `index`, for pictures of any size, which plain transformers have to be told."""
    wanted = {"pretrained": False, "features_only": True, "out_indices": (index,)}
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    try:
        if config is None or not config.fixed_input_size:
            return timm.create_model(name, **wanted)
        try:
            model = timm.create_model(name, **wanted, dynamic_img_size=True, dynamic_img_pad=True)
        except TypeError:  # not an option of this kind of model
            model = timm.create_model(name, **wanted)
    except RuntimeError as error:  # no such model, or none with feature maps
        raise InputError(f"timm:{name} cannot be used: {error} `timm.list_models()` has all names.") from error
    try:
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, 97, 161))
    except (AssertionError, RuntimeError) as error:
        only = f"timm:{name} takes only pictures of certain sizes ({error})"
        raise InputError(f"{only}. Choose a convolutional network or a plain vision transformer.") from error
    return model


def import_timm() -> Any:
    if importlib.util.find_spec("timm") is None:
        raise InputError("timm backbones need timm: pip install 'cooc[timm]'.")
    if "torchvision" not in sys.modules:
        _prepare_torchvision()
    try:
        import timm
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(
            f"timm cannot be imported: {error}. Install the torchvision that belongs to torch {torch.__version__}, "
            "from the index that this torch came from."
        ) from error
    return timm


def _prepare_torchvision() -> None:
    """timm imports torchvision, and the package index has a build of it for CUDA. Beside a torch for CPUs its compiled
    operators cannot be loaded, and its import fails where it describes two of them. timm's models use none: it is
    enough that those two have names."""
    found = importlib.util.find_spec("torchvision")
    for compiled in Path(found.origin).parent.glob("_C*.so") if found and found.origin else ():
        try:
            ctypes.CDLL(str(compiled))
        except OSError:
            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", schema)
