"""A learned filter after training: made small, taken over from others, and what it learned most."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from cooc.cooccurrence import Cooccurrence, direct_filter
from cooc.errors import InputError, UnknownNameError

__all__ = ["STORAGE", "compress", "error", "import_filter", "provenance_of", "save_filter", "strongest"]

STORAGE = ("float32", "float16")


def delta(layer: Cooccurrence) -> Tensor:
    """What was learned: the filter less the direct one. (C, C, S, S)"""
    full = layer.full_filter().float()
    return full - direct_filter(full.shape[0], layer.radius, layer.eps)


def compress(layer: Cooccurrence, rank: int) -> Cooccurrence:
    """Direct + the nearest delta of that rank: 512 x 512 x 9 x 9 in 85 MB -> 2.7 MB at rank 32 in float16."""
    return Cooccurrence(
        "factored",
        filter=layer.full_filter().float(),
        rank=rank,
        threshold=layer.threshold,
        eps=layer.eps,
        window_mean=layer.window_mean,
    )


def error(layer: Cooccurrence, reference: Cooccurrence) -> float:
    """How far what one learned is from what the other did, relative to the latter."""
    wanted = delta(reference)
    norm = float(wanted.norm())
    return float((delta(layer) - wanted).norm()) / norm if norm else 0.0


def save_filter(
    layer: Cooccurrence, path: str | Path, *, storage: str = "float32", about: Mapping[str, Any] | None = None
) -> None:
    """Write a filter with where it comes from (`about`, kept as JSON). float16 halves it; loading gives float32."""
    if storage not in STORAGE:
        raise UnknownNameError("storage of a filter", storage, STORAGE)
    path = Path(path)
    if path.suffix == ".npy":
        layer.save(path)  # the authors' layout has no room for more
        return
    stored = copy.deepcopy(layer)
    if storage == "float16":
        stored = _balanced(stored).half()
    temporary = path.with_name(f".{path.stem}.part.safetensors")
    try:
        stored.save(temporary)
        with safe_open(temporary, "pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        temporary.unlink()  # safetensors' own files are for their owner only; this one is like any other
        temporary.write_bytes(save(tensors, meta | {"about": json.dumps(dict(about or {}))}))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def provenance_of(path: str | Path) -> dict[str, Any]:
    """What `save_filter` was told about a filter."""
    if Path(path).suffix == ".npy":
        return {}
    with safe_open(path, "pt") as file:
        found: dict[str, Any] = json.loads((file.metadata() or {}).get("about", "{}"))
    return found


@torch.no_grad()
def _balanced(layer: Cooccurrence) -> Cooccurrence:
    """Rows of `left` and `right` of like size, so that float16 has digits for both; their product is the same."""
    if layer.form == "factored":
        scale = (layer.left.abs().amax(0) / layer.right.abs().amax((1, 2, 3)).clamp_min(1e-30)).clamp_min(1e-30).sqrt()
        layer.left.div_(scale)
        layer.right.mul_(scale[:, None, None, None])
    return layer


def import_filter(path: str | Path) -> tuple[Cooccurrence, float]:
    """A filter from elsewhere, scaled so that it is 1 where nothing was learned; and the factor.

    The authors' code divides the filter by S^2. Normalisation removes such a factor from every vector, but it must be
    known to tell what was learned from what the direct filter has.
    """
    layer = Cooccurrence.load(path)
    full = layer.full_filter().float()
    if full.shape[0] != full.shape[1]:
        raise InputError(f"{path}: a filter is (C, C, S, S), not {tuple(full.shape)}.")
    typical = float(full.flatten().median())
    if not typical > 0:
        raise InputError(f"{path}: its median is {typical:.3g}; a co-occurrence filter is positive nearly everywhere.")
    area = full.shape[2] * full.shape[3]
    factor = 1.0 if 0.5 < typical < 2 else float(area) if 0.5 < typical * area < 2 else 1 / typical
    if factor == 1:
        return layer, factor
    return Cooccurrence("learned", filter=full * factor, threshold=layer.threshold, eps=layer.eps), factor


def strongest(layer: Cooccurrence, count: int = 8) -> list[tuple[int, int, float]]:
    """Pairs of channels (k, w) whose squares changed most, with the norm of the change."""
    change = delta(layer).flatten(2).norm(dim=2)  # (C, C)
    values, places = change.flatten().topk(min(count, change.numel()))
    return [(*divmod(int(i), change.shape[1]), float(v)) for v, i in zip(values, places, strict=True)]
