"""The clone as its users leave it: what they make in it changes nothing that is checked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("benchmarks", "cooc", "docs", "examples", "tests")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with what `make demo`, `cooc index` and a user's own work leave behind."""
    root = tmp_path_factory.mktemp("clone")
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in OURS:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for folder in ("demo", ".cooc/bench", "photos/rich", "typer"):
        (root / folder).mkdir(parents=True)
    (root / "demo/demo.png").write_bytes(b"")
    (root / "photos/sort.py").write_text("import os,sys\nprint( 'mine' )\n")
    (root / "notes.py").write_text("import cooc, numpy\n")
    return root


@pytest.mark.parametrize("words", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_sees_our_files_alone(clone: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *words, "--no-cache", "."], cwd=clone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_sees_all_of_our_files(clone: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."], cwd=clone, capture_output=True, text=True
    )
    seen = {Path(line).relative_to(clone) for line in done.stdout.splitlines()}
    assert seen == {path.relative_to(clone) for name in OURS for path in (clone / name).rglob("*.py")} | {
        Path("pyproject.toml")
    }
