"""cooc bench compare: recipes on a labelled folder, what they find and what they cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from cooc.bench.compare import compare, time_recipe
from cooc.bench.describing import BenchOptions
from cooc.cli import reporting
from cooc.datasets.retrieval import load_dataset
from cooc.descriptor import Descriptor
from cooc.errors import InputError
from cooc.evaluation import evaluate
from cooc.recipes import find_recipe
from tests.labelled import write_labelled_folder

RECIPES = ("ucrow+raw+size=64", "paper-bilinear+raw+size=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled_folder(tmp_path_factory.mktemp("compare") / "things")


def options(cache: Path) -> BenchOptions:
    return BenchOptions(device="cpu", dtype="float32", workers=0, cache=cache)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    recipes = [find_recipe(name) for name in RECIPES]
    return compare(load_dataset(folder), recipes, options(tmp_path_factory.mktemp("cache")), images=2)


def test_numbers_are_those_of_the_recipes_alone(folder: Path, found: dict[str, Any]) -> None:
    dataset = load_dataset(folder)
    rows = {row["recipe"]: row for row in found["recipes"]}
    assert set(rows) == set(RECIPES)
    assert rows[RECIPES[0]]["bytes"] == 4 * 512
    assert rows[RECIPES[1]]["bytes"] == 4 * 8192
    assert [row["mAP"] for row in found["recipes"]] == sorted((r["mAP"] for r in rows.values()), reverse=True)
    for row in rows.values():
        assert 0 < row["network_ms"] < row["ms"]
        assert row["interval"][0] <= row["mAP"] <= row["interval"][1]
    describe = Descriptor(find_recipe(RECIPES[0]).config.replace(dtype="float32"), device="cpu")
    database = describe(dataset.image_paths)
    queries = describe([q.path for q in dataset.queries], [q.box for q in dataset.queries])
    rankings = np.argsort(-(queries @ database.T).numpy(), axis=1, kind="stable")
    assert rows[RECIPES[0]]["mAP"] == pytest.approx(
        100 * evaluate(rankings, dataset.ground_truth, "plain").map, abs=1e-3
    )


def test_a_recipe_is_beaten_by_one_that_is_as_good_in_all(found: dict[str, Any]) -> None:
    for row in found["recipes"]:
        better = [
            other["recipe"]
            for other in found["recipes"]
            if other is not row
            and other["mAP"] >= row["mAP"]
            and other["ms"] <= row["ms"]
            and other["bytes"] <= row["bytes"]
        ]
        assert row["beaten_by"] == (better[0] if better else None)


def test_nothing_to_compare_is_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one recipe"):
        compare(load_dataset(folder), [], options(tmp_path))
    with pytest.raises(InputError, match="one picture"):
        compare(load_dataset(folder), [find_recipe(RECIPES[0])], options(tmp_path), images=0)


def test_the_command_shows_writes_and_draws(folder: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(reporting.compare)
    common = [str(folder), "--images", "1", "--device", "cpu", "--workers", "0"]
    common += ["--cache", str(tmp_path / "cache"), "--dtype", "float32"]
    files = ["--output", str(tmp_path / "new" / "compare.json"), "--plot", str(tmp_path / "new" / "compare.svg")]
    done = CliRunner().invoke(app, [*common, *files, "--recipe", ",".join(RECIPES)])
    assert done.exit_code == 0, done.output
    assert "32,768" in done.stdout
    content = json.loads((tmp_path / "new" / "compare.json").read_text())
    assert {row["recipe"] for row in content["recipes"]} == set(RECIPES)
    assert {"command", "commit", "machine"} <= set(content)
    assert "<svg" in (tmp_path / "new" / "compare.svg").read_text()
    printed = CliRunner().invoke(app, [*common, "--json", "--recipe", RECIPES[0]])
    assert json.loads(printed.stdout)["dataset"] == "things"


def test_a_recipe_may_name_its_dtype(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed as it asks for; --dtype is for all of them."""
    timed: list[str] = []

    def record(descriptor: Descriptor, paths: Any) -> dict[str, float]:
        timed.append(descriptor.config.dtype)
        return time_recipe(descriptor, paths)

    monkeypatch.setattr("cooc.bench.compare.time_recipe", record)
    recipes = [find_recipe(f"{RECIPES[0]}+dtype={dtype}") for dtype in ("bfloat16", "float32")]
    compare(load_dataset(folder), recipes, replace(options(tmp_path), dtype="auto"), images=1)
    compare(load_dataset(folder), recipes, options(tmp_path), images=1)
    assert timed == ["bfloat16", "float32", "float32", "float32"]
