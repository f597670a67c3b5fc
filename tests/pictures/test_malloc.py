"""Memory that is kept is not asked for again: counted in page faults, in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
import numpy as np
{}
def fill():
    for _ in range(15):
        np.empty(120 << 20, np.uint8).fill(1)
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

LEAST = 15 * 60  # page faults if nothing is kept and the system gives out pages of 2 MB; of 4 kB it is 512 times that

KEEP = "from cooc.pictures.malloc import keep_memory; keep_memory(1 << 27, 1 << 30)"
NETWORK = "from cooc.activations import build_backbone; build_backbone('efficientnet-lite0', weights=None)"
INDEX = """
from pathlib import Path
from typer.testing import CliRunner
import cooc.cli.indexing
Path("photos").mkdir()
done = CliRunner().invoke(cooc.cli.indexing.app, ["index", "photos", "-r", "RECIPE+size=64", "--device", "cpu"])
assert done.exit_code == 0, (done.output, done.exception)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
@pytest.mark.parametrize(
    ("first", "kept"),
    [
        ("", False),
        (KEEP, True),
        (NETWORK, False),
        (INDEX.replace("RECIPE", "light"), True),
        (INDEX.replace("RECIPE", "paper-linear"), False),
    ],
    ids=["nothing", "kept", "a network", "index, light", "index, VGG16"],
)
def test_pages_are_asked_for_once(tmp_path: Path, first: str, kept: bool) -> None:
    """Where somebody chose so: the index command does for light networks, a network that is built does not."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first)],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert (int(run.stdout) < LEAST / 4) == kept  # threads that idle ask for some as well


PIECES = """
from pathlib import Path
from cooc.pictures.malloc import trim
def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) >> 8  # MB
pieces = [bytes([1]) * 8000 for _ in range(20_000)]
pieces = pieces[::50]  # 160 MB are free, between pieces that are in use
before = held()
trim()
print(before - held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_what_is_free_between_pieces_in_use_goes_back() -> None:
    run = subprocess.run([sys.executable, "-c", PIECES], check=True, capture_output=True, cwd=Path(__file__).parents[2])
    assert int(run.stdout) > 80
