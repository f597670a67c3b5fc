"""The example for researchers: what it writes is what `cooc bench --vectors` measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from cooc.cli import every
from tests.labelled import write_labelled_folder
from tests.shell import shell

SCRIPT = Path(__file__).parent.parent / "examples/compare_your_method.py"


def test_the_example_and_the_command_agree(tmp_path: Path) -> None:
    folder, output = write_labelled_folder(tmp_path / "things"), tmp_path / "mine"
    said = subprocess.run([sys.executable, SCRIPT, folder, output], capture_output=True, text=True, check=True).stdout
    pair = f"mine={output / 'database.npy'},{output / 'queries.npy'}"
    done = shell(every())("bench", folder, "--vectors", pair, "--json", "--results", tmp_path / "results")
    assert done.code == 0, done.err
    [result] = done.json
    scores = result["results"]["none"]["plain"]
    recall = ", ".join(f"recall@{k} {value:.1f}" for k, value in scores["recall@k"].items())
    assert said == f"plain: mAP {scores['mAP']:.1f}, {recall}, MRR {scores['MRR']:.1f}\n"


def test_an_index_of_its_vectors(tmp_path: Path) -> None:
    """A search in it by a picture is the matrix product."""
    folder, output = write_labelled_folder(tmp_path / "things"), tmp_path / "mine"
    subprocess.run([sys.executable, SCRIPT, folder, output], capture_output=True, check=True)
    cooc, index = shell(every()), output / "index"
    words = ("--paths", output / "names.txt", "--index", index, "--root", folder, "--name", "mine")
    done = cooc("import", output / "database.npy", *words)
    assert done.code == 0, done.err
    assert "9 in the index" in done.out
    names, vectors = (output / "names.txt").read_text().splitlines(), np.load(output / "database.npy")
    found = cooc("search", names[4], "--index", index, "--json", "-k", 9)
    assert found.code == 0, found.err
    order = np.argsort(-vectors @ vectors[4], kind="stable")
    assert [match["file"] for match in found.json["matches"]] == [names[row] for row in order]
