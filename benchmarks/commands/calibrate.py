"""`python -m benchmarks calibrate`: the calibrations that ship with cooc."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.commands.index import ResultsOption
from cooc.cli import options, out
from cooc.cli.writing import check_output

CURVES = Path(__file__).parents[2] / "cooc/data/calibration.json"


def calibrate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With ground_truth.json and jpg/.")],
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="One or more recipes, separated by commas.")
    ] = options.DEFAULT,
    vectors: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="RECIPE.npz with arrays database and queries, made before.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", help="The curves; others in it are kept. [default: ours]"),
    ] = None,
    results: ResultsOption = Path("results"),
    device: options.Device = "auto",
    workers: options.Workers = None,
    cache: Annotated[Path, typer.Option(help="Where raw vectors are kept between runs.")] = Path(".cooc/bench"),
) -> None:
    """Fit the calibration of recipes on labelled queries: half to fit, half to test."""
    from benchmarks.calibration import calibrate_recipe, write_curve
    from cooc.bench.describing import BenchOptions
    from cooc.datasets.retrieval import load_dataset
    from cooc.recipes import find_recipe

    curves = output or CURVES
    check_output(curves, ".json")
    results.mkdir(parents=True, exist_ok=True)
    dataset = load_dataset(str(folder), folder.parent)
    options = BenchOptions(device=device, workers=workers, cache=cache)
    table = Table("space", "Brier", "base rate", "ECE", "nothing found: said rightly", "wrongly")
    for found in [find_recipe(name) for name in recipe.split(",")]:
        report = calibrate_recipe(dataset, found, options, vectors)
        write_curve(report, curves, results)
        test, no_match = report["test"], report["no match"]
        shares = (f"{100 * no_match[key]:.0f}%" for key in ("said rightly", "said wrongly"))
        numbers = (f"{test[key]:.3f}" for key in ("brier", "brier of the base rate", "ece"))
        table.add_row(report["space"], *numbers, *shares)
    out.print(table)
