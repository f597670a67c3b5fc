"""Better rankings out of the vectors alone: query expansion, database augmentation and re-ranking.

All functions take plain arrays whose rows are L2-normalised, so that an inner product is a similarity. None of them
holds a matrix of database x database: products are made block by block, graphs are sparse, and re-ranking looks at a
shortlist of each query. The database may be a memory-mapped file.

    expanded = alpha_expansion(queries, database)             # new query vectors: search again with them
    order = RERANKERS["k-reciprocal"](queries, database)      # (Q, N): the shortlist in its new order, then the rest

A shortlist may also come from an index: give the vectors of the candidates as `database`; the order refers to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc.errors import InputError, UnknownNameError
from cooc.vectors import unit_rows

Vectors = NDArray[np.float32]
Indices = NDArray[np.int64]
Scores = NDArray[np.float32]
Found = tuple[ArrayLike, ArrayLike]

QUERY_BLOCK = 256  # rows at a time; with DATABASE_BLOCK columns a block of scores takes 16 MB
DATABASE_BLOCK = 16384
TINY = np.finfo(np.float32).tiny


# Ranking


def rank(queries: ArrayLike, database: ArrayLike, k: int | None = None) -> tuple[Indices, Scores]:
    """The `k` most similar rows of the database for each query (all of them by default), best first.

    Exact. Equal scores keep the order of the database.
    """
    queries, database = _pair(queries, database)
    return _rank(queries, database, len(database) if k is None else _count("k", k))


def _rank(queries: Vectors, database: Vectors, k: int) -> tuple[Indices, Scores]:
    k = min(k, len(database))
    indices = np.empty((len(queries), k), np.int64)
    scores = np.empty((len(queries), k), np.float32)
    if k == 0:
        return indices, scores
    for rows in _blocks(len(queries), _rows_for(k)):
        kept: list[tuple[Indices, Scores]] = []
        for columns in _blocks(len(database), DATABASE_BLOCK):
            block = queries[rows] @ database[columns].T
            chosen = _largest(block, k)
            kept.append((chosen + columns.start, np.take_along_axis(block, chosen, axis=1)))
            if sum(part.shape[1] for part, _ in kept) > 2 * k:
                kept = [_merge(kept, k)]
        indices[rows], scores[rows] = _merge(kept, k)
    return indices, scores


def _largest(scores: Scores, k: int) -> Indices:
    """Columns of the k largest values of each row in ascending order; of equal values the leftmost are taken."""
    rows, columns = scores.shape
    if k >= columns:
        return np.broadcast_to(np.arange(columns), scores.shape)
    smallest = np.partition(scores, columns - k, axis=1)[:, columns - k, None]
    taken = scores >= smallest
    if np.count_nonzero(taken) > rows * k:  # rare: more than k because of ties
        above, equal = scores > smallest, scores == smallest
        taken = above | (equal & (equal.cumsum(axis=1) <= k - above.sum(axis=1, keepdims=True)))
    chosen: Indices = np.flatnonzero(taken) % columns
    return chosen.reshape(rows, k)


def _merge(kept: list[tuple[Indices, Scores]], k: int) -> tuple[Indices, Scores]:
    """The k best of several parts; a stable sort, so that of equal scores the first in the database stays first."""
    indices, scores = (np.hstack(parts) for parts in zip(*kept, strict=True))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(indices, order, axis=1), np.take_along_axis(scores, order, axis=1)


# Query expansion and database augmentation


def no_expansion(queries: ArrayLike, database: ArrayLike) -> Vectors:
    """The queries as they are."""
    return _pair(queries, database)[0].copy()


def alpha_expansion(
    queries: ArrayLike,
    database: ArrayLike,
    n: int = 10,
    alpha: float = 3,
    *,
    exclude: ArrayLike | None = None,
    found: Found | None = None,
) -> Vectors:
    """alphaQE (Radenovic et al., TPAMI 2018): L2 of the query plus its `n` best matches, weighing max(score, 0)^alpha.

    `exclude` holds, for each query, the row of the database that is the query's own image (-1: it has none): that row
    is not counted. `found = (indices, scores)` is a search result to use instead of ranking here; -1 fills short rows.
    """
    queries, database = _pair(queries, database)
    n = _count("n", n)
    if not alpha >= 0:
        raise InputError(f"alpha is {alpha}, but the exponent of a similarity must be 0 or more.")
    own = _own(exclude, len(queries), len(database))
    matches = _rank(queries, database, n + 1) if found is None else _found(found, len(queries), len(database))
    indices, scores = _without(own, *matches, n)
    weights = np.power(np.maximum(scores, 0), np.float32(alpha)) * (indices >= 0)
    expanded = queries.copy()
    if len(database):
        for rows in _blocks(len(queries), _rows_for(n * database.shape[1])):
            expanded[rows] += np.einsum("qn,qnd->qd", weights[rows], database[indices[rows]])
    return unit_rows(expanded)


def average_expansion(queries: ArrayLike, database: ArrayLike, n: int = 10, **options: Any) -> Vectors:
    """AQE (Chum et al., ICCV 2007): L2 of the query plus the sum of its `n` best matches."""
    return alpha_expansion(queries, database, n, alpha=0, **options)


def database_augmentation(database: ArrayLike, n: int = 10, alpha: float = 3) -> Vectors:
    """alpha-DBA: each vector of the database expanded, as a query, by its `n` neighbours; it does not count itself."""
    vectors = _vectors("database", database)
    return alpha_expansion(vectors, vectors, n, alpha, exclude=np.arange(len(vectors)))


def _without(own: Indices, indices: Indices, scores: Scores, n: int) -> tuple[Indices, Scores]:
    """The first n entries of each row that are not `own`; rows that run short are filled with -1 and score 0."""
    hidden = (indices == own[:, None]) | (indices < 0)
    order = np.argsort(hidden, axis=1, kind="stable")[:, :n]
    indices, scores = np.where(hidden, -1, indices), np.where(hidden, np.float32(0), scores)
    return np.take_along_axis(indices, order, axis=1), np.take_along_axis(scores, order, axis=1)


# Re-ranking of a shortlist: a score for each candidate, seen together with the others


def no_reranking(queries: ArrayLike, database: ArrayLike, k: int | None = None) -> Indices:
    """Plain similarity."""
    return rank(queries, database, k)[0]


def k_reciprocal(
    queries: ArrayLike, database: ArrayLike, k: int | None = None, *, shortlist: int = 400, **options: Any
) -> Indices:
    """k-reciprocal encoding (Zhong et al., CVPR 2017) of each query among its `shortlist` best matches."""
    return _rerank_by(partial(k_reciprocal_scores, **options), queries, database, k, shortlist)


def k_reciprocal_scores(
    query: ArrayLike, candidates: ArrayLike, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Scores:
    """Minus the distance (1 - weight) Jaccard + weight d of one query (D,) to each candidate (M, D).

    Among these M + 1 vectors: d is the squared Euclidean distance, each row divided by its largest value as the authors
    do. R(p, k) = the vectors that have p, and that p has, among the k nearest. R*(p) = R(p, k1) and all R(q, k1/2) of
    its members q that lie in it by two thirds or more. V_p = exp(-d) on R*(p), of sum 1, then the mean over p and its
    k2 - 1 nearest. Jaccard = 1 - sum min(V_p, V_q) / sum max(V_p, V_q).
    """
    query, candidates = _pair(np.atleast_2d(np.asarray(query)), candidates)
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
    return _rerank_by(partial(superglobal_scores, **options), queries, database, k, shortlist)


def superglobal_scores(query: ArrayLike, candidates: ArrayLike, *, neighbours: int = 9, beta: float = 0.15) -> Scores:
    """Scores of one query (D,) for candidates (M, D), both refined among the candidates only.

    Each candidate becomes the mean of itself, with weight 1, and its nearest candidates, with weight beta * similarity
    (0 where that is negative). The query is expanded to the maximum, in each dimension, of the `neighbours` + 1 refined
    candidates nearest to it. The score is the mean of query . refined and expanded . refined; as in the authors' code,
    nothing is normalised again.
    """
    query, candidates = _pair(np.atleast_2d(np.asarray(query)), candidates)
    count = _count("neighbours", neighbours) + 1
    if not len(candidates):
        return np.empty(0, np.float32)
    similarities = candidates @ candidates.T
    np.fill_diagonal(similarities, np.inf)  # each candidate is its own first neighbour, whatever its duplicates
    nearest = np.argsort(-similarities, axis=1, kind="stable")[:, :count]
    weights = beta * np.maximum(np.take_along_axis(similarities, nearest, axis=1), 0)
    weights[:, 0] = 1
    refined = np.einsum("mn,mnd->md", weights, candidates[nearest]) / weights.sum(axis=1, keepdims=True)
    plain = refined @ query[0]
    expanded = refined[np.argsort(-plain, kind="stable")[:count]].max(axis=0)
    return np.asarray((plain + refined @ expanded) / 2, np.float32)


# Diffusion


@dataclass(frozen=True)
class NeighbourGraph:
    """Sparse symmetric affinity of a database: row i is joined to row `indices[i, c]` with weight `weights[i, c]`."""

    indices: Indices  # (N, K)
    weights: Scores  # (N, K), 0 where there is no edge


def knn_graph(database: ArrayLike, neighbours: int = 50, gamma: float = 3) -> NeighbourGraph:
    """W = max(similarity, 0)^gamma between mutual nearest neighbours, as D^-1/2 W D^-1/2. Make it once and keep it.

    Only mutual edges count: each row then has at most `neighbours` of them, and the graph is symmetric as it is.
    """
    vectors = _vectors("database", database)
    row = np.arange(len(vectors))
    neighbours = min(_count("neighbours", neighbours), max(len(vectors) - 1, 0))
    indices, scores = _without(row, *_rank(vectors, vectors, neighbours + 1), neighbours)
    there, back = row[:, None] * len(vectors) + indices, indices * len(vectors) + row[:, None]  # one number per edge
    weights = np.maximum(scores, 0) ** np.float32(gamma) * np.isin(back, there, assume_unique=True)
    degrees = weights.sum(axis=1)
    scale = np.divide(1, np.sqrt(degrees), out=np.zeros_like(degrees), where=degrees > 0)
    return NeighbourGraph(indices, weights * scale[:, None] * scale[indices])


def diffusion(
    queries: ArrayLike,
    database: ArrayLike,
    k: int | None = None,
    *,
    shortlist: int = 5000,
    graph: NeighbourGraph | None = None,
    neighbours: int = 50,
    gamma: float = 3,
    seeds: int = 10,
    alpha: float = 0.99,
    iterations: int = 20,
) -> Indices:
    """Diffusion (Iscen et al., CVPR 2017): similarity flows from the query along the graph of the database.

    The graph is truncated to the `shortlist` best matches of each query. It is made here unless given: for a large
    database make it once with `knn_graph`, or diffuse over the vectors of a shortlist only.
    """
    queries, vectors = _pair(queries, database)
    whole = knn_graph(vectors, neighbours, gamma) if graph is None else graph
    if len(whole.indices) != len(vectors):
        raise InputError(
            f"A graph of {len(whole.indices)} rows for {len(vectors)} vectors. Make it again: knn_graph()."
        )
    place = np.full(len(vectors), -1)  # of a row in the shortlist

    def score(query: Vectors, chosen: Indices) -> NDArray[np.float64]:
        place[chosen] = np.arange(len(chosen))
        indices = place[whole.indices[chosen]]
        place[chosen] = -1
        part = NeighbourGraph(np.maximum(indices, 0), whole.weights[chosen] * (indices >= 0))
        similarities = vectors[chosen] @ query
        return diffusion_scores(similarities, part, gamma=gamma, seeds=seeds, alpha=alpha, iterations=iterations)

    return _rerank(score, queries, vectors, k, shortlist)


def diffusion_scores(
    similarities: ArrayLike,
    graph: NeighbourGraph,
    *,
    gamma: float = 3,
    seeds: int = 10,
    alpha: float = 0.99,
    iterations: int = 20,
    tolerance: float = 1e-6,
) -> NDArray[np.float64]:
    """f of (I - alpha S) f = y by conjugate gradients; y = max(similarity, 0)^gamma for the `seeds` best, else 0.

    The matrix is positive definite for alpha < 1, for S and any part of it has no eigenvalue above 1. A few iterations
    give the ranking. What no path joins to a seed scores 0.
    """
    if not 0 <= alpha < 1:
        raise InputError(f"alpha is {alpha}, but diffusion converges only for 0 <= alpha < 1.")
    similarities = np.asarray(similarities, np.float64)
    best = np.argsort(-similarities, kind="stable")[: _count("seeds", seeds)]
    residual = np.zeros(len(similarities))
    residual[best] = np.maximum(similarities[best], 0) ** gamma
    flow, direction = np.zeros_like(residual), residual.copy()
    energy = residual @ residual
    enough = tolerance**2 * energy
    for _ in range(iterations):
        if energy <= enough:
            break
        moved = direction - alpha * np.einsum("nk,nk->n", graph.weights, direction[graph.indices])
        step = energy / (direction @ moved)
        flow += step * direction
        residual -= step * moved
        energy, before = residual @ residual, energy
        direction = residual + energy / before * direction
    return flow


# By name

EXPANSIONS: dict[str, Callable[..., Vectors]] = {
    "none": no_expansion,
    "average": average_expansion,
    "alpha": alpha_expansion,
}
RERANKERS: dict[str, Callable[..., Indices]] = {
    "none": no_reranking,
    "k-reciprocal": k_reciprocal,
    "diffusion": diffusion,
    "superglobal": superglobal,
}


def expand(name: str, queries: ArrayLike, database: ArrayLike, **options: Any) -> Vectors:
    """New query vectors by the expansion of that name."""
    if name not in EXPANSIONS:
        raise UnknownNameError("expansion", name, EXPANSIONS)
    return EXPANSIONS[name](queries, database, **options)


def rerank(name: str, queries: ArrayLike, database: ArrayLike, k: int | None = None, **options: Any) -> Indices:
    """Order (Q, K) of the database for each query, by the re-ranking of that name."""
    if name not in RERANKERS:
        raise UnknownNameError("re-ranking", name, RERANKERS)
    return RERANKERS[name](queries, database, k, **options)


# What they share


def _rerank(
    score: Callable[[Vectors, Indices], NDArray[Any]],
    queries: Vectors,
    database: Vectors,
    k: int | None,
    shortlist: int,
) -> Indices:
    """Rank, sort the shortlist of each query by `score(query, its rows)`, and leave the rest. Ties keep their order."""
    k = len(database) if k is None else _count("k", k)
    order, _ = _rank(queries, database, max(k, _count("shortlist", shortlist)))
    for query, row in zip(queries, order, strict=True):
        head = row[:shortlist].copy()
        row[:shortlist] = head[np.argsort(-score(query, head), kind="stable")]
    return order[:, :k]


def _rerank_by(
    scores: Callable[[Vectors, Vectors], Scores],
    queries: ArrayLike,
    database: ArrayLike,
    k: int | None,
    shortlist: int,
) -> Indices:
    """The same by `scores(query, candidates)` of vectors."""
    queries, vectors = _pair(queries, database)
    return _rerank(lambda query, chosen: scores(query, vectors[chosen]), queries, vectors, k, shortlist)


def _pair(queries: ArrayLike, database: ArrayLike) -> tuple[Vectors, Vectors]:
    queries, database = _vectors("queries", queries), _vectors("database", database)
    if queries.shape[1] != database.shape[1]:
        dimensions = f"{queries.shape[1]} dimensions, the database {database.shape[1]}"
        raise InputError(f"The queries have {dimensions}. Describe both with the same recipe.")
    return queries, database


def _vectors(name: str, value: ArrayLike) -> Vectors:
    vectors = np.asarray(value, np.float32)
    if vectors.ndim != 2:
        raise InputError(f"{name}: expected an array (count, dimensions), got one of shape {vectors.shape}.")
    for rows in _blocks(len(vectors), DATABASE_BLOCK):
        bad = np.flatnonzero(~np.isfinite(vectors[rows]).all(axis=1))
        if len(bad):
            raise InputError(f"{name}: row {rows.start + bad[0]} holds NaN or infinity. Describe that image again.")
    return vectors


def _count(name: str, value: int) -> int:
    if value < 0:
        raise InputError(f"{name} is {value}, but it counts things and cannot be negative.")
    return int(value)


def _own(exclude: ArrayLike | None, queries: int, database: int) -> Indices:
    own = np.full(queries, -1) if exclude is None else np.asarray(exclude, np.int64)
    if own.shape != (queries,) or (own >= database).any():
        raise InputError(
            f"exclude: expected a row of the database (of {database}), or -1, for each of {queries} queries."
        )
    return own


def _found(found: Found, queries: int, database: int) -> tuple[Indices, Scores]:
    indices, scores = np.asarray(found[0], np.int64), np.asarray(found[1], np.float32)
    if indices.ndim != 2 or len(indices) != queries or indices.shape != scores.shape:
        raise InputError(
            f"found: expected indices and scores of shape ({queries}, n), got {indices.shape}, {scores.shape}."
        )
    if (indices >= database).any() or not np.isfinite(scores[indices >= 0]).all():
        raise InputError(
            f"found: an index beyond the {database} vectors of the database, or a score that is not finite."
        )
    return indices, scores


def _blocks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _rows_for(width: int) -> int:
    """How many rows of that width to handle at a time: at most 64 MB of float32."""
    return max(1, min(QUERY_BLOCK, 2**24 // max(1, width)))
