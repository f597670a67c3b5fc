"""Commands about what an index holds: remove, tag, status."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cooc.cli import app, options, out
from cooc.errors import InputError, counted

if TYPE_CHECKING:
    from cooc.image_search import Status


@app.command()
def remove(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Pictures or folders.")],
    index: options.Index = "",
) -> None:
    """Take pictures out of an index. The files stay; a later `cooc index` adds those that still exist."""
    with options.opened(index, write=True) as search:
        count = search.remove(paths)
    if not count:
        raise InputError("None of these is in the index: `cooc status` shows its root.")
    out.print(f"{counted(count, 'picture')} removed from the index.")


@app.command()
def tag(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Pictures or folders of the index.")],
    add: Annotated[list[str] | None, typer.Option("--add", "-a", metavar="TAG", help="May be repeated.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", "-d", metavar="TAG", help="May be repeated.")] = None,
    index: options.Index = "",
) -> None:
    """Give tags to pictures, or take them away, for `cooc search --tag`. Without --add or --remove, show the tags."""
    from cooc.cli.showing import shown

    change = bool(add or remove)
    with options.opened(index, write=change) as search:
        if change:
            out.print(f"{counted(search.tag(paths, add=add or (), remove=remove or ()), 'picture')} tagged.")
            return
        for record in search.records(paths):
            out.print(f"{shown(record.path)}: {', '.join(sorted(record.tags)) or '-'}", markup=False)


@app.command()
def status(
    index: options.Index = "",
    bad: Annotated[bool, typer.Option("--bad", help="List the bad files: why, and since when.")] = False,
    as_json: options.Json = False,
) -> None:
    """What an index holds."""
    from cooc.cli.showing import shown

    with options.opened(index) as search:
        if bad:
            for file in search.store.bad_files():
                if as_json:
                    typer.echo(json.dumps({"path": file.path, "reason": file.reason, "since": file.since}))
                else:
                    since = f" (since {_moment(file.since)})" if file.since else ""
                    out.print(f"{shown(file.path)}: {shown(file.reason)}{since}", markup=False)
            return
        found = search.status()
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("index", shown(found.index))
    table.add_row("root", shown(found.root))
    table.add_row("pictures", f"{found.images:,}")
    for folder, since in sorted(found.away.items()):
        table.add_row("away", f"{shown(folder) or 'all'}, since {_moment(since)}")
    table.add_row("left out", f"{found.bad:,}" + ("  (cooc status --bad says why)" if found.bad else ""))
    if found.failed:
        table.add_row("failed", f"{found.failed:,}  (the machine did; cooc index tries them again)")
    table.add_row("recipe", f"{found.recipe}, {found.dim} dimensions")
    table.add_row("features", _features(found))
    table.add_row("calibrated on", shown(found.calibration) if found.calibration else "nothing (cooc calibrate)")
    if found.bytes is not None:
        table.add_row("on disk", f"{found.bytes / 1e6:,.1f} MB")
    table.add_row("made", f"{found.created} by cooc {found.cooc_version}")
    out.print(table, soft_wrap=False, crop=False)


def _features(found: Status) -> str:
    if not found.features:
        return "none (cooc index FOLDER --verify sift)"
    without = found.images - found.with_features
    each = f", {found.feature_bytes / found.with_features / 1e3:.1f} kB a picture" if found.with_features else ""
    return f"{found.features}, {counted(found.with_features, 'picture')}{each}" + (
        f"; {without:,} without" if without else ""
    )


def _moment(text: str) -> str:
    """An ISO time as people read it: to the minute, and it is UTC."""
    return f"{text[:16].replace('T', ' ')} UTC"
