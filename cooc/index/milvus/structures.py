"""What Milvus searches with: which structure for how many images, building it, and how far to look in it.

A scan (FLAT) is exact. The others find most of the nearest, for an effort: how many candidates a graph keeps in sight
(HNSW, DISKANN), or how many lists are read (IVF_PQ). `compact` measures which effort a structure takes on the very
vectors that it is built of, against what the structure before it finds.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from pymilvus import MilvusClient

from cooc.errors import StoreError
from cooc.index import effort
from cooc.index.milvus.server import Server

HNSW_FROM, IVF_PQ_FROM = 200_000, 20_000_000  # images; reasoned, not measured: see docs/scaling.md
EFFORT = "cooc.effort"  # property of the collection
UNMEASURED = 200  # HNSW found all of the 10 nearest of 5000 random vectors of 64 dimensions with that, 0.74 with 18


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


def current(server: Server) -> Structure:
    found = server.ask("describe_index", "vector")
    return Structure(str(found["index_type"]) if found else "", int(server.properties().get(EFFORT, "0")))


def wanted(server: Server, images: int, now: str) -> str:
    """The structure for that many images. It is not taken back when there are a few less."""
    if server.address.index != "auto":
        return server.address.index.upper()
    if server.address.lite or images < HNSW_FROM:
        return now
    return "IVF_PQ" if images >= IVF_PQ_FROM else "HNSW" if now == "FLAT" else now


def build(server: Server, kind: str, dim: int) -> None:
    """Build the search structure, unless it is there, and load it. Repeating this does no harm."""
    params = KINDS[kind].build | ({"m": _divisor(dim)} if kind == "IVF_PQ" else {})
    lite = server.address.lite
    asked = MilvusClient.prepare_index_params()
    asked.add_index("vector", index_type=kind, metric_type="IP", index_name="vector", params=params)
    for field in () if lite else ("id", "sha256"):
        asked.add_index(field, index_type="Trie", index_name=field)
    if current(server).kind != kind:
        server.ask("create_index", asked, sync=False, timeout=None)
    # Loaded before that is built, a collection was at times searched by something coarse (by its settings, the server's
    # interim index): 54 % of the nearest were found, whatever the effort.
    while (found := server.ask("describe_index", "vector"))["state"] != "Finished":
        if found["state"] == "Failed":
            raise StoreError(f"The server of {server.address.shown} could not build {kind}: {found}")
        time.sleep(0.1)
    copies: dict[str, Any] = {} if lite else {"replica_number": server.address.replicas}
    server.ask("load_collection", timeout=None, **copies)


def replace(server: Server, kind: str, dim: int) -> None:
    """Searching has to wait meanwhile."""
    server.ask("flush", timeout=None)
    server.ask("release_collection")
    server.ask("drop_index", "vector")
    build(server, kind, dim)


def search_params(structure: Structure, fetch: int) -> dict[str, Any]:
    """For so many candidates."""
    kind, level = KINDS[structure.kind], structure.effort or UNMEASURED
    if structure.kind != "IVF_PQ":  # a graph keeps at least as many in sight
        level = max(fetch, effort.scaled(level, fetch))
    return {"metric_type": "IP", "params": {kind.parameter: min(kind.most, level)} if kind.parameter else {}}


def _divisor(dim: int) -> int:
    """Sub-vectors of a product quantizer: as near to eight dimensions each as divides the dimension."""
    return min((m for m in range(1, dim + 1) if dim % m == 0), key=lambda m: (abs(dim / 8 - m), m))
