"""The example for researchers: what it writes is what `cooc bench --vectors` measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cooc.cli import app
from tests.labelled import write_labelled_folder
from tests.shell import shell

SCRIPT = Path(__file__).parent.parent / "examples/compare_your_method.py"


def test_the_example_and_the_command_agree(tmp_path: Path) -> None:
    folder, output = write_labelled_folder(tmp_path / "things"), tmp_path / "mine"
    said = subprocess.run([sys.executable, SCRIPT, folder, output], capture_output=True, text=True, check=True).stdout
    pair = f"mine={output / 'database.npy'},{output / 'queries.npy'}"
    done = shell(app)("bench", folder, "--vectors", pair, "--json", "--results", tmp_path / "results")
    assert done.code == 0, done.err
    [result] = done.json
    scores = result["results"]["none"]["plain"]
    recall = ", ".join(f"recall@{k} {value:.1f}" for k, value in scores["recall@k"].items())
    assert said == f"plain: mAP {scores['mAP']:.1f}, {recall}, MRR {scores['MRR']:.1f}\n"
