"""Commands: filter show | compress | import."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from cooc.cli import app, err, options, out

if TYPE_CHECKING:
    from cooc.cooccurrence import Cooccurrence

filter_app = typer.Typer(no_args_is_help=True, help="Learned filters: look at them, make them small, import them.")
app.add_typer(filter_app, name="filter")

FilterFile = Annotated[Path, typer.Argument(metavar="FILTER", help="A .safetensors or .npy filter.")]
Storage = Literal["float32", "float16"]
DEFAULT_RANK = 32


@filter_app.command("show")
def show(
    file: FilterFile,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.png", help="Draw it there.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Pairs of channels to list.")] = 8,
    as_json: options.Json = False,
) -> None:
    """What a filter learned: the pairs of channels that changed most; and a drawing of them."""
    from cooc.bench.plot import plot_filter, save
    from cooc.cooccurrence import Cooccurrence
    from cooc.filter_files import about_filter
    from cooc.training.filters import strongest

    layer = Cooccurrence.load(file)
    pairs = strongest(layer, count)
    about = {"file": str(file), **_facts(layer, file), "about": about_filter(file)}
    if as_json:
        typer.echo(json.dumps(about | {"strongest": pairs}))
    else:
        table = Table("channel", "with channel", "change", box=None, pad_edge=False)
        for k, w, change in pairs:
            table.add_row(str(k), str(w), f"{change:.4g}")
        out.print(", ".join(f"{name} {value}" for name, value in about.items() if name != "about"), markup=False)
        out.print(table)
    if output is not None:
        save(lambda: plot_filter(layer), output)
        err.print(f"Drawn: {output}")


@filter_app.command("compress")
def compress(
    file: FilterFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.safetensors", help="Where it goes.")],
    rank: Annotated[
        int, typer.Option(min=1, help="Rank that is kept of the change to the direct filter.")
    ] = DEFAULT_RANK,
    storage: Annotated[Storage, typer.Option(help="float16 takes half the space.")] = "float16",
    on: Annotated[str, typer.Option(metavar="DATASET", help="Also measure both filters' mAP on this data set.")] = "",
    data: Annotated[Path, typer.Option(help="Folder below which data sets lie.")] = Path("data"),
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="For the mAP.")] = "paper-bilinear",
    whiten: Annotated[Path | None, typer.Option(help="Pictures to fit a whitening on, for the mAP.")] = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Keep the direct filter plus a low rank: smaller, and faster by the same factor."""
    from cooc.cooccurrence import Cooccurrence
    from cooc.filter_files import about_filter
    from cooc.training import filters

    layer = Cooccurrence.load(file)
    about = about_filter(file) | {"compressed": {"from": file.name, "rank": rank}}
    filters.compress(layer, rank).save(output, storage=storage, about=about)
    written = Cooccurrence.load(output)
    rows = [{"file": str(file), **_facts(layer, file), "error": 0.0}]
    rows.append({"file": str(output), **_facts(written, output), "error": filters.error(written, layer)})
    if on:
        scores = _scores([file, output], on, data, recipe, whiten, device)
        rows = [row | score for row, score in zip(rows, scores, strict=True)]
    _print_rows(rows, as_json)


@filter_app.command("import")
def import_(
    file: FilterFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.safetensors", help="Where it goes.")],
    rank: Annotated[int, typer.Option(min=0, help="Compress it to this rank; 0 keeps it whole.")] = 0,
    storage: Annotated[Storage, typer.Option(help="float16 takes half the space.")] = "float32",
    as_json: options.Json = False,
) -> None:
    """Take over a filter (C, C, S, S), as the authors of the paper publish theirs."""
    from cooc.cooccurrence import Cooccurrence
    from cooc.training import filters

    layer, factor = filters.import_filter(file)
    small = filters.compress(layer, rank) if rank else layer
    small.save(output, storage=storage, about={"imported": file.name, "factor": factor})
    written = Cooccurrence.load(output)
    row = {"file": str(output), **_facts(written, output), "error": filters.error(written, layer), "factor": factor}
    _print_rows([row], as_json)


def _facts(layer: Cooccurrence, file: Path) -> dict[str, Any]:
    shape = layer.weight.shape if layer.form == "learned" else layer.right.shape
    facts: dict[str, Any] = {"form": layer.form, "channels": shape[1], "side": shape[2]}
    if layer.form == "factored":
        facts["rank"] = shape[0]
    return facts | {"MB": round(file.stat().st_size / 1e6, 3)}


def _scores(
    files: list[Path], dataset: str, data: Path, recipe: str, whiten: Path | None, device: str
) -> list[dict[str, float]]:
    """mAP of the recipe with each of the filters."""
    from cooc.bench.describing import BenchOptions
    from cooc.bench.run import run
    from cooc.datasets.retrieval import image_set, load_dataset
    from cooc.recipes import Recipe, find_recipe

    config = find_recipe(recipe).config
    if whiten is None:
        config = config.replace(whitening="", dim=0)
    learned = [config.replace(cooccurrence="learned", filter=str(file)) for file in files]
    recipes = [Recipe(file.stem, one, "a filter compared") for file, one in zip(files, learned, strict=True)]
    with tempfile.TemporaryDirectory() as cache:
        settings = BenchOptions(
            device=device,
            cache=Path(cache),
            expansions=("none",),
            whitening_set=tuple(image_set(whiten)) if whiten else (),
            whitening_name=whiten.name if whiten else "",
            progress=lambda what, done, total: err.print(f"{what}: {done} of {total}"),
        )
        found = run(load_dataset(dataset, data), recipes, settings)
    return [{name: score["mAP"] for name, score in result["results"]["none"].items()} for result in found]


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    out.print(table, soft_wrap=False, crop=False)
