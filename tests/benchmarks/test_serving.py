"""The load test, small: a real server in a process of its own, and clients that ask it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import Options, run_serving, write_serving


def test_a_server_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("benchmarks.serving.WARM", 0.5)
    recipe = "paper-linear+backbone=efficientnet-lite0+raw+size=64"
    said: list[str] = []
    result = run_serving(
        Options(images=500, recipe=recipe, clients=8, seconds=2, uploads=0.3, device="cpu", progress=said.append)
    )
    assert result["options"]["images"] == 500
    assert result["engine"]["searches/s"] > 0
    assert all(set(route["codes"]) == {"200"} for route in result["routes"].values())
    assert set(result["by id"]["codes"]) == {"200"}
    assert set(result["mixed"]["codes"]) <= {"200", "503"}
    assert result["mixed"]["upload"]["count"] > 0
    assert result["mixed"]["id"]["p50 ms"] <= result["mixed"]["id"]["p99 ms"]
    assert len(result["server MB during the mixture"]) == 10
    assert said == ["building the index", "the engine alone", "each route", "search by id over HTTP", "the mixture"]
    path = write_serving(result, tmp_path)
    assert path.name == "serving-500.json"
    assert json.loads(path.read_text())["by id over engine"] == result["by id over engine"]
