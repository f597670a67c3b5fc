"""An index of synthetic vectors against what it is made of, in one run: what `cooc bench search` measures.

This is the one place beside the engine that talks to faiss, because here faiss is the yardstick.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.synthetic import Vectors, blocks, make_index, record
from cooc.errors import UnknownNameError
from cooc.index import create_store, open_store
from cooc.index.records import StoreMeta

ROUNDS = 3, 7  # at least and at most, of a batch
SINGLES = 30, 200  # likewise, queries asked one at a time
ENOUGH = 60.0  # seconds after which the least will do
EFFORTS = (16, 24, 32, 48, 64, 96, 100, 128, 192, 256, 384, 512, 768, 1024)  # efSearch that peers are tried with

Say = Callable[[str], None]
Ask = Callable[[Vectors], Any]  # (1, D) -> rows (1, k)
Peer = Callable[[Vectors, int, Path], Iterator[Ask]]  # builds its graph, or reads it; then searches with growing effort

_OPENING = """
import sys, time, json
import numpy as np
from cooc.index import open_store
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
    folder: Path,
    count: int,
    dim: int,
    k: int,
    peers: Sequence[str],
    seed: int,
    recipe: str = "",
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Exact search against faiss's flat index, approximate search against HNSW at equal recall.

    Both sides of each ratio are measured turn by turn in this process; opening and memory in a fresh one. Indexes and
    graphs that are in `folder` already are not built again.
    """
    for name in peers:
        if name not in PEERS:
            raise UnknownNameError("library", name, PEERS)
    made = make_index(folder, count, dim, seed, recipe, say=say)
    vectors, queries = made.vectors, made.queries
    if not (folder / "empty").exists():
        create_store(folder / "empty", StoreMeta("none", {}, "none", "none", dim)).close()
    say("opening")
    opening = json.loads(
        subprocess.run(
            [sys.executable, "-c", _OPENING, *(str(folder / name) for name in (".cooc", "queries.npy", "empty"))],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )

    store = open_store(made.index)
    say("exact search")
    batched, one, truth = _exact(store, vectors, queries, k)
    say("approximate search")
    chosen = {name: PEERS[name] for name in peers}
    approximate, recalls = _approximate(store, vectors, queries, truth, chosen, folder, say)
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
        "adding, vectors per second": count / made.seconds["adding"],
        "building the graph, seconds": made.seconds["building the graph"],
        "on disk, share of the vectors": sum(f.stat().st_size for f in made.index.rglob("*")) / size,
    }


def _exact(
    store: Any, vectors: Vectors, queries: Vectors, k: int
) -> tuple[dict[str, float], dict[str, float], NDArray[np.int64]]:
    """Seconds of a batch, milliseconds of one query, and the right answers."""
    import faiss

    flat = faiss.IndexFlatIP(vectors.shape[1])
    for _, block in blocks(vectors):
        flat.add(block)
    batched = _turns({"cooc": lambda: store.search(queries, k, exact=True), "faiss": lambda: flat.search(queries, k)})
    one = _one_by_one(queries, {"cooc": lambda q: store.search(q, k, exact=True), "faiss": lambda q: flat.search(q, k)})
    return batched, one, flat.search(queries, k)[1]


def _approximate(
    store: Any,
    vectors: Vectors,
    queries: Vectors,
    truth: NDArray[np.int64],
    peers: dict[str, Peer],
    folder: Path,
    say: Say,
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of one query and recall; of each peer with the least effort that reaches our recall."""
    k = truth.shape[1]
    wanted = [{record(row).id for row in rows} for rows in truth.tolist()]
    ours = [store.search(query[None], k, exact=False).ids[0] for query in queries]
    recalls = {"cooc": statistics.mean(len(a & set(b)) / k for a, b in zip(wanted, ours, strict=True))}
    asks: dict[str, Ask] = {"cooc": lambda q: store.search(q, k, exact=False)}
    for name, build in peers.items():
        say(f"building the graph of {name}")
        for ask in build(vectors, k, folder / f"{name}.graph"):
            found = np.concatenate([ask(query[None]) for query in queries])
            hits = [len(set(a) & set(b)) / k for a, b in zip(found.tolist(), truth.tolist(), strict=True)]
            if statistics.mean(hits) >= recalls["cooc"]:
                asks[name], recalls[name] = ask, statistics.mean(hits)
                break
    return _one_by_one(queries, asks), recalls


def _turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each, turn by turn."""
    for call in calls.values():
        call()  # to warm up
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for done in range(ROUNDS[1]):
        if done >= ROUNDS[0] and time.perf_counter() - begun > ENOUGH:
            break
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def _one_by_one(queries: Vectors, asks: dict[str, Ask]) -> dict[str, float]:
    """Median milliseconds of one query."""
    times: dict[str, list[float]] = {name: [] for name in asks}
    begun = time.perf_counter()
    for done, query in enumerate(queries[: SINGLES[1]]):
        if done >= SINGLES[0] and time.perf_counter() - begun > ENOUGH:
            break
        for name, ask in asks.items():
            started = time.perf_counter()
            ask(query[None])
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def _faiss_graph(vectors: Vectors, k: int, file: Path) -> Iterator[Ask]:
    import faiss

    if file.exists():
        index = faiss.read_index(str(file))
    else:
        index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 80
        for _, block in blocks(vectors):
            index.add(block)
        faiss.write_index(index, str(file))
    for effort in EFFORTS:
        parameters = faiss.SearchParametersHNSW(efSearch=effort)
        yield lambda q, parameters=parameters: index.search(q, k, params=parameters)[1]  # type: ignore[misc]


def _same_graph(vectors: Vectors, k: int, file: Path) -> Iterator[Ask]:
    """Our own graph, searched by faiss alone with the vectors in its own memory: what is left is what we add."""
    import faiss

    (graph,) = (file.parent / ".cooc" / "cache").glob("graph-*.hnsw")
    index = faiss.read_index(str(graph), faiss.IO_FLAG_SKIP_STORAGE)
    storage = faiss.IndexFlatIP(vectors.shape[1])
    for _, block in blocks(vectors):
        storage.add(block)
    index.storage, index.own_fields = storage, False
    for effort in EFFORTS:
        parameters = faiss.SearchParametersHNSW(efSearch=effort)
        yield lambda q, parameters=parameters: index.search(q, k, params=parameters)[1]  # type: ignore[misc]


def _hnswlib_graph(vectors: Vectors, k: int, file: Path) -> Iterator[Ask]:
    try:
        import hnswlib
    except ImportError:
        return
    index = hnswlib.Index(space="ip", dim=vectors.shape[1])
    if file.exists():
        index.load_index(str(file))
    else:
        index.init_index(len(vectors), M=16, ef_construction=200)
        for _, block in blocks(vectors):
            index.add_items(block)  # named by their number
        index.save_index(str(file))
    for effort in EFFORTS:
        if effort >= k:  # it demands so
            index.set_ef(effort)
            yield lambda q: index.knn_query(q, k)[0]


PEERS: dict[str, Peer] = {"faiss": _faiss_graph, "hnswlib": _hnswlib_graph, "same-graph": _same_graph}
