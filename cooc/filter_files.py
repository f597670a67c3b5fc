"""A learned filter on disk: `.npy` in the authors' layout (C, C, S, S), or safetensors with its form and options.

The second also says where the filter comes from (`about`, kept as JSON), and may be stored as float16, for half the
bytes. Reading gives float32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cooc.errors import InputError, check_name
from cooc.files import replacing

STORAGE = {"float32": torch.float32, "float16": torch.float16}


def write_filter(
    path: str | os.PathLike[str],
    parameters: Mapping[str, Tensor],
    options: Mapping[str, Any],
    full: Callable[[], Tensor],
    storage: str = "float32",
    about: Mapping[str, Any] | None = None,
) -> None:
    """`parameters` are those of the form, `full()` is the whole filter: what goes into a .npy."""
    check_name("storage of a filter", storage, STORAGE)
    if Path(path).suffix == ".npy":
        with replacing(path) as file:
            np.save(file, full().float().cpu().numpy())
        return
    meta = {"cooc_form" if key == "form" else key: str(value) for key, value in options.items()}
    tensors = {name: tensor.detach().cpu() for name, tensor in parameters.items()}
    if storage == "float16":
        tensors = _balanced(tensors)
    stored = {name: tensor.to(STORAGE[storage]).contiguous() for name, tensor in tensors.items()}
    with replacing(path) as file:
        file.write(save(stored, meta | {"about": json.dumps(dict(about or {}))}))


def _balanced(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of `left` and `right` of like size, so that float16 has digits for both; their product is the same."""
    if "left" not in tensors:
        return tensors
    left, right = tensors["left"], tensors["right"]
    scale = (left.abs().amax(0) / right.abs().amax((1, 2, 3)).clamp_min(1e-30)).clamp_min(1e-30).sqrt()
    return {"left": left / scale, "right": right * scale[:, None, None, None]}


def read_filter(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters, and form, threshold, eps and window_mean as far as the file says."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such filter file. Train one, or give a .npy or .safetensors filter.")
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            return {"weight": torch.from_numpy(array.astype(np.float32, casting="same_kind"))}, {"form": "learned"}
        with safe_open(path, "pt") as tensors:
            meta = tensors.metadata() or {}
            found = {name: tensors.get_tensor(name).float() for name in tensors.keys()}  # noqa: SIM118
        threshold = meta["threshold"] if meta["threshold"] == "mean" else float(meta["threshold"])
        options = {"threshold": threshold, "eps": float(meta["eps"]), "window_mean": meta["window_mean"] == "True"}
        return found, {"form": meta["cooc_form"], **options}
    except OSError as error:  # of the disk, or of this process: the file may be good
        raise InputError(f"{path} cannot be read: {error}. Look at the disk and `ulimit -n`, and try again.") from error
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not a filter that cooc can read ({error}). Save or export it again.") from error


def about_filter(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was said about a filter when it was written."""
    if Path(path).suffix == ".npy":
        return {}
    with safe_open(path, "pt") as file:
        found: dict[str, Any] = json.loads((file.metadata() or {}).get("about", "{}"))
    return found
