"""Visual words: which pictures share local features with a query, told without comparing all of them.

A vector of the whole picture loses a small or flat thing among clutter; its local features do not. They are looked up
by words, and what words find is verified like the rest of a shortlist: ASMK* (Tolias, Avrithis and Jegou 2016).

    word      the nearest of 128 x 128 centres, found in two steps; fitted once on landmark photos, and ships
    residuals what the centre leaves of the features of one word, summed: 64 signs, one bit each
    score     sum over the words of both pictures of u^3, u = 1 - 2 (bits that differ) / 64 where that is positive

so that two features which merely fall into one word count little. A picture has about 1200 words: 12 kB.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cooc.files import DATA
from cooc.verification.coding import vectors
from cooc.verification.features import LocalFeatures

ENGINE = "sift"  # whose features have words
SIDE = 128  # centres of a step
WORDS = SIDE * SIDE
POWER = 3
FILE = DATA / "words.npz"
ALIKE = (
    np.maximum(1 - np.arange(65, dtype=np.float32) / 32, 0) ** POWER
)  # by how many bits differ, looked up millions of times

Floats = NDArray[np.float32]


class Vocabulary(NamedTuple):
    coarse: Floats  # (128, 64)
    fine: Floats  # (128, 128, 64)
    turn: Floats  # (64, 64), orthogonal: the residual is spread over all bits

    def __call__(self, rows: Floats) -> tuple[NDArray[np.int64], Floats]:
        """The word of each unit vector (N, 64), and what is left of it."""
        first = _nearest(rows, self.coarse)
        words, left = np.empty(len(rows), np.int64), np.empty_like(rows)
        order = np.argsort(first, kind="stable")
        ends = np.searchsorted(first[order], np.arange(SIDE + 1))
        for step, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            which = order[start:end]
            if len(which):
                second = _nearest(rows[which], self.fine[step])
                words[which] = step * SIDE + second
                left[which] = rows[which] - self.fine[step][second]
        return words, left @ self.turn


class Signature(NamedTuple):
    """The words of a picture, in their order, and the signs of their residuals."""

    words: NDArray[np.uint16]  # (W,)
    bits: NDArray[np.uint64]  # (W,)


@cache
def vocabulary() -> Vocabulary:
    """Fitted on landmark photos (python -m benchmarks fit-words)."""
    with np.load(FILE, allow_pickle=False) as data:
        coarse, fine = (data[name].astype(np.float32) * data["scale"] for name in ("coarse", "fine"))
        return Vocabulary(coarse, fine, data["turn"])


def signatures(pictures: Sequence[Sequence[LocalFeatures]]) -> list[Signature]:
    """Of many pictures at once, each with its features by one engine or more."""
    rows = [
        np.concatenate([np.zeros((0, 64), np.float32), *(vectors(f.descriptors) for f in one if f.engine == ENGINE)])
        for one in pictures
    ]
    owner = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    words, left = vocabulary()(np.concatenate([np.zeros((0, 64), np.float32), *rows]))
    left /= np.maximum(np.linalg.norm(left, axis=1, keepdims=True), 1e-9)
    both, place = np.unique(owner * WORDS + words, return_inverse=True)  # by picture, then by word
    sums = np.zeros((len(both), 64), np.float32)
    np.add.at(sums, place, left)
    bits = np.packbits(sums > 0, axis=1).view(np.uint64)[:, 0]
    ends = np.searchsorted(both, np.arange(len(rows) + 1) * WORDS)
    return [
        Signature((both[start:end] % WORDS).astype(np.uint16), bits[start:end])
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


def similarity(bits: NDArray[np.uint64], others: NDArray[np.uint64]) -> Floats:
    """Of the residuals of two pictures in one word each."""
    return np.asarray(ALIKE[np.bitwise_count(bits ^ others)])


def _nearest(rows: Floats, centres: Floats) -> NDArray[np.int64]:
    return np.asarray(np.argmin((centres**2).sum(1) - 2 * (rows @ centres.T), axis=1))
