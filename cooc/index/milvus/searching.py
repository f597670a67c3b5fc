"""The nearest images: the server finds candidates, and here they are searched as an embedded index is.

So a score depends on the two vectors only, and copies of a picture really tie. A candidate whose vector is not what was
written is left out.

What the server searches with depends on how many images there are. A scan (FLAT) is exact. The others find most of the
nearest, for an effort: how many candidates a graph keeps in sight (HNSW, DISKANN), or how many lists are read (IVF_PQ).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pymilvus import MilvusClient

from cooc.errors import StoreError
from cooc.index import effort
from cooc.index.embedded.nearest import SLACK, SPARE
from cooc.index.milvus import rows
from cooc.index.milvus.server import LIMIT, Row, Server
from cooc.index.store import Vectors, blocks

HNSW_FROM, IVF_PQ_FROM = 200_000, 20_000_000  # images; reasoned, not measured: see docs/scaling.md
EFFORT = "cooc.effort"  # property of the collection
UNMEASURED = 200  # HNSW found all of the 10 nearest of 5000 random vectors of 64 dimensions with that, 0.74 with 18
HITS = 200_000  # candidates asked for at once

Found = tuple[str, Vectors]  # the id of an image, and its vector (D,)
Best = tuple[Vectors, NDArray[np.str_]]  # scores and ids


class Kind(NamedTuple):
    build: dict[str, int]
    parameter: str = ""  # of a search: how far to look
    efforts: tuple[int, ...] = ()  # that are tried
    most: int = 0  # that the server takes


KINDS = {
    "FLAT": Kind({}),
    "HNSW": Kind({"M": 32, "efConstruction": 160}, "ef", effort.EFFORTS, 32_768),
    # lists of a segment, 250,000 vectors of 512 dimensions
    "IVF_PQ": Kind({"nlist": 2048, "nbits": 8}, "nprobe", (32, 64, 128, 256, 512, 1024), 65_536),
    "DISKANN": Kind({}, "search_list", effort.EFFORTS, 65_535),
}


class Structure(NamedTuple):
    kind: str  # of KINDS; empty while there is none
    effort: int  # for 100 results; 0: not measured

    @classmethod
    def of(cls, server: Server) -> Structure:
        found = server.ask("describe_index", "vector")
        return cls(str(found["index_type"]) if found else "", int(server.properties().get(EFFORT, "0")))

    def wanted(self, server: Server, images: int) -> str:
        """The kind for that many images. It is not taken back when there are a few less."""
        if server.address.index != "auto":
            return server.address.index.upper()
        if server.address.lite or images < HNSW_FROM:
            return self.kind
        return "IVF_PQ" if images >= IVF_PQ_FROM else "HNSW" if self.kind == "FLAT" else self.kind

    def params(self, fetch: int) -> dict[str, Any]:
        """Of a search for so many candidates."""
        kind, level = KINDS[self.kind], self.effort or UNMEASURED
        if self.kind != "IVF_PQ":  # a graph keeps at least as many in sight
            level = max(fetch, effort.scaled(level, fetch))
        return {"metric_type": "IP", "params": {kind.parameter: min(kind.most, level)} if kind.parameter else {}}


def build(server: Server, kind: str, dim: int) -> None:
    """Build the search structure, unless it is there, and load it. Repeating this does no harm."""
    lite, params = server.address.lite, KINDS[kind].build
    if kind == "IVF_PQ":  # sub-vectors: as near to eight dimensions each as divides the dimension
        params = params | {
            "m": min((m for m in range(1, dim + 1) if dim % m == 0), key=lambda m: (abs(dim / 8 - m), m))
        }
    asked = MilvusClient.prepare_index_params()
    asked.add_index("vector", index_type=kind, metric_type="IP", index_name="vector", params=params)
    for name in () if lite else ("id", "sha256"):
        asked.add_index(name, index_type="Trie", index_name=name)
    if Structure.of(server).kind != kind:
        server.ask("create_index", asked, sync=False, timeout=None)
    # Loaded before that is built, a collection was at times searched by something coarse (by its settings, the server's
    # interim index): 54 % of the nearest were found, whatever the effort.
    while (found := server.ask("describe_index", "vector"))["state"] != "Finished":
        if found["state"] == "Failed":
            raise StoreError(f"The server of {server.address.shown} could not build {kind}: {found}")
        time.sleep(0.1)
    copies: dict[str, Any] = {} if lite else {"replica_number": server.address.replicas}
    server.ask("load_collection", timeout=None, **copies)


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
        best, rest, flat = dict[int, Best](), list(range(len(queries))), self.structure.kind == "FLAT"
        coded = self.structure.kind in ("IVF_PQ", "DISKANN")  # which orders roughly
        fetch = 4 * max(k, effort.NEIGHBOURS) + 100 if coded else k + SPARE
        while rest and fetch <= LIMIT and (flat or not exact):
            for part in blocks(rest, max(1, HITS // fetch)):
                self._near(queries, part, k, fetch, best)
            rest = [row for row in rest if row not in best]
            fetch = 4 * fetch if flat else LIMIT + 1  # a graph that gave too few would do so again
        if rest:
            best |= zip(rest, self._scan(queries[rest], k), strict=True)
        return [best[row] for row in range(len(queries))]

    def _near(self, queries: Vectors, part: list[int], k: int, fetch: int, best: dict[int, Best]) -> None:
        """The best that the server finds, but for queries where that may not be all."""
        options = {"filter": self.condition, "search_params": self.structure.params(fetch)}
        hits = self.server.read("search", data=queries[part], limit=fetch, **options)
        keys = list({key for hit in hits for key in hit.ids})
        asked = (f"key in {json.dumps(some)}" for some in blocks(keys, self.block))
        found = self._sound(row for one in asked for row in self.server.query(one, rows.ALL, limit=LIMIT))
        for row, hit in zip(part, hits, strict=True):
            scores, ids = _searched(queries[row : row + 1], k, [found[key] for key in hit.ids if key in found])
            done = scores.shape[1] == k
            if self.structure.kind == "FLAT":  # others like the last one may have been left out
                done = len(hit.ids) < fetch or (done and scores[0, -1] > hit.distances[-1] + SLACK)
            if done:
                best[row] = scores[0], ids[0]

    def _scan(self, queries: Vectors, k: int) -> Iterable[Best]:
        """Everything that meets the condition, read and searched here: slow and exact."""
        best = _searched(queries, k, [])
        for block in blocks(self.server.pages(self.condition, rows.ALL, self.block), self.block):
            best = _searched(queries, k, self._sound(block).values(), best)
        return zip(*best, strict=True)

    def _sound(self, found: Iterable[Row]) -> dict[str, Found]:
        """By key, those whose vector is what was written."""
        vectors = {row["key"]: (row["id"], rows.vector(row)) for row in found}
        self.damaged |= {key for key, (_, vector) in vectors.items() if vector is None}
        return {key: (name, vector) for key, (name, vector) in vectors.items() if vector is not None}


def _searched(queries: Vectors, k: int, found: Iterable[Found], before: Best | None = None) -> Best:
    """Scores (Q, k') and ids (Q, k') of the best of these, and of what was best before."""
    found = list(found)
    vectors = np.array([vector for _, vector in found], np.float32).reshape(-1, queries.shape[1])
    products = [np.einsum("nd,d->n", vectors, query, dtype=np.float64) for query in queries]  # each by itself
    scores = np.array(products, np.float32).reshape(len(queries), -1)
    ids = np.broadcast_to(np.array([name for name, _ in found], "U32"), scores.shape)
    if before is not None:
        scores, ids = np.hstack([before[0], scores]), np.hstack([before[1], ids])
    order = np.lexsort((ids, -scores))[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
