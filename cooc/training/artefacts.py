"""What a training run leaves behind: an artefact (cooc/artefacts.py) that is a recipe, and how it came about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from cooc.artefacts import FILTER, WHITENING, write_artefact
from cooc.cooccurrence import Cooccurrence
from cooc.datasets.photos import Photos
from cooc.errors import UnknownNameError
from cooc.files import write_whole
from cooc.recipes import DescriptorConfig
from cooc.training import filters
from cooc.training.cache import ActivationCache
from cooc.training.network import describe
from cooc.training.train import Run
from cooc.whitening import Whitening, fit_learned, fit_pca


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
        vectors = describe(run.net, cache, range(len(cache)), raw=True)
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
    recipe: DescriptorConfig | None = None,
    whitening: str = "pca",
    dim: int = 0,
    compress: int = 0,
    storage: Literal["float32", "float16"] = "float32",
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write what a run came to: filter, whitening and settings as one artefact, and run.json. Gives what that holds.

    recipe: what a filter was learned for, at the image size and scales of searching, which may differ from those of
    training. compress: the rank to which a full filter is cut; 0 keeps it whole. storage: float32, or float16 for half
    the bytes. The whitening is fitted with the filter as it was written.
    """
    net, searching = run.net, recipe or run.config.descriptor
    config = run.config.descriptor.replace(size=searching.size, scales=searching.scales, options=net.options())
    summary: dict[str, Any] = dict(about or {}) | {
        "config": run.config.as_dict(),
        "data": {"name": photos.name, "photos": len(photos), "held_out": int(photos.held_out.sum())},
        "pairs": len(photos.pairs()[0]),
        "history": run.history,
        "best": run.best,
        "seconds": run.seconds,
        "peak_bytes": run.peak_bytes,
    }
    if "filter" in run.config.train:
        file, layer = folder / FILTER, net.filter()
        small = filters.compress(layer, compress) if compress and layer.form == "learned" else layer
        small.save(file, storage=storage, about=summary)
        written = Cooccurrence.load(file)
        net.load_filter(written)
        config = config.replace(cooccurrence="learned", filter=str(file))
        size = {"bytes": file.stat().st_size, "error": filters.error(written, layer)}
        summary["filter"] = {"file": file.name, "form": written.form, **size}
    if "exponent" in run.config.train:
        summary["exponent"] = float(net.exponent.detach())
    fitted = None
    if whitening != "none":
        meta = {"fitted_on": photos.name, "size": str(run.config.descriptor.size)}
        fitted = fit_whitening(run, cache, photos, whitening, dim, meta)
        summary["whitening"] = dict(fitted.meta) | {"file": WHITENING, "dim": fitted.dim}
    write_artefact(folder, config, None, fitted, storage=storage, about={"source": f"trained on {photos.name}"})
    write_whole(folder / "run.json", json.dumps(summary, indent=1) + "\n")
    return summary
