"""A learned filter after training: made small, taken over from others, and what it learned most."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from cooc.cooccurrence import Cooccurrence, direct_filter
from cooc.errors import InputError


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
