"""How time, memory and disk of an index grow with the number of its images: from a thousand to a million.

Vectors are made up, as whitened ones are distributed, and so are the files' names, times and hashes; describing a
picture takes the same time whatever the size of the index, `cooc bench index` measures it. Each size is a process of
its own. Memory is what that process holds beyond the mapped cache files, which the system may drop at any time.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cooc.index import create_store, open_store
from cooc.index.records import Record, StoreMeta
from cooc.index.store import Vectors
from cooc.provenance import provenance

BLOCK = 2000  # images added in one transaction
QUERIES = 20


def run_growth(
    sizes: Sequence[int],
    storages: Sequence[str],
    dim: int = 512,
    place: Path | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One row for each storage and size. `keep` is given the result after each."""
    result: dict[str, Any] = {"benchmark": "growth", "dim": dim, "rows": [], **provenance("cpu")}
    for storage in storages:
        for size in sorted(sizes):
            say(f"{size} images as {storage}")
            with tempfile.TemporaryDirectory(dir=place) as folder:
                code = f"from benchmarks.growth import grow; grow({str(folder)!r}, {size}, {storage!r}, {dim})"
                done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
            result["rows"].append(json.loads(done.stdout))
            keep(result)
    return result


def grow(folder: str, count: int, storage: str, dim: int) -> None:
    """Make an index of that size, search in it, print one row as JSON. For a process of its own."""
    index = Path(folder) / "index"
    create_store(Path(folder) / "warm", StoreMeta("none", {}, "none", "none", dim)).close()  # everything is imported
    empty = _memory()
    seconds, held = 0.0, []
    with create_store(index, StoreMeta("none", {}, "none", "none", dim, storage=storage)) as store:
        for records, vectors in _blocks(count, dim):
            started = time.perf_counter()
            store.add(records, vectors)
            seconds += time.perf_counter() - started
            held.append(_memory() - empty)
        started = time.perf_counter()
    seconds += time.perf_counter() - started  # what closing has to finish
    queries = _vectors(np.random.default_rng(1), QUERIES, dim)
    before = _memory()
    with open_store(index) as store:
        started = time.perf_counter()
        store.search(queries[:1], 100, exact=True)
        first = time.perf_counter() - started
        times = []
        for query in queries:
            started = time.perf_counter()
            store.search(query[None], 100, exact=True)
            times.append(time.perf_counter() - started)
        searching = _memory() - before
    files = [path.stat().st_size for path in index.rglob("*") if path.is_file()]
    row = {
        "images": count,
        "storage": storage,
        "adding, seconds": round(seconds, 3),
        "adding, images per second": round(count / seconds, 1),
        "adding, memory in MB": {"median": _mb(statistics.median(held)), "most": _mb(max(held))},
        "on disk, MB": _mb(sum(files)),
        "on disk, bytes per image": round(sum(files) / count, 1),
        "first search, seconds": round(first, 4),
        "exact search, ms": round(1e3 * statistics.median(times), 3),
        "searching, memory in MB": _mb(searching),
    }
    sys.stdout.write(json.dumps(row) + "\n")


def _blocks(count: int, dim: int) -> Iterator[tuple[list[Record], Vectors]]:
    rng = np.random.default_rng(0)
    for start in range(0, count, BLOCK):
        rows = range(start, min(start + BLOCK, count))
        yield [_record(row) for row in rows], _vectors(rng, len(rows), dim)


def _vectors(rng: np.random.Generator, count: int, dim: int) -> Vectors:
    rows = rng.standard_normal((count, dim), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def _record(row: int) -> Record:
    """As in a collection of photographs: hashes in any order, a name of 36 characters, and a date."""
    sha256 = hashlib.sha256(str(row).encode()).hexdigest()
    taken = f"{2005 + row % 20}-{1 + row % 12:02}-{1 + row % 28:02}T12:{row % 60:02}:00"
    size, mtime = 10**6 + row * 7919 % 10**6, 1_500_000_000_000_000_000 + row * 7_919_000_001
    return Record(f"photographs/{row // 1000:05}/IMG_{row:09}.jpg", size, mtime, sha256, 4032, 3024, taken)


def _memory() -> int:
    """Bytes of this process that are not backed by a file."""
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _mb(size: float) -> float:
    return round(size / 1e6, 1)
