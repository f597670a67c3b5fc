"""cooc tables, cooc figures, cooc bench compare: what results/ holds, for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cooc.cli import app, err, out
from cooc.errors import PARTIAL, CoocError, InputError

if TYPE_CHECKING:
    from cooc.benchmark import report

DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
ResultsOption = Annotated[Path, typer.Option(help="Folder of the result files.")]


@app.command()
def tables(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; all by default.")] = None,
    results: ResultsOption = Path("results"),
    write: Annotated[
        bool, typer.Option("--write", help="Renew the tables in README.md and docs/, and the constants of `cooc plan`.")
    ] = False,
    root: Annotated[Path, typer.Option(help="The folder of README.md, docs/ and cooc/.")] = Path(),
) -> None:
    """The paper's tables, row by row: its values, ours from results/, and the difference."""
    from cooc.benchmark import planning, report

    found = report.load_results(results)
    if write:
        constants = root / "cooc/data/planning.json"
        for path in (*report.documents(root), *([constants] if constants.is_file() else [])):
            text = path.read_text(encoding="utf-8")
            renewed = planning.text(found) if path == constants else report.rewrite(text, found, str(path))
            if renewed != text:
                path.write_text(renewed, encoding="utf-8")
            err.print(f"{path}: {'written' if renewed != text else 'up to date'}", markup=False)
        return
    for name in names or report.TABLES:
        _print(report.make(name, found))


def _print(table: report.Table) -> None:
    if not table.rows:
        out.print(f"{table.title}: not measured\n", markup=False)
        return
    shown = Table(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    for i, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if i > 1 else "left")
    for row in table.rows:
        shown.add_row(*row)
    _show(shown)
    for source in table.sources:
        out.print(f"  {source}", markup=False)
    out.print()


def _show(table: Table) -> None:
    """Cells are broken between words where the terminal is narrow, but a number is never cut off."""
    needs = Measurement.get(out, out.options.update(width=1000), table)
    width = max(out.width, needs.minimum) if out.is_terminal else needs.maximum
    Console(file=out.file, width=width, highlight=False).print(table)


@app.command()
def figures(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; all by default.")] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Folders below which the datasets lie. [default: data]")
    ] = None,
    dataset: Annotated[str, typer.Option(help="A dataset other than Oxford's.")] = "",
    images: Annotated[list[Path] | None, typer.Option(help="Pictures for the maps; else public-domain ones.")] = None,
    filter: Annotated[str, typer.Option(help="A learned filter: a file, or the name of one.")] = "landmarks",
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Recipes of the curves, separated by commas.")] = "",
    results: ResultsOption = Path("results"),
    out_folder: Annotated[Path, typer.Option("--out", help="Where the figures go.")] = Path("docs/images"),
    size: Annotated[int, typer.Option(help="Longest side of the pictures.")] = 512,
    device: DeviceOption = "auto",
) -> None:
    """Draw the paper's figures: correlation, spatial, filters, learned-maps, precision-recall, best-worst; and growth.

    Without a name all are drawn; those whose material is missing are left out and reported (exit code 3).
    """
    from cooc.benchmark.figures import FIGURES, Inputs, draw

    inputs = Inputs(
        data=tuple(data or [Path("data")]),
        dataset=dataset,
        images=tuple(images or ()),
        filter=filter,
        results=results,
        recipes=tuple(name for name in recipe.split(",") if name),
        size=size,
        device=device,
    )
    left_out = False
    for name in names or FIGURES:
        try:
            out.print(str(draw(name, inputs, out_folder)), markup=False)
        except CoocError as error:
            if names:
                raise
            left_out = True
            err.print(f"{name}: left out. {error}", markup=False)
    if left_out:
        raise typer.Exit(PARTIAL)


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
    from cooc.benchmark.compare import CompareOptions
    from cooc.benchmark.compare import compare as measure
    from cooc.benchmark.datasets import load_dataset
    from cooc.benchmark.run import Options
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
        from cooc.benchmark.figures import plot_comparison, save

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
    _show(shown)
