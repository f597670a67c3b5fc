"""`cooc bench index` and `cooc bench search`: how fast and how safe an index is."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cooc.cli import err, options, out
from cooc.files import write_whole

ResultsOption = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the result file goes.")]


def bench_index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Pictures to index, in a temporary index.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A name from `cooc recipes`.")] = options.DEFAULT,
    device: options.Device = "auto",
    workers: options.Workers = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is measured.")] = 3,
    kills: Annotated[int, typer.Option(min=0, help="Instead: kill -9 at so many random moments.")] = 0,
    seed: Annotated[int, typer.Option(help="Of those moments.")] = 0,
    ranking: Annotated[
        bool, typer.Option("--ranking", help="Instead: of a labelled set, compare all rankings with a matrix product.")
    ] = False,
    cache: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Of the vectors for that, as `cooc bench` keeps them.")
    ] = Path(".cooc/bench"),
    results: ResultsOption = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Indexing against the bare network on the same pictures; or what kill -9 does to an index, or how it ranks."""
    from benchmarks.agreement import compare_rankings
    from benchmarks.indexing import kill_and_resume, measure_throughput, open_or_create
    from cooc.bench.describing import BenchOptions
    from cooc.pictures.malloc import keep_maps
    from cooc.provenance import provenance
    from cooc.recipes import find_recipe

    if find_recipe(recipe).config.depthwise:  # as `cooc index` does
        keep_maps()
    with err.status("Measuring ..."):
        if ranking:
            name, found = (
                "ranking",
                compare_rankings(folder, recipe, BenchOptions(device, workers=workers, cache=cache)),
            )
        elif kills:
            name, opening = "kills", functools.partial(open_or_create, recipe=recipe, device=device)
            found = kill_and_resume(folder, opening, kills, seed, commit_images=1)
        else:
            name, found = "index", measure_throughput(folder, recipe, device, workers, rounds)
    found |= provenance(device)
    kind = "cuda" if found["machine"]["accelerator"] else "cpu"
    _write(found, results / f"{name}-{kind}.json")
    _show(found, as_json)
    if found.get("problems") or found.get("out of place, beyond rounding"):
        raise typer.Exit(5)


def bench_search(
    count: Annotated[int, typer.Option(min=1000, help="Vectors.")] = 100_000,
    dim: Annotated[int, typer.Option(min=2, help="Numbers in each.")] = 512,
    k: Annotated[int, typer.Option("-k", min=1, help="Results of a query.")] = 100,
    peers: Annotated[
        str, typer.Option(metavar="NAMES", help="Libraries whose graphs are built as well, which takes long; or none.")
    ] = "faiss,hnswlib",
    place: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For the temporary index.")] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Instead: for an index that is kept, and used again by the next run."),
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Of the kept index, for `cooc bench serve`.")] = "",
    seed: Annotated[int, typer.Option(help="Of the synthetic vectors.")] = 0,
    results: ResultsOption = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Search in synthetic vectors: exact against faiss's flat index, approximate against HNSW at equal recall."""
    from benchmarks.search import measure_search
    from cooc.provenance import provenance

    libraries = [] if peers == "none" else peers.split(",")
    with err.status("Measuring ...") as status, tempfile.TemporaryDirectory(dir=place) as folder:
        found = measure_search(keep or Path(folder), count, dim, k, libraries, seed, recipe, status.update)
    found |= provenance("cpu")
    size = f"{count // 1_000_000}m" if count % 1_000_000 == 0 else f"{count // 1000}k"
    _write(found, results / f"search-{size}.json")
    _show(found, as_json)


def _write(found: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(found, indent=1) + "\n")
    err.print(f"Written: {file}", markup=False)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in found.items():
        if name in ("rounds", "versions", "machine", "command", "commit", "date"):
            continue
        for part, number in value.items() if isinstance(value, dict) else (("", value),):
            shown = f"{number:.4g}" if isinstance(number, float) else str(number)
            table.add_row(f"{name}: {part}" if part else name, shown)
    out.print(table, soft_wrap=False, crop=False)
