"""cooc calibrate: what an index's scores are worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cooc.cli import app, err, options, out
from cooc.cli.bars import counting
from cooc.cli.writing import check_output, writing
from cooc.errors import PARTIAL, InputError, counted

if TYPE_CHECKING:
    from cooc.image_search import ImageSearch


@app.command()
def calibrate(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER|MARKS",
            help="Labelled pictures (ground_truth.json and jpg/), or a .csv or .json of query,path,right|wrong.",
        ),
    ] = None,
    index: options.Index = "",
    marked: Annotated[bool, typer.Option("--marked", help="Learn from the marks made on the page.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Forget the calibration that the index has.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.json", help="Write how true it is, bin by bin.")
    ] = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
) -> None:
    """Learn from labelled queries, or from results that you marked, which scores of an index are likely right.

    The curve is kept in the index, for all who search in it. Pictures that are in the index need not be described.
    """
    if [forget, marked, source is not None].count(True) != 1:
        raise InputError("Give a folder of labelled pictures or a file of marks, or --marked, or --forget.")
    if report is not None:
        check_output(report, ".json")
    with options.opened(index, write=True, device=device) as search:
        if forget:
            search.calibrate(None)
            out.print(f"Forgotten. Calibrated on {_worth(search)}.", markup=False)
            return
        found, left_out = _fit(search, source, workers)
        for reason in left_out:
            err.print(f"left out: {reason}", style="yellow", markup=False)
        out.print(f"Calibrated on {_worth(search)}.", markup=False)
    if report is not None:
        with writing(report) as stream:
            stream.write(json.dumps(found, indent=1).encode() + b"\n")
    out.print(_judgement(found), markup=False)
    if left_out:
        raise typer.Exit(PARTIAL)


def _fit(search: ImageSearch, source: Path | None, workers: int | None) -> tuple[dict[str, Any], list[str]]:
    """The report, and what was left out. The curve is in the index then."""
    from cooc.bench.calibrating import about, from_dataset, from_marks
    from cooc.bench.marks import ENDINGS, kept_marks, read_marks
    from cooc.datasets.retrieval import load_dataset

    with counting("describing") as show:
        left_out: list[str] = []
        if source is None:
            curve, found, left_out = from_marks(search, kept_marks(search.store), workers=workers, progress=show)
        elif source.is_dir():
            dataset = load_dataset(str(source), source.parent)
            curve, found = from_dataset(search, dataset, workers=workers, progress=show)
        elif source.suffix.lower() in ENDINGS:
            marks, folder = read_marks(source), source.parent
            curve, found, left_out = from_marks(search, marks, folder=folder, workers=workers, progress=show)
        else:
            raise InputError(f"{source} is neither a folder of labelled pictures nor a .csv or .json of marks.")
    search.calibrate(curve, about(found))
    return found, left_out


def _worth(search: ImageSearch) -> str:
    return search.calibration.fitted_on if search.calibration else "nothing"


def _judgement(found: dict[str, Any]) -> str:
    if not found["test"]:
        return "Too few queries to say how true it is: mark results of more queries."
    test = found["test"]
    return (
        f"Tested on {counted(test['results'], 'result')} of other queries: Brier {test['brier']:.3f} "
        f"({test['brier of the base rate']:.3f} for the base rate), calibration error {test['ece']:.3f}."
    )
