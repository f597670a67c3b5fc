"""Vectors or rankings -> a result: every protocol's mAP, mP@k, recall@k and MRR, kept as JSON. No network, no torch."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc.datasets.retrieval import Dataset
from cooc.errors import check_name
from cooc.evaluation import PROTOCOLS, bootstrap_interval, evaluate, positive_ranks, precision_recall
from cooc.files import write_whole
from cooc.reranking import alpha_expansion, database_augmentation, rank, rerank

Vectors = NDArray[np.float32]
Indices = NDArray[np.int64]
RECALL = np.linspace(0, 1, 21)  # where the mean precision-recall curve of a result is kept


def _expanded(queries: Vectors, database: Vectors, own: Indices, n: int, alpha: float) -> Indices:
    return rank(alpha_expansion(queries, database, n, alpha, exclude=own), database)[0]


def _reranked(queries: Vectors, database: Vectors, own: Indices, name: str) -> Indices:
    return rerank(name, queries, database)


# What is done between the vectors and the ranking: queries (Q, D), database (N, D), own rows (Q,) -> rankings (Q, N)
WAYS: dict[str, Callable[[Vectors, Vectors, Indices], Indices]] = {
    "none": lambda queries, database, own: rank(queries, database)[0],
    "average-5": functools.partial(_expanded, n=5, alpha=0),
    "average-10": functools.partial(_expanded, n=10, alpha=0),
    "alpha-10": functools.partial(_expanded, n=10, alpha=3),
    "alpha-50": functools.partial(_expanded, n=50, alpha=3),
    "augmentation": lambda queries, database, own: rank(queries, database_augmentation(database))[0],
    "k-reciprocal": functools.partial(_reranked, name="k-reciprocal"),
    "diffusion": functools.partial(_reranked, name="diffusion"),
    "superglobal": functools.partial(_reranked, name="superglobal"),
}


def evaluate_vectors(dataset: Dataset, database: Vectors, queries: Vectors, expansion: str) -> dict[str, Any]:
    """The scores of `evaluate_rankings` for unit vectors, ranked in one of WAYS."""
    check_name("expansion or re-ranking", expansion, WAYS)
    return evaluate_rankings(dataset, list(WAYS[expansion](queries, database, left_out(dataset))))


def evaluate_rankings(dataset: Dataset, rankings: Sequence[ArrayLike]) -> dict[str, Any]:
    """For each protocol, in percent: mAP and its interval, mP@k, recall@k, MRR; each query's AP, the mean curve."""
    out = {}
    for protocol in dataset.protocols:
        scores = evaluate(rankings, dataset.ground_truth, protocol)
        low, high = bootstrap_interval(scores.ap)
        out[protocol] = {
            "mAP": round(100 * scores.map, 4),
            "interval": [round(100 * low, 2), round(100 * high, 2)],
            "mP@k": {str(k): round(100 * v, 2) for k, v in scores.mp_at_k.items()},
            "recall@k": {str(k): round(100 * v, 2) for k, v in scores.recall_at_k.items()},
            "MRR": round(100 * scores.mrr, 2),
            "ap": [None if np.isnan(value) else round(float(value), 6) for value in scores.ap],
            "curve": [round(float(value), 4) for value in mean_curve(dataset, rankings, protocol)],
        }
    return out


def left_out(dataset: Dataset) -> Indices:
    """Each query's own row where the protocol takes it out of the ranking; -1 where it does not, or there is none.

    What is ranked may expand a query too: Oxford and Paris count the query's own picture as a good answer.
    """
    ignored = {group for protocol in dataset.protocols for group in PROTOCOLS[protocol].ignored}
    own = [query.select(["itself"]) for query in dataset.ground_truth]
    hidden = [query.select(sorted(ignored)) for query in dataset.ground_truth]
    return np.array([int(row[0]) if np.isin(row, out).any() else -1 for row, out in zip(own, hidden, strict=True)])


def mean_curve(dataset: Dataset, rankings: Sequence[ArrayLike], protocol: str) -> NDArray[np.float64]:
    """Precision at the levels of RECALL along the line whose area is AP, averaged over queries that have positives."""
    curves = []
    for ranking, truth in zip(rankings, dataset.ground_truth, strict=True):
        ranks, count = positive_ranks(ranking, truth, protocol)
        if not len(ranks):  # nothing was found; queries without positives do not count
            curves += [np.zeros(len(RECALL))] if count else []
            continue
        precision, recall = precision_recall(ranks, count)
        curves.append(np.interp(RECALL, recall, precision, right=0.0))
    return np.mean(curves, axis=0) if curves else np.full(len(RECALL), np.nan)


def first_names(dataset: Dataset, rankings: Sequence[ArrayLike]) -> list[list[str]]:
    """Names of the first ten pictures for each query."""
    return [[dataset.image_paths[i].stem for i in np.asarray(ranking)[:10]] for ranking in rankings]


def write_result(result: dict[str, Any], folder: Path) -> Path:
    """results/<dataset>--<recipe>.json; a recipe that is a folder is named by its path, without separators."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = "-".join(part for part in re.split(r"[/\\]", result["recipe"]) if part not in ("", ".", ".."))
    path = folder / f"{result['dataset']}--{recipe}.json"
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[\n[^\[\]{}]+\]", lambda flat: re.sub(r"\n\s*", " ", flat[0]), text)  # plain lists on one line
    write_whole(path, text + "\n")
    return path
