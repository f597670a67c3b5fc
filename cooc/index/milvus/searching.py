"""The nearest images: the server finds candidates, and here they are scored again, one by one, in float64.

So a score depends on the two vectors only, and copies of a picture really tie. A candidate whose vector is not what was
written is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cooc.index.effort import NEIGHBOURS
from cooc.index.milvus import rows
from cooc.index.milvus.rows import VECTOR
from cooc.index.milvus.server import LIMIT, Row, Server
from cooc.index.milvus.structures import Structure, search_params
from cooc.index.store import Vectors, blocks

SPARE, SLACK = 8, 2e-6  # candidates beyond k; more than float32 products of unit vectors are ever off by
HITS = 200_000  # candidates asked for at once


class Best:
    """The k best of what was seen, for one query."""

    def __init__(self, query: Vectors, k: int) -> None:
        self.query, self.k = query, k
        self.scores, self._ids = np.empty(0, np.float32), np.empty(0, "U32")

    @property
    def least(self) -> float:
        """What a score has to reach to matter."""
        return float(self.scores[-1]) if len(self.scores) == self.k else -np.inf

    @property
    def ids(self) -> list[str]:
        return [str(name) for name in self._ids]

    def take(self, ids: NDArray[np.str_], vectors: Vectors) -> None:
        scores = np.einsum("nd,d->n", vectors, self.query, dtype=np.float64).astype(np.float32)
        scores, ids = np.concatenate([self.scores, scores]), np.concatenate([self._ids, ids])
        order = np.lexsort((ids, -scores))[: self.k]
        self.scores, self._ids = scores[order], ids[order]


@dataclass
class Search:
    """One search among the images that meet a condition."""

    server: Server
    structure: Structure
    condition: str
    dim: int
    block: int  # vectors in one request
    damaged: set[str] = field(default_factory=set)  # keys of images that were left out

    def nearest(self, queries: Vectors, k: int, exact: bool) -> list[Best]:
        best, flat = [Best(query, k) for query in queries], self.structure.kind == "FLAT"
        rest = list(range(len(best)))
        coded = self.structure.kind in ("IVF_PQ", "DISKANN")  # which orders roughly
        fetch = 4 * max(k, NEIGHBOURS) + 100 if coded else k + SPARE
        while rest and fetch <= LIMIT and (flat or not exact):
            parts = blocks(rest, max(1, HITS // fetch))
            rest = [row for part in parts for row in self._candidates(best, part, fetch)]
            if not flat:  # a graph that gave too few of those that meet the condition would do so again
                break
            fetch = LIMIT if fetch < LIMIT < 4 * fetch else 4 * fetch
        if rest:
            self._scan([best[row] for row in rest])
        return best

    def _candidates(self, best: list[Best], which: list[int], fetch: int) -> list[int]:
        """Put what the server finds into `best`; return those for which that may not be all."""
        hits = self.server.read(
            "search",
            data=np.stack([best[row].query for row in which]),
            limit=fetch,
            filter=self.condition,
            search_params=search_params(self.structure, fetch),
        )
        keys = list({key for hit in hits for key in hit.ids})
        asked = (f"key in {json.dumps(part)}" for part in blocks(keys, self.block))
        found = [row for one in asked for row in self.server.query(one, VECTOR, LIMIT)]
        names, ids, vectors = self._sound(found)
        place, undone = {name: i for i, name in enumerate(names)}, list[int]()
        for row, hit in zip(which, hits, strict=True):
            near = Best(best[row].query, best[row].k)
            chosen = [place[key] for key in hit.ids if key in place]
            near.take(ids[chosen], vectors[chosen])
            # In a scan others like the last one may have been left out; a graph may just find too few.
            if self.structure.kind == "FLAT":
                done = len(hit.ids) < fetch or near.least > hit.distances[-1] + SLACK
            else:
                done = len(near.scores) == near.k
            if done:
                best[row] = near
            else:
                undone.append(row)
        return undone

    def _scan(self, best: list[Best]) -> None:
        """Everything that meets the condition, read and scored here: slow and exact."""
        for block in blocks(self.server.pages(self.condition, VECTOR, self.block), self.block):
            _, ids, vectors = self._sound(block)
            rough = np.stack([one.query for one in best]) @ vectors.T
            for one, scores in zip(best, rough, strict=True):
                near = scores >= one.least - SLACK
                one.take(ids[near], vectors[near])

    def _sound(self, found: list[Row]) -> tuple[list[str], NDArray[np.str_], Vectors]:
        """Keys, ids and vectors of those whose vector is what was written."""
        vectors, sound = rows.matrix(found, self.dim)
        good = [row for row, fine in zip(found, sound, strict=True) if fine]
        self.damaged |= {row["key"] for row in found} - {row["key"] for row in good}
        return [row["key"] for row in good], np.array([row["id"] for row in good], "U32"), vectors[sound]
