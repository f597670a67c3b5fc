"""A whitening as a safetensors file, in full, in half or in a quarter of the space."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from cooc.errors import WhiteningError, check_name
from cooc.files import write_whole
from cooc.whitening.layer import Whitening

Storage = Literal["float32", "float16", "int8"]
STORAGE = ("float32", "float16", "int8")
FORMAT = "cooc-whitening/1"


def save(whitening: Whitening, path: str | Path, storage: Storage = "float32") -> None:
    """Writes safetensors, atomically, with the projection in full, in half or in a quarter of the space."""
    check_name("whitening storage", storage, STORAGE)
    tensors = {"mean": whitening.mean, "eigenvalues": whitening.eigenvalues, **_pack(whitening.projection, storage)}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    own = {"format": FORMAT, "storage": storage, "checksum": _checksum(plain)}
    try:
        write_whole(path, to_bytes(plain, metadata=whitening.meta | own))
    except OSError as error:
        raise WhiteningError(f"Cannot write whitening to {path} ({error}): check the folder and its space.") from error


def load(path: str | Path) -> Whitening:
    """Reads what `save` wrote, as float32 on the CPU. `meta["storage"]` says how exact the file was."""
    try:
        with safe_open(path, framework="pt") as file:
            meta: dict[str, str] = dict(file.metadata() or {})
            tensors: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise WhiteningError(f"There is no whitening file {path}: fit one and save it there.") from error
    except (OSError, SafetensorError) as error:
        raise WhiteningError(f"{path} is not a readable whitening file ({error}): fetch or fit it again.") from error
    version = meta.pop("format", "")
    if not version.startswith(FORMAT.split("/")[0]) or not {"mean", "projection"} <= tensors.keys():
        raise WhiteningError(f"{path} holds no whitening: give a file that a whitening was saved to.")
    if version != FORMAT:
        raise WhiteningError(f"{path} has format {version}, this cooc reads {FORMAT}: update cooc, or fit again.")
    if meta.pop("checksum", "") != _checksum(tensors):
        raise WhiteningError(f"{path} is damaged (its checksum does not match): fetch or fit it again.")
    return Whitening(tensors["mean"], _unpack(tensors), meta, tensors.get("eigenvalues"))


def _pack(projection: Tensor, storage: Storage) -> dict[str, Tensor]:
    """Rows with a float32 scale each, since whitening scales span decades.

    int8 rounding errors of a weak direction's row also meet the strong directions, where vectors have their energy, and
    would drown what that row is for. So the errors along the first sixteenth of the rows are kept too, as float16.
    """
    if storage == "float32":
        return {"projection": projection}
    scale = projection.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(projection.dtype).tiny)
    if storage == "float16":
        return {"projection": (projection / scale).half(), "scale": scale}
    scale = scale / 127
    rows = (projection / scale).round()
    strong = F.normalize(rows[: -(-projection.shape[1] // 16)], dim=1)  # (k, D)
    correction = (projection / scale - rows) @ torch.linalg.pinv(strong)  # (d, k)
    return {"projection": rows.to(torch.int8), "scale": scale, "correction": correction.half()}


def _unpack(tensors: Mapping[str, Tensor]) -> Tensor:
    rows = tensors["projection"].float()
    if "correction" in tensors:
        correction = tensors["correction"].float()
        rows = rows + correction @ F.normalize(rows[: correction.shape[1]], dim=1)
    return rows * tensors["scale"] if "scale" in tensors else rows


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
