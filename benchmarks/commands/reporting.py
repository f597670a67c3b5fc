"""`python -m benchmarks tables` and `figures`: what results/ holds, for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from benchmarks.commands.index import ResultsOption
from cooc.cli import err, options, out
from cooc.cli.reporting import show_table
from cooc.errors import PARTIAL, CoocError

if TYPE_CHECKING:
    from benchmarks.results import Table as ResultTable


def tables(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; all by default.")] = None,
    results: ResultsOption = Path("results"),
    write: Annotated[
        bool, typer.Option("--write", help="Renew the tables in README.md and docs/, and the constants of `cooc plan`.")
    ] = False,
    root: Annotated[Path, typer.Option(help="The folder of README.md, docs/ and cooc/.")] = Path(),
) -> None:
    """The tables of the documents, from results/: what was measured, beside what the paper published."""
    from benchmarks import planning, report
    from benchmarks.results import load_results

    found = load_results(results)
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


def _print(table: ResultTable) -> None:
    if not table.rows:
        out.print(f"{table.title}: not measured\n", markup=False)
        return
    shown = Table(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    for i, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if i > 1 else "left")
    for row in table.rows:
        shown.add_row(*row)
    show_table(shown)
    for source in table.sources:
        out.print(f"  {source}", markup=False)
    out.print()


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
    device: options.Device = "auto",
) -> None:
    """Draw the paper's figures: correlation, spatial, filters, learned-maps, precision-recall, best-worst.

    And growth and qualities, of what was measured.

    Without a name all are drawn; those whose material is missing are left out and reported (exit code 3).
    """
    from benchmarks.figures import FIGURES, Inputs, draw

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
