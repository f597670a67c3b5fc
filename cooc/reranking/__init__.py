"""Better rankings out of the vectors alone: query expansion, database augmentation and re-ranking.

All functions take plain arrays whose rows are L2-normalised, so that an inner product is a similarity. None of them
holds a matrix of database x database: products are made block by block, graphs are sparse, and re-ranking looks at a
shortlist of each query. The database may be a memory-mapped file.

    expanded = alpha_expansion(queries, database)             # new query vectors: search again with them
    order = RERANKERS["k-reciprocal"](queries, database)      # (Q, N): the shortlist in its new order, then the rest

A shortlist may also come from an index: give the vectors of the candidates as `database`; the order refers to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike

from cooc.errors import check_name
from cooc.reranking.diffusing import NeighbourGraph, diffusion, diffusion_scores, knn_graph
from cooc.reranking.expansion import alpha_expansion, average_expansion, database_augmentation, no_expansion
from cooc.reranking.ranking import Indices, Vectors, rank
from cooc.reranking.shortlists import k_reciprocal, k_reciprocal_scores, no_reranking, superglobal, superglobal_scores

__all__ = [
    "EXPANSIONS", "RERANKERS", "NeighbourGraph", "alpha_expansion", "average_expansion", "database_augmentation",
    "diffusion", "diffusion_scores", "expand", "k_reciprocal", "k_reciprocal_scores", "knn_graph", "no_expansion",
    "no_reranking", "rank", "rerank", "superglobal", "superglobal_scores",
]  # fmt: skip

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
    check_name("expansion", name, EXPANSIONS)
    return EXPANSIONS[name](queries, database, **options)


def rerank(name: str, queries: ArrayLike, database: ArrayLike, k: int | None = None, **options: Any) -> Indices:
    """Order (Q, K) of the database for each query, by the re-ranking of that name."""
    check_name("re-ranking", name, RERANKERS)
    return RERANKERS[name](queries, database, k, **options)
