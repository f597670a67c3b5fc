"""What a training run leaves behind: an artefact (cooc/artefacts.py) that is a recipe, and how it came about.

Photos that were held out decide. If what was learned does not find them better than the recipe does as it is, there is
no artefact, and one of an earlier run stays.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from cooc.artefacts import FILTER, TUNING, WHITENING, write_artefact
from cooc.cooccurrence import Cooccurrence
from cooc.datasets.photos import Photos
from cooc.errors import UnknownNameError, WhiteningError
from cooc.evaluation import Floats, bootstrap_interval
from cooc.files import write_whole
from cooc.recipes import ARTEFACT, DescriptorConfig, find_tuning, find_whitening
from cooc.training import filters
from cooc.training.cache import ActivationCache
from cooc.training.network import CoOcNet, describe
from cooc.training.train import EXPONENTS, Run, as_it_is, average_precisions, mean_ap
from cooc.tuning import both, read_tuning, write_tuning
from cooc.whitening import Whitening, adapt, fit_learned, fit_pca

FEWEST = 10  # queries that can tell whether something is better


def fit_whitening(
    run: Run, cache: ActivationCache, photos: Photos, kind: str, dim: int, meta: Mapping[str, str]
) -> Whitening:
    """The whitening that goes with what was learned: `pca` of the photos, `learned` from their matching pairs (Lw), or
    the recipe's own, through which it was learned, `adapted` to these pairs.

    Photos that were held out have no part in it but one, the choice of the exponent: they are to judge it. A layer that
    was trained is that whitening already.
    """
    if run.net.layer is not None and "whitening" in run.config.train:
        layer = run.net.layer
        return Whitening(layer.mean.cpu(), layer.projection.detach().cpu(), {"kind": "trained"} | dict(meta))
    rows = np.flatnonzero(~photos.held_out)
    with torch.no_grad():
        vectors = describe(run.net, cache, torch.from_numpy(rows), raw=True)
    queries, positives = (np.searchsorted(rows, side) for side in photos.pairs(held_out=False))
    if kind == "adapted" and run.net.layer is not None:
        return adapt(run.net.layer, vectors, queries, positives, meta=meta).to("cpu")
    dim = min(dim or vectors.shape[1], vectors.shape[1], len(vectors) - 1)
    if kind == "learned":
        return fit_learned(vectors, queries, positives, dim, meta=meta).to("cpu")
    if kind != "pca":
        raise UnknownNameError("whitening", kind, ("adapted", "pca", "learned"))
    fitted = fit_pca(vectors, dim, meta=meta)
    if len(photos.queries(held_out=True)):
        score = _held_out(run.net, cache, photos)
        fitted = max((fitted.with_exponent(e) for e in EXPONENTS), key=lambda layer: mean_ap(score(layer)))
    return fitted.to("cpu")


@torch.no_grad()
def _held_out(net: CoOcNet, cache: ActivationCache, photos: Photos) -> Callable[[Whitening | None], Floats]:
    """The photos held out, described once; what a whitening makes of them: the AP of each query."""
    queries, database, truth = photos.validation()
    rows = np.union1d(database, queries)
    vectors = describe(net, cache, torch.from_numpy(rows), raw=True)
    places = np.searchsorted(rows, queries), np.searchsorted(rows, database)

    def score(layer: Whitening | None) -> Floats:
        found = vectors if layer is None else layer.to(cache.device)(vectors)
        return average_precisions(found, *places, truth)

    return score


@torch.no_grad()
def judge(
    run: Run, whitening: Whitening | None, cache: ActivationCache, photos: Photos, recipe: DescriptorConfig
) -> dict[str, Any]:
    """mAP of the photos held out, by the recipe as it is and by what was learned: is that better beyond chance?"""
    before = as_it_is(recipe, cache, run.config.block)
    ap = [_held_out(before, cache, photos)(own_whitening(recipe)), _held_out(run.net, cache, photos)(whitening)]
    gain = [round(bound, 4) for bound in bootstrap_interval(100 * (ap[1] - ap[0]))]
    better = gain[0] > 0 and len(ap[0]) >= FEWEST
    return {"queries": len(ap[0]), "before": mean_ap(ap[0]), "after": mean_ap(ap[1]), "gain": gain, "better": better}


def own_whitening(recipe: DescriptorConfig) -> Whitening | None:
    """The whitening that a recipe has already; none, where it would have to be fitted first."""
    try:
        found = find_whitening(recipe) if recipe.whitening else None
    except WhiteningError:
        return None
    return found.truncate(recipe.dim or found.dim) if found is not None and recipe.dim <= found.dim else None


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
    """Write what a run came to: filter, whitening and settings as one artefact, if it is better than the recipe as it
    is or nothing was held out to tell; and run.json. Gives what that holds.

    recipe: what a filter was learned for, at the image size and scales of searching, which may differ from those of
    training. compress: the rank to which a full filter is cut; 0 keeps it whole. storage: float32, or float16 for half
    the bytes. The whitening is fitted with the filter as it was written.
    """
    net, searching = run.net, recipe or run.config.descriptor
    config = run.config.descriptor.replace(size=searching.size, scales=searching.scales, options=net.options())
    summary: dict[str, Any] = dict(about or {}) | {
        "config": run.config.as_dict(),
        "data": {"name": photos.name, "photos": len(photos), "held_out": int(photos.held_out.sum())},
        "pairs": len(photos.pairs(held_out=False)[0]),
        "history": run.history,
        "best": run.best,
        "seconds": run.seconds,
        "peak_bytes": run.peak_bytes,
    }
    if "exponent" in run.config.train:
        summary["exponent"] = float(net.exponent.detach())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        if "filter" in run.config.train:
            file, layer = Path(made) / FILTER, net.filter()
            small = filters.compress(layer, compress) if compress and layer.form == "learned" else layer
            small.save(file, storage=storage, about=summary)
            written = Cooccurrence.load(file)
            net.load_filter(written)
            config = config.replace(cooccurrence="learned", filter=str(file))
            size = {"bytes": file.stat().st_size, "error": filters.error(written, layer)}
            summary["filter"] = {"file": file.name, "form": written.form, **size}
        if net.block is not None:
            change = Path(made) / TUNING
            net.block.load_change({name: tensor.half() for name, tensor in net.block.change().items()})  # as it is kept
            before = read_tuning(find_tuning(config)) if config.tuning else {}
            write_tuning(change, both(before, net.block.change()), summary)
            config = config.replace(tuning=str(change))
            summary["tuning"] = {"file": change.name, "bytes": change.stat().st_size}
        fitted = None
        if whitening != "none":
            meta = {"fitted_on": photos.name, "size": str(run.config.descriptor.size)}
            fitted = fit_whitening(run, cache, photos, whitening, dim, meta)
            summary["whitening"] = dict(fitted.meta) | {"file": WHITENING, "dim": fitted.dim}
        if len(photos.queries(held_out=True)):
            whole = searching if whitening != "none" else searching.replace(whitening="", dim=0)
            summary["judged"] = judge(run, fitted, cache, photos, whole)
        if summary.get("judged", {}).get("better", True):
            write_artefact(made, config, None, fitted, storage=storage, about={"source": f"trained on {photos.name}"})
            (folder / ARTEFACT).unlink(missing_ok=True)  # whatever stops this now leaves no mixture of two runs
            for name in (FILTER, TUNING, WHITENING, ARTEFACT):  # a folder that has the last is whole
                if (Path(made) / name).is_file():
                    (Path(made) / name).replace(folder / name)
    write_whole(folder / "run.json", json.dumps(summary, indent=1) + "\n")
    return summary
