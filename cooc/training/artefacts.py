"""What a training run leaves behind: a filter, the whitening that goes with it, and where both come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cooc.cooccurrence import Cooccurrence
from cooc.datasets.photos import Photos
from cooc.errors import UnknownNameError
from cooc.training import filters
from cooc.training.cache import ActivationCache
from cooc.training.network import describe
from cooc.training.progress import Record
from cooc.training.train import POSITIONS, Run
from cooc.whitening import Whitening, fit_learned, fit_pca, save

__all__ = ["finish", "fit_whitening"]


def fit_whitening(
    run: Run, cache: ActivationCache, photos: Photos, kind: str, dim: int, meta: Mapping[str, str]
) -> Whitening:
    """The whitening that goes with what was learned: `pca` of all photos, `learned` from all matching pairs (Lw).

    A layer that was trained is that whitening already.
    """
    if run.net.layer is not None and "whitening" in run.config.train:
        layer = run.net.layer
        return Whitening(layer.mean.cpu(), layer.projection.detach().cpu(), {"kind": "trained"} | dict(meta))
    with torch.no_grad():
        vectors = describe(run.net, cache, range(len(cache)), positions=POSITIONS[cache.device.type], raw=True)
    dim = min(dim or vectors.shape[1], vectors.shape[1], len(vectors) - 1)
    if kind == "learned":
        queries, positives = photos.pairs()
        return fit_learned(vectors, queries, positives, dim, meta=meta).to("cpu")
    if kind != "pca":
        raise UnknownNameError("whitening", kind, ("pca", "learned"))
    return fit_pca(vectors, dim, meta=meta).to("cpu")


def finish(
    run: Run,
    cache: ActivationCache,
    photos: Photos,
    folder: Path,
    *,
    whitening: str = "pca",
    dim: int = 0,
    compress: int = 0,
    storage: str = "float32",
    about: Mapping[str, Any] | None = None,
) -> Record:
    """Write what a run came to: filter.safetensors, whitening.safetensors and run.json. Gives what run.json holds.

    compress: the rank to which a full filter is cut; 0 keeps it whole. storage: float32, or float16 for half the bytes.
    The whitening is fitted with the filter as it was written.
    """
    config, net = run.config.descriptor, run.net
    summary: Record = dict(about or {}) | {
        "config": run.config.as_dict(),
        "data": {"name": photos.name, "photos": len(photos), "held_out": int(photos.held_out.sum())},
        "pairs": len(photos.pairs()[0]),
        "history": run.history,
        "best": run.best,
        "seconds": run.seconds,
        "peak_bytes": run.peak_bytes,
    }
    if "filter" in run.config.train:
        file, layer = folder / "filter.safetensors", net.filter()
        small = filters.compress(layer, compress) if compress and layer.form == "learned" else layer
        filters.save_filter(small, file, storage=storage, about=summary)
        written = Cooccurrence.load(file)
        net.load_filter(written)
        config = config.replace(cooccurrence="learned", filter=str(file))
        size = {"bytes": file.stat().st_size, "error": filters.error(written, layer)}
        summary["filter"] = {"file": file.name, "form": written.form, **size}
    if "exponent" in run.config.train:
        summary["exponent"] = float(net.exponent.detach())
    if whitening != "none":
        meta = {"space": config.space, "space_hash": config.space_hash, "fitted_on": photos.name}
        fitted = fit_whitening(run, cache, photos, whitening, dim, meta | {"size": str(config.size)})
        save(fitted, folder / "whitening.safetensors", "float16" if storage == "float16" else "float32")
        summary["whitening"] = dict(fitted.meta) | {"file": "whitening.safetensors", "dim": fitted.dim}
    temporary = folder / ".run.tmp"
    temporary.write_text(json.dumps(summary, indent=1) + "\n")
    temporary.replace(folder / "run.json")
    return summary
