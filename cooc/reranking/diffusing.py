"""Diffusion: similarity that flows along a sparse graph of the database."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc.errors import InputError
from cooc.reranking.ranking import Indices, Scores, Vectors, check_count, check_pair, check_rows, nearest, without
from cooc.reranking.shortlists import reordered


@dataclass(frozen=True)
class NeighbourGraph:
    """Sparse symmetric affinity of a database: row i is joined to row `indices[i, c]` with weight `weights[i, c]`."""

    indices: Indices  # (N, K)
    weights: Scores  # (N, K), 0 where there is no edge


def knn_graph(database: ArrayLike, neighbours: int = 50, gamma: float = 3) -> NeighbourGraph:
    """W = max(similarity, 0)^gamma between mutual nearest neighbours, as D^-1/2 W D^-1/2. Make it once and keep it.

    Only mutual edges count: each row then has at most `neighbours` of them, and the graph is symmetric as it is.
    """
    vectors = check_rows("database", database)
    row = np.arange(len(vectors))
    neighbours = min(check_count("neighbours", neighbours), max(len(vectors) - 1, 0))
    indices, scores = without(row, *nearest(vectors, vectors, neighbours + 1), neighbours)
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
    queries, vectors = check_pair(queries, database)
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

    return reordered(score, queries, vectors, k, shortlist)


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
    """What `diffuse` gives for y = max(similarity, 0)^gamma of the `seeds` best, else 0."""
    similarities = np.asarray(similarities, np.float64)
    best = np.argsort(-similarities, kind="stable")[: check_count("seeds", seeds)]
    start = np.zeros(len(similarities))
    start[best] = np.maximum(similarities[best], 0) ** gamma
    return diffuse(graph, start, alpha=alpha, iterations=iterations, tolerance=tolerance)


def diffuse(
    graph: NeighbourGraph, seeds: ArrayLike, *, alpha: float = 0.99, iterations: int = 20, tolerance: float = 1e-6
) -> NDArray[np.float64]:
    """f of (I - alpha S) f = seeds by conjugate gradients.

    The matrix is positive definite for alpha < 1, for S and any part of it has no eigenvalue above 1. A few iterations
    give the ranking. What no path joins to a seed scores 0.
    """
    if not 0 <= alpha < 1:
        raise InputError(f"alpha is {alpha}, but diffusion converges only for 0 <= alpha < 1.")
    residual = np.array(seeds, np.float64)
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
