"""The harness: what a whitening is fitted on, and which picture may expand a query."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cooc.bench.describing import BenchOptions
from cooc.bench.run import run
from cooc.bench.scoring import evaluate_vectors
from cooc.datasets.retrieval import image_set, load_dataset
from cooc.provenance import provenance
from cooc.recipes import find_recipe
from cooc.whitening import Whitening
from tests.labelled import write_labelled_folder


def test_a_result_says_nothing_of_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "cooc",
        "bench",
        "/home/me/set",
        "--results",
        "/tmp/out",
        "--index=/srv/a b/i",
        "--data",
        "data/x",
        "s3://bucket/a",
    ]
    monkeypatch.setattr("sys.argv", words)
    command = provenance("cpu")["command"]
    assert command.startswith("cooc bench set --results out ")
    assert command.endswith("--data data/x s3://bucket/a")
    assert "/home" not in command
    assert "/tmp" not in command
    monkeypatch.setattr("sys.argv", ["/home/me/cooc/benchmarks/__main__.py", "speed"])
    assert provenance("cpu")["command"] == "python -m benchmarks speed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_labelled_folder(tmp_path / "things")


@pytest.mark.parametrize(("ignored", "found"), [(False, True), (True, False)])
def test_the_own_picture_expands_a_query_only_where_it_is_ranked(folder: Path, ignored: bool, found: bool) -> None:
    """The good answer is near the query's own picture, a wrong one near the cropped query: the former decides."""
    truth = json.loads((folder / "ground_truth.json").read_text())
    own, good, *_ = names = truth["database"]
    truth["queries"] = [{"image": own, "bbox": None, "positives": [good], "junk": [own] if ignored else []}]
    (folder / "ground_truth.json").write_text(json.dumps(truth))
    database = np.zeros((len(names), 3), np.float32)
    database[:, 2] = 1  # orthogonal to all that follows
    database[0] = 0.1, 0.995, 0
    database[1] = 0.4, 0.916, 0
    database[2] = 0.9, -0.436, 0
    queries = np.array([[0.98, 0.199, 0]], np.float32)
    [ap] = evaluate_vectors(load_dataset(folder), database, queries, "average-5")["plain"]["ap"]
    first = evaluate_vectors(load_dataset(folder), database, queries, "none")["plain"]["ap"][0]
    assert first < 0.9  # the wrong one comes first before the expansion
    assert (ap > first) == found


def test_a_whitening_may_be_fitted_on_the_vectors_of_each_scale(folder: Path, tmp_path: Path) -> None:
    pictures = image_set(folder / "jpg")
    fitted: dict[bool, Whitening] = {}
    for each in (False, True):
        options = BenchOptions(
            device="cpu",
            dtype="float32",
            workers=0,
            cache=tmp_path / "cache",
            expansions=("none",),
            whitening_set=tuple(pictures),
            whitening_size=80,
            whitening_each_scale=each,
        )
        run(
            load_dataset(folder),
            [find_recipe("ucrow+size=80+dim=4+scales=1,0.5")],
            options,
            keep=lambda found, each=each: fitted.update({each: next(iter(found.values()))}),  # type: ignore[misc]
        )
    assert [int(fitted[each].meta["samples"]) for each in (False, True)] == [len(pictures), 2 * len(pictures)]
    assert not np.allclose(fitted[False].projection, fitted[True].projection)
