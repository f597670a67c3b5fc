"""Which pooling suits a network's maps: one pass over the pictures, every form from the same activations.

Each form is whitened by PCA, fitted on landmark photos, and cut to the recipe's dimensions. On ResNet's maps hardly any
value is zero, so that co-occurrence, which asks which values lie over the mean, sees something else than on VGG16's:
`own` are values over their channel's own mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cooc.activations import Activations
from cooc.bench.scoring import evaluate_vectors
from cooc.cooccurrence import cooccurrence
from cooc.datasets.retrieval import Dataset
from cooc.descriptor import load_backbone
from cooc.errors import CoocError
from cooc.evaluation import bootstrap_interval
from cooc.pictures.batches import Item
from cooc.pooling import chco_sct, gem, l2_normalise, ucrow
from cooc.provenance import provenance
from cooc.recipes import Recipe
from cooc.stream import stream
from cooc.whitening import fit_pca

PLAIN = "sums"


def own(A: Tensor) -> Tensor:
    return (A - A.mean((2, 3), keepdim=True)).clamp_min(0)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    PLAIN: ucrow,
    "ChCO-SC_T": lambda A: chco_sct(A, cooccurrence(A)),
    "ChCO-SC_T of own": lambda A: chco_sct(own(A), cooccurrence(own(A), threshold=0.0)),
    "ChCO-SC_T, weights by own": lambda A: chco_sct(A, cooccurrence(own(A), threshold=0.0)),
    "GeM": gem,
    "GeM of own": lambda A: gem(own(A)),
    "GeM, weighted by SC_T": lambda A: gem(A * cooccurrence(A).sum(1, keepdim=True).clamp_min(0).pow(1 / 6)),
}


def measure_maps(
    recipe: Recipe, photos: Sequence[Path], datasets: Sequence[Dataset], *, fit_size: int, exponent: float
) -> dict[str, Any]:
    """mAP of each form on each data set, with what it gains over sums."""
    backbone, config = load_backbone(recipe.config, torch.device("cpu")), recipe.config
    fitting = _vectors([Item(None, path) for path in photos], backbone, fit_size)
    found: dict[str, Any] = {}
    whitenings = {name: fit_pca(rows, config.dim, exponent=exponent) for name, rows in fitting.items()}
    for dataset in datasets:
        sides = (
            [Item(None, path) for path in dataset.image_paths],
            [Item(None, query.path, query.box) for query in dataset.queries],
        )
        database, queries = (_vectors(items, backbone, config.size) for items in sides)
        scores = {
            name: evaluate_vectors(dataset, whiten(database[name]).numpy(), whiten(queries[name]).numpy(), "none")
            for name, whiten in whitenings.items()
        }
        for protocols in scores.values():
            for protocol, score in protocols.items():
                before = scores[PLAIN][protocol]["ap"]
                gain = [100 * (a - b) for a, b in zip(score["ap"], before, strict=True) if a is not None]
                score["gain"] = [round(float(np.mean(gain)), 2), *(round(g, 2) for g in bootstrap_interval(gain))]
                del score["curve"]
        found[dataset.name] = scores
    return {
        "benchmark": "maps",
        "recipe": recipe.name,
        "photos that whitening is fitted on": len(photos),
        "their size": fit_size,
        "exponent": exponent,
        "size": config.size,
        "dim": config.dim,
        "results": found,
        **provenance("cpu"),
    }


def _vectors(items: Sequence[Item], backbone: Activations, size: int) -> dict[str, Tensor]:
    """(N, C) of unit rows for each form, in the order of the items."""
    rows: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(items) for name in FORMS}

    @torch.inference_mode()
    def begin(images: Tensor) -> Callable[[], list[dict[str, Tensor]]]:
        A = backbone(images).float()
        pooled = {name: l2_normalise(form(A)) for name, form in FORMS.items()}
        return lambda: [{name: of_all[n] for name, of_all in pooled.items()} for n in range(len(A))]

    keyed = [Item(str(n), item.picture, item.box) for n, item in enumerate(items)]
    for item, found in stream(keyed, begin, device=torch.device("cpu"), size=size, min_side=backbone.stride, workers=0):
        if isinstance(found, CoocError):
            raise found
        for name, row in found.items():
            rows[name][int(item.key or 0)] = row.clone()
    return {name: torch.stack(of_form) for name, of_form in rows.items()}
