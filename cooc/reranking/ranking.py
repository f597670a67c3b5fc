"""Ranking by inner products, block by block, and what everything in this room checks first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc.errors import InputError

Vectors = NDArray[np.float32]
Indices = NDArray[np.int64]
Scores = NDArray[np.float32]

QUERY_BLOCK = 256  # rows at a time; with DATABASE_BLOCK columns a block of scores takes 16 MB
DATABASE_BLOCK = 16384


def rank(queries: ArrayLike, database: ArrayLike, k: int | None = None) -> tuple[Indices, Scores]:
    """The `k` most similar rows of the database for each query (all of them by default), best first.

    Exact. Equal scores keep the order of the database.
    """
    queries, database = check_pair(queries, database)
    return nearest(queries, database, len(database) if k is None else check_count("k", k))


def nearest(queries: Vectors, database: Vectors, k: int) -> tuple[Indices, Scores]:
    """`rank`, of vectors that have been checked."""
    k = min(k, len(database))
    indices = np.empty((len(queries), k), np.int64)
    scores = np.empty((len(queries), k), np.float32)
    if k == 0:
        return indices, scores
    for rows in slices(len(queries), rows_for(k)):
        kept: list[tuple[Indices, Scores]] = []
        for columns in slices(len(database), DATABASE_BLOCK):
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


def without(own: Indices, indices: Indices, scores: Scores, n: int) -> tuple[Indices, Scores]:
    """The first n entries of each row that are not `own`; rows that run short are filled with -1 and score 0."""
    hidden = (indices == own[:, None]) | (indices < 0)
    order = np.argsort(hidden, axis=1, kind="stable")[:, :n]
    indices, scores = np.where(hidden, -1, indices), np.where(hidden, np.float32(0), scores)
    return np.take_along_axis(indices, order, axis=1), np.take_along_axis(scores, order, axis=1)


def check_pair(queries: ArrayLike, database: ArrayLike) -> tuple[Vectors, Vectors]:
    queries, database = check_rows("queries", queries), check_rows("database", database)
    if queries.shape[1] != database.shape[1]:
        dimensions = f"{queries.shape[1]} dimensions, the database {database.shape[1]}"
        raise InputError(f"The queries have {dimensions}. Describe both with the same recipe.")
    return queries, database


def check_rows(name: str, value: ArrayLike) -> Vectors:
    vectors = np.asarray(value, np.float32)
    if vectors.ndim != 2:
        raise InputError(f"{name}: expected an array (count, dimensions), got one of shape {vectors.shape}.")
    for rows in slices(len(vectors), DATABASE_BLOCK):
        bad = np.flatnonzero(~np.isfinite(vectors[rows]).all(axis=1))
        if len(bad):
            raise InputError(f"{name}: row {rows.start + bad[0]} holds NaN or infinity. Describe that image again.")
    return vectors


def check_count(name: str, value: int) -> int:
    if value < 0:
        raise InputError(f"{name} is {value}, but it counts things and cannot be negative.")
    return int(value)


def slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def rows_for(width: int) -> int:
    """How many rows of that width to handle at a time: at most 64 MB of float32."""
    return max(1, min(QUERY_BLOCK, 2**24 // max(1, width)))
