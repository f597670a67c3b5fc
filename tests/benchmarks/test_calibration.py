"""The calibrations that ship with cooc are fitted on labelled photos, and what they are written to is checked first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.labelled import write_labelled_folder
from tests.shell import Shell

RECIPE = "paper-linear+raw+size=96"


def test_calibrate(benchmarks: Shell, tmp_path: Path) -> None:
    folder = write_labelled_folder(tmp_path / "things")
    curves, results = tmp_path / "curves.json", tmp_path / "results"
    words = ("-r", RECIPE, "--results", results, "--cache", tmp_path / "cache", "--device", "cpu")
    done = benchmarks("calibrate", folder, *words, "-o", curves)
    assert done.code == 0, done
    (name,) = json.loads(curves.read_text())
    assert name == "vgg16-caffe-chco-sct-act-raw-512"
    report = json.loads((results / f"calibration--{name}.json").read_text())
    assert report["slope"] > 0
    assert report["tested on queries"] == 3
    rng = np.random.default_rng(0)
    np.savez(tmp_path / f"{RECIPE}.npz", database=rng.normal(size=(9, 4)), queries=rng.normal(size=(5, 4)))
    refused = benchmarks("calibrate", folder, *words, "-o", curves, "--vectors", tmp_path)
    assert refused.code == 2
    assert "describe them again" in refused.err


def test_a_place_that_is_not_there_is_refused_before_the_work(benchmarks: Shell, tmp_path: Path) -> None:
    folder = write_labelled_folder(tmp_path / "things")
    refused = benchmarks(
        "calibrate", folder, "-r", RECIPE, "-o", tmp_path / "no/curves.json", "--cache", tmp_path / "c"
    )
    assert refused.code == 2
    assert "there is no folder" in refused.err
    assert not (tmp_path / "c").exists()  # nothing was described
