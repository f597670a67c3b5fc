"""The calibrations that ship with cooc: of named recipes, on labelled photos -> cooc/data/calibration.json, results/.

`cooc.index.calibration` fits and judges; here is where the vectors come from and where the curves go. A user's own
index has its own calibration: `cooc calibrate`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cooc.bench.describing import BenchOptions, Vectors, raw_vectors
from cooc.datasets.retrieval import Dataset
from cooc.errors import InputError
from cooc.evaluation import PROTOCOLS
from cooc.files import write_whole
from cooc.index.calibration import calibrate
from cooc.pictures.batches import Item
from cooc.provenance import provenance
from cooc.recipes import Recipe, find_whitening


def calibrate_recipe(
    dataset: Dataset, recipe: Recipe, options: BenchOptions, made: Path | None = None
) -> dict[str, Any]:
    """The curve of a recipe's scores. `made`: a folder with RECIPE.npz, arrays `database` and `queries`."""
    database, queries = plain_vectors(dataset, recipe, options) if made is None else _load(made / f"{recipe.name}.npz")
    if (len(database), len(queries)) != (len(dataset.image_paths), len(dataset.queries)):
        raise InputError(
            f"{len(database)} and {len(queries)} vectors for {len(dataset.image_paths)} pictures and "
            f"{len(dataset.queries)} queries of {dataset.name}: describe them again."
        )
    name = recipe.config.score_space(database.shape[1])
    if name is None:
        raise InputError(f"{recipe.name} uses a whitening of your own: there is no common name to keep its curve by.")
    protocol = PROTOCOLS[dataset.protocols[0]]
    truth = dataset.ground_truth
    _, report = calibrate(
        queries,
        database,
        [query.select(protocol.positive) for query in truth],
        [query.select((*protocol.ignored, "itself")) for query in truth],
    )
    about = {"space": name, "recipe": recipe.name, "dataset": dataset.name, "pictures": len(database)}
    return about | report | provenance(options.device)


def write_curve(report: dict[str, Any], curves: Path, results: Path) -> None:
    """The curve into the file of all curves, the report into results/."""
    known = json.loads(curves.read_text(encoding="utf-8")) if curves.is_file() else {}
    known[report["space"]] = {key: report[key] for key in ("slope", "offset", "recipe", "dataset", "commit")}
    write_whole(curves, json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    write_whole(results / f"calibration--{report['space']}.json", json.dumps(report, indent=1) + "\n")


def plain_vectors(dataset: Dataset, recipe: Recipe, options: BenchOptions) -> tuple[Vectors, Vectors]:
    """Whitened, of the database and the queries."""
    import torch

    whitening = find_whitening(recipe.config) if recipe.config.whitening else None
    if whitening is not None and recipe.config.dim:
        whitening = whitening.truncate(recipe.config.dim)
    found = []
    for what, items in (
        ("database", [Item(None, path) for path in dataset.image_paths]),
        ("queries", [Item(None, query.path, query.box) for query in dataset.queries]),
    ):
        raw = raw_vectors(items, [recipe], options, f"{dataset.name} {what}")[recipe.config.pooling_hash]
        found.append(raw if whitening is None else whitening(torch.from_numpy(raw)).numpy())
    return found[0], found[1]


def _load(file: Path) -> tuple[Vectors, Vectors]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return arrays["database"].astype(np.float32), arrays["queries"].astype(np.float32)
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"{str(file)!r} does not hold arrays database and queries ({error}).") from error
