"""`python -m benchmarks serve`: a server on this machine under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cooc.cli import err, options, out


def bench_serve(
    images: Annotated[int, typer.Option(min=100, help="Made-up vectors in the index.")] = 100_000,
    index: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Instead: an index, as `cooc bench search --keep` makes one.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 50,
    seconds: Annotated[float, typer.Option(min=1, help="Of the mixture.")] = 60,
    uploads: Annotated[float, typer.Option(min=0, max=1, help="The part of requests that are uploads.")] = 0.1,
    recipe: options.Recipe = "paper-linear+size=256",
    device: options.Device = "auto",
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where serving-SIZE.json goes.")] = Path("results"),
    as_json: options.Json = False,
) -> None:
    """Measure a server on this machine: the engine alone, search by id over HTTP, and a mixture with uploads."""
    from benchmarks.serving import Options, run_serving, write_serving

    with err.status("Measuring ...") as shown:
        options = Options(
            images=images,
            index=index,
            recipe=recipe,
            clients=clients,
            seconds=seconds,
            uploads=uploads,
            device=device,
            progress=lambda what: shown.update(f"Measuring {what} ..."),
        )
        result = run_serving(options)
    path = write_serving(result, results)
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table("", "per second", "p50 ms", "p99 ms", "answers", box=None, pad_edge=False)
    table.add_row("engine alone", f"{result['engine']['searches/s']:.0f}", "", "", "")
    for name, one in result["routes"].items():
        answers = ", ".join(f"{count} x {code}" for code, count in one["codes"].items())
        table.add_row(name, "", f"{one['p50 ms']:.1f}", f"{one['p99 ms']:.1f}", answers)
    for name in ("by id", "mixed"):
        load = result[name]
        kinds = [load[kind] for kind in ("id", "upload") if kind in load]
        cells = [" / ".join(f"{kind[q]:.0f}" for kind in kinds) for q in ("p50 ms", "p99 ms")]
        codes = ", ".join(f"{count} x {code}" for code, count in load["codes"].items())
        table.add_row(name, f"{load['requests/s']:.0f}", *cells, codes)
    out.print(table)
    memory = [megabytes for megabytes in result["server MB during the mixture"] if megabytes]
    held = f" The server held {memory[0]:.0f} MB at first, {memory[-1]:.0f} MB in the end." if memory else ""
    out.print(f"By id, {result['by id over engine']:.0%} of the engine's rate.{held}", markup=False)
    err.print(f"Written: {path}")
