"""Commands that look after an index: verify, compact, export, import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cooc.cli import app, err, out
from cooc.cli.describing import JsonOption
from cooc.cli.indexing import IndexOption, find_index


@app.command()
def verify(index: IndexOption = "", as_json: JsonOption = False) -> None:
    """Read a whole index and check it; exit code 5 if something is wrong."""
    from cooc.image_search import ImageSearch

    with ImageSearch.open(find_index(index)) as search:
        problems = search.store.verify()
        count = len(search.store)
    if as_json:
        typer.echo(json.dumps({"images": count, "problems": problems}))
    else:
        for problem in problems:
            err.print(problem, style="red", markup=False)
        out.print(f"{len(problems)} problems." if problems else f"All is well: {count} pictures.")
    if problems:
        raise typer.Exit(5)


@app.command()
def compact(index: IndexOption = "") -> None:
    """Give back the space of removed pictures, and prepare fast search in a large index."""
    from cooc.image_search import ImageSearch

    with ImageSearch.open(find_index(index), write=True) as search:
        before = search.status().bytes
        search.store.compact()
    with ImageSearch.open(find_index(index)) as search:
        after = search.status().bytes
    if before is not None and after is not None:
        out.print(f"{before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now.")


@app.command()
def export(
    output: Annotated[Path, typer.Argument(metavar="FILE.npy|FILE.parquet", help="Where it goes.")],
    index: IndexOption = "",
) -> None:
    """Write vectors and records to files: .npy with a .jsonl beside it, or .parquet."""
    from cooc.image_search import ImageSearch
    from cooc.index.export import export_index

    with ImageSearch.open(find_index(index)) as search:
        count = export_index(search.store, output)
    out.print(f"{count} pictures: {output}", markup=False)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE.npy|FILE.parquet", help="What `cooc export` wrote.")],
    index: Annotated[
        str, typer.Option("--index", metavar="INDEX", help="An index, or where to make one: a folder or an address.")
    ],
    root: Annotated[str, typer.Option(help="For a new index: the folder of its pictures.")] = "",
) -> None:
    """Add the pictures of an exported index to another one, or make a new one of them."""
    from cooc.image_search import ImageSearch

    with ImageSearch.import_from(source, index, root=root or None) as search:
        out.print(f"{len(search.store)} pictures in {search.index_name}.", markup=False)
