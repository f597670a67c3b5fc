"""Commands that look after an index: verify, compact, snapshot, restore, rebuild, export, import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cooc.cli import app, err, options, out
from cooc.cli.runs import finish
from cooc.errors import PARTIAL, counted


@app.command()
def verify(index: options.Index = "", as_json: options.Json = False) -> None:
    """Read a whole index and check it; exit code 5 if something is wrong."""
    with options.opened(index) as search:
        problems = search.store.verify()
        count = len(search.store)
    if as_json:
        typer.echo(json.dumps({"images": count, "problems": problems}))
    else:
        for problem in problems:
            err.print(problem, style="red", markup=False)
        out.print(f"{counted(len(problems), 'problem')}." if problems else f"All is well: {counted(count, 'picture')}.")
    if problems:
        raise typer.Exit(5)


@app.command()
def compact(index: options.Index = "") -> None:
    """Give back the space of removed pictures, and prepare fast search in a large index."""
    with options.opened(index, write=True) as search:
        before = search.status().bytes
        search.store.compact()
    with options.opened(index) as search:
        after = search.status().bytes
    if before is not None and after is not None:
        out.print(f"{before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now.")


@app.command()
def snapshot(
    index: Annotated[str, typer.Argument(metavar="INDEX", help="A folder, postgresql://... or milvus://...")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A folder that is not there yet.")],
) -> None:
    """Copy an index to a folder, as it is at this moment; others may go on using it."""
    from cooc.index import open_store

    with open_store(index) as store:
        store.snapshot(dest)
    with open_store(dest) as store:
        out.print(f"{counted(len(store), 'picture')}: {dest}", markup=False)


@app.command()
def restore(
    source: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="What `cooc snapshot` wrote.")],
    index: Annotated[str, typer.Argument(metavar="INDEX", help="A folder, or an address where there is none yet.")],
    root: Annotated[str, typer.Option(metavar="FOLDER|URL", help="On a server: where the pictures lie.")] = "",
) -> None:
    """Put a snapshot in the place of an index. Who reads it goes on with the new one; nobody may be writing."""
    from cooc.index import copying, without_password

    count = copying.restore(source, index, root=root or None)
    out.print(f"{counted(count, 'picture')} in {without_password(index)}.", markup=False)


@app.command()
def rebuild(
    index: options.Index = "",
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Another recipe. [default: that of the index]")] = "",
    storage: Annotated[str, typer.Option(help="Another storage: float32, float16, int8, int4 or pq.")] = "",
    verify: Annotated[
        str, typer.Option(metavar="ENGINES|none", help="Other local features, such as sift+xfeat, or none.")
    ] = "",
    to: Annotated[
        str, typer.Option(metavar="INDEX", help="Where the new index stays. [default: in the place of the old]")
    ] = "",
    device: options.Device = "auto",
    workers: options.Workers = None,
) -> None:
    """Describe all pictures of an index again, of a damaged one too; tags are kept. For another recipe, name it."""
    from cooc.image_search import ImageSearch, Report

    with err.status("describing") as shown:

        def progress(report: Report) -> None:
            shown.update(f"described {report.described}" + (f", left out {report.bad}" if report.bad else ""))

        report = ImageSearch.rebuild(
            options.find_index(index),
            to=to or None,
            recipe=recipe or None,
            storage=storage or None,
            features="" if verify == "none" else verify or None,
            device=device,
            workers=workers,
            progress=progress,
        )
    for note in report.notes:
        err.print(note, style="yellow", markup=False)
    done = "Interrupted; run it again to go on. " if report.interrupted else ""
    left_out = report.bad + report.failed
    out.print(f"{done}{counted(report.done - left_out, 'picture')} described, {left_out} left out.")
    if report.interrupted:
        raise typer.Exit(130)
    if left_out or report.notes:
        raise typer.Exit(PARTIAL)


@app.command()
def export(
    output: Annotated[Path, typer.Argument(metavar="FILE.npy|FILE.parquet", help="Where it goes.")],
    index: options.Index = "",
) -> None:
    """Write vectors and records to files: .npy with a .jsonl beside it, or .parquet."""
    from cooc.index.export import export_index

    with options.opened(index) as search:
        count = export_index(search.store, output)
        left = len(search.store) - count
    out.print(f"{counted(count, 'picture')}: {output}", markup=False)
    if left > 0:
        err.print(f"{left} left out: their vectors are damaged. The next `cooc index` describes them again.")
        raise typer.Exit(PARTIAL)


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="FILE.npy|FILE.parquet", help="What `cooc export` wrote, or vectors.")
    ],
    index: Annotated[
        str, typer.Option("--index", metavar="INDEX", help="An index, or where to make one: a folder or an address.")
    ],
    root: Annotated[str, typer.Option(help="For a new index: the folder of its pictures.")] = "",
    paths: Annotated[
        Path | None,
        typer.Option(metavar="FILE.txt", help="The pictures of FILE.npy, a line each: vectors of your own."),
    ] = None,
    name: Annotated[str, typer.Option(help="With --paths: what the vectors are called. [default: as FILE]")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="With --paths: one line of JSON for each event.")] = False,
) -> None:
    """Add the pictures of an exported index to another one, or make a new one of them.

    With --paths, FILE.npy holds vectors (N, D) of any method, and FILE.txt the picture of each, below the root. Then
    `cooc search` takes pictures of the index, `cooc duplicates` and the page work as ever, and `cooc index ROOT --index
    INDEX --verify sift` adds local features. Another version of a method is another name, and another index.
    """
    from cooc.image_search import ImageSearch

    if paths is not None:
        search, report = ImageSearch.import_vectors(source, paths, index, root=root or None, name=name or source.stem)
        with search:
            finish(search, report, False, as_json)
        return
    with ImageSearch.import_from(source, index, root=root or None) as search:
        out.print(f"{counted(len(search.store), 'picture')} in {search.index_name}.", markup=False)
