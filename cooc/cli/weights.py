"""Commands: weights list | fetch | verify | export | import. `cooc/weights/` does the work and knows the sources;
whole descriptors are cooc/artefacts.py's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Table

from cooc.cli import app, err, options, out
from cooc.errors import WeightsError

weights = typer.Typer(no_args_is_help=True, help="The networks' weights: fetch them, check them, carry them around.")
app.add_typer(weights, name="weights")


@weights.command("list")
def list_(as_json: options.Json = False) -> None:
    """Show the known sets, which of them are here, and where."""
    from cooc.weights import weights_home, weights_status

    found = weights_status()
    if as_json:
        typer.echo(json.dumps([vars(one) | {"path": str(one.path)} for one in found]))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("set", "here", "MB", "hash", "licence"):
        table.add_column(title, justify="right" if title == "MB" else "left")
    for one in found:
        megabytes = f"{one.bytes / 1e6:.1f}" if one.present else ""
        table.add_row(one.name, "yes" if one.present else "no", megabytes, (one.hash or "")[:12], one.licence)
    out.print(table, soft_wrap=False)
    out.print(f"in {weights_home()}", markup=False)


@weights.command()
def fetch(name: Annotated[str, typer.Argument(metavar="NAME|all", help="A set, all of them, or timm:MODEL.")]) -> None:
    """Bring a set into the cache, from the first of its sources that works, and check it."""
    from cooc.weights import WEIGHTS, fetch_weights

    failures: list[WeightsError] = []
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    for one in WEIGHTS if name == "all" else [name]:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
            task = bar.add_task(one, total=None)

            def show(what: str, done: int, total: int, bar: Progress = bar, task: int = task) -> None:
                bar.update(task, description=what, completed=done, total=total or None)  # type: ignore[arg-type]

            try:
                path = fetch_weights(one, progress=show)
            except WeightsError as error:
                failures.append(error)
                continue
        out.print(f"{one}: {path}", markup=False)
    if failures:
        raise WeightsError("\n".join(map(str, failures)))


@weights.command()
def verify(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A set; without it, all that are here.")] = "",
) -> None:
    """Read cached sets in full and compare them with their known hashes."""
    from cooc.weights import verify_weights, weights_status

    failures: list[WeightsError] = []
    names = [name] if name else [one.name for one in weights_status() if one.present]
    for one in names:
        try:
            verify_weights(one)
        except WeightsError as error:
            failures.append(error)
        else:
            out.print(f"{one}: good", markup=False)
    if failures:
        raise WeightsError("\n".join(map(str, failures)))
    if not names:
        out.print("There are no weights here yet: `cooc weights fetch NAME` brings them.")


@weights.command()
def export(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A set from `cooc weights list`, timm:MODEL, a recipe, or a folder.")
    ],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A file or folder; of a recipe a folder, or FILE.onnx.")],
) -> None:
    """Copy a set of weights, or a whole descriptor, to be carried to a machine without a connection.

    A recipe, or the folder of one that `cooc train` wrote, becomes one folder with network, filter, whitening and
    settings. As FILE.onnx it is the whole chain, pictures to vectors, for programs without PyTorch.
    """
    from cooc.artefacts import export_artefact
    from cooc.weights import WEIGHTS, export_weights

    if name in WEIGHTS or name.startswith("timm:"):
        out.print(str(export_weights(name, dest)), markup=False)
    elif dest.suffix == ".onnx":
        from cooc.descriptor import Descriptor

        Descriptor.from_pretrained(name, device="cpu", dtype="float32").export_onnx(dest)
        out.print(str(dest), markup=False)
    else:
        out.print(str(export_artefact(name, dest)), markup=False)


@weights.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="From `cooc weights export`; an official .pth; or a source's archive."),
    ],
    name: Annotated[
        str | None, typer.Option(help="The set it must be, or the descriptor's name. [default: its own]")
    ] = None,
) -> None:
    """Check a file, or the folder of a descriptor, and keep it: weights in the cache, a descriptor under its name."""
    from cooc.artefacts import import_artefact
    from cooc.recipes import ARTEFACT
    from cooc.weights import import_weights

    if (file / ARTEFACT).is_file():
        out.print(f"{import_artefact(file, name)}: a recipe now, imported from {file}", markup=False)
    else:
        out.print(f"{import_weights(file, name)}: imported from {file}", markup=False)
