"""How far an engine looks in a structure that may miss something: one rule for all of them.

Vectors differ tenfold in the effort that a graph takes to find what a scan finds. So it is measured on the very vectors
of an index when the structure is built: the least effort that finds `RECALL` of the `NEIGHBOURS` nearest, for queries
such as another picture of the same thing would give. Whoever asks for more results looks as much farther.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from cooc.index.store import Vectors
from cooc.vectors import unit_rows

_T = TypeVar("_T")

RECALL, NEIGHBOURS, SAMPLE = 0.97, 100, 64
EFFORTS = (100, 150, 200, 300, 400, 600, 900, 1400)  # nodes of a graph to keep in sight


def views(vectors: Vectors) -> Vectors:
    """Queries like another picture of what these show."""
    noise = unit_rows(np.random.default_rng(0).normal(size=vectors.shape))
    return unit_rows(vectors + noise / 2)


def least(
    efforts: Sequence[int], expected: Sequence[Collection[_T]], search: Callable[[int], Sequence[Collection[_T]]]
) -> int:
    """The first of the efforts with which `search` finds what it should, or the last; 0 where there are none."""
    effort = 0
    for effort in efforts:
        hits = [len(set(a) & set(b)) / max(1, len(a)) for a, b in zip(expected, search(effort), strict=True)]
        if sum(hits) >= RECALL * len(hits):
            break
    return effort


def scaled(effort: int, k: int) -> int:
    """For k results, from what was measured for `NEIGHBOURS`."""
    return effort * max(k, NEIGHBOURS) // NEIGHBOURS
