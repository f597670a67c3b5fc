"""Any store at scale: loading, the search structure, latency and recall, through the `Store` interface alone."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.synthetic import Vectors, blocks, clustered, record
from cooc.index import create_store, is_folder, open_store
from cooc.index.records import Filter, StoreMeta
from cooc.index.store import Store

ASKED = 20, 200  # queries, at least and at most
ENOUGH = 60.0  # seconds after which the least will do
THREADS = 4
ROWS = 50_000  # compared at once for the right answers
# Dates of the made-up records repeat every 60 (year and month) and every 10 (year) rows.
FILTERS: dict[str, tuple[Filter, Callable[[NDArray[np.int64]], NDArray[np.bool_]]]] = {
    "1 in 60 passes": (Filter(taken_from="2015-01", taken_to="2015-01"), lambda rows: rows % 60 == 0),
    "1 in 2 passes": (Filter(taken_from="2020"), lambda rows: rows % 10 >= 5),
}


def engine_name(address: str) -> str:
    scheme = "embedded" if is_folder(address) else address.partition("://")[0]
    return {"postgres": "postgresql"}.get(scheme, scheme)


def measure_store(
    address: str,
    folder: Path,
    count: int,
    dim: int,
    k: int,
    seed: int = 0,
    pid: int | None = None,
    exact: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Make an index of synthetic vectors at `address` (there must be none) and search it; `folder` holds the vectors.

    `pid`: the server's process, if it runs on this machine, whose memory is then told as well. `exact`: search without
    the search structure, too; an engine that hands over all vectors for that may take minutes for each query.
    """
    say("making vectors")
    vectors, queries = clustered(folder / "vectors.f32", count, dim, seed)
    queries = queries[: ASKED[1]]
    say("adding vectors")
    with create_store(address, StoreMeta("none", {}, "none", "none", dim, root=str(folder))) as store:
        started = time.perf_counter()
        for number, (records, block) in enumerate(blocks(vectors), 1):
            store.add(records, block)
            say(f"adding vectors: {number * len(block):,}")
        added = time.perf_counter() - started
    with open_store(address, write=True) as store:
        plain = store.disk_bytes()
        say("building the search structure")
        started = time.perf_counter()
        store.compact()
        if hasattr(store, "build_graph"):
            store.build_graph()  # of a small index too, to compare it
        built = time.perf_counter() - started
    found: dict[str, Any] = {
        "engine": engine_name(address),
        "vectors": count,
        "dim": dim,
        "k": k,
        "adding, vectors per second": count / added,
        "building the search structure, seconds": built,
    }
    started = time.perf_counter()
    with open_store(address) as store:
        found["open, seconds"] = time.perf_counter() - started
        disk = store.disk_bytes()
        found["on disk, share of the vectors"] = disk and disk / vectors.nbytes
        found["search structure, bytes per image"] = (disk - plain) / count if disk and plain else None
        asks: dict[str, tuple[Filter | None, bool, NDArray[np.bool_] | None]] = {"approximate": (None, False, None)}
        if exact:
            asks["exact"] = None, True, None
        for name, (chosen, passing) in FILTERS.items():
            asks[f"approximate, {name}"] = chosen, False, passing(np.arange(count))
        for name, (where, whole, mask) in asks.items():
            say(name)
            found[name] = _measure(store, vectors, queries, k, where, whole, mask)
        say("several at once")
        found[f"approximate, queries per second of {THREADS} threads"] = _together(store, queries, k)
    found["memory of the client, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if pid is not None:
        found["memory of the server, MB"] = sum(map(_memory, _family(pid))) / 1024
    return found


def _measure(
    store: Store,
    vectors: Vectors,
    queries: Vectors,
    k: int,
    where: Filter | None,
    exact: bool,
    mask: NDArray[np.bool_] | None,
) -> dict[str, float]:
    """Milliseconds of one query at a time, and the share of the right answers that it gives."""
    store.search(queries[:1], k, where=where, exact=exact)
    times, answers = list[float](), list[set[str]]()
    for query in queries:
        started = time.perf_counter()
        answers.append(set(store.search(query[None], k, where=where, exact=exact).ids[0]))
        times.append(1e3 * (time.perf_counter() - started))
        if len(times) >= ASKED[0] and sum(times) > 1e3 * ENOUGH:
            break
    truth = right_answers(vectors, queries[: len(times)], k, mask)
    hits = [len(a & {record(int(row)).id for row in rows}) / len(rows) for a, rows in zip(answers, truth, strict=True)]
    return {
        "p50 ms": statistics.median(times),
        "p99 ms": float(np.percentile(times, 99)),
        "recall": statistics.mean(hits),
        "queries": len(times),
    }


def right_answers(vectors: Vectors, queries: Vectors, k: int, mask: NDArray[np.bool_] | None = None) -> list[Any]:
    """The rows of the k nearest for each query, by the plain matrix product, in blocks."""
    scores, rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    for start in range(0, len(vectors), ROWS):
        block = np.arange(start, min(start + ROWS, len(vectors)))
        block = block if mask is None else block[mask[block]]
        scores = np.hstack([scores, queries @ np.asarray(vectors[block]).T])
        rows = np.hstack([rows, np.broadcast_to(block, (len(queries), len(block)))])
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
    return list(rows)


def _together(store: Store, queries: Vectors, k: int) -> float:
    with ThreadPoolExecutor(THREADS) as pool:
        started = time.perf_counter()
        list(pool.map(lambda query: store.search(query[None], k, exact=False), queries))
        return len(queries) / (time.perf_counter() - started)


def _family(pid: int) -> set[int]:
    """A process and all that it started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has just ended
            continue
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _memory(pid: int) -> int:
    """kB that a process holds; what it shares with others counts in parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
