"""cooc bench, cooc data: numbers that reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from cooc.cli import app, err, options, out
from cooc.cli.reporting import compare, named_recipes, own_results, show_table
from cooc.errors import InputError, counted

MOVED = ("speed", "index", "search", "store", "serve", "scale", "engines", "compact", "growth")  # cooc's own costs


class DatasetOrCommand(typer.core.TyperGroup):
    """`cooc bench roxford5k ...` and `cooc bench compare ...`: what is no command is a dataset or a folder."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in MOVED and not Path(args[0]).is_dir():
            raise InputError(f"`cooc bench {args[0]}` measures cooc itself. In a clone: python -m benchmarks {args[0]}")
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["dataset", *args]
        return super().resolve_command(ctx, args)


bench = typer.Typer(
    cls=DatasetOrCommand,
    no_args_is_help=True,
    help="Measure on labelled pictures: mAP of recipes (cooc bench DATASET|FOLDER), or compare them with their cost.",
)
data = typer.Typer(no_args_is_help=True, help="Benchmark datasets: which, where they are published, what is missing.")
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
bench.command("compare")(compare)


@bench.command("dataset")
def bench_dataset(
    dataset: Annotated[str, typer.Argument(help="A known dataset, or a folder with ground_truth.json and jpg/.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="One or more recipes, separated by commas.")] = "",
    vectors: options.Vectors = None,
    rankings: options.Rankings = None,
    data: options.Data = Path("data"),
    whiten: Annotated[
        Path | None, typer.Option(help="Pictures to fit the whitening on; else the recipe's own.")
    ] = None,
    whiten_size: Annotated[int, typer.Option(help="Longest side of those pictures.")] = 640,
    whiten_shrinkage: Annotated[
        float, typer.Option(help="Share of the mean variance added to each: 0.01 allows more dimensions than pictures.")
    ] = 0.0,
    whiten_exponent: Annotated[float, typer.Option(help="0.5 whitens, less is softer.")] = 0.5,
    whiten_each_scale: Annotated[
        bool, typer.Option(help="With several scales, fit on the vectors of each: more samples.")
    ] = False,
    exclude: Annotated[list[str] | None, typer.Option(help="Labels (folders) of those pictures to leave out.")] = None,
    exclude_from: Annotated[
        Path | None, typer.Option(help="Leave out pictures that this dataset folder holds.")
    ] = None,
    save_whitening: Annotated[Path | None, typer.Option(help="Folder to keep the fitted whitenings in.")] = None,
    storage: Annotated[
        Literal["float32", "float16", "int8"], typer.Option(help="How the whitenings are kept.")
    ] = "float16",
    expand: Annotated[str, typer.Option(help="Expansions and re-rankings, by commas.")] = "none,average-10,alpha-10",
    verify: Annotated[
        str,
        typer.Option(
            metavar="ENGINES", help="Verify by geometry: sift, xfeat, activations, sift+xfeat; several by commas."
        ),
    ] = "",
    top: Annotated[
        int | None, typer.Option(min=1, help="Pictures verified in a round. [default: as a search does]")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    workers: options.Workers = None,
    cache: options.Cache = Path(".cooc/bench"),
    results: Annotated[Path, typer.Option(help="Folder for the result files.")] = Path("results"),
    as_json: options.Json = False,
) -> None:
    """mAP, recall@k and MRR of recipes, or of your own vectors or rankings, on a dataset; written to results/."""
    from cooc.bench.describing import BenchOptions
    from cooc.bench.run import run, save_whitenings
    from cooc.bench.scoring import write_result
    from cooc.datasets.retrieval import image_set, load_dataset
    from cooc.verification.rounds import TOP

    recipes = named_recipes(recipe, needed=not (vectors or rankings))
    loaded = load_dataset(dataset, data)
    fitting = image_set(whiten, exclude_labels=exclude or (), exclude_names_of=exclude_from) if whiten else []
    settings = BenchOptions(
        device=device,
        dtype=dtype,
        workers=workers,
        cache=cache,
        expansions=tuple(expand.split(",")),
        verify=tuple(filter(None, verify.split(","))),
        top=top or TOP,
        whitening_set=tuple(fitting),
        whitening_size=whiten_size,
        whitening_exponent=whiten_exponent,
        whitening_shrinkage=whiten_shrinkage,
        whitening_each_scale=whiten_each_scale,
        whitening_name=f"{whiten.name}, {counted(len(fitting), 'picture')}" if whiten else "",
        progress=lambda what, done, total: err.print(f"{what}: {done} of {total}"),
    )
    found = own_results(loaded, vectors, rankings, settings)
    if recipes:
        found += run(loaded, recipes, settings, keep=lambda fitted: save_whitenings(fitted, save_whitening, storage))
    files = [write_result(result, results) for result in found]
    if as_json:
        out.print_json(json.dumps(found))
        return
    columns = ("mAP", "mP@10", "recall@1", "recall@5", "recall@10", "MRR")
    table = Table("recipe", "dim", "expansion", "protocol", *columns, title=f"{loaded.name}, in percent")
    for result in found:
        for expansion, scores in result["results"].items():
            for protocol, score in scores.items():
                values = [score["mAP"], score["mP@k"]["10"], *score["recall@k"].values(), score["MRR"]]
                row = (result["recipe"], str(result["dim"] or "-"), expansion, protocol)
                table.add_row(*row, *(f"{value:.1f}" for value in values))
    show_table(table)
    err.print(f"Written: {', '.join(str(file) for file in files)}")


@data.command("list")
def data_list() -> None:
    """The datasets that cooc knows."""
    from cooc.datasets.published import DATASETS

    table = Table("name", "pictures", "queries", "protocols")
    for name, spec in DATASETS.items():
        table.add_row(name, str(spec.size or "-"), str(spec.queries or "-"), ", ".join(spec.protocols))
    out.print(table)


@data.command("check")
def data_check(
    dataset: Annotated[str, typer.Argument(help="A known dataset, or a folder with ground_truth.json.")],
    data: options.Data = Path("data"),
) -> None:
    """Is it complete? Names what is missing; exit code 6 if anything is."""
    from cooc.datasets.retrieval import check

    report = check(dataset, data)
    out.print(str(report), markup=False)
    if not report.complete:
        raise typer.Exit(6)


@data.command("where")
def data_where(dataset: Annotated[str, typer.Argument(help="A known dataset.")]) -> None:
    """Where it is published."""
    from cooc.datasets.retrieval import where

    out.print(where(dataset), markup=False)
