"""The nearest images: the server finds candidates, and here they are scored again, each from the two vectors alone.

So copies of a picture really tie. A candidate whose vector is not what was written is left out. What the server
searches with depends on how many images there are. A scan (FLAT) is exact. The others find most of the nearest, for an
effort: how many candidates a graph keeps in sight (HNSW, DISKANN), or how many lists are read (IVF_PQ).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from pymilvus import MilvusClient

from cooc.errors import StoreError
from cooc.index import effort
from cooc.index.embedded.nearest import SLACK, SPARE
from cooc.index.milvus import rows
from cooc.index.milvus.server import LIMIT, Row, Server
from cooc.index.store import PAGE, Vectors, blocks

HNSW_FROM, IVF_PQ_FROM = 200_000, 20_000_000  # images; reasoned, not measured: see docs/scaling.md
EFFORT = "cooc.effort"  # property of the collection
UNMEASURED = 200  # HNSW found all of the 10 nearest of 5000 random vectors of 64 dimensions with that, 0.74 with 18
HITS = 200_000  # candidates asked for at once
SCORED = ["key", "id", "crc", "vector"]  # fields of a candidate

Hit = tuple[float, str]  # the score, negative so that the best comes first, and the id


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
    effort: int = 0  # for 100 results; 0: not measured

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
        params = params | {"m": min((m for m in range(1, dim + 1) if dim % m == 0), key=lambda m: abs(dim / 8 - m))}
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
    copies = {} if lite else {"replica_number": server.address.replicas}
    server.ask("load_collection", timeout=None, **copies)


def nearest(
    server: Server, structure: Structure, condition: str, queries: Vectors, k: int, exact: bool
) -> tuple[list[list[Hit]], int]:
    """For each query up to k, and how many images were left out for their vectors."""
    best, damaged, flat = dict[int, list[Hit]](), set[str](), structure.kind == "FLAT"
    coded = structure.kind in ("IVF_PQ", "DISKANN")  # which orders roughly
    rest, fetch = list(range(len(queries))), 4 * max(k, effort.NEIGHBOURS) + 100 if coded else k + SPARE
    while rest and fetch <= LIMIT and (flat or not exact):
        options = {"filter": condition, "search_params": structure.params(fetch), "limit": fetch}
        for part in blocks(rest, max(1, HITS // fetch)):
            hits = server.read("search", data=queries[part], **options)
            found = _sound(server.find("key", {key for hit in hits for key in hit.ids}, SCORED), damaged)
            for row, hit in zip(part, hits, strict=True):
                near = _scored(queries[row], {key: found[key] for key in hit.ids if key in found}, k)
                done = len(near) == k
                if flat:  # others like the last one may have been left out
                    done = len(hit.ids) < fetch or (done and -near[-1][0] > hit.distances[-1] + SLACK)
                if done:
                    best[row] = near
        rest = [row for row in rest if row not in best]
        fetch = 4 * fetch if flat else LIMIT + 1  # a graph that gave too few would do so again
    if rest:  # everything that meets the condition, read and scored here: slow and exact
        for block in blocks(server.rows(condition, SCORED), PAGE):
            found = _sound(block, damaged)
            for row in rest:
                best[row] = heapq.nsmallest(k, [*best.get(row, ()), *_scored(queries[row], found, k)])
    return [best.get(row, []) for row in range(len(queries))], len(damaged)


def _sound(found: Iterable[Row], damaged: set[str]) -> dict[str, tuple[str, Vectors]]:
    """Id and vector by key, where the vector is what was written."""
    vectors = {row["key"]: (row["id"], rows.vector(row)) for row in found}
    damaged |= {key for key, (_, vector) in vectors.items() if vector is None}
    return {key: (name, vector) for key, (name, vector) in vectors.items() if vector is not None}


def _scored(query: Vectors, found: dict[str, tuple[str, Vectors]], k: int) -> list[Hit]:
    """The best k; equal scores in the order of ids."""
    vectors = np.array([vector for _, vector in found.values()], np.float32).reshape(-1, len(query))
    scores = np.einsum("nd,d->n", vectors, query, dtype=np.float64).astype(np.float32)
    return heapq.nsmallest(k, zip((-scores).tolist(), (name for name, _ in found.values()), strict=True))
