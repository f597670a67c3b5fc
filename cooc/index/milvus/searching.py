"""The nearest images: the server finds candidates, and here they are scored again, one by one, in float64.

So a score depends on the two vectors only, and copies of a picture really tie. A candidate whose vector is not what was
written is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cooc.index.effort import NEIGHBOURS
from cooc.index.milvus import rows
from cooc.index.milvus.server import LIMIT, Row, Server
from cooc.index.milvus.structures import Structure, search_params
from cooc.index.store import Vectors, blocks

SPARE, SLACK = 8, 2e-6  # candidates beyond k; more than float32 products of unit vectors are ever off by
HITS = 200_000  # candidates asked for at once
FIELDS = ["key", "id", "crc", "vector"]

Found = tuple[str, Vectors]  # the id of an image, and its vector (D,)


class Best:
    """The k best of what was seen, for one query."""

    def __init__(self, query: Vectors, k: int) -> None:
        self.query, self.k = query, k
        self.forget()

    def forget(self) -> None:
        self.scores, self.ids = np.empty(0, np.float32), np.empty(0, "U32")

    @property
    def least(self) -> float:
        """What a score has to reach to matter."""
        return float(self.scores[-1]) if len(self.scores) == self.k else -np.inf

    def take(self, found: Sequence[Found]) -> None:
        vectors = np.array([vector for _, vector in found], np.float32).reshape(len(found), len(self.query))
        scores = np.einsum("nd,d->n", vectors, self.query, dtype=np.float64).astype(np.float32)
        scores = np.concatenate([self.scores, scores])
        ids = np.concatenate([self.ids, np.array([name for name, _ in found], "U32")])
        order = np.lexsort((ids, -scores))[: self.k]
        self.scores, self.ids = scores[order], ids[order]


@dataclass
class Search:
    """One search among the images that meet a condition."""

    server: Server
    structure: Structure
    condition: str
    block: int  # vectors in one request
    damaged: set[str] = field(default_factory=set)  # keys of images that were left out

    def nearest(self, queries: Vectors, k: int, exact: bool) -> list[Best]:
        best, flat = [Best(query, k) for query in queries], self.structure.kind == "FLAT"
        coded = self.structure.kind in ("IVF_PQ", "DISKANN")  # which orders roughly
        rest, fetch = best, 4 * max(k, NEIGHBOURS) + 100 if coded else k + SPARE
        while rest and fetch <= LIMIT and (flat or not exact):
            rest = [one for part in blocks(rest, max(1, HITS // fetch)) for one in self._undone(part, fetch)]
            if not flat:  # a graph that gave too few of those that meet the condition would do so again
                break
            fetch = LIMIT if fetch < LIMIT < 4 * fetch else 4 * fetch
        if rest:
            self._scan(rest)
        return best

    def _undone(self, best: list[Best], fetch: int) -> list[Best]:
        """Each gets what the server finds for it; those for which that may not be all."""
        hits = self.server.read(
            "search",
            data=np.stack([one.query for one in best]),
            limit=fetch,
            filter=self.condition,
            search_params=search_params(self.structure, fetch),
        )
        keys, undone = list({key for hit in hits for key in hit.ids}), list[Best]()
        asked = (f"key in {json.dumps(part)}" for part in blocks(keys, self.block))
        found = self._sound(row for one in asked for row in self.server.query(one, FIELDS, LIMIT))
        for one, hit in zip(best, hits, strict=True):
            one.forget()
            one.take([found[key] for key in hit.ids if key in found])
            # In a scan others like the last one may have been left out; a graph may just find too few.
            all_seen = len(hit.ids) < fetch or one.least > hit.distances[-1] + SLACK
            if not (all_seen if self.structure.kind == "FLAT" else len(one.scores) == one.k):
                undone.append(one)
        return undone

    def _scan(self, best: list[Best]) -> None:
        """Everything that meets the condition, read and scored here: slow and exact."""
        queries = np.stack([one.query for one in best])
        for one in best:
            one.forget()
        for block in blocks(self.server.pages(self.condition, FIELDS, self.block), self.block):
            if found := list(self._sound(block).values()):
                rough = queries @ np.stack([vector for _, vector in found]).T
                for one, scores in zip(best, rough, strict=True):
                    one.take([found[i] for i in np.flatnonzero(scores >= one.least - SLACK)])

    def _sound(self, found: Iterable[Row]) -> dict[str, Found]:
        """By key, those whose vector is what was written."""
        vectors = {row["key"]: (row["id"], rows.vector(row)) for row in found}
        self.damaged |= {key for key, (_, vector) in vectors.items() if vector is None}
        return {key: (name, vector) for key, (name, vector) in vectors.items() if vector is not None}
