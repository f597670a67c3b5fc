"""Compact vectors: codes against formulas written out here, and an index of each storage against plain products."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from cooc.errors import InputError, UnknownNameError
from cooc.index import create_store, open_store
from cooc.index.embedded.coding import Coding, _centroids
from cooc.index.records import STORAGES, StoreMeta
from cooc.index.store import Vectors
from tests.index.test_store import record

DIM = 64
COMPACT = STORAGES[1:]
BYTES = {"float32": 4 * DIM, "float16": 2 * DIM, "int8": DIM, "int4": DIM // 2, "pq": DIM // 4}
COSINE = {"float16": 0.9999, "int8": 0.999, "int4": 0.985, "pq": 0.92}


def whitened(n: int, seed: int = 0, dim: int = DIM) -> Vectors:
    rows = np.random.default_rng(seed).standard_normal((n, dim), np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def turned(vector: Vectors) -> Vectors:
    """Signs, then the matrix whose entry i, j is -1 to the number of bits that i and j share."""
    dim = len(vector)
    digest = hashlib.shake_256(b"cooc").digest(dim // 8)
    signed = [-x if digest[i // 8] >> (7 - i % 8) & 1 else x for i, x in enumerate(vector)]
    rows = [sum((-1) ** (i & j).bit_count() * signed[j] for j in range(dim)) for i in range(dim)]
    return np.array(rows, np.float32) / np.float32(dim**0.5)


def naive(storage: str, vector: Vectors) -> list[float]:
    """A vector as its code keeps it, number by number, from the levels that docs/index-format.md gives."""
    unit = 1 / len(vector) ** 0.5
    if storage == "float16":
        return [float(np.float16(x)) for x in vector]
    if storage == "int8":
        levels = [(-12 + 24 * (c + 0.5) / 255) * unit for c in range(256)]
        return [min(levels, key=lambda level: abs(level - x)) for x in vector]
    if storage == "int4":
        levels = [(c - 7.5) * 0.3352 * unit for c in range(16)]
        return [min(levels, key=lambda level: abs(level - x)) for x in vector]
    out: list[float] = []
    for start in range(0, len(vector), 4):
        part = vector[start : start + 4]
        best = min(_centroids() / 0.90235 * unit, key=lambda centroid: float(((centroid - part) ** 2).sum()))
        out += [float(x) for x in best]
    return out


@pytest.mark.parametrize("storage", COMPACT)
def test_codes_are_the_nearest_levels(storage: str) -> None:
    coding, vectors = Coding(storage, DIM), whitened(5)
    codes = coding.encode(vectors)
    assert codes.shape == (5, BYTES[storage])
    assert codes.dtype == np.uint8
    if storage in ("int4", "pq"):
        np.testing.assert_allclose(coding.turn(vectors), [turned(v) for v in vectors], atol=1e-6)
        np.testing.assert_allclose(coding.turn(vectors) @ coding.turn(vectors).T, vectors @ vectors.T, atol=1e-6)
        vectors = coding.turn(vectors)
    longer = [v / (0.90235 if storage == "pq" else np.dot(v, naive(storage, v))) for v in vectors]  # by what is lost
    np.testing.assert_allclose(coding.turn(coding.decode(codes)), [naive(storage, v) for v in longer], atol=2e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_little_is_lost_and_products_keep_their_size(storage: str) -> None:
    coding, vectors = Coding(storage, 512), whitened(400, dim=512)
    codes = coding.encode(vectors)
    assert np.einsum("nd,nd->n", coding.unit(codes), vectors).min() > COSINE.get(storage, 1 - 1e-6)
    np.testing.assert_allclose(np.einsum("nd,nd->n", coding.decode(codes), vectors).mean(), 1, atol=0.01)
    np.testing.assert_allclose(np.linalg.norm(coding.unit(codes), axis=1), 1, atol=1e-6)
    blank = np.full((1, coding.width), coding.blank, np.uint8)
    assert np.abs(coding.decode(blank) @ vectors.T).max() < 0.3


@pytest.mark.parametrize("storage", COMPACT)
def test_an_index_of_each_storage(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact search ranks by the stored vectors; removing, filters, compacting and reopening work as ever."""
    monkeypatch.setattr("cooc.index.embedded.cache.FILED_FROM", 1)
    vectors, queries = whitened(300), whitened(4, seed=1)
    records = [record(f"{i // 100}/{i}.jpg") for i in range(300)]
    meta = StoreMeta("test", {}, "c" * 64, "d" * 64, DIM, storage=storage)
    with create_store(tmp_path / "index", meta) as store:
        store.add(records, vectors)
        store.remove([f"0/{i}.jpg" for i in range(40)])
        kept = records[40:]
        stored = Coding(storage, DIM).decode(Coding(storage, DIM).encode(vectors))[40:]
        for _ in range(2):
            found = store.search(queries, 25, exact=True)
            scores = queries @ stored.T
            for row, (ids, values) in enumerate(zip(found.ids, found.scores, strict=True)):
                best = np.argsort(-scores[row])[:25]
                assert ids == [kept[i].id for i in best]
                np.testing.assert_allclose(values, scores[row][best], atol=2e-6)
            assert store.verify() == []
            store.compact()
    with open_store(tmp_path / "index") as store:
        assert store.meta.storage == storage
        given = store.vectors([r.id for r in kept])
        np.testing.assert_allclose(np.linalg.norm(given, axis=1), 1, atol=1e-5)
        assert np.einsum("nd,nd->n", given, vectors[40:]).min() > 0.9
    cached = sorted(path.suffix for path in (tmp_path / "index" / "cache").glob("rows-*"))
    assert cached == ([] if storage in ("int4", "pq") else [f".{storage}"])


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_graphs_over_codes(storage: str, tmp_path: Path) -> None:
    vectors, queries = whitened(2000), whitened(20, seed=1)
    meta = StoreMeta("test", {}, "c" * 64, "d" * 64, DIM, storage=storage)
    with create_store(tmp_path / "index", meta) as store:
        store.add([record(f"{i}.jpg") for i in range(2000)], vectors)
        store.build_graph()  # type: ignore[attr-defined]
        exact, near = (store.search(queries, 10, exact=e) for e in (True, False))
        hits = [len(set(a) & set(b)) / 10 for a, b in zip(exact.ids, near.ids, strict=True)]
        assert np.mean(hits) > 0.9
        assert store.verify() == []


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    spike = np.zeros((1, 512), np.float32)
    spike[0, 3] = 1
    with pytest.raises(InputError, match="too uneven"):
        Coding("int8", 512).encode(spike)
    assert Coding("float16", 512).decode(Coding("float16", 512).encode(spike)).tolist() == spike.tolist()
    with pytest.raises(UnknownNameError, match="Did you mean 'int8'"):
        Coding("int", DIM)
    with pytest.raises(InputError, match="choose int4"):
        create_store(tmp_path / "index", StoreMeta("t", {}, "c", "w", 30, storage="pq"))
    assert not (tmp_path / "index").exists()
