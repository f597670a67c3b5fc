"""Commands that make and keep an index: index, add, remove, tag, status, verify, compact, export, import, calibrate."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from cooc.cli import app, err, out
from cooc.cli.describing import DEFAULT, DeviceOption, JsonOption, WorkersOption
from cooc.errors import PARTIAL, InputError, StoreMissingError, UnknownNameError

if TYPE_CHECKING:
    from cooc.image_search import ImageSearch
    from cooc.index.sync import Engine, Report

NAME = ".cooc"
ENGINES = ("here", "ray")
SAID = 10  # bad files that are named at the end of a run; `cooc status --bad` names all
EVENT_SECONDS = 1.0  # between two lines of --json
TIDY = 0.1  # share of the index that changed, from which it is compacted after a run

IndexOption = Annotated[
    str,
    typer.Option(
        "--index",
        metavar="INDEX",
        help="A folder, postgresql://... or milvus://... [default: $COOC_INDEX, or the nearest folder .cooc]",
    ),
]


def find_index(given: str) -> str:
    """The index that a command means: named, or in this folder, or in the nearest one above it."""
    if named := given or os.environ.get("COOC_INDEX", ""):
        return named
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / NAME / "index.sqlite").is_file():
            return str(folder / NAME)
    raise StoreMissingError(
        f"There is no index in {str(here)!r} or above it. Name one with --index or COOC_INDEX, or make one: "
        "cooc index FOLDER"
    )


@app.command()
def index(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="FOLDER|URL", help="Pictures: folders, s3://BUCKET/PREFIX, tar+FOLDER with tars."),
    ],
    index: Annotated[
        str,
        typer.Option(
            "--index",
            metavar="INDEX",
            help="A folder, postgresql://user@host/db?index=NAME or milvus://host/NAME. [default: FOLDER/.cooc]",
        ),
    ] = "",
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help=f"For a new index: see `cooc recipes`. [default: {DEFAULT}]")
    ] = "",
    root: Annotated[
        str, typer.Option(metavar="FOLDER|URL", help="For a new index: all its pictures lie below. [default: FOLDER]")
    ] = "",
    storage: Annotated[str, typer.Option(help="For a new index: vectors as float32, float16, int8, int4 or pq.")] = "",
    device: DeviceOption = "auto",
    workers: WorkersOption = None,
    engine: Annotated[str, typer.Option(help="What describes: here, or ray for a cluster of machines.")] = "here",
    address: Annotated[
        str, typer.Option(help="Of the Ray cluster. [default: $RAY_ADDRESS, or one that is started on this machine]")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Follow symbolic links.")] = False,
    keep_missing: Annotated[bool, typer.Option("--keep-missing", help="Keep what is no longer on disk.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but problems.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each event.")] = False,
) -> None:
    """Index folders of pictures, or bring their index up to date.

    Only new and changed pictures are described. Stop it when you like, and run it again: it goes on where it was.
    """
    from cooc.activations import resolve_device
    from cooc.pictures import is_url
    from cooc.pictures.malloc import keep_maps

    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES)
    for folder in folders:
        if not is_url(folder) and not Path(folder).is_dir() and not folder.endswith(".tar"):
            raise InputError(f"{folder!r} is not a folder. For single pictures: cooc add FILE --index INDEX")
    if not index and len(folders) > 1:
        raise InputError("Several folders need --index INDEX, where their common index is kept.")
    pictures = root or _common(folders)
    if not index and is_url(pictures):
        raise InputError(f"Pictures in {pictures} need --index INDEX: a folder of this machine, or a server.")
    where = index or str(Path(folders[0]) / NAME)
    with _open_or_create(where, recipe, pictures, device, storage) as search:
        if search.config.depthwise and resolve_device(device).type == "cpu":
            keep_maps()
        with _progress(quiet, as_json) as progress:
            report = search.index(
                folders,
                workers=workers,
                engine=_on_ray(search, address, workers, device) if engine == "ray" else None,
                keep_missing=keep_missing,
                follow=follow,
                progress=progress,
            )
        if not report.interrupted and report.described + report.removed > TIDY * len(search.store):
            search.store.compact()
        _finish(search, report, quiet, as_json)


@app.command()
def add(
    files: Annotated[list[str], typer.Argument(metavar="FILE|URL", help="Pictures.")],
    index: IndexOption = "",
    device: DeviceOption = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but problems.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each event.")] = False,
) -> None:
    """Add single pictures to an index, or describe them again if they changed."""
    from cooc.image_search import ImageSearch

    for file in files:
        if Path(file).is_dir():
            raise InputError(f"{file!r} is a folder: cooc index {file}")
    with ImageSearch.open(find_index(index), write=True, device=device) as search:
        with _progress(quiet, as_json) as progress:
            report = search.add(files, progress=progress)
        _finish(search, report, quiet, as_json)


@app.command()
def remove(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Pictures or folders.")], index: IndexOption = ""
) -> None:
    """Take pictures out of an index. The files stay; a later `cooc index` adds those that still exist."""
    from cooc.image_search import ImageSearch

    with ImageSearch.open(find_index(index), write=True) as search:
        count = search.remove(paths)
    if not count:
        raise InputError("None of these is in the index: `cooc status` shows its root.")
    out.print(f"{count} pictures removed from the index.")


@app.command()
def tag(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Pictures or folders of the index.")],
    add: Annotated[list[str] | None, typer.Option("--add", "-a", metavar="TAG", help="May be repeated.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", "-d", metavar="TAG", help="May be repeated.")] = None,
    index: IndexOption = "",
) -> None:
    """Give tags to pictures, or take them away, for `cooc search --tag`. Without --add or --remove, show the tags."""
    from cooc.cli.showing import shown
    from cooc.image_search import ImageSearch

    change = bool(add or remove)
    with ImageSearch.open(find_index(index), write=change) as search:
        if change:
            out.print(f"{search.tag(paths, add=add or (), remove=remove or ())} pictures tagged.")
            return
        for record in search.records(paths):
            out.print(f"{shown(record.path)}: {', '.join(sorted(record.tags)) or '-'}", markup=False)


@app.command()
def status(
    index: IndexOption = "",
    bad: Annotated[bool, typer.Option("--bad", help="List the files that were left out, and why.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What an index holds."""
    from cooc.cli.showing import shown
    from cooc.image_search import ImageSearch

    with ImageSearch.open(find_index(index)) as search:
        if bad:
            for file in search.store.bad_files():
                line = json.dumps({"path": file.path, "reason": file.reason})
                typer.echo(line) if as_json else out.print(f"{shown(file.path)}: {shown(file.reason)}", markup=False)
            return
        found = search.status()
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("index", shown(found.index))
    table.add_row("root", shown(found.root))
    table.add_row("pictures", f"{found.images:,}")
    table.add_row("left out", f"{found.bad:,}" + ("  (cooc status --bad says why)" if found.bad else ""))
    table.add_row("recipe", f"{found.recipe}, {found.dim} numbers")
    table.add_row("match probability", "yes" if found.calibrated else "no: this recipe is not calibrated")
    if found.bytes is not None:
        table.add_row("on disk", f"{found.bytes / 1e6:,.1f} MB")
    table.add_row("made", f"{found.created} by cooc {found.cooc_version}")
    out.print(table, soft_wrap=False, crop=False)


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


@app.command()
def calibrate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With ground_truth.json and jpg/.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="One or more recipes, separated by commas.")] = DEFAULT,
    vectors: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="RECIPE.npz with arrays database and queries, made before.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.json", help="The curves; others in it are kept.")
    ] = Path("cooc/data/calibration.json"),
    results: Annotated[Path, typer.Option(help="Folder for the calibration curves.")] = Path("results"),
    device: DeviceOption = "auto",
    workers: WorkersOption = None,
    cache: Annotated[Path, typer.Option(help="Where raw vectors are kept between runs.")] = Path(".cooc/bench"),
) -> None:
    """Fit the match probability of recipes on labelled queries: half to fit, half to test."""
    from cooc.bench.calibrating import calibrate_recipe, write_curve
    from cooc.bench.run import Options
    from cooc.datasets.retrieval import load_dataset
    from cooc.recipes import find_recipe

    dataset = load_dataset(str(folder), folder.parent)
    options = Options(device=device, workers=workers, cache=cache)
    table = Table("space", "Brier", "base rate", "ECE", "no match: said rightly", "wrongly")
    for name in recipe.split(","):
        report = calibrate_recipe(dataset, find_recipe(name), options, vectors)
        write_curve(report, output, results)
        test, no_match = report["test"], report["no match"]
        shares = (f"{100 * no_match[key]:.0f}%" for key in ("said rightly", "said wrongly"))
        numbers = (f"{test[key]:.3f}" for key in ("brier", "brier of the base rate", "ece"))
        table.add_row(report["space"], *numbers, *shares)
    out.print(table)


def _common(folders: list[str]) -> str:
    """The root of a new index: the folder that holds all of these. Single tars lie in one, too."""
    from cooc.pictures import is_url

    tars = [folder.endswith(".tar") for folder in folders]
    places = [
        folder.rpartition("/")[0] or "." if tar else folder.rstrip("/")
        for folder, tar in zip(folders, tars, strict=True)
    ]
    mark = "tar+" if any(tars) and not places[0].startswith("tar+") else ""
    if not any(map(is_url, places)):
        return mark + os.path.commonpath([os.path.abspath(place) for place in places])  # noqa: PTH100
    if len(set(places)) > 1:
        raise InputError("Several addresses need --root URL: what they have in common, and all pictures lie below.")
    return mark + places[0]


def _on_ray(search: ImageSearch, address: str, workers: int | None, device: str) -> Engine:
    from cooc.descriptor import Descriptor
    from cooc.index.ray import OnRay

    config = search.config

    def build(device: str, threads: int) -> Descriptor:
        import torch

        torch.set_num_threads(threads)
        return Descriptor(config, device=device)

    return OnRay(build, search.meta.weights_hash, address=address, workers=workers, device=device)


def _open_or_create(where: str, recipe: str, root: str, device: str, storage: str) -> ImageSearch:
    from cooc.image_search import ImageSearch

    try:
        search = ImageSearch.open(where, write=True, recipe=recipe or None, device=device)
    except StoreMissingError:
        chosen = storage or "float32"
        return ImageSearch.create(where, recipe=recipe or DEFAULT, root=root, storage=chosen, device=device)
    if storage not in ("", search.meta.storage):
        search.close()
        raise InputError(
            f"The index {search.index_name} keeps vectors as {search.meta.storage}: for {storage} build another one."
        )
    return search


@contextmanager
def _progress(quiet: bool, as_json: bool) -> Iterator[Any]:
    """What to call with a report as it grows: a bar, lines of JSON, or nothing."""
    if as_json:
        last = 0.0

        def line(report: Report) -> None:
            nonlocal last
            if time.monotonic() - last >= EVENT_SECONDS:
                last = time.monotonic()
                typer.echo(json.dumps({"event": "progress", **asdict(report)}))

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task("indexing", total=None, rate="")

        def show(report: Report) -> None:
            rate = f"{report.described / report.seconds:.1f} described/s" if report.seconds else ""
            bad = f", {report.bad} bad" if report.bad else ""
            bar.update(task, completed=report.done, total=report.total, rate=rate + bad)

        yield show


def _finish(search: ImageSearch, report: Report, quiet: bool, as_json: bool) -> None:
    """Say what was done. Exit code: 130 interrupted, 3 something left out, else 0."""
    from cooc.cli.showing import shown

    bad = search.store.bad_files() if report.bad else iter(())
    if as_json:
        for file in bad:
            typer.echo(json.dumps({"event": "bad", "path": file.path, "reason": file.reason}))
        typer.echo(json.dumps({"event": "done", **asdict(report), "images": len(search.store)}))
    else:
        for number, file in enumerate(bad):
            if number == SAID:
                err.print("... and more: cooc status --bad", style="yellow")
                break
            err.print(f"left out: {shown(file.path)}: {shown(file.reason)}", style="yellow", markup=False)
        for note in report.notes:
            err.print(note, style="yellow", markup=False)
        if not quiet:
            kinds = ("described", "copied", "moved", "unchanged", "removed", "bad")
            done = ", ".join(f"{getattr(report, kind)} {kind}" for kind in kinds if getattr(report, kind))
            what = "Interrupted; run it again to go on. " if report.interrupted else ""
            out.print(f"{what}{done or 'No pictures'} in {report.seconds:.1f} s; {len(search.store)} in the index.")
    if report.interrupted:
        raise typer.Exit(130)
    if report.bad or report.notes:
        raise typer.Exit(PARTIAL)
