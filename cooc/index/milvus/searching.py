"""The nearest images: the server finds candidates, and here they are searched as an embedded index is.

So a score depends on the two vectors only, and copies of a picture really tie. A candidate whose vector is not what was
written is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cooc.index.effort import NEIGHBOURS
from cooc.index.embedded.coding import Coding
from cooc.index.embedded.nearest import SLACK, SPARE, View
from cooc.index.milvus import rows
from cooc.index.milvus.server import LIMIT, Row, Server
from cooc.index.milvus.structures import Structure, search_params
from cooc.index.store import Vectors, blocks

HITS = 200_000  # candidates asked for at once
FIELDS = ["key", "id", "crc", "vector"]

Found = tuple[str, Vectors]  # the id of an image, and its vector (D,)
Best = tuple[Vectors, NDArray[np.str_]]  # scores and ids


@dataclass
class Search:
    """One search among the images that meet a condition."""

    server: Server
    structure: Structure
    condition: str
    block: int  # vectors in one request
    damaged: set[str] = field(default_factory=set)  # keys of images that were left out

    def nearest(self, queries: Vectors, k: int, exact: bool) -> list[Best]:
        """For each query up to k, best first."""
        best, flat = dict[int, Best](), self.structure.kind == "FLAT"
        coded = self.structure.kind in ("IVF_PQ", "DISKANN")  # which orders roughly
        rest, fetch = list(range(len(queries))), 4 * max(k, NEIGHBOURS) + 100 if coded else k + SPARE
        while rest and fetch <= LIMIT and (flat or not exact):
            for part in blocks(rest, max(1, HITS // fetch)):
                found = zip(part, self._near(queries[part], k, fetch), strict=True)
                best |= {row: one for row, one in found if one is not None}
            rest = [row for row in rest if row not in best]
            if not flat:  # a graph that gave too few of those that meet the condition would do so again
                break
            fetch = LIMIT if fetch < LIMIT < 4 * fetch else 4 * fetch
        if rest:
            best |= zip(rest, self._scan(queries[rest], k), strict=True)
        return [best[row] for row in range(len(queries))]

    def _near(self, queries: Vectors, k: int, fetch: int) -> Iterator[Best | None]:
        """The best that the server finds; None where that may not be all."""
        options = {"filter": self.condition, "search_params": search_params(self.structure, fetch)}
        hits = self.server.read("search", data=queries, limit=fetch, **options)
        keys = list({key for hit in hits for key in hit.ids})
        asked = (f"key in {json.dumps(part)}" for part in blocks(keys, self.block))
        found = self._sound(row for one in asked for row in self.server.query(one, FIELDS, limit=LIMIT))
        for query, hit in zip(queries, hits, strict=True):
            scores, ids = _searched(query[None], k, [found[key] for key in hit.ids if key in found])
            done = scores.shape[1] == k
            if self.structure.kind == "FLAT":  # others like the last one may have been left out
                done = len(hit.ids) < fetch or (done and scores[0, -1] > hit.distances[-1] + SLACK)
            yield (scores[0], ids[0]) if done else None

    def _scan(self, queries: Vectors, k: int) -> Iterable[Best]:
        """Everything that meets the condition, read and searched here: slow and exact."""
        scores, ids = _searched(queries, k, [])
        for block in blocks(self.server.pages(self.condition, FIELDS, self.block), self.block):
            more = _searched(queries, k, list(self._sound(block).values()))
            scores, ids = np.hstack([scores, more[0]]), np.hstack([ids, more[1]])
            order = np.lexsort((ids, -scores))[:, :k]
            scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
        return zip(scores, ids, strict=True)

    def _sound(self, found: Iterable[Row]) -> dict[str, Found]:
        """By key, those whose vector is what was written."""
        vectors = {row["key"]: (row["id"], rows.vector(row)) for row in found}
        self.damaged |= {key for key, (_, vector) in vectors.items() if vector is None}
        return {key: (name, vector) for key, (name, vector) in vectors.items() if vector is not None}


def _searched(queries: Vectors, k: int, found: Sequence[Found]) -> Best:
    """Scores (Q, k') and ids (Q, k') of the best of these."""
    coding, names = Coding("float32", queries.shape[1]), np.array([name for name, _ in found], "U32")
    vectors = np.array([vector for _, vector in found], np.float32).reshape(-1, coding.dim)
    ids = np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(-1, 16)
    view = View(coding, coding.encode(vectors), ids, np.ones(len(found), np.bool_), len(found))
    scores, slots = view.search(queries, k, None, approximate=False)
    return scores, names[slots]
