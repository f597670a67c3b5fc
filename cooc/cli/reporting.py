"""cooc tables, cooc compare: what was measured, for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cooc.cli import app, err, out
from cooc.errors import InputError

DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
ResultsOption = Annotated[Path, typer.Option(help="Folder of the result files.")]


@app.command()
def tables(
    results: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where `cooc bench` wrote.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
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
            shown.add_row(row["recipe"], str(row["dim"]), row["expansion"], *(f"{row[p]:.1f}" for p in protocols))
        show_table(shown)


def show_table(table: Table) -> None:
    """Cells are broken between words where the terminal is narrow, but a number is never cut off."""
    needs = Measurement.get(out, out.options.update(width=1000), table)
    width = max(out.width, needs.minimum) if out.is_terminal else needs.maximum
    Console(file=out.file, width=width, highlight=False).print(table)


@app.command()
def compare(
    folder: Annotated[str, typer.Argument(help="A folder with ground_truth.json and jpg/, or a known dataset.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Recipes to compare, separated by commas.")],
    data: Annotated[Path, typer.Option(help="Folder below which known datasets lie.")] = Path("data"),
    images: Annotated[int, typer.Option(min=1, help="Pictures to time.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw mAP against time: a .png, .svg or .pdf file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the comparison as JSON.")] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes that decode; by default as the device needs.")] = None,
    cache: Annotated[Path, typer.Option(help="Where raw vectors are kept between runs.")] = Path(".cooc/bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Which recipe is best for these pictures, at which cost: mAP, ms for a picture, bytes for a picture."""
    from cooc.bench.compare import CompareOptions
    from cooc.bench.compare import compare as measure
    from cooc.bench.run import Options
    from cooc.datasets.retrieval import load_dataset
    from cooc.recipes import find_recipe

    recipes = [find_recipe(name) for name in recipe.split(",") if name]
    if not recipes:
        raise InputError("Name at least one recipe; `cooc recipes` lists them.")
    options = Options(
        device=device,
        dtype=dtype,
        workers=workers,
        cache=cache,
        expansions=("none",),
        progress=lambda what, done, total: err.print(f"{what}: {done} of {total}", markup=False),
    )
    found = measure(load_dataset(folder, data), recipes, CompareOptions(options, images))
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
    shown = Table("recipe", "dim", "mAP", "95% interval", "ms", "of it network", "bytes", "beaten by", title=title)
    for row in found["recipes"]:
        low, high = row["interval"]
        share = f"{row['network_ms']:.1f} ({100 * row['network_ms'] / row['ms']:.0f}%)"
        cells = (f"{row['mAP']:.1f}", f"{low:.1f} to {high:.1f}", f"{row['ms']:.1f}", share, f"{row['bytes']:,}")
        shown.add_row(row["recipe"], str(row["dim"]), *cells, row["beaten_by"] or "-")
    show_table(shown)
