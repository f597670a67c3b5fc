"""Other methods by our protocols: vectors or rankings that somebody else's program wrote, as a result of `cooc bench`.

    result = vectors_result(dataset, "mine=database.npy,queries.npy")     # (N, D) and (Q, D), floats
    result = rankings_result(dataset, "mine=rankings.npy")                # (Q, k) rows of the database, best first

Rows are in the order of the dataset: `dataset.image_paths` and `dataset.queries`. Vectors are compared by the cosine. A
ranking may be shorter than the database (its AP is then a lower bound), and -1 fills places at its end, as in faiss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cooc.bench.scoring import Indices, Vectors, evaluate_rankings, evaluate_vectors, first_names
from cooc.datasets.retrieval import Dataset
from cooc.errors import InputError
from cooc.provenance import provenance
from cooc.reranking import rank
from cooc.vectors import read_array, read_vectors, unit_rows


def vectors_result(
    dataset: Dataset,
    given: str,
    expansions: Sequence[str] = ("none",),
    verified: Callable[[Vectors, Vectors], dict[str, Any]] = lambda database, queries: {},
) -> dict[str, Any]:
    """`given`: DATABASE.npy,QUERIES.npy, or NAME= and that; without a name it is that of the database's file.

    `verified` tells what geometry makes of the ranking (`cooc.bench.run.Verified.results`).
    """
    name, files = _named(given)
    if len(files) != 2:
        raise InputError(f"--vectors wants two files, DATABASE.npy,QUERIES.npy, not {given!r}.")
    database = _vectors(files[0], len(dataset.image_paths), "pictures in the database")
    queries = _vectors(files[1], len(dataset.queries), "queries")
    if database.shape[1] != queries.shape[1]:
        found = f"{database.shape[1]} and {queries.shape[1]}"
        raise InputError(f"{files[0]} and {files[1]} have {found} dimensions: vectors of one method have the same.")
    scores = {way: evaluate_vectors(dataset, database, queries, way) for way in expansions}
    scores |= verified(database, queries)
    return _result(dataset, name, "own vectors", database.shape[1], scores, list(rank(queries, database, 10)[0]))


def rankings_result(dataset: Dataset, given: str) -> dict[str, Any]:
    """`given`: RANKINGS.npy, or NAME= and that."""
    name, files = _named(given)
    if len(files) != 1:
        raise InputError(f"--rankings wants one file, RANKINGS.npy, not {given!r}.")
    rankings = _rankings(files[0], dataset)
    return _result(dataset, name, "own rankings", None, {"none": evaluate_rankings(dataset, rankings)}, rankings)


def _result(
    dataset: Dataset, name: str, source: str, dim: int | None, scores: dict[str, Any], rankings: Sequence[Indices]
) -> dict[str, Any]:
    return {
        "dataset": dataset.name,
        "recipe": name,
        "source": source,
        "dim": dim,
        "images": len(dataset.image_paths),
        "queries": len(dataset.queries),
        "results": scores,
        "top": first_names(dataset, rankings),
        **provenance("cpu"),
    }


def _named(given: str) -> tuple[str, list[Path]]:
    """NAME=FILE,FILE. The name becomes part of a file's name."""
    before, sign, after = given.partition("=")
    named = bool(sign) and not {"/", "\\", ","} & set(before)  # else the sign is part of a path
    files = [Path(file) for file in (after if named else given).split(",") if file]
    if not files:
        raise InputError(f"{given!r} names no file.")
    name = before if named else files[0].stem
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise InputError(f"{name!r} is no name for a method: letters, digits and . + - _ are. Write NAME=FILE.")
    return name, files


def _vectors(file: Path, rows: int, what: str) -> Vectors:
    """(rows, D) unit vectors."""
    vectors = read_vectors(file)
    if len(vectors) != rows:
        raise InputError(f"{file} has {len(vectors)} rows for {rows} {what}: write one for each, in their order.")
    return unit_rows(vectors.astype(np.float64))


def _rankings(file: Path, dataset: Dataset) -> list[Indices]:
    array = read_array(file)
    size, queries = len(dataset.image_paths), len(dataset.queries)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{file} holds {array.dtype}. Rankings are integers, the rows of the database.")
    if array.ndim != 2:
        raise InputError(f"{file} has shape {array.shape}. Rankings are (queries, k).")
    if len(array) != queries:
        raise InputError(f"{file} has {len(array)} rows for {queries} queries: write one for each, in their order.")
    rankings = []
    for query, row in enumerate(array.astype(np.int64)):
        filled = np.trim_zeros(row + 1, "b") - 1  # -1 at the end: no more was found
        if len(filled) and not 0 <= filled.min() <= filled.max() < size:
            wrong = filled[(filled < 0) | (filled >= size)][0]
            raise InputError(f"Row {query} of {file} has index {wrong}: the database has rows 0 to {size - 1}.")
        if len(np.unique(filled)) < len(filled):
            raise InputError(f"Row {query} of {file} has an index twice: each picture has one place.")
        rankings.append(filled)
    return rankings
