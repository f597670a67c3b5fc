"""cooc tables, cooc compare: what was measured, for people."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cooc.cli import app, err, options, out
from cooc.errors import InputError

if TYPE_CHECKING:
    from cooc.bench.describing import BenchOptions
    from cooc.datasets.retrieval import Dataset
    from cooc.recipes import Recipe


@app.command()
def tables(
    results: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where `cooc bench` wrote.")] = Path("results"),
    as_json: options.Json = False,
) -> None:
    """The results of a folder, a table for each dataset: mAP of every recipe and expansion, best first."""
    from cooc.bench.tables import load_results, rows

    found = load_results(results)
    if as_json:
        out.print_json(json.dumps({dataset: rows(of) for dataset, of in found.items()}))
        return
    for dataset, of in found.items():
        protocols = list(
            of[0]["results"]["none"] if "none" in of[0]["results"] else next(iter(of[0]["results"].values()))
        )
        shown = Table(
            "recipe", "dim", "expansion", *protocols, title=f"mAP on {dataset}, in percent", title_justify="left"
        )
        for row in rows(of):
            shown.add_row(
                row["recipe"], str(row["dim"] or "-"), row["expansion"], *(f"{row[p]:.1f}" for p in protocols)
            )
        show_table(shown)


def show_table(table: Table) -> None:
    """Cells are broken between words where the terminal is narrow, but a number is never cut off."""
    needs = Measurement.get(out, out.options.update(width=1000), table)
    width = max(out.width, needs.minimum) if out.is_terminal else needs.maximum
    Console(file=out.file, width=width, highlight=False).print(table)


@app.command()
def compare(
    folder: Annotated[str, typer.Argument(help="A folder with ground_truth.json and jpg/, or a known dataset.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Recipes to compare, separated by commas.")] = "",
    vectors: options.Vectors = None,
    rankings: options.Rankings = None,
    data: options.Data = Path("data"),
    images: Annotated[int, typer.Option(min=1, help="Pictures to time.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw mAP against time: a .png, .svg or .pdf file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the comparison as JSON.")] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    workers: options.Workers = None,
    cache: options.Cache = Path(".cooc/bench"),
    as_json: options.Json = False,
) -> None:
    """Which recipe is best for these pictures, at which cost: mAP, ms for a picture, bytes for a picture."""
    from cooc.bench.compare import compare as measure
    from cooc.bench.describing import BenchOptions
    from cooc.datasets.retrieval import load_dataset

    recipes = named_recipes(recipe, needed=not (vectors or rankings))
    dataset = load_dataset(folder, data)
    settings = BenchOptions(
        device=device,
        dtype=dtype,
        workers=workers,
        cache=cache,
        progress=lambda what, done, total: err.print(f"{what}: {done} of {total}", markup=False),
    )
    others = own_results(dataset, vectors, rankings, replace(settings, expansions=("none",)))
    found = measure(dataset, recipes, settings, images=images, others=others)
    text = json.dumps(found, indent=1)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8")
    if plot:
        from cooc.bench.plot import plot_comparison, save

        save(lambda: plot_comparison(found), plot)
    if as_json:
        out.print_json(text)
        return
    title = f"{found['dataset']}, {found['protocol']}: {found['queries']} queries; time on {found['device']}"
    columns = ("mAP", "95% interval", "recall@1", "MRR", "ms", "of it network", "bytes", "beaten by")
    shown = Table("recipe", "dim", *columns, title=title)
    for row in found["recipes"]:
        low, high = row["interval"]
        scores = (f"{row['mAP']:.1f}", f"{low:.1f} to {high:.1f}", f"{row['recall@k']['1']:.1f}", f"{row['MRR']:.1f}")
        ms = share = "-"
        if row["ms"] is not None:
            ms = f"{row['ms']:.1f}"
            share = f"{row['network_ms']:.1f} ({100 * row['network_ms'] / row['ms']:.0f}%)"
        size = "-" if row["bytes"] is None else f"{row['bytes']:,}"
        shown.add_row(row["recipe"], str(row["dim"] or "-"), *scores, ms, share, size, row["beaten_by"] or "-")
    show_table(shown)


def named_recipes(names: str, needed: bool) -> list[Recipe]:
    """Recipes by commas."""
    from cooc.recipes import find_recipe

    recipes = [find_recipe(name) for name in names.split(",") if name]
    if needed and not recipes:
        raise InputError("Name at least one recipe (`cooc recipes` lists them), or give --vectors or --rankings.")
    return recipes


def own_results(
    dataset: Dataset, vectors: list[str] | None, rankings: list[str] | None, settings: BenchOptions
) -> list[dict[str, Any]]:
    """What --vectors and --rankings are worth."""
    from cooc.bench.own import rankings_result, vectors_result
    from cooc.bench.run import Verified

    if rankings and settings.verify:
        raise InputError("--verify goes on from vectors: give --vectors in the place of --rankings.")
    local = Verified(dataset, settings)
    found = [vectors_result(dataset, given, settings.expansions, local.results) for given in vectors or ()]
    return found + [rankings_result(dataset, given) for given in rankings or ()]
