"""`cooc bench scale`: indexing by Ray against the plain loop."""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands.index import ResultsOption, _show, _write
from cooc.cli import err

LIGHT = "paper-linear+backbone=efficientnet-lite0+raw+size=96"


def bench_scale(
    count: Annotated[int, typer.Option(min=10, help="Pictures, made for this, that both engines index.")] = 20_000,
    sample: Annotated[int, typer.Option(min=10, help="Pictures for the rates of one worker and of two.")] = 5_000,
    side: Annotated[int, typer.Option(min=32, help="Longest side of a picture, in pixels.")] = 96,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A name from `cooc recipes`.")] = LIGHT,
    place: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For pictures and indexes, temporarily.")] = None,
    results: ResultsOption = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Indexing by Ray against the plain loop: overhead, what a second worker brings, and whether the indexes agree."""
    from benchmarks.scaling import measure_scaling
    from cooc.provenance import provenance

    with err.status("Measuring ...") as status, tempfile.TemporaryDirectory(dir=place) as folder:
        found = measure_scaling(Path(folder), recipe, count, sample, side, status.update)
    found |= provenance("cpu")
    found["versions"]["ray"] = metadata.version("ray")
    _write(found, results / "scale-ray.json")
    _show(found, as_json)
    if found["problems"] or not found["same pictures in both indexes"]:
        raise typer.Exit(5)
