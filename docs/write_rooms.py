"""Write the picture of the rooms in CONTRIBUTING.md from the import contracts in pyproject.toml: `make docs`.

tests/test_docs.py fails when the two differ, import-linter when the code and the contracts do.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
WIDTH = 110
BLOCK = re.compile(r"(?<=<!-- rooms -->\n).*(?=<!-- /rooms -->)", re.DOTALL)


def contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def rooms() -> list[list[str]]:
    """Layers, the highest first; those of one layer do not know one another."""
    (layers,) = (one["layers"] for one in contracts() if one["type"] == "layers")
    return [[room.strip().removeprefix("cooc.") for room in layer.split("|")] for layer in layers]


def picture(layers: list[list[str]]) -> list[str]:
    """One row for each layer, one field for each room."""
    rows = list[str]()
    walls = [set[int]()]  # columns, of each row and of the nothing above and below them
    for names in layers:
        spare, extra = divmod(WIDTH - sum(len(name) + 3 for name in names), len(names))
        row, at = "", {0}
        for i, name in enumerate(names):
            row += "│ " + name.ljust(len(name) + 1 + spare + (i < extra))
            at.add(len(row))
        rows.append(row + "│")
        walls.append(at)
    walls.append(set())
    floors = ["".join(_joint(x, *beside) for x in range(WIDTH + 1)) for beside in itertools.pairwise(walls)]
    return [line for pair in zip(floors, rows, strict=False) for line in pair] + floors[-1:]


def _joint(x: int, above: set[int], below: set[int]) -> str:
    """Of a wall between two layers: the one character at column x."""
    left, right = x > 0, x < WIDTH
    signs = {(1, 1, 1, 1): "┼", (1, 1, 1, 0): "┴", (1, 1, 0, 1): "┬", (0, 1, 1, 1): "├", (1, 0, 1, 1): "┤"}
    corners = {(0, 1, 0, 1): "┌", (1, 0, 0, 1): "┐", (0, 1, 1, 0): "└", (1, 0, 1, 0): "┘"}
    return (signs | corners).get((left, right, x in above, x in below), "─")


def page(text: str) -> str:
    """CONTRIBUTING.md with the picture as the contracts have it."""
    rules = [f"- {one['name']}\n" for one in contracts() if one["type"] != "layers"]
    drawn = "\n".join(["```text", *picture(rooms()), "```", "", *(rule.rstrip() for rule in rules), ""])
    if not BLOCK.search(text):
        raise SystemExit(f"{PAGE} has no place for the picture: <!-- rooms --> and <!-- /rooms -->.")
    return BLOCK.sub(lambda _: drawn, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
