"""The results of a folder, as rows of tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cooc.errors import DatasetError

Result = dict[str, Any]  # as `cooc.bench.run.write_result` writes it


def load_results(folder: Path) -> dict[str, list[Result]]:
    """Dataset -> its results. A file that cannot be read is an error: a table must not lose a row silently."""
    found: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("*--*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if "results" in content:  # a calibration has none
                found.setdefault(content["dataset"], []).append(content)
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{path} is no result file of cooc ({error!r}). Measure it again, or remove it."
            ) from error
    if not found:
        raise DatasetError(f"There are no results in {folder}. Measure some: cooc bench DATASET -r RECIPE")
    return found


def rows(results: Sequence[Result]) -> list[Result]:
    """One for each recipe and expansion, by the mAP of the middle protocol (medium, where there are three)."""
    made = []
    for result in results:
        for expansion, scores in result["results"].items():
            values = {protocol: score["mAP"] for protocol, score in scores.items()}
            made.append({"recipe": result["recipe"], "dim": result["dim"], "expansion": expansion, **values})
    middle = list(results[0]["results"][next(iter(results[0]["results"]))])
    return sorted(made, key=lambda row: -row[middle[len(middle) // 2]])
