"""python -m benchmarks index and search: small, and what they write."""

from __future__ import annotations

import json
from pathlib import Path

from tests.labelled import write_labelled_folder
from tests.shell import Shell

RECIPE = "paper-linear+raw+size=96"


def test_bench_search(benchmarks: Shell, tmp_path: Path) -> None:
    words = ("search", "--count", 2000, "--dim", 24, "-k", 10, "--keep", tmp_path / "kept")
    assert benchmarks(*words, "--results", tmp_path, "--peers", "annoy").code == 2
    assert benchmarks(*words, "--results", tmp_path, "--peers", "same-graph").code == 0
    done = benchmarks(*words, "--results", tmp_path, "--json")  # with what is kept
    assert done.code == 0, done
    assert json.loads((tmp_path / "search-2k.json").read_text()) == done.json
    assert done.json["approximate, recall"]["cooc"] > 0.5
    assert {"exact, batched", "approximate, to faiss"} <= done.json["ratios"].keys()


def test_bench_index(benchmarks: Shell, tmp_path: Path) -> None:
    indexed = write_labelled_folder(tmp_path / "things") / "jpg"
    words = ("index", indexed, "-r", RECIPE, "--device", "cpu", "--rounds", 1, "--workers", 0)
    done = benchmarks(*words, "--results", tmp_path, "--json")
    assert done.code == 0, done
    assert done.json["pictures"] == 9
    assert done.json["share of the bare network"] > 0
    assert (tmp_path / "index-cpu.json").is_file()


def test_bench_index_ranking(benchmarks: Shell, tmp_path: Path) -> None:
    folder = write_labelled_folder(tmp_path / "things")
    words = ("index", folder, "--ranking", "-r", RECIPE, "--device", "cpu", "--cache", tmp_path / "cache")
    boxed = benchmarks(*words, "--results", tmp_path)
    assert boxed.code == 2
    assert "boxes" in boxed.err
    truth = json.loads((folder / "ground_truth.json").read_text())
    truth["queries"] = [query | {"bbox": None} for query in truth["queries"]]
    (folder / "ground_truth.json").write_text(json.dumps(truth))
    done = benchmarks(*words, "--results", tmp_path, "--json")
    assert done.code == 0, done
    assert (done.json["pictures"], done.json["queries"], done.json["results"]) == (9, 6, 54)
    assert done.json["out of place, beyond rounding"] == 0
    assert done.json["largest difference of a score"] < 1e-5
    assert (tmp_path / "ranking-cpu.json").is_file()
