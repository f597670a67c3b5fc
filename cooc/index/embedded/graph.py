"""faiss's HNSW graph over the first N slots, in cache/graph-EPOCH-N.hnsw without the vectors: built, kept, loaded."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from cooc.files import replacing
from cooc.index.embedded.coding import Codes, Coding
from cooc.index.embedded.nearest import Graph
from cooc.index.store import Vectors

CHUNK = 16_384  # vectors added at once
M, EF_CONSTRUCTION = 32, 80  # measured: as few distances at recall 0.95 as M=16 with ef 200, at half the building time
EFFORTS = (100, 150, 200, 300, 400, 600, 900, 1400)
RECALL = 0.97  # at 100, to be had when a graph is built


def load_graph(path: Path, crc: int, ef: int, coding: Coding, codes: Codes) -> Graph:
    """The graph in `path` over these codes. A damaged one is an OSError: following it could end anywhere."""
    if _crc(path) != crc:
        raise OSError(f"{path} is damaged")
    index = _read(path)
    storage = coding.borrow(codes)
    index.storage, index.own_fields = storage, False
    return Graph(index, storage, codes, ef)


def build_graph(path: Path, vectors: Vectors, base: Path | None) -> tuple[int, int]:
    """Write the graph over these vectors to `path`, going on from `base` where there is one; return its crc32 and ef.

    Building needs a second copy of the vectors in memory for as long as it takes; searching does not.
    """
    index = faiss.IndexHNSWFlat(vectors.shape[1], M, faiss.METRIC_INNER_PRODUCT)
    if base is not None:
        index = _read(base)
        storage = faiss.IndexFlatIP(vectors.shape[1])
        storage.add(vectors[: index.ntotal])
        index.storage, index.own_fields = storage, False
    index.hnsw.efConstruction = EF_CONSTRUCTION
    for start in range(index.ntotal, len(vectors), CHUNK):
        index.add(vectors[start : start + CHUNK])
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        writer = faiss.PyCallbackIOWriter(file.write)
        faiss.write_index(index, writer, faiss.IO_FLAG_SKIP_STORAGE)
        del writer  # it holds what it has not yet written
    return _crc(path), _calibrated(index, vectors)


def _read(path: Path) -> faiss.IndexHNSW:
    with path.open("rb") as file:
        return faiss.read_index(faiss.PyCallbackIOReader(file.read), faiss.IO_FLAG_SKIP_STORAGE)


def _calibrated(index: faiss.IndexHNSW, vectors: Vectors) -> int:
    """The least effort that finds what a scan finds in *these* vectors: sets differ tenfold in what they take."""
    rng, k = np.random.default_rng(0), min(100, len(vectors))
    near = vectors[rng.choice(len(vectors), min(64, len(vectors)), replace=False)]
    queries = _unit(near + _unit(rng.normal(size=near.shape)) / 2)  # as another picture of the same thing might be
    _, expected = faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
    for ef in EFFORTS:
        _, found = index.search(queries, k, params=faiss.SearchParametersHNSW(efSearch=ef))
        if np.mean([np.isin(a, b).mean() for a, b in zip(expected, found, strict=True)]) >= RECALL:
            break
    return ef


def _unit(rows: NDArray[np.floating[Any]]) -> Vectors:
    unit: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
