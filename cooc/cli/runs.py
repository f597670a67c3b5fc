"""How a run that fills an index is shown: a bar or lines of JSON meanwhile, then what was done, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from cooc.cli import err, out
from cooc.cli.bars import SECONDS, now_and_then
from cooc.cli.estimating import duration
from cooc.errors import PARTIAL, MachineError

if TYPE_CHECKING:
    from cooc.image_search import ImageSearch
    from cooc.index.report import Report


SAID = 10  # files that are named at the end of a run; `cooc status --bad` names all that are bad
EVENT_SECONDS = 1.0  # between two lines of --json
TRIM_SECONDS = 2.0  # after which memory that is free goes back to the system: after 50 photos 70 MB of 430


@contextmanager
def _progress(quiet: bool, as_json: bool) -> Iterator[Any]:
    """What to call with a report as it grows: a bar, lines of text or JSON, or nothing."""
    if as_json:

        def line(report: Report) -> None:
            typer.echo(json.dumps({"event": "progress", **report.as_dict()}))

        yield now_and_then(EVENT_SECONDS, line, at_once=True)
        return
    if not quiet and not err.is_terminal:
        yield now_and_then(SECONDS, _so_far)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=err, transient=True, disable=quiet) as bar:
        task = bar.add_task("indexing", total=None, rate="")

        yield lambda report: bar.update(task, completed=report.done, total=report.total, rate=_rate(report))


def _so_far(report: Report) -> None:
    total = f" of {report.total}" if report.total else ""
    err.print(f"indexing: {report.done}{total}, {_rate(report)}", markup=False)


def _rate(report: Report) -> str:
    rate = f"{report.described / report.seconds:.1f} described/s" if report.seconds else ""
    kinds = (report.completed, "given features"), (report.bad, "bad"), (report.failed, "failed")
    for count, kind in kinds:
        rate += f", {count} {kind}" if count else ""
    return rate if report.left is None else f"{rate}, {duration(report.left)} left"


@contextmanager
def running(search: ImageSearch, quiet: bool, as_json: bool) -> Iterator[Any]:
    """What to call with a report as it grows. Should this machine fail, what was done before is said, too."""
    from cooc.pictures.malloc import trim

    latest: list[Report] = []
    tidied = now_and_then(TRIM_SECONDS, trim)
    try:
        with _progress(quiet, as_json) as show:

            def watch(report: Report) -> None:
                latest[:] = [report]
                if not search.config.depthwise:  # such a network is faster with what it has freed: see there
                    tidied()
                show(report)

            yield watch
    except MachineError:
        for report in latest:
            say(search, report, quiet, as_json, "stopped")
        raise


def finish(search: ImageSearch, report: Report, quiet: bool, as_json: bool) -> None:
    """Say what was done. Exit code: 130 interrupted, 3 something left out, else 0."""
    say(search, report, quiet, as_json, "done")
    if report.interrupted:
        raise typer.Exit(130)
    if report.bad or report.failed or report.notes:
        raise typer.Exit(PARTIAL)


def say(search: ImageSearch, report: Report, quiet: bool, as_json: bool, event: str) -> None:
    from cooc.cli.showing import shown

    if as_json:
        for file in report.problems:
            kind = "failed" if file.machine else "bad"
            typer.echo(json.dumps({"event": kind, "path": file.path, "reason": file.reason}))
        typer.echo(json.dumps({"event": event, **report.as_dict(), "images": len(search.store)}))
        return
    for number, file in enumerate(sorted(report.problems, key=lambda file: not file.machine)):
        if number == SAID:
            err.print("... and more: cooc status --bad", style="yellow")
            break
        kind = "failed" if file.machine else "left out"
        err.print(f"{kind}: {shown(file.path)}: {shown(file.reason)}", style="yellow", markup=False)
    for note in report.notes:
        err.print(note, style="yellow", markup=False)
    if not quiet:
        kinds = ("described", "copied", "moved", "unchanged", "removed", "away", "bad", "failed")
        done = ", ".join(f"{getattr(report, kind)} {kind}" for kind in kinds if getattr(report, kind))
        done += f"{', ' if done else ''}{report.completed} given local features" if report.completed else ""
        what = "Interrupted; run it again to go on. " if report.interrupted else ""
        out.print(f"{what}{done or 'No pictures'} in {report.seconds:.1f} s; {len(search.store)} in the index.")
