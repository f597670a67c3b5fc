"""`cooc bench index --ranking`: do the commands rank real pictures as a matrix product does?

The harness has its own way to vectors, so the two sides share the recipe and nothing else: decoding in other processes,
other batches, SQLite, the search structure and the command line are all on one side only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration import plain_vectors
from cooc.bench.describing import BenchOptions
from cooc.datasets.retrieval import load_dataset
from cooc.errors import CoocError, InputError
from cooc.recipes import find_recipe

CLOSE = 1e-5  # what a vector may differ by between batches: scores nearer than twice that may change places


def compare_rankings(source: Path, recipe: str, options: BenchOptions) -> dict[str, Any]:
    """`cooc index` and `cooc search` on all pictures and queries of a labelled set, against queries @ database.T."""
    dataset = load_dataset(str(source))
    if any(query.box for query in dataset.queries):
        raise InputError(
            f"The queries of {dataset.name} have boxes, and a batch of queries cannot: choose another set."
        )
    names = [path.name for path in dataset.image_paths]
    with tempfile.TemporaryDirectory() as place:
        photos, queries = Path(place) / "photos", Path(place) / "queries"
        for folder, paths in ((photos, dataset.image_paths), (queries, [query.path for query in dataset.queries])):
            folder.mkdir()
            for path in paths:
                shutil.copyfile(path, folder / path.name)
        _cooc("index", str(photos), "--recipe", recipe, "--device", options.device, "--quiet")
        index = str(photos / ".cooc")
        lines = _cooc(
            "search",
            str(queries),
            "--index",
            index,
            "-k",
            str(len(names)),
            "--device",
            options.device,
            "--json",
            "--no-verify",
        )
        found = {Path(answer["query"]).name: answer["matches"] for answer in map(json.loads, lines.splitlines())}
    database, asked = plain_vectors(dataset, find_recipe(recipe), options)
    scores = asked @ database.T  # (Q, N)
    same = wrong = 0
    off = 0.0
    for query, row in zip(dataset.queries, scores, strict=True):
        matches = found[query.path.name]
        place_of = {name: i for i, name in enumerate(names)}
        order = np.array([place_of[match["path"]] for match in matches])
        ranked = np.sort(row)[::-1]
        same += int((row[order] == ranked).sum())
        wrong += int((np.abs(row[order] - ranked) > 2 * CLOSE).sum()) + abs(len(order) - len(names))
        off = max(off, float(np.abs(row[order] - [match["score"] for match in matches]).max()))
    return {
        "dataset": dataset.name,
        "recipe": recipe,
        "pictures": len(names),
        "queries": len(dataset.queries),
        "results": len(dataset.queries) * len(names),
        "in the same place": same,
        "out of place, beyond rounding": wrong,
        "largest difference of a score": off,
    }


def _cooc(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "cooc.cli", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CoocError(f"cooc {words[0]} failed: {done.stderr.strip()}")
    return done.stdout
