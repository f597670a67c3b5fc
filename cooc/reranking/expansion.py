"""Query expansion and database augmentation: vectors joined with what they find."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cooc.errors import InputError
from cooc.reranking.ranking import (
    Indices,
    Scores,
    Vectors,
    check_count,
    check_pair,
    check_rows,
    nearest,
    rows_for,
    slices,
    without,
)
from cooc.vectors import unit_rows

Found = tuple[ArrayLike, ArrayLike]


def no_expansion(queries: ArrayLike, database: ArrayLike) -> Vectors:
    """The queries as they are."""
    return check_pair(queries, database)[0].copy()


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
    queries, database = check_pair(queries, database)
    n = check_count("n", n)
    if not alpha >= 0:
        raise InputError(f"alpha is {alpha}, but the exponent of a similarity must be 0 or more.")
    own = _own(exclude, len(queries), len(database))
    matches = nearest(queries, database, n + 1) if found is None else _found(found, len(queries), len(database))
    indices, scores = without(own, *matches, n)
    weights = np.power(np.maximum(scores, 0), np.float32(alpha)) * (indices >= 0)
    expanded = queries.copy()
    if len(database):
        for rows in slices(len(queries), rows_for(n * database.shape[1])):
            expanded[rows] += np.einsum("qn,qnd->qd", weights[rows], database[indices[rows]])
    return unit_rows(expanded)


def average_expansion(queries: ArrayLike, database: ArrayLike, n: int = 10, **options: Any) -> Vectors:
    """AQE (Chum et al., ICCV 2007): L2 of the query plus the sum of its `n` best matches."""
    return alpha_expansion(queries, database, n, alpha=0, **options)


def database_augmentation(database: ArrayLike, n: int = 10, alpha: float = 3) -> Vectors:
    """alpha-DBA: each vector of the database expanded, as a query, by its `n` neighbours; it does not count itself."""
    vectors = check_rows("database", database)
    return alpha_expansion(vectors, vectors, n, alpha, exclude=np.arange(len(vectors)))


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
