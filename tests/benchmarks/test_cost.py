"""cooc bench engines, compact and growth: the same functions at small sizes, and their tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks import report
from benchmarks.compact import export_vectors, import_vectors, measure_compact
from benchmarks.engines import DEFAULT, lost_map, run_engines
from benchmarks.growth import run_growth
from benchmarks.hard import VIEWS, measure_hard
from benchmarks.maps import _vectors as maps_vectors
from benchmarks.maps import measure_maps
from benchmarks.results import load_results
from cooc.activations import BACKBONES, build_backbone, fold_batch_norms
from cooc.bench.describing import BenchOptions
from cooc.bench.run import run
from cooc.datasets.retrieval import load_dataset
from cooc.descriptor import Descriptor, load_backbone
from cooc.errors import DatasetError, InputError, UnknownNameError
from cooc.pictures.batches import Item
from cooc.pictures.decode import load_image
from cooc.recipes import find_recipe
from tests.labelled import write_labelled_folder
from tests.shell import Shell
from tests.test_activations import pictures, random_weights
from tests.verification.pictures import PHOTOS, photo


def whitened(count: int, seed: int) -> Any:
    rows = np.random.default_rng(seed).standard_normal((count, 64)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("name", ["resnet50", "resnet50-caffe", "efficientnet-lite0"])
def test_folded_batch_norms_change_nothing(name: str) -> None:
    weights, images = random_weights(name), pictures(1, 64, 96)
    plain = BACKBONES[name].build(next(iter(BACKBONES[name].layers))).eval()
    plain.load_state_dict(dict(weights))
    x = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = plain(x)
        fold_batch_norms(plain)
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in plain.modules())
        torch.testing.assert_close(plain(x), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    assert build_backbone(name, weights=weights).layout == torch.channels_last
    assert build_backbone(name, weights=weights)(images).isfinite().all()


def test_an_engine_finds_what_the_harness_finds(
    real_weights: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    real_weights("efficientnet-lite0")
    dataset = load_dataset(write_labelled_folder(tmp_path / "things"))
    recipe = find_recipe("light+size=64")
    options = BenchOptions(device="cpu", dtype="float32", workers=0, cache=tmp_path, expansions=("none",))
    (expected,) = run(dataset, [recipe], options)
    found = lost_map(recipe, dataset, [DEFAULT], dataset.image_paths[:1])
    assert found == {DEFAULT: pytest.approx(next(iter(expected["results"]["none"].values()))["mAP"], abs=1e-6)}


def test_forms_on_one_networks_maps_are_those_of_the_recipes(
    real_weights: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    real_weights("efficientnet-lite0")
    dataset = load_dataset(write_labelled_folder(tmp_path / "things"))
    base, paths = "backbone=efficientnet-lite0+size=64+dtype=float32", dataset.image_paths
    recipe = find_recipe(f"gem+{base}+dim=4")
    found = maps_vectors([Item(None, path) for path in paths], load_backbone(recipe.config, torch.device("cpu")), 64)
    for form, name in {"GeM": "gem", "ChCO-SC_T": "paper-linear", "sums": "ucrow"}.items():
        expected = Descriptor(find_recipe(f"{name}+{base}+raw").config, device="cpu").describe(paths)
        torch.testing.assert_close(found[form], expected, rtol=1e-3, atol=1e-4)
    result = measure_maps(recipe, paths, [dataset], fit_size=64, exponent=0.25)
    (scores,) = result["results"].values()
    assert scores.keys() == found.keys()
    assert scores["sums"]["plain"]["gain"] == [0, 0, 0]


def test_hard_queries(real_weights: Callable[[str], dict[str, Tensor]], tmp_path: Path) -> None:
    real_weights("efficientnet-lite0")
    pixels = photo("coffee")
    seen = {name: view(pixels, np.random.default_rng(0)) for name, view in VIEWS.items()}
    assert seen["whole"] is pixels
    assert 0.5 <= seen["part"].shape[0] / len(pixels) <= 0.75
    assert 0.25 <= seen["afar"].shape[1] / pixels.shape[1] <= 0.4
    assert abs(float(seen["afar"].mean()) - float(pixels.mean())) < 2
    assert seen["dusk"].shape == pixels.shape
    assert 0.2 < seen["dusk"].mean() / pixels.mean() < 0.7
    dataset = load_dataset(write_labelled_folder(tmp_path / "things"))
    Image.fromarray(pixels).save(other := tmp_path / "other.png")
    found = measure_hard(dataset, [other], ["light+size=64", "light+size=64+raw"])["results"]
    assert {view for views in found.values() for view in views} == VIEWS.keys()
    first, raw = (found[recipe]["whole"]["plain"] for recipe in found)
    assert first["gain"] == [0, 0, 0]
    assert raw["gain"][0] == pytest.approx(raw["mAP"] - first["mAP"], abs=0.02)


def test_half_thumbnails(benchmarks: Shell, tmp_path: Path) -> None:
    folder = write_labelled_folder(tmp_path / "things", side=300)
    truth = json.loads((folder / "ground_truth.json").read_text())
    names = [f"{name}.jpg" for name in truth["database"]]
    query, *rest = names
    asked = [{"image": query, "bbox": None, "positives": rest[:2], "junk": []}]
    (folder / "ground_truth.json").write_text(json.dumps({"name": "things", "database": rest, "queries": asked}))
    assert benchmarks("thumbnails", folder, tmp_path / "made").code == 0
    half, both = (load_dataset(tmp_path / "made" / name) for name in ("half", "half-by-thumbnail"))
    assert [half.name, both.name] == ["half", "half-by-thumbnail"]
    for one, other in zip(half.image_paths, both.image_paths, strict=True):
        assert one.read_bytes() == other.read_bytes()
    sides = [max(load_image(path).shape) for path in half.image_paths]
    assert [side > 256 for side in sides] == [False, True] * 4
    assert min(sides) >= 100
    assert max(load_image(half.queries[0].path).shape) == 300
    assert max(load_image(both.queries[0].path).shape) <= 256


def test_engines(
    real_weights: Callable[[str], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_weights("efficientnet-lite0")  # fetched, or the reason why not
    monkeypatch.setattr("benchmarks.engines.HOPELESS", math.inf)  # one call, on a busy machine, says little
    kept: list[dict[str, Any]] = []
    engines = [DEFAULT, "torch float32 channels-first"]
    found = run_engines(["efficientnet-lite0"], [(64, 96)], engines, 0.01, kept.append)
    assert kept == [found]
    assert [row["engine"] for row in found["rows"]] == engines
    for row in found["rows"]:
        assert 0 < row["low"] <= row["ms"] <= row["high"]
        assert row["error"] < 1e-3
    assert found["rows"][0]["times_faster"] == 1
    (tmp_path / "engines-cpu.json").write_text(json.dumps(found))
    table = report.TABLES["engines"](load_results(tmp_path))
    assert [row[1] for row in table.rows] == engines
    with pytest.raises(UnknownNameError, match="Did you mean 'OpenVINO'"):
        run_engines(["vgg16"], [(64, 64)], ["OpenVIN"])


def test_an_engine_that_fails_stays_in_the_table(
    real_weights: Callable[[str], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_weights("efficientnet-lite0")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)  # as where it is not installed
    found = run_engines(["efficientnet-lite0"], [(64, 64)], ["ONNX Runtime"], 0.01)
    assert found["rows"][1]["ms"] is None
    assert found["rows"][1]["note"].startswith("not run: ModuleNotFoundError")


def test_compact(tmp_path: Path) -> None:
    """float32 changes nothing; what was exported gives the same again."""
    dataset = load_dataset(write_labelled_folder(tmp_path / "things"))
    pair = whitened(len(dataset.image_paths), 0), whitened(len(dataset.queries), 1)
    found = measure_compact(dataset, {"made-up": pair}, ["float16", "int4"])
    assert [(row["storage"], row["bytes"]) for row in found["rows"]] == [
        ("float32", 256),
        ("float16", 128),
        ("int4", 32),
    ]
    assert found["rows"][0]["change"] == {"plain": 0}
    for row in found["rows"]:
        assert row["change"]["plain"] == pytest.approx(row["mAP"]["plain"] - found["rows"][0]["mAP"]["plain"], abs=2e-3)
    files = export_vectors(dataset, {"made-up": pair}, tmp_path / "out")
    ((database, queries),) = import_vectors(dataset, files).values()
    np.testing.assert_allclose(database, pair[0], atol=1e-3)
    np.testing.assert_allclose(queries, pair[1], atol=1e-3)
    with pytest.raises(InputError, match="no vectors of things"):
        import_vectors(dataset, [tmp_path / "vectors--other--made-up.npz"])
    np.savez(files[0], database=pair[0][:2], queries=pair[1])
    with pytest.raises(DatasetError, match="holds 2 pictures"):
        import_vectors(dataset, files)


def test_growth(tmp_path: Path) -> None:
    kept: list[int] = []
    found = run_growth([50, 100], ["float32", "int4"], 32, tmp_path, lambda result: kept.append(len(result["rows"])))
    assert kept == [1, 2, 3, 4]
    assert [(row["storage"], row["images"]) for row in found["rows"]] == [
        ("float32", 50),
        ("float32", 100),
        ("int4", 50),
        ("int4", 100),
    ]
    for row in found["rows"]:
        assert row["adding, seconds"] > 0
        assert row["exact search, ms"] > 0
        assert row["on disk, bytes per image"] > 32
    (tmp_path / "growth-cpu.json").write_text(json.dumps(found))
    assert len(report.TABLES["growth"](load_results(tmp_path)).rows) == 4


@pytest.mark.parametrize(
    "command", [["engines", "--sizes", "512"], ["growth", "--sizes", "1000,many"], ["compact", "FOLDER"]]
)
def test_commands_say_what_is_wrong(benchmarks: Shell, command: list[str], tmp_path: Path) -> None:
    folder = write_labelled_folder(tmp_path / "things")
    assert benchmarks(*(folder if part == "FOLDER" else part for part in command)).code == 2


@pytest.mark.parametrize("known", [False, True])
def test_startup_names_the_steps(cooc: Shell, benchmarks: Shell, tmp_path: Path, known: bool) -> None:
    photos = write_labelled_folder(tmp_path / "things") / "jpg"
    options = ("-r", "light+size=96", "--count", 3, "--rounds", 1, "--results", tmp_path)
    if known:
        assert cooc("index", photos, "-r", "light+size=96", "--quiet").code == 0
        options += "--index", photos / ".cooc"
    done = benchmarks("startup", photos, *options)
    assert done.code == 0, done.err
    assert "answered by it: " in done.out
    found = json.loads((tmp_path / "startup-cpu.json").read_text())
    assert found["pictures"] == (9 if known else 3)
    assert found["processor seconds of the steps, by torch"]["torch"] > 0
    assert found["answered by it"]["processor seconds"] < found["in a fresh process"]["processor seconds"]


def test_queries_by_opencv_are_compared(benchmarks: Shell, tmp_path: Path) -> None:
    folder = write_labelled_folder(tmp_path / "things")
    options = ("-r", "resnet-gem+size=96", "--cache", tmp_path / "cache", "--results", tmp_path)
    assert benchmarks("queries", folder, *options).code == 0
    found = json.loads((tmp_path / "queries-cpu.json").read_text())
    assert found["least cosine of the two vectors"] > 0.9999
    assert found["mAP"]["plain"]["OpenCV"] == pytest.approx(found["mAP"]["plain"]["torch"])
    assert found["queries with the same first 20"] == found["queries"]
    assert benchmarks("queries", folder, "-r", "light+size=96", *options[2:]).code == 2  # nothing is kept of it


def test_duplicates_by_kind(benchmarks: Shell, tmp_path: Path) -> None:
    for name in PHOTOS:
        Image.fromarray(photo(name)).save(tmp_path / f"{name}.png")
    done = benchmarks("duplicates", tmp_path, "-r", "light+size=128", "--copied", 2, "--results", tmp_path)
    assert done.code == 0, done.err
    assert "photos that were joined: none" in done.out
    found = json.loads((tmp_path / "duplicates-light+size=128.json").read_text())
    assert found["pictures"] == len(PHOTOS) + 2 * len(found["found"])
    assert set(found["found"].values()) == {2}


def test_qualities(benchmarks: Shell, tmp_path: Path) -> None:
    photos = write_labelled_folder(tmp_path / "things") / "jpg"
    done = benchmarks("qualities", photos, "--counts", "fast=2,balanced=2", "--results", tmp_path)
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "qualities-cpu.json").read_text())["qualities"]
    assert list(found) == ["fast", "balanced"]
    assert found["fast"]["MB of a thousand photos"] < found["balanced"]["MB of a thousand photos"]
    for row in found.values():
        assert 0 < row["seconds of a photo"] <= row["seconds in all"]
        assert row["MB of memory"] >= 0  # looked at every two seconds


def test_ladder(benchmarks: Shell, tmp_path: Path) -> None:
    photos = write_labelled_folder(tmp_path / "things", side=200) / "jpg"
    done = benchmarks("ladder", photos, "--count", 2, "--results", tmp_path)
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "ladder-cpu.json").read_text())
    assert {name for forms in found["seconds of a photo"].values() for name in forms} >= {"whole", "float32", "sift"}
    cosines = found["least cosine to the first"]
    assert cosines["float32, channels first, decoded whole"] == pytest.approx(1, abs=1e-5)
    assert min(cosines.values()) > 0.99
    assert min(found["seconds of a photo in cooc index"].values()) > 0
