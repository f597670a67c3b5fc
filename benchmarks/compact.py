"""What compact storage costs: mAP of a recipe's vectors, stored in every way that an index can store them.

    vectors = whitened(dataset, recipes, options)                  # recipe -> database, queries
    result = measure_compact(dataset, vectors, STORAGES)

`export_vectors` and `import_vectors` carry the vectors from the machine that described the pictures to one with faiss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cooc.bench.describing import BenchOptions, Vectors
from cooc.bench.run import raw_of
from cooc.datasets.retrieval import Dataset
from cooc.errors import DatasetError, InputError
from cooc.evaluation import evaluate
from cooc.provenance import provenance
from cooc.recipes import Recipe
from cooc.reranking import rank
from cooc.vectors import unit_rows

Pair = tuple[Vectors, Vectors]  # database (N, D), queries (Q, D)


def whitened(dataset: Dataset, recipes: Sequence[Recipe], options: BenchOptions) -> dict[str, Pair]:
    """As each recipe describes and whitens them."""
    raw = raw_of(dataset, recipes, options)
    return {recipe.name: raw.vectors(recipe, raw.whitening(recipe)) for recipe in recipes}


def measure_compact(dataset: Dataset, vectors: Mapping[str, Pair], storages: Sequence[str]) -> dict[str, Any]:
    """For each recipe and storage the bytes of a vector and, by protocol, mAP and what is lost of float32's."""
    from cooc.index.embedded.coding import Coding  # faiss, which a machine that only describes may lack

    rows: list[dict[str, Any]] = []
    for recipe, (database, queries) in vectors.items():
        exact: dict[str, float] = {}
        for storage in dict.fromkeys(("float32", *storages)):
            coding = Coding(storage, database.shape[1])
            stored = coding.decode(coding.encode(np.ascontiguousarray(database)))
            rankings, _ = rank(queries, np.ascontiguousarray(stored))
            found = {p: 100 * evaluate(rankings, dataset.ground_truth, p).map for p in dataset.protocols}
            exact = exact or found
            rows.append(
                {
                    "recipe": recipe,
                    "dim": database.shape[1],
                    "storage": storage,
                    "bytes": coding.width,
                    "mAP": {p: round(value, 3) for p, value in found.items()},
                    "change": {p: round(value - exact[p], 3) for p, value in found.items()},
                }
            )
    return {"benchmark": "compact", "dataset": dataset.name, "rows": rows, **provenance("cpu")}


def export_vectors(dataset: Dataset, vectors: Mapping[str, Pair], folder: Path) -> list[Path]:
    """vectors--<dataset>--<recipe>.npz, in float16: 1 kB for each picture at 512 dimensions."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for recipe, (database, queries) in vectors.items():
        file = folder / f"vectors--{dataset.name}--{recipe}.npz"
        with file.open("wb") as out:
            np.savez(out, database=database.astype(np.float16), queries=queries.astype(np.float16))
        files.append(file)
    return files


def import_vectors(dataset: Dataset, files: Sequence[Path]) -> dict[str, Pair]:
    """What `export_vectors` wrote, brought back to unit length."""
    found: dict[str, Pair] = {}
    for file in files:
        kind, _, rest = file.stem.partition("--")
        name, _, recipe = rest.partition("--")
        if kind != "vectors" or name != dataset.name or not recipe:
            raise InputError(
                f"{file} holds no vectors of {dataset.name}: vectors--{dataset.name}--RECIPE.npz is wanted."
            )
        with np.load(file) as content:
            pair = unit_rows(content["database"]), unit_rows(content["queries"])
        if (len(pair[0]), len(pair[1])) != (len(dataset.image_paths), len(dataset.queries)):
            raise DatasetError(
                f"{file} holds {len(pair[0])} pictures and {len(pair[1])} queries; {dataset.name} has others."
            )
        found[recipe] = pair
    return found
