"""Result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cooc.bench.scoring import write_result


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("gem+p=4", "gem+p=4"), ("./runs/mine", "runs-mine"), ("/home/me/run+ms", "home-me-run+ms"), ("..\\run\\", "run")],
)
def test_a_recipe_that_is_a_folder_has_a_file_too(tmp_path: Path, recipe: str, name: str) -> None:
    assert write_result({"dataset": "set", "recipe": recipe}, tmp_path / "results").name == f"set--{name}.json"
    assert [file.name for file in (tmp_path / "results").iterdir()] == [f"set--{name}.json"]
