"""faiss's HNSW graph over the first N slots, in cache/graph-EPOCH-N.hnsw without the vectors: built, kept, loaded."""

from __future__ import annotations

import zlib
from pathlib import Path

import faiss
import numpy as np

from cooc.files import replacing
from cooc.index import effort
from cooc.index.embedded.coding import Codes, Coding
from cooc.index.embedded.nearest import Graph
from cooc.index.store import Vectors

CHUNK = 16_384  # vectors added at once
M, EF_CONSTRUCTION = 32, 80  # measured: as few distances at recall 0.95 as M=16 with ef 200, at half the building time


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
    """The effort for these vectors: see `cooc.index.effort`."""
    k, count = min(effort.NEIGHBOURS, len(vectors)), min(effort.SAMPLE, len(vectors))
    queries = effort.views(vectors[np.random.default_rng(0).choice(len(vectors), count, replace=False)])
    _, expected = faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)

    def search(ef: int) -> list[list[int]]:
        _, found = index.search(queries, k, params=faiss.SearchParametersHNSW(efSearch=ef))
        return list(found.tolist())

    return effort.least(effort.EFFORTS, expected.tolist(), search)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
