"""Which features of a query and of a picture are each other's nearest.

The similarities are made in blocks that stay in the cache and are never kept. A GPU does the same with many pictures at
a time: `on_device.py`. Both give the matches that two loops would give, up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cooc.verification.coding import vectors
from cooc.verification.engines import ENGINES
from cooc.verification.features import LocalFeatures

Floats = NDArray[np.float32]

ROWS = 256  # of the query at a time: 256 x 1000 similarities are a megabyte
SAME = 1e-6  # 1 - cosine of vectors that are equal: two such are as near as each other, and a ratio of 1 apart


class Matches(NamedTuple):
    """Pairs of features, the most certain first."""

    query: NDArray[np.int64]  # (M,)
    picture: NDArray[np.int64]  # (M,)


NONE = Matches(np.zeros(0, np.int64), np.zeros(0, np.int64))


def match(
    query: LocalFeatures, picture: LocalFeatures, *, ratio: float | None = None, similarity: float | None = None
) -> Matches:
    """Mutual nearest neighbours; the engine's own `ratio` or `similarity` unless others are given.

    With `ratio`, a match's distance is under `ratio` times that of the query's second nearest. With `similarity`, its
    cosine is over it.
    """
    ratio, similarity = rule_of(query, ratio, similarity)
    return _match(vectors(query.descriptors), vectors(picture.descriptors), ratio, similarity)


def rule_of(query: LocalFeatures, ratio: float | None, similarity: float | None) -> tuple[float | None, float | None]:
    if ratio is None and similarity is None:
        engine = ENGINES[query.engine]
        return engine.ratio, engine.similarity
    return ratio, similarity


def _match(query: Floats, picture: Floats, ratio: float | None, similarity: float | None) -> Matches:
    if not len(query) or not len(picture) or (ratio is not None and len(picture) < 2):
        return NONE
    partner = np.empty(len(query), np.int64)
    best, second = np.empty(len(query), np.float32), np.full(len(query), -1, np.float32)
    block = np.empty((min(ROWS, len(query)), len(picture)), np.float32)
    row = np.arange(len(block))
    other = np.ascontiguousarray(picture.T)
    for start in range(0, len(query), ROWS):
        part = slice(start, min(start + ROWS, len(query)))
        scores = block[: part.stop - start]
        np.matmul(query[part], other, out=scores)
        partner[part] = nearest = scores.argmax(1)
        best[part] = scores[row[: len(scores)], nearest]
        if ratio is not None:
            scores[row[: len(scores)], nearest] = -2
            second[part] = scores.max(1)
    certain, good = _certainty(best, second, ratio, similarity)
    kept = np.flatnonzero(good)
    back = (query @ other[:, partner[kept]]).argmax(0)  # only those columns: a tenth of the work above
    kept = kept[back == kept]
    kept = kept[np.argsort(-certain[kept], kind="stable")]
    return Matches(kept, partner[kept])


def _certainty(
    best: Floats, second: Floats, ratio: float | None, similarity: float | None
) -> tuple[Floats, NDArray[np.bool_]]:
    """How certain each match is, and whether it is good enough. Distances of unit vectors are sqrt(2 - 2 cosine)."""
    good = np.ones(len(best), bool)
    certain = best
    if similarity is not None:
        good &= best > similarity
    if ratio is not None:
        certain = np.asarray(-np.maximum(1 - best, SAME) / np.maximum(1 - second, SAME), np.float32)
        good &= certain > -(ratio**2)
    return certain, good
