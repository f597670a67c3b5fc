"""Re-ranking of a shortlist: a score for each candidate, seen together with the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc.errors import InputError
from cooc.reranking.ranking import Indices, Scores, Vectors, check_count, check_pair, nearest, rank

TINY = np.finfo(np.float32).tiny


def reordered(
    score: Callable[[Vectors, Indices], NDArray[Any]],
    queries: Vectors,
    database: Vectors,
    k: int | None,
    shortlist: int,
) -> Indices:
    """Rank, sort the shortlist of each query by `score(query, its rows)`, and leave the rest. Ties keep their order."""
    k = len(database) if k is None else check_count("k", k)
    order, _ = nearest(queries, database, max(k, check_count("shortlist", shortlist)))
    for query, row in zip(queries, order, strict=True):
        head = row[:shortlist].copy()
        row[:shortlist] = head[np.argsort(-score(query, head), kind="stable")]
    return order[:, :k]


def reordered_by(
    scores: Callable[[Vectors, Vectors], Scores], queries: ArrayLike, database: ArrayLike, k: int | None, shortlist: int
) -> Indices:
    """The same by `scores(query, candidates)` of vectors."""
    queries, vectors = check_pair(queries, database)
    return reordered(lambda query, chosen: scores(query, vectors[chosen]), queries, vectors, k, shortlist)


def no_reranking(queries: ArrayLike, database: ArrayLike, k: int | None = None) -> Indices:
    """Plain similarity."""
    return rank(queries, database, k)[0]


def k_reciprocal(
    queries: ArrayLike, database: ArrayLike, k: int | None = None, *, shortlist: int = 400, **options: Any
) -> Indices:
    """k-reciprocal encoding (Zhong et al., CVPR 2017) of each query among its `shortlist` best matches."""
    return reordered_by(partial(k_reciprocal_scores, **options), queries, database, k, shortlist)


def k_reciprocal_scores(
    query: ArrayLike, candidates: ArrayLike, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Scores:
    """Minus the distance (1 - weight) Jaccard + weight d of one query (D,) to each candidate (M, D).

    Among these M + 1 vectors: d is the squared Euclidean distance, each row divided by its largest value as the authors
    do. R(p, k) = the vectors that have p, and that p has, among the k nearest. R*(p) = R(p, k1) and all R(q, k1/2) of
    its members q that lie in it by two thirds or more. V_p = exp(-d) on R*(p), of sum 1, then the mean over p and its
    k2 - 1 nearest. Jaccard = 1 - sum min(V_p, V_q) / sum max(V_p, V_q).
    """
    query, candidates = check_pair(np.atleast_2d(np.asarray(query)), candidates)
    if min(k1, k2) < 1:
        raise InputError(f"k1 = {k1} and k2 = {k2}: both count neighbours and must be at least 1.")
    points = np.vstack([query, candidates])
    distances = np.maximum(2 - 2 * (points @ points.T), 0)
    np.fill_diagonal(distances, -1)  # each vector is its own first neighbour, whatever its duplicates
    order = np.argsort(distances, axis=1, kind="stable")
    np.fill_diagonal(distances, 0)
    distances /= np.maximum(distances.max(axis=1, keepdims=True), TINY)

    wide, narrow = _mutual(order, k1), _mutual(order, round(k1 / 2))  # 0 and 1, so that products count members
    inside = wide @ narrow.T  # [p, q] = how many of R(q, k1/2) lie in R(p, k1)
    joined = wide * (3 * inside >= 2 * narrow.sum(axis=1))
    members = (wide + joined @ narrow) > 0

    codes = np.exp(-distances) * members
    codes /= codes.sum(axis=1, keepdims=True)
    codes = np.mean([codes[column] for column in order[:, :k2].T], axis=0)
    common = np.minimum(codes[0], codes[1:]).sum(axis=1)
    jaccard = 1 - common / (2 - common)  # each code sums to 1, so that sum max = 2 - sum min
    return np.asarray((weight - 1) * jaccard - weight * distances[0, 1:], np.float32)


def _mutual(order: Indices, k: int) -> NDArray[np.float32]:
    """[p, q] = 1 where each is among the other's k nearest, or is the other."""
    near = np.zeros(order.shape, np.float32)
    np.put_along_axis(near, order[:, : k + 1], 1, axis=1)
    return near * near.T


def superglobal(
    queries: ArrayLike, database: ArrayLike, k: int | None = None, *, shortlist: int = 400, **options: Any
) -> Indices:
    """The global re-ranking of SuperGlobal (Shao et al., ICCV 2023) on the `shortlist` best matches of each query."""
    return reordered_by(partial(superglobal_scores, **options), queries, database, k, shortlist)


def superglobal_scores(query: ArrayLike, candidates: ArrayLike, *, neighbours: int = 9, beta: float = 0.15) -> Scores:
    """Scores of one query (D,) for candidates (M, D), both refined among the candidates only.

    Each candidate becomes the mean of itself, with weight 1, and its nearest candidates, with weight beta * similarity
    (0 where that is negative). The query is expanded to the maximum, in each dimension, of the `neighbours` + 1 refined
    candidates nearest to it. The score is the mean of query . refined and expanded . refined; as in the authors' code,
    nothing is normalised again.
    """
    query, candidates = check_pair(np.atleast_2d(np.asarray(query)), candidates)
    count = check_count("neighbours", neighbours) + 1
    if not len(candidates):
        return np.empty(0, np.float32)
    similarities = candidates @ candidates.T
    np.fill_diagonal(similarities, np.inf)  # each candidate is its own first neighbour, whatever its duplicates
    closest = np.argsort(-similarities, axis=1, kind="stable")[:, :count]
    weights = beta * np.maximum(np.take_along_axis(similarities, closest, axis=1), 0)
    weights[:, 0] = 1
    refined = np.einsum("mn,mnd->md", weights, candidates[closest]) / weights.sum(axis=1, keepdims=True)
    plain = refined @ query[0]
    expanded = refined[np.argsort(-plain, kind="stable")[:count]].max(axis=0)
    return np.asarray((plain + refined @ expanded) / 2, np.float32)
