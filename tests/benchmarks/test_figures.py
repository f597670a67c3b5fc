"""Every figure from real activations, on small pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.figures import FIGURES, Inputs, cooccurrence_vectors, draw, landmarks
from benchmarks.growth import run_growth
from cooc.bench.describing import BenchOptions
from cooc.bench.plot import save
from cooc.bench.run import run
from cooc.bench.scoring import write_result
from cooc.cooccurrence import Cooccurrence
from cooc.datasets.retrieval import load_dataset
from cooc.errors import DatasetError, InputError, UnknownNameError
from cooc.recipes import find_recipe
from tests.labelled import write_labelled_folder
from tests.shell import Shell


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A labelled folder, its measured result, two pictures and a filter with a known change."""
    folder = tmp_path_factory.mktemp("figures")
    things = write_labelled_folder(folder / "things")
    dataset = load_dataset(things)
    options = BenchOptions(device="cpu", dtype="float32", workers=0, cache=folder / "cache", expansions=("none",))
    for result in run(dataset, [find_recipe("ucrow+raw+size=96"), find_recipe("crow+raw+size=96")], options):
        write_result(result, folder / "results")
    (folder / "results" / "growth-cpu.json").write_text(json.dumps(run_growth([10, 20], ["float32", "int4"], 64)))
    costs = {"fast": 0.1, "balanced": 0.4, "best": 2.0}
    rows = {name: {"seconds of a photo": seconds} for name, seconds in costs.items()}
    (folder / "results" / "qualities-cpu.json").write_text(json.dumps({"qualities": rows}))
    (folder / "results" / "verified").mkdir()
    for name in ("resnet-tuned+size=384", "resnet-tuned"):
        stages = ("none",) if "384" in name else ("sift thorough", "sift+xfeat thorough")
        found = {"results": {stage: {"plain": {"mAP": 60.0}} for stage in stages}}
        (folder / "results" / "verified" / f"gldv2_dev--{name}.json").write_text(json.dumps(found))
    torch.manual_seed(0)
    layer = Cooccurrence("factored", channels=512, rank=1)
    with torch.no_grad():
        layer.left[3] = 2.0
    layer.save(folder / "filter.safetensors")
    return Inputs(
        data=(folder,),
        dataset=str(things),
        images=(things / "jpg" / "arch_000000.jpg", things / "jpg" / "gate_000001.jpg"),
        filter=str(folder / "filter.safetensors"),
        results=folder / "results",
        recipes=("ucrow+raw+size=96", "crow+raw+size=96"),
        size=96,
        device="cpu",
    )


@pytest.mark.parametrize("name", FIGURES)
def test_it_is_drawn_and_small(name: str, inputs: Inputs, tmp_path: Path) -> None:
    path = draw(name, inputs, tmp_path / "new")
    assert [p.name for p in (tmp_path / "new").iterdir()] == [path.name]
    assert 2_000 < path.stat().st_size < 300_000
    if path.suffix == ".svg":
        assert "<svg" in path.read_text()
        again = path.read_bytes()
        assert draw(name, inputs, tmp_path / "new").read_bytes() == again
        return
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    assert min(pixels.shape) > 100
    assert np.ptp(pixels) > 150


def test_vectors_are_those_of_the_cropped_query(inputs: Inputs) -> None:
    dataset = load_dataset(inputs.dataset)
    descriptor = inputs.descriptor()
    vectors = cooccurrence_vectors(descriptor, dataset.queries[:1])
    query = dataset.queries[0]
    with torch.inference_mode():
        A = descriptor.backbone(descriptor.load(query.path, query.box)[None]).float()
    assert vectors.shape == (1, 512)
    assert np.allclose(vectors[0], Cooccurrence(radius=4)(A).sum((2, 3))[0], rtol=1e-5)


def test_queries_of_one_thing_are_found_together(inputs: Inputs) -> None:
    dataset = load_dataset(inputs.dataset)
    assert landmarks(dataset) == ["arch", "arch", "gate", "gate", "tower", "tower"]


def test_what_is_missing_is_said(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'correlation'"):
        draw("corelation", inputs, tmp_path)
    with pytest.raises(DatasetError, match="run `cooc bench things -r gem`"):
        draw("best-worst", replace(inputs, recipes=("gem",)), tmp_path)
    with pytest.raises(DatasetError, match="has no result of gem"):
        draw("precision-recall", replace(inputs, recipes=("gem",)), tmp_path)
    with pytest.raises(InputError, match="no such filter file"):
        draw("filters", replace(inputs, filter="nowhere.npy"), tmp_path)
    with pytest.raises(UnknownNameError, match="type of figure"):
        save(_empty, tmp_path / "figure.bmp2")
    assert list(tmp_path.iterdir()) == []


def _empty():  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    return Figure()


def test_the_command_draws_what_it_can(benchmarks: Shell, inputs: Inputs, tmp_path: Path) -> None:
    np.save(tmp_path / "filter.npy", np.random.default_rng(0).normal(1, 0.1, (16, 16, 9, 9)))
    common = ["--results", str(inputs.results), "--out", str(tmp_path / "out"), "--data", str(tmp_path), "--size", "64"]
    common += [
        "--recipe",
        ",".join(inputs.recipes),
        "--images",
        str(inputs.images[0]),
        "--filter",
        str(tmp_path / "filter.npy"),
    ]
    done = benchmarks("figures", "--device", "cpu", *common)
    assert done.code == 3, done
    drawn = {path.stem for path in (tmp_path / "out").iterdir()}
    assert drawn == {"spatial", "filters", "precision-recall", "growth", "qualities"}
    assert "learned-maps: left out. This filter is for 16 channels" in done.err
    assert "correlation: left out." in done.err
