"""Queries that OpenCV describes, in a database that torch has described: what is found, and in which order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration import plain_vectors
from cooc.bench.describing import BenchOptions
from cooc.datasets.retrieval import Dataset
from cooc.descriptor import Descriptor
from cooc.errors import InputError
from cooc.evaluation import evaluate
from cooc.provenance import provenance
from cooc.query_network.running import QueryNetwork
from cooc.query_network.writing import keep
from cooc.recipes import find_recipe
from cooc.reranking import rank

FIRST = 20  # results that a search shows


def compare_queries(dataset: Dataset, recipe: str, cache: Path) -> dict[str, Any]:
    """By vector alone: what geometry proves does not depend on the network."""
    database, asked = plain_vectors(dataset, find_recipe(recipe), BenchOptions(device="cpu", cache=cache))
    with tempfile.TemporaryDirectory() as place:
        descriptor = Descriptor.from_pretrained(recipe, device="cpu")
        keep(descriptor, Path(place) / "kept", None)
        network = QueryNetwork.find(Path(place) / "kept", descriptor.config.size)
        if network is None:
            raise InputError(f"{recipe} is not kept for queries: OpenCV cannot run it.")
        found = network.describe([query.path for query in dataset.queries], [query.box for query in dataset.queries])
    rankings = {"torch": rank(asked, database)[0], "OpenCV": rank(found, database)[0]}
    same = rankings["torch"] == rankings["OpenCV"]  # (Q, N)
    return {
        "benchmark": "queries",
        "dataset": dataset.name,
        "recipe": recipe,
        "queries": len(asked),
        "pictures": len(database),
        "least cosine of the two vectors": round(float((asked * found).sum(axis=1).min()), 7),
        "queries with the same ranking of all pictures": int(same.all(axis=1).sum()),
        f"queries with the same first {FIRST}": int(same[:, :FIRST].all(axis=1).sum()),
        "largest difference of a score": float(f"{np.abs((asked - found) @ database.T).max():.2g}"),
        "mAP": {
            protocol: {
                name: round(100 * evaluate(ranking, dataset.ground_truth, protocol).map, 4)
                for name, ranking in rankings.items()
            }
            for protocol in dataset.protocols
        },
        **provenance("cpu"),
    }
