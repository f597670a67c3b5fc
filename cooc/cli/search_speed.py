"""An index of synthetic vectors against what it is made of, in one run: what `cooc bench search` measures.

This is the one place beside the engine that talks to faiss, because here faiss is the yardstick.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cooc.store import Record, StoreMeta
from cooc.stores import create_store, open_store

__all__ = ["clustered", "measure_search"]

BLOCK = 5000  # vectors added in one transaction
ROUNDS = 7
SINGLES = 200  # queries asked one at a time
EFFORTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # efSearch that peers are tried with


Vectors = NDArray[np.float32]
Say = Callable[[str], None]
Ask = Callable[[Vectors], Any]  # (1, D) -> rows (1, k)
Peer = Callable[[Vectors, int], Iterator[Ask]]  # builds its graph; then searches with growing effort

_OPENING = """
import sys, time, json
import numpy as np
from cooc.stores import open_store
def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) * 1024
queries = np.load(sys.argv[2])
open_store(sys.argv[3]).close()  # an empty one: everything is imported
before = resident()
start = time.perf_counter()
store = open_store(sys.argv[1])
opened = time.perf_counter() - start
store.search(queries[:1], 100)
first = time.perf_counter() - start - opened
for query in queries[:20]:
    store.search(query[None], 100, exact=True)
    store.search(query[None], 100)
print(json.dumps({"open": opened, "first": first, "resident": resident() - before}))
"""


def measure_search(
    folder: Path, count: int, dim: int, k: int, peers: bool, seed: int, say: Say = lambda text: None
) -> dict[str, Any]:
    """Exact search against faiss's flat index, approximate search against HNSW at equal recall.

    Both sides of each ratio are measured turn by turn in this process; opening and memory in a fresh one.
    """
    vectors, queries = clustered(folder / "vectors.f32", count, dim, seed)
    np.save(folder / "queries.npy", queries)
    create_store(folder / "empty", StoreMeta("none", {}, "none", "none", dim)).close()
    store: Any = create_store(folder / "index", StoreMeta("none", {}, "none", "none", dim))
    say("adding vectors")
    started = time.perf_counter()
    for records, block in _records(vectors):
        store.add(records, block)
    added = time.perf_counter() - started
    say("building the graph")
    started = time.perf_counter()
    store.compact()
    if hasattr(store, "build_graph"):
        store.build_graph()  # of a small index too, to compare it
    built = time.perf_counter() - started
    store.close()
    opening = json.loads(
        subprocess.run(
            [sys.executable, "-c", _OPENING, *(str(folder / name) for name in ("index", "queries.npy", "empty"))],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )

    store = open_store(folder / "index")
    say("exact search")
    batched, one, truth = _exact(store, vectors, queries, k)
    say("approximate search")
    approximate, recalls = _approximate(store, vectors, queries, truth, PEERS if peers else {}, say)
    store.close()
    size = 4 * count * dim
    ratios = {"exact, batched": batched["cooc"] / batched["faiss"], "exact, one by one": one["cooc"] / one["faiss"]}
    ratios |= {f"approximate, to {name}": approximate["cooc"] / approximate[name] for name in recalls if name != "cooc"}
    return {
        "vectors": count,
        "dim": dim,
        "k": k,
        "queries": len(queries),
        "ratios": ratios,
        "exact, batched, seconds": batched,
        "exact, one by one, milliseconds": one,
        "approximate, milliseconds": approximate,
        "approximate, recall": recalls,
        "open, seconds": opening["open"],
        "first search, seconds": opening["first"],
        "resident memory, share of the vectors": opening["resident"] / size,
        "adding, vectors per second": count / added,
        "building the graph, seconds": built,
        "on disk, share of the vectors": sum(f.stat().st_size for f in (folder / "index").rglob("*")) / size,
    }


def _exact(
    store: Any, vectors: Vectors, queries: Vectors, k: int
) -> tuple[dict[str, float], dict[str, float], NDArray[np.int64]]:
    """Seconds of a batch, milliseconds of one query, and the right answers."""
    import faiss

    flat = faiss.IndexFlatIP(vectors.shape[1])
    for _, block in _records(vectors):
        flat.add(block)
    batched = _turns({"cooc": lambda: store.search(queries, k, exact=True), "faiss": lambda: flat.search(queries, k)})
    one = _one_by_one(queries, {"cooc": lambda q: store.search(q, k, exact=True), "faiss": lambda q: flat.search(q, k)})
    return batched, one, flat.search(queries, k)[1]


def _approximate(
    store: Any, vectors: Vectors, queries: Vectors, truth: NDArray[np.int64], peers: dict[str, Peer], say: Say
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of one query and recall; of each peer with the least effort that reaches our recall."""
    k = truth.shape[1]
    wanted = [{_record(row).id for row in rows} for rows in truth.tolist()]
    ours = [store.search(query[None], k, exact=False).ids[0] for query in queries]
    recalls = {"cooc": statistics.mean(len(a & set(b)) / k for a, b in zip(wanted, ours, strict=True))}
    asks: dict[str, Ask] = {"cooc": lambda q: store.search(q, k, exact=False)}
    for name, build in peers.items():
        say(f"building the graph of {name}")
        for ask in build(vectors, k):
            found = np.concatenate([ask(query[None]) for query in queries])
            hits = [len(set(a) & set(b)) / k for a, b in zip(found.tolist(), truth.tolist(), strict=True)]
            if statistics.mean(hits) >= recalls["cooc"]:
                asks[name], recalls[name] = ask, statistics.mean(hits)
                break
    return _one_by_one(queries, asks), recalls


def clustered(file: Path, count: int, dim: int, seed: int) -> tuple[Vectors, Vectors]:
    """Unit vectors (on disk) and queries: like descriptors, in clusters and of fewer dimensions than they have numbers.

    A thousand around each centre in 64 dimensions, turned into `dim`, with a little noise in all of them.
    """
    rng = np.random.default_rng(seed)
    centres, turn = _normal(rng, max(1, count // 1000), 64), _normal(rng, 64, dim) / 8

    def around(number: int) -> Vectors:
        latent = centres[rng.integers(0, len(centres), number)] + 0.7 * _normal(rng, number, 64)
        rows = latent @ turn + 0.2 * _normal(rng, number, dim)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)

    vectors = np.memmap(file, np.float32, "w+", shape=(count, dim))
    for start in range(0, count, BLOCK):
        vectors[start : start + BLOCK] = around(min(BLOCK, count - start))
    return vectors, around(512)


def _normal(rng: np.random.Generator, *shape: int) -> Vectors:
    return rng.standard_normal(shape, np.float32)


def _record(row: int) -> Record:
    return Record(f"{row // 1000:06}/{row:09}.jpg", 1, 1, f"{row:064x}", 1, 1)


def _records(vectors: Vectors) -> Iterator[tuple[list[Record], Vectors]]:
    for start in range(0, len(vectors), BLOCK):
        block = np.array(vectors[start : start + BLOCK])
        yield [_record(row) for row in range(start, start + len(block))], block


def _turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first one warms up


def _one_by_one(queries: Vectors, asks: dict[str, Ask]) -> dict[str, float]:
    """Median milliseconds of one query."""
    times: dict[str, list[float]] = {name: [] for name in asks}
    for query in queries[:SINGLES]:
        for name, ask in asks.items():
            started = time.perf_counter()
            ask(query[None])
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def _faiss_graph(vectors: Vectors, k: int) -> Iterator[Ask]:
    import faiss

    index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 80
    for _, block in _records(vectors):
        index.add(block)
    for effort in EFFORTS:
        parameters = faiss.SearchParametersHNSW(efSearch=effort)
        yield lambda q, parameters=parameters: index.search(q, k, params=parameters)[1]  # type: ignore[misc]


def _hnswlib_graph(vectors: Vectors, k: int) -> Iterator[Ask]:
    try:
        import hnswlib
    except ImportError:
        return
    index = hnswlib.Index(space="ip", dim=vectors.shape[1])
    index.init_index(len(vectors), M=16, ef_construction=200)
    for start, (_, block) in enumerate(_records(vectors)):
        index.add_items(block, np.arange(start * BLOCK, start * BLOCK + len(block)))
    for effort in EFFORTS:
        if effort >= k:  # it demands so
            index.set_ef(effort)
            yield lambda q: index.knn_query(q, k)[0]


PEERS: dict[str, Peer] = {"faiss": _faiss_graph, "hnswlib": _hnswlib_graph}
