"""`cooc bench store`: its right answers are right, and any engine can be measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import stores
from benchmarks.stores import engine_name, right_answers
from tests import servers
from tests.index.test_store import random_vectors
from tests.shell import Shell


def test_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ROWS", 30)
    vectors, queries = random_vectors(100), random_vectors(5, seed=1)
    for mask in (None, np.arange(100) % 3 == 0):
        for query, found in zip(queries, right_answers(vectors, queries, 7, mask), strict=True):
            rows = sorted(range(100), key=lambda row: -float(vectors[row] @ query))
            assert found.tolist() == [row for row in rows if mask is None or mask[row]][:7]


def test_names() -> None:
    assert engine_name("some/folder") == "embedded"
    assert engine_name("postgres://host/db") == engine_name("postgresql://host/db") == "postgresql"


@pytest.mark.parametrize("engine", sorted({"embedded", "postgresql"} & set(servers.ENGINES)))
def test_any_store_can_be_measured(benchmarks: Shell, tmp_path: Path, engine: str) -> None:
    index = servers.engine(engine).address(tmp_path)
    options = ("--count", 1000, "--dim", 16, "-k", 10, "--results", tmp_path, "--place", tmp_path)
    done = benchmarks("store", "--index", index, *options, "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["engine"] == engine
    assert found["vectors"] == 1000
    assert found["exact"]["recall"] > 0.999
    if engine == "embedded":
        assert found["search structure, bytes per image"] > 2 * 32 * 4  # neighbours of the lowest layer alone
    for name in ("approximate", "approximate, 1 in 60 passes", "approximate, 1 in 2 passes"):
        assert found[name]["recall"] > 0.9
        assert 0 < found[name]["p50 ms"] <= found[name]["p99 ms"]
    assert "be%2Fshown" not in (tmp_path / f"scale-{engine}.json").read_text()
