"""One short vector for all local features of a picture, the same however the picture is turned.

    summaries = summarise(lambda: iter(codes))  # (N, 256): unit vectors, of what an index keeps of N pictures
    nearest(summaries, 10, 0.3)                 # for each of them those that may be its turned copies

A network's vector changes when a picture is turned, so that a turned copy need not be among the nearest by it. SIFT
describes each place in a frame of its own, and their sum does not change. It is a VLAD (Jégou et al. 2010): descriptors
are put in cells, by the largest of their main directions and its sign, and each cell adds up how they differ from
what is usual in it. Nothing is fitted but that usual descriptor, on the pictures themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from cooc.vectors import unit_rows
from cooc.verification.coding import vectors
from cooc.verification.features import unpack

Floats = NDArray[np.float32]

ENGINE = "sift"  # whose descriptors do not change when the picture is turned
DIRECTIONS = 16  # by which cells are chosen: two each
SAMPLE = 1000  # pictures from which the usual descriptors are learnt
DIM = 256
BLOCK = 1024


def summarise(codes: Callable[[], Iterator[bytes | None]]) -> Floats:
    """(N, 256), a row of zeros for a picture without such features. `codes()` goes through them, twice."""
    sums, counts = zip(*map(_cells, itertools.islice(codes(), SAMPLE)), strict=True)
    usual = sum(sums) / np.maximum(sum(counts), 1)[:, None]  # (32, D), or (32, 1) if there are no features at all
    sketch = np.random.default_rng(0).standard_normal((usual.size, DIM)).astype(np.float32)
    rows = []
    for total, count in map(_cells, codes()):
        differing = (total - count[:, None] * usual).ravel()
        rows.append((np.sign(differing) * np.sqrt(np.abs(differing))).astype(np.float32) @ sketch)
    return unit_rows(np.array(rows, np.float32))


def _cells(code: bytes | None) -> tuple[Floats, Floats]:
    """The sum of the descriptors in each cell (32, D), and how many there are (32,)."""
    found = [part for part in unpack(code or b"") if part.engine == ENGINE and len(part)]
    if not found:
        return np.zeros((2 * DIRECTIONS, 1), np.float32), np.zeros(2 * DIRECTIONS, np.float32)
    rows = vectors(found[0].descriptors)
    largest = np.abs(rows[:, :DIRECTIONS]).argmax(axis=1)
    cell = 2 * largest + (rows[np.arange(len(rows)), largest] > 0)
    chosen = np.eye(2 * DIRECTIONS, dtype=np.float32)[cell]  # (N, 32)
    return chosen.T @ rows, chosen.sum(axis=0)


def nearest(summaries: Floats, count: int, least: float) -> Iterator[tuple[int, list[int]]]:
    """The rows of those that are most similar to each row, at most so many, with a cosine of at least so much."""
    for first in range(0, len(summaries), BLOCK):
        cosines = summaries[first : first + BLOCK] @ summaries.T
        for row, scores in enumerate(cosines, first):
            scores[row] = -1
            best = np.argsort(-scores)[:count] if len(scores) <= count else np.argpartition(-scores, count)[:count]
            yield row, [int(other) for other in best if scores[other] >= least]
