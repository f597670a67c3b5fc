"""Which of many pictures are worth a full comparison with a query: most share nothing with it.

A full comparison looks at all pairs of features, three million of them. Here a feature of a picture is compared only
with those of the query that lie near the same coarse centre of the vocabulary (`words.py`): a twentieth of the pairs.
Each match tells by itself how things are moved, turned and scaled there. Where enough of the others agree with one of
them, the pictures are compared in full, and only that comparison counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cooc.verification.coding import vectors
from cooc.verification.engines import ENGINES
from cooc.verification.features import LocalFeatures
from cooc.verification.matching import SAME, Matches
from cooc.verification.words import ENGINE, SIDE, vocabulary

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

NEAR = 6  # of the 128 centres, at which a feature of the query is looked for
FEATURES = 1000  # of a picture that are looked at, the best ones
MOST = 150  # matches that vote, the most certain ones
ENOUGH = 5  # that agree with one of them, itself included
LOOSE = 0.1  # of the way from one match to another, by which the second may be off, for sizes and directions are rough


class Sought(NamedTuple):
    """A query's features: unit vectors (Q, D), and for each coarse centre those that are looked for there."""

    rows: Floats
    by_centre: list[Indices]


def sought(query: LocalFeatures, near: int = NEAR) -> Sought:
    rows = vectors(query.descriptors)
    centres = _closeness(rows).argpartition(-near, axis=1)[:, -near:].ravel()  # (Q * near,)
    order = np.argsort(centres, kind="stable")
    return Sought(rows, np.split(order // near, np.searchsorted(centres[order], np.arange(1, SIDE))))


def rough_matches(query: Sought, pictures: Sequence[LocalFeatures]) -> list[Matches]:
    """For each picture most of what `match` finds: pairs that are each other's nearest among those compared.

    The ratio of the nearest to the second nearest is that of the picture's feature, not of the query's.
    """
    codes = [picture.descriptors[:FEATURES] for picture in pictures]
    rows, owner = vectors(np.concatenate(codes)), np.repeat(np.arange(len(codes)), list(map(len, codes)))
    centres = _closeness(rows).argmax(1)
    order = np.argsort(centres, kind="stable")
    ends = np.searchsorted(centres[order], np.arange(SIDE + 1)).tolist()
    best, second = np.full(len(rows), -1, np.float32), np.full(len(rows), -1, np.float32)
    partner = np.zeros(len(rows), np.int64)
    for those, start, end in zip(query.by_centre, ends[:-1], ends[1:], strict=True):
        if len(those) < 2 or start == end:
            continue
        here = order[start:end]
        scores = rows[here] @ query.rows[those].T
        row, nearest = np.arange(len(here)), scores.argmax(1)
        partner[here], best[here] = those[nearest], scores[row, nearest]
        scores[row, nearest] = -1
        second[here] = scores.max(1)
    certain = np.maximum(1 - best, SAME) / np.maximum(1 - second, SAME)
    kept = np.flatnonzero(certain < (ENGINES[ENGINE].ratio or 1) ** 2)
    kept = kept[np.lexsort((-best[kept], partner[kept], owner[kept]))]  # of one feature of the query the nearest first
    first = np.ones(len(kept), bool)
    first[1:] = (np.diff(owner[kept]) != 0) | (np.diff(partner[kept]) != 0)
    kept = kept[first]
    kept = kept[np.lexsort((certain[kept], owner[kept]))]
    starts = np.searchsorted(owner, np.arange(len(pictures)))
    parts = np.split(kept, np.searchsorted(owner[kept], np.arange(1, len(pictures))))
    return [Matches(partner[part], part - start) for part, start in zip(parts, starts, strict=True)]


def is_promising(query: LocalFeatures, picture: LocalFeatures, matches: Matches) -> bool:
    """Do `ENOUGH` matches agree with one of them in place, size and direction?"""
    mine, other = (indices[:MOST] for indices in matches)
    growth = np.log2(picture.scales[other] / query.scales[mine])
    turn = np.radians(picture.angles[other] - query.angles[mine])
    facing = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    alike = np.abs(growth[:, None] - growth) <= ENGINES[ENGINE].octaves
    alike &= facing @ facing.T >= np.cos(np.radians(ENGINES[ENGINE].turn))
    one, two = np.divmod(np.flatnonzero(alike), max(len(mine), 1))
    here, there = _plane(query.points[mine]), _plane(picture.points[other])
    way = (2**growth * _plane(facing))[one] * (here[two] - here[one])
    off = np.abs(there[one] + way - there[two])
    agreed = one[off <= 2 * ENGINES[ENGINE].tolerance * max(picture.size) + LOOSE * np.abs(way)]
    return bool(np.bincount(agreed).max(initial=0) >= ENOUGH)


def _plane(points: Floats) -> NDArray[np.complex64]:
    return np.asarray(points[:, 0] + 1j * points[:, 1], np.complex64)


def _closeness(rows: Floats) -> Floats:
    """(N, 128): greatest for the nearest centre."""
    centres = vocabulary().coarse
    close = rows @ centres.T
    close -= (centres**2).sum(1) / 2
    return np.asarray(close, np.float32)
