"""Nearest neighbours in one committed state of an embedded index: plain arrays in, scores and slots out.

An exact search takes a few more candidates than asked for from BLAS (up to some hundred queries) or faiss (from there
on) and scores them again, one by one, in float64. So a score depends on the two vectors only, never on the batch, the
block or the position that BLAS saw them in, and copies of a picture really tie. The graph, where less than exact will
do, gives scores that are good to float32.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cooc.index import effort
from cooc.index.embedded.coding import Codes, Coding
from cooc.index.store import Vectors

if TYPE_CHECKING:
    import faiss

Slots = NDArray[np.int64]
Ids = NDArray[np.uint8]  # (n, 16)

SLACK = 2e-6  # more than float32 products of unit vectors are ever off by
SPARE = 8  # candidates beyond k: enough unless there are many copies of a picture
BLOCK = 16_384  # rows gathered at once for a filter
MANY = 256  # queries: from here on faiss is faster than BLAS with a partition
WIDTH = 1 << 24  # scores held at once
FILTERS = 32  # remembered, with a bit for each image
_scanning = threading.Lock()  # a scan uses all cores: threads that scan side by side only wait for each other's


@dataclass(frozen=True)
class Graph:
    """An HNSW graph over the first `size` slots. It borrows the view's codes: no second copy in memory."""

    index: faiss.IndexHNSW
    storage: faiss.IndexFlatCodes
    codes: Codes  # keeps the memory alive
    ef: int  # nodes to keep in sight for 100 results, found when the graph was built

    @property
    def size(self) -> int:
        return int(self.index.ntotal)


class _Wanted(NamedTuple):
    """Which slots may be results: for the graph as bits and as a share, for what is newer than it as slots."""

    bits: NDArray[np.uint8]
    share: float
    newer: Slots

    @classmethod
    def of(cls, live: NDArray[np.bool_], size: int) -> _Wanted:
        share = max(1, int(np.count_nonzero(live[:size]))) / max(1, size)
        return cls(np.packbits(live[:size], bitorder="little"), share, np.flatnonzero(live[size:]) + size)


@dataclass(frozen=True)
class View:
    """Slots 0..n-1 of one committed state."""

    coding: Coding
    codes: Codes  # (n, width)
    ids: Ids  # (n, 16)
    live: NDArray[np.bool_]  # (n,)
    count: int  # of live slots
    damaged: int = 0  # that would be
    graph: Graph | None = None
    _filters: OrderedDict[Hashable, NDArray[np.uint8]] = field(default_factory=OrderedDict)

    def chosen(self, where: Hashable) -> Slots | None:
        """The slots that were found for a filter, in order: pages of results ask for the same ones again and again."""
        bits = self._filters.get(where)
        return None if bits is None else np.flatnonzero(np.unpackbits(bits, count=len(self.live)))

    def alive(self, slots: Slots) -> Slots:
        """Without those whose vectors are damaged."""
        return slots[self.live[slots]]

    def remember(self, where: Hashable, slots: Slots) -> None:
        live = np.zeros(len(self.live), np.bool_)
        live[slots] = True
        self._filters[where] = np.packbits(live)
        while len(self._filters) > FILTERS:
            with suppress(KeyError):  # another thread was faster
                self._filters.popitem(last=False)

    def search(self, queries: Vectors, k: int, slots: Slots | None, approximate: bool) -> tuple[Vectors, Slots]:
        """Scores (Q, k') and slots (Q, k') of the best among `slots` (live ones; None: all that live)."""
        k = min(k, self.count if slots is None else len(slots))
        scores, found = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        rest = np.arange(len(queries))
        if k and approximate and self.graph and (slots is None or 2 * len(slots) >= self.count):
            near, where = self._walk(self.graph, queries, k, slots)
            if near.shape[1] == k and np.isfinite(near).all() and (near[:, 1:] < near[:, :-1]).all():
                return near, where  # in order, and no ties to settle
            rest = self._finish(queries, rest, k, near, where, scores, found)
        total = len(self.live) if slots is None else len(slots)
        fetch = k + SPARE + (0 if slots is not None else 2 * k * (total - self.count) // max(total, 1))
        while k and len(rest):
            fetch = min(fetch, total)
            step = max(1, WIDTH // fetch)
            rest = np.concatenate(
                [
                    self._finish(
                        queries, part, k, *self._scan(queries[part], fetch, slots), scores, found, fetch == total
                    )
                    for part in (rest[i : i + step] for i in range(0, len(rest), step))
                ]
            )
            fetch *= 4
        return scores, found

    def _scan(self, queries: Vectors, fetch: int, slots: Slots | None) -> tuple[Vectors, Slots]:
        """The `fetch` best of the given slots, dead ones among them if none are given."""
        scores, found = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        for rows, first in self._blocks(slots):
            block_scores, block_rows = _top(self.coding, queries, rows, min(fetch, len(rows)))
            block_slots = block_rows + first if isinstance(first, int) else first[block_rows]
            scores, found = np.hstack([scores, block_scores]), np.hstack([found, block_slots])
            if scores.shape[1] > fetch:
                keep = np.argpartition(-scores, fetch - 1, axis=1)[:, :fetch]
                scores, found = np.take_along_axis(scores, keep, 1), np.take_along_axis(found, keep, 1)
        return scores, found

    def _blocks(self, slots: Slots | None) -> Iterable[tuple[Codes, int | Slots]]:
        if slots is None:
            yield self.codes, 0
        else:
            for start in range(0, len(slots), BLOCK):
                part = slots[start : start + BLOCK]
                yield self.codes[part], part

    @cached_property
    def _living(self) -> _Wanted:
        return _Wanted.of(self.live, self.graph.size if self.graph else 0)

    def _walk(self, graph: Graph, queries: Vectors, k: int, slots: Slots | None) -> tuple[Vectors, Slots]:
        """Candidates from the graph, and from an exact scan of what was added after it was built."""
        import faiss

        wanted = self._living
        if slots is not None:
            live = np.zeros_like(self.live)
            live[slots] = True
            wanted = _Wanted.of(live, graph.size)
        chosen = faiss.IDSelectorBitmap(graph.size, faiss.swig_ptr(wanted.bits)) if wanted.share < 1 else None
        far = int(effort.scaled(graph.ef, k) / wanted.share)  # what is not wanted is walked through as well
        params = faiss.SearchParametersHNSW(efSearch=far, sel=chosen)
        scores, found = graph.index.search(queries, min(k, graph.size), params=params)
        scores[found < 0] = -np.inf
        if len(wanted.newer):
            more = self._scan(queries, min(k, len(wanted.newer)), wanted.newer)
            scores, found = np.hstack([scores, more[0]]), np.hstack([found, more[1]])
        return scores, found

    def _finish(
        self,
        queries: Vectors,
        which: NDArray[np.int64],
        k: int,
        scores: Vectors,
        slots: Slots,
        out_scores: Vectors,
        out_slots: Slots,
        complete: bool | None = None,
    ) -> NDArray[np.int64]:
        """Put out the best k candidates of the queries `which`; return the queries left undone.

        Undone are those with fewer than k live candidates and, in an exact search, those whose last candidate is so
        near to the k-th that others like it may have been left out. `complete`: all was fetched; None: the search is
        approximate, and the scores stay as they are.
        """
        lowest = scores.min(axis=1)
        scores = np.where((slots >= 0) & self.live[slots], scores, np.float32(-np.inf))
        kth = np.partition(scores, -k, axis=1)[:, -k] if scores.shape[1] >= k else np.full(len(which), -np.inf)
        done = np.isfinite(kth)
        if complete is False:
            done &= lowest < kth - SLACK
        for row in np.flatnonzero(done):
            query = which[row]
            chosen = scores[row] >= kth[row] - SLACK
            near = slots[row][chosen]
            found = scores[row][chosen] if complete is None else self._score(queries[query], near)
            high, low = self.ids[near].view(">u8").T
            best = np.lexsort((low, high, -found))[:k]
            out_scores[query], out_slots[query] = found[best], near[best]
        return which[~done]

    def _score(self, query: Vectors, slots: Slots) -> Vectors:
        blocks = (self.coding.decode(self.codes[slots[i : i + BLOCK]]) for i in range(0, len(slots), BLOCK))
        return np.concatenate([np.einsum("nd,d->n", rows, query, dtype=np.float64) for rows in blocks]).astype(
            np.float32
        )


def _top(coding: Coding, queries: Vectors, codes: Codes, k: int) -> tuple[Vectors, Slots]:
    """The k best rows for each query, in any order."""
    with _scanning:
        if coding.plain:
            return _scan_all(queries, coding.decode(codes), k)
        scores, found = coding.borrow(codes).search(coding.turn(queries), k)
        return scores, found


def _scan_all(queries: Vectors, rows: Vectors, k: int) -> tuple[Vectors, Slots]:
    if len(queries) >= MANY and k <= 2048:
        import faiss

        scores, found = faiss.knn(queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT)
        return scores, found
    scores, found = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    step = max(1, WIDTH // len(rows))
    for i in range(0, len(queries), step):
        block = queries[i : i + step] @ rows.T
        best = np.argpartition(block, len(rows) - k, axis=1)[:, len(rows) - k :]
        scores[i : i + step], found[i : i + step] = np.take_along_axis(block, best, 1), best
    return scores, found
