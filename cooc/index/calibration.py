"""From a score to the share of such results that were right, so that "nothing like that in here" can be said.

A similarity of 0.4 means little by itself: how often such a result is right depends on the descriptor. On labelled
queries it can be counted, and a logistic curve through the counts is all that is kept:

    P(match | score) = 1 / (1 + exp(-(slope * score + offset)))

A curve belongs to an index and is kept in it, by the name of its descriptor's scores (`DescriptorConfig.score_space`);
`cooc calibrate` fits it on labelled queries or on one's own right and wrong marks. Without one of its own, an index
takes the curve that ships with cooc for such scores (data/calibration.json, landmark photos); where there is none,
nothing is made up. A curve is as true as the queries are alike: on other kinds of pictures, and in a much larger
collection, where chance finds better wrong results, it promises too much.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc.errors import InputError
from cooc.files import DATA
from cooc.reranking import rank

NOTE = "calibration"  # of an index: curves by the names of their scores
THRESHOLD = 0.5  # if even the best result is more likely wrong than right, there is no match
TOP = 20  # results of each query that count: what a person looks at
BINS = 10

log = logging.getLogger("cooc")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    slope: float
    offset: float
    fitted_on: str = field(default="", compare=False)  # for people

    @property
    def sound(self) -> bool:
        return math.isfinite(self.slope) and math.isfinite(self.offset) and self.slope > 0

    def __call__(self, scores: ArrayLike) -> Floats:
        return 1 / (1 + np.exp(-(self.slope * np.asarray(scores, np.float64) + self.offset)))


def find(space: str | None, notes: Mapping[str, Any] | None = None) -> Calibration | None:
    """The curve for the scores of that name: the index's own, from its notes, else the one that ships with cooc."""
    own = (notes or {}).get(NOTE)
    if space and isinstance(own, dict) and space in own:
        try:
            curve = Calibration(float(own[space]["slope"]), float(own[space]["offset"]), str(own[space]["fitted_on"]))
            if curve.sound:
                return curve
        except (KeyError, TypeError, ValueError):
            pass
        log.warning("The calibration that the index keeps cannot be read: fit it again with cooc calibrate.")
    known = _shipped().get(space) if space else None
    return Calibration(known["slope"], known["offset"], f"{known['dataset']}, ships with cooc") if known else None


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    return dict(json.loads((DATA / "calibration.json").read_text(encoding="utf-8")))


# Fitting


@dataclass(frozen=True, eq=False)
class Scored:
    """The best results of labelled queries, row by row."""

    query: NDArray[np.int64]
    score: Floats
    match: NDArray[np.bool_]

    def of(self, queries: ArrayLike) -> Scored:
        rows = np.isin(self.query, np.asarray(queries))
        return Scored(self.query[rows], self.score[rows], self.match[rows])


def top_results(
    queries: ArrayLike,
    database: ArrayLike,
    positives: Sequence[ArrayLike],
    ignored: Sequence[ArrayLike],
    top: int = TOP,
) -> Scored:
    """The `top` best results of each query among (N, D) vectors, without those that count neither way."""
    most = top + max((np.asarray(rows).size for rows in ignored), default=0)
    order, scores = rank(queries, database, most)
    parts = []
    for query, (row, values) in enumerate(zip(order, scores, strict=True)):
        kept = np.flatnonzero(~np.isin(row, np.asarray(ignored[query], np.int64)))[:top]
        match = np.isin(row[kept], np.asarray(positives[query], np.int64))
        parts.append((np.full(len(kept), query), values[kept].astype(np.float64), match))
    query_rows, score, match = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Scored(query_rows, score, match)


def fit(score: ArrayLike, match: ArrayLike) -> Calibration:
    """The most likely curve, by Newton's method.

    Targets are drawn in by one imagined result on either side (Platt 1999), so that the curve stays finite where
    matches and others do not overlap.
    """
    x, right = np.asarray(score, np.float64), np.asarray(match, bool)
    if not right.any() or right.all():
        raise InputError("A curve needs results that match and results that do not: give more queries.")
    target = np.where(right, (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2))
    design = np.stack([(x - x.mean()) / max(x.std(), 1e-9), np.ones_like(x)])  # (2, n), well conditioned
    weights = np.zeros(2)
    for _ in range(100):
        p = 1 / (1 + np.exp(-(weights @ design)))
        gradient = design @ (target - p)
        curvature = (design * (p * (1 - p))) @ design.T + 1e-9 * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        step *= min(1.0, 2.0 / float(np.abs(step).max()))  # far from the goal, the parabola misleads
        weights += step
        if np.abs(step).max() < 1e-10:
            break
    slope = weights[0] / max(x.std(), 1e-9)
    if slope <= 0:
        raise InputError("Higher scores are not better ones here: check that vectors and ground truth belong together.")
    return Calibration(float(slope), float(weights[1] - slope * x.mean()))


def assess(p: Floats, right: NDArray[np.bool_]) -> dict[str, Any]:
    """How true probabilities are: in each bin, what was promised and what came; their mean gap (ECE); Brier."""
    which = np.minimum((p * BINS).astype(int), BINS - 1)
    table = []
    gap = 0.0
    for b in range(BINS):
        members = which == b
        count = int(members.sum())
        if count:
            promised, came = float(p[members].mean()), float(right[members].mean())
            gap += count * abs(promised - came) / len(p)
            table.append({"from": b / BINS, "count": count, "promised": promised, "came": came})
    return {
        "results": len(p),
        "matches": int(right.sum()),
        "brier": float(np.mean((p - right) ** 2)),
        "brier of the base rate": float(np.mean((right.mean() - right) ** 2)),
        "ece": gap,
        "bins": table,
    }


def judge(scored: Scored) -> tuple[Calibration, dict[str, Any]]:
    """The curve of results that a person marked: fitted on all, and judged by letting each half test the other's curve.

    The halves hold different queries, which alternate by their share of right results, so that both kinds are in both.
    """
    share = {query: float(scored.match[scored.query == query].mean()) for query in np.unique(scored.query).tolist()}
    order = sorted(share, key=lambda query: (share[query], query))
    halves = [scored.of(order[i::2]) for i in range(2)]
    curve = fit(scored.score, scored.match)
    test = None
    if all(half.match.any() and not half.match.all() for half in halves):
        promised = np.concatenate([fit(half.score, half.match)(other.score) for half, other in (halves, halves[::-1])])
        test = assess(promised, np.concatenate([halves[1].match, halves[0].match]))
    return curve, {"slope": curve.slope, "offset": curve.offset, "queries": len(order), "test": test}


def calibrate(
    queries: ArrayLike,
    database: ArrayLike,
    positives: Sequence[ArrayLike],
    ignored: Sequence[ArrayLike],
    *,
    top: int = TOP,
    seed: int = 0,
) -> tuple[Calibration, dict[str, Any]]:
    """Fit on half of the queries; on the other half, judge the curve and how well "no match" is told.

    For the latter each query is asked twice: as it is, and with all its matches taken out of the database.
    """
    count = len(np.asarray(queries))
    shuffled = np.random.default_rng(seed).permutation(count)
    fitting, testing = np.sort(shuffled[: count // 2]), np.sort(shuffled[count // 2 :])
    scored = top_results(queries, database, positives, ignored, top)
    without = top_results(
        queries,
        database,
        [()] * count,
        [np.union1d(np.asarray(p, np.int64), np.asarray(i, np.int64)) for p, i in zip(positives, ignored, strict=True)],
        top=1,
    )
    fitted, tested = scored.of(fitting), scored.of(testing)
    curve = fit(fitted.score, fitted.match)
    answerable = [q for q in testing if np.asarray(positives[q]).size]
    best = [curve(tested.score[tested.query == q]).max() for q in answerable]
    empty = curve(without.of(testing).score)
    report = {
        "slope": curve.slope,
        "offset": curve.offset,
        "fitted on queries": len(fitting),
        "tested on queries": len(testing),
        "results of each query": top,
        "test": assess(curve(tested.score), tested.match),
        "no match": {
            "threshold": THRESHOLD,
            "said rightly": float(np.mean(empty < THRESHOLD)),
            "said wrongly": float(np.mean(np.array(best) < THRESHOLD)),
        },
    }
    return curve, report
