"""`cooc bench store`: what a store of any engine costs, for as many vectors as one likes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands.index import ResultsOption, _show, _write
from cooc.cli import err


def bench_store(
    index: Annotated[
        str, typer.Option("--index", metavar="INDEX", help="Where to make it: there must be none. [default: a folder]")
    ] = "",
    count: Annotated[int, typer.Option(min=1000, help="Vectors.")] = 100_000,
    dim: Annotated[int, typer.Option(min=2, help="Numbers in each.")] = 512,
    k: Annotated[int, typer.Option("-k", min=1, help="Results of a query.")] = 100,
    place: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For the vectors meanwhile.")] = None,
    pid: Annotated[int | None, typer.Option(help="Of the server, if it runs here: to tell its memory.")] = None,
    seed: Annotated[int, typer.Option(help="Of the synthetic vectors.")] = 0,
    exact: Annotated[bool, typer.Option(help="Search exactly, too: minutes for a query in a large Milvus.")] = True,
    results: ResultsOption = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Synthetic vectors in a store of any engine: time to load, latency, recall, with and without filters."""
    from benchmarks.stores import measure_store
    from cooc.index import without_password
    from cooc.provenance import provenance

    with err.status("Measuring ...") as status, tempfile.TemporaryDirectory(dir=place) as folder:
        address = index or f"{folder}/index"
        found = measure_store(address, Path(folder), count, dim, k, seed, pid, exact, status.update)
    found |= provenance("cpu")
    found["command"] = found["command"].replace(index, without_password(index)) if index else found["command"]
    _write(found, results / f"scale-{found['engine']}{'-1m' if count >= 1_000_000 else ''}.json")
    _show(found, as_json)
