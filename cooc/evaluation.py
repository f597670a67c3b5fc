"""Rankings -> mAP, mP@k, recall@k and MRR, by the rules of the official evaluations (SPEC 10).

AP is the area under the precision-recall line by the trapezoid rule of the Oxford code; the usual average precision of
information retrieval is 1-6 points higher. What counts as positive, and what is taken out of the ranking before places
are counted, differs between the benchmarks: PROTOCOLS is the table.

Recall@k is that of metric learning and place recognition: the share of queries with at least one positive among the
first k. MRR is the mean of 1 / place of the first positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc.errors import InputError, check_name

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Query:
    """Ground truth of one query: groups of database indices. None means that the data set has no such group."""

    positives: ArrayLike | None = None  # Oxford and Paris: good and ok together
    easy: ArrayLike | None = None
    hard: ArrayLike | None = None
    junk: ArrayLike | None = None
    itself: ArrayLike | None = None  # the query's own index, where it is part of the database

    def __post_init__(self) -> None:
        for name in self.groups:
            object.__setattr__(self, name, _indices(getattr(self, name), f"group {name!r} of a query"))

    @property
    def groups(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def select(self, names: Sequence[str]) -> Ints:
        """Indices of the named groups together; a group that is None is empty."""
        found = [np.asarray(getattr(self, name), np.int64) for name in names if getattr(self, name) is not None]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *found]))


@dataclass(frozen=True)
class Protocol:
    positive: tuple[str, ...]  # groups of Query to be found
    ignored: tuple[str, ...]  # groups taken out of the ranking first; all others are wrong answers


_EASY = Protocol(positive=("easy",), ignored=("hard", "junk"))
_MEDIUM = Protocol(positive=("easy", "hard"), ignored=("junk",))
_HARD = Protocol(positive=("hard",), ignored=("easy", "junk"))

PROTOCOLS: dict[str, Protocol] = {
    "plain": Protocol(positive=("positives",), ignored=("junk",)),
    "oxford": Protocol(positive=("positives",), ignored=("junk",)),
    "paris": Protocol(positive=("positives",), ignored=("junk",)),
    "roxford-easy": _EASY,
    "roxford-medium": _MEDIUM,
    "roxford-hard": _HARD,
    "rparis-easy": _EASY,
    "rparis-medium": _MEDIUM,
    "rparis-hard": _HARD,
    "holidays": Protocol(positive=("positives",), ignored=("itself", "junk")),
}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Per query and on average, 0 to 1. Queries without a positive under the protocol are NaN and not averaged."""

    protocol: str
    ap: Floats  # (Q,)
    precision_at_k: dict[int, Floats]  # k -> (Q,)
    first: Floats  # (Q,): zero-based place of the first positive; infinite where the ranking has none

    @property
    def queries(self) -> int:
        """How many queries count."""
        return int(np.isfinite(self.ap).sum())

    @property
    def map(self) -> float:
        return _mean(self.ap)

    @property
    def mp_at_k(self) -> dict[int, float]:
        return {k: _mean(precision) for k, precision in self.precision_at_k.items()}

    @property
    def recall_at_k(self) -> dict[int, float]:
        """Share of the queries whose first k hold a positive."""
        counted = self.first[~np.isnan(self.first)]
        return {k: _mean((counted < k).astype(np.float64)) for k in self.precision_at_k}

    @property
    def mrr(self) -> float:
        """Mean reciprocal rank of the first positive; 0 for a query whose ranking has none."""
        return _mean(1 / (self.first + 1))


def evaluate(
    rankings: Sequence[ArrayLike] | NDArray[np.integer],
    queries: Sequence[Query],
    protocol: str,
    ks: Sequence[int] = (1, 5, 10),
) -> Evaluation:
    """Rankings are database indices, best first: (Q, N), or one array for each query.

    A ranking may be cut short: positives that it lacks are never found, so that AP and MRR are lower bounds; mP@k and
    recall@k are exact up to its length without the ignored ones.
    """
    if len(rankings) != len(queries):
        raise InputError(f"{len(rankings)} rankings for {len(queries)} queries: give one ranking for each query.")
    _rule(protocol)
    if any(k < 1 for k in ks):
        raise InputError(f"mP@k needs k of at least 1, not {min(ks)}.")
    ap, precision = np.full(len(queries), np.nan), {k: np.full(len(queries), np.nan) for k in ks}
    first = np.full(len(queries), np.nan)
    for i, (ranking, query) in enumerate(zip(rankings, queries, strict=True)):
        try:
            ranks, count = positive_ranks(ranking, query, protocol)
        except InputError as error:
            raise InputError(f"Query {i}: {error}") from error
        ap[i] = average_precision(ranks, count)
        if count:
            first[i] = ranks[0] if len(ranks) else np.inf
        for k in ks if count else ():
            depth = min(k, ranks[-1] + 1) if len(ranks) == count else k  # missing positives come after the end
            precision[k][i] = np.count_nonzero(ranks < depth) / depth
    return Evaluation(protocol, ap, precision, first)


def positive_ranks(ranking: ArrayLike, query: Query, protocol: str) -> tuple[Ints, int]:
    """Zero-based places of the positives once the ignored ones are taken out, and how many positives there are."""
    rule = _rule(protocol)
    if missing := [name for name in rule.positive if name not in query.groups]:
        given = ", ".join(query.groups) or "no groups"
        raise InputError(f"Protocol {protocol} needs {', '.join(missing)}, but the query has {given}.")
    positives, ignored = query.select(rule.positive), query.select(rule.ignored)
    if len(both := np.intersect1d(positives, ignored)):
        raise InputError(
            f"Index {both[0]} is positive and ignored under protocol {protocol}: correct the ground truth."
        )
    order = _indices(ranking, "a ranking")
    places = np.flatnonzero(np.isin(order, positives))
    return places - np.cumsum(np.isin(order, ignored))[places], len(positives)


def precision_recall(ranks: ArrayLike, n_positives: int) -> tuple[Floats, Floats]:
    """Precision and recall along the line whose area is AP: a point before and a point after each positive."""
    places = np.sort(_indices(ranks, "the ranks"))
    if len(places) > n_positives:
        raise InputError(f"{len(places)} ranks, but only {n_positives} positives.")
    found = np.arange(len(places))
    before = np.where(places > 0, found / np.maximum(places, 1), 1.0)  # precision is 1 before the first place
    after = (found + 1) / (places + 1)
    precision = np.stack([before, after], axis=1).ravel()
    recall = np.stack([found, found + 1], axis=1).ravel() / max(n_positives, 1)
    return precision, recall


def average_precision(ranks: ArrayLike, n_positives: int) -> float:
    """Trapezoid AP from zero-based places of the positives; NaN where there is none to find."""
    precision, recall = precision_recall(ranks, n_positives)
    if not n_positives:
        return float("nan")
    return float(np.sum(np.diff(recall) * (precision[1:] + precision[:-1]) / 2))


def bootstrap_interval(ap: ArrayLike, n: int = 10_000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean over queries, from n resamplings of them: would other queries tell the same?"""
    if n < 1 or not 0 < level < 1:
        raise InputError(f"A bootstrap needs n of at least 1 and a level between 0 and 1, not {n} and {level}.")
    values = np.asarray(ap, np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(n, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _rule(protocol: str) -> Protocol:
    check_name("protocol", protocol, PROTOCOLS)
    return PROTOCOLS[protocol]


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _indices(values: ArrayLike, what: str) -> Ints:
    """Different indices, checked: one given twice would count twice, and engines fill short lists up with -1."""
    array = np.atleast_1d(np.asarray(values))
    if not len(array):
        return np.zeros(0, np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"Indices in {what} must be a list of integers, not {array.dtype} of shape {array.shape}.")
    if array.min() < 0:
        raise InputError(f"Index {array.min()} in {what}: indices start at 0; cut unfilled places off.")
    if len(np.unique(array)) < len(array):
        raise InputError(f"An index appears twice in {what}: each database image has one place.")
    return array.astype(np.int64)
