"""Result files, and the parts that tables of them are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cooc.errors import DatasetError
from cooc.provenance import portable

Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""
    sources: list[str] = field(default_factory=list)  # command, commit and machine of its result files


ROOMS = ("learned", "verified")  # pairs that differ in the filter alone; rankings that geometry has changed


@dataclass(frozen=True)
class Results:
    """Result files by data set and recipe, those of `cooc bench speed` by device, and the others by file name."""

    by_name: dict[tuple[str, str], Result]
    speed: dict[str, Result]
    other: dict[str, Result] = field(default_factory=dict)

    def choose(self, recipes: Sequence[str], datasets: Iterable[str]) -> str | None:
        """The first of the recipes that was measured on any of the data sets."""
        known = set(datasets)
        return next((name for name in recipes if any((dataset, name) in self.by_name for dataset in known)), None)

    def score(self, recipe: str, column: tuple[str, str], expansions: Sequence[str] = ("none",)) -> Result | None:
        """mAP, interval, ... of a recipe in a column, with the first of the expansions that was measured."""
        dataset, protocol = column
        measured: dict[str, Result] = self.by_name.get((dataset, recipe), {}).get("results", {})
        return next((measured[name][protocol] for name in expansions if name in measured), None)


def load_results(folder: str | Path) -> Results:
    """All result files of a folder. One that cannot be read is an error: a table must not lose a row silently."""
    by_name: dict[tuple[str, str], Result] = {}
    speed: dict[str, Result] = {}
    other: dict[str, Result] = {}
    base = Path(folder)
    for path in (*sorted(base.glob("*.json")), *(p for room in ROOMS for p in sorted(base.glob(f"{room}/*.json")))):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if path.name.startswith("speed-"):
                speed[path.stem.removeprefix("speed-")] = content
            elif path.parent != base:
                other[f"{path.parent.name}/{path.stem}"] = content
            elif "--" in path.name and not path.name.startswith("calibration--"):
                by_name[content["dataset"], content["recipe"]] = content
            else:
                other[path.stem] = content
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{path} is no result file of cooc ({error!r}). Measure it again, or remove it."
            ) from error
    return Results(_multi_scale(other) | by_name, speed, other)


def _multi_scale(other: dict[str, Result]) -> dict[tuple[str, str], Result]:
    """Rows of the whitening experiment that are the paper's: three scales, 8192 dimensions, the best whitening."""
    if (found := other.get("experiment-whitening")) is None:
        return {}
    about = {key: value for key, value in found.items() if key != "rows"}
    direct, best = "BP(AC_T)", ", each scale, shrunk 0.01"
    out = {}
    for label, row in found["rows"].items():
        method = label.removesuffix(best)
        if method == label or not f"{method}, ".startswith(f"{direct}, "):  # another whitening, or a mask
            continue
        recipe = "paper-bilinear-ms" if method == direct else "learned-ms"
        for dataset, scores in row["scores"].items():
            out[dataset, recipe] = about | {"dataset": dataset, "recipe": recipe, "dim": 8192, "results": scores}
    return out


def number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value + 1e-9:.1f}"  # 59.65 is 59.7, not 59.6


def difference(ours: Result | None, theirs: float | None, tolerance: float = math.inf) -> str:
    """What is shown is what is judged: marked where it is more than the tolerance."""
    if ours is None or theirs is None:
        return "-"
    found = round(ours["mAP"] - theirs, 1) + 0.0  # no -0.0
    return f"{found:+.1f}{' !' if abs(found) > tolerance else ''}"


def sources(used: Iterable[Result]) -> list[str]:
    """How those results were made, each run once."""
    lines = []
    for result in used:
        machine = result.get("machine") or {}
        on = machine.get("accelerator") or machine.get("cpu") or "unknown machine"
        lines.append(f"`{portable(result.get('command', 'unknown'))}` (commit {result.get('commit', 'unknown')}, {on})")
    return list(dict.fromkeys(lines))
