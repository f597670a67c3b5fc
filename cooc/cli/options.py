"""Options that several commands have, each said once, and the index that a command means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cooc.errors import StoreMissingError

if TYPE_CHECKING:
    from cooc.image_search import ImageSearch

NAME = ".cooc"  # the folder of an index, in that of its pictures
DEFAULT = "resnet-tuned"  # what a new index is described with
PAPER = "paper-linear"  # of a command that shows the paper

Index = Annotated[
    str,
    typer.Option(
        "--index",
        metavar="INDEX",
        help="A folder, postgresql://... or milvus://... [default: $COOC_INDEX, or the nearest folder .cooc]",
    ),
]
Recipe = Annotated[str, typer.Option("--recipe", "-r", help="A name from `cooc recipes`, with +changes.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Decoding processes; 0 is threads. [default: as fits]")]
Prune = Annotated[bool, typer.Option("--prune", help="Pictures of empty or missing folders are gone for good.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but problems.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Events = Annotated[bool, typer.Option("--json", help="One line of JSON for each event.")]

Folder = Annotated[str, typer.Option("--folder", metavar="PREFIX", help="Only pictures below this folder.")]
Verify = Annotated[
    bool | None, typer.Option("--verify/--no-verify", help="Check by geometry. [default: if the index has features]")
]

# of benchmarks
Data = Annotated[Path, typer.Option(help="Folder below which known datasets lie.")]
Cache = Annotated[Path, typer.Option(help="Where raw vectors are kept between runs.")]
Vectors = Annotated[
    list[str] | None,
    typer.Option(metavar="[NAME=]DATABASE.npy,QUERIES.npy", help="Your own vectors, (N, D) and (Q, D). Repeatable."),
]
Rankings = Annotated[
    list[str] | None,
    typer.Option(metavar="[NAME=]RANKINGS.npy", help="Your own rankings, (Q, k) rows of the database. Repeatable."),
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


def opened(index: str, *, write: bool = False, device: str = "auto") -> ImageSearch:
    """The index that a command means. What it takes to use one is loaded now."""
    from cooc.image_search import ImageSearch

    return ImageSearch.open(find_index(index), write=write, device=device)
