"""cooc search: questions to an index."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.measure import Measurement

from cooc.cli import app, err, options, out
from cooc.cli.writing import PICTURES, check_output, save_picture, writing
from cooc.errors import PARTIAL, ImageError, InputError

if TYPE_CHECKING:
    from cooc.cli.showing import Answer
    from cooc.image_search import ImageSearch
    from cooc.index.records import Filter
    from cooc.index.shortlist import Match
    from cooc.pictures.boxes import Box
    from cooc.pictures.decode import Picture

UNBOUNDED = 100_000  # columns: no name is longer


@app.command()
def search(
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE|URL|-|FOLDER|WORDS...", help="Several pictures make one query; a folder, one for each."
        ),
    ],
    index: options.Index = "",
    box: Annotated[str, typer.Option(metavar="X0,Y0,X1,Y1", help="The part of the picture to search for.")] = "",
    k: Annotated[int, typer.Option("-k", min=1, help="How many results.")] = 20,
    expand: Annotated[str, typer.Option(help="Search again with the best results: none, average or alpha.")] = "none",
    database_augmentation: Annotated[
        bool, typer.Option("--database-augmentation", help="Compare with each result's own neighbours too.")
    ] = False,
    rerank: Annotated[str, typer.Option(help="none, k-reciprocal, diffusion or superglobal.")] = "none",
    verify: options.Verify = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also verify by what was found: slower, and finds more views of a thing.")
    ] = False,
    min_score: Annotated[float | None, typer.Option(help="Leave out results below this score.")] = None,
    folder: options.Folder = "",
    taken_from: Annotated[
        str, typer.Option("--from", metavar="DATE", help="Only taken then or later: 2023, 2023-07, ...")
    ] = "",
    taken_to: Annotated[str, typer.Option("--to", metavar="DATE", help="Only taken then or before.")] = "",
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Only with this tag; may be repeated.")] = None,
    device: options.Device = "auto",
    thumbnails: Annotated[
        bool | None, typer.Option("--thumbnails/--no-thumbnails", help="In the table. [default: if colours allow]")
    ] = None,
    as_json: options.Json = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with everything in it.")] = None,
    sheet: Annotated[Path | None, typer.Option(metavar="FILE.jpg", help="Write a contact sheet.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the results in a browser.")] = False,
) -> None:
    """Find the pictures that show the same thing as a picture, or as a part of it.

    First come those that are verified: so many points of both pictures agree on one geometry. Pictures below these are
    merely similar, which is no proof that they show the same thing. Without local features in the index (cooc index
    --verify sift) all are merely similar, most similar first.

    In a terminal the network stays loaded for 5 minutes, so that the next search need not wait for it. COOC_WARM=0
    leaves nothing behind; COOC_WARM=30 keeps it for 30 minutes, outside terminals, too.
    """
    from cooc.cli import warm
    from cooc.pictures.boxes import parse_box

    for file, endings in ((html, (".html", ".htm")), (sheet, PICTURES)):
        if file is not None:
            check_output(file, *endings)
    ways = {
        "k": k,
        "expand": expand,
        "rerank": rerank,
        "augment": database_augmentation,
        "where": _filter(folder, taken_from, taken_to, tag),
        "min_score": min_score,
        "verify": verify,
        "thorough": thorough,
    }
    part = parse_box(box) if box else None
    keep = bool(html or sheet or open_)
    answers: list[Answer] = []
    bad, checked = 0, False
    with warm.opened(options.find_index(index), device) as found:
        from cooc.cli import showing

        for title, sources in _queries(images, part):
            try:
                answer = _ask(found, title, sources, part, ways)
            except ImageError as error:
                if len(images) == 1 and not Path(images[0]).is_dir():
                    raise
                bad += 1
                err.print(f"left out: {error}", style="yellow", markup=False)
                continue
            checked = checked or answer.results.checked
            answers += [answer] if keep else []
            if as_json:
                typer.echo(json.dumps(_as_json(answer, found)))
            else:
                _print(answer, found, bool(thumbnails) if thumbnails is not None else out.color_system == "truecolor")
        if found.calibration is None and not as_json and not checked:
            err.print(showing.UNCALIBRATED, style="dim")
        if keep and answers:
            if sheet is not None:
                save_picture(showing.sheet(answers, found.collection), sheet, quality=90)
                err.print(f"Written: {sheet}", markup=False)
            if html is None and open_:
                html = Path(tempfile.mkdtemp(prefix="cooc-")) / "search.html"
            if html is not None:
                with writing(html) as stream:
                    stream.write(showing.page(answers, found.collection, found.index_name).encode())
                err.print(f"Written: {html}", markup=False)
            if open_:
                typer.launch(str(html))
    if bad:
        raise typer.Exit(PARTIAL)


def _filter(folder: str, taken_from: str, taken_to: str, tags: list[str] | None) -> Filter | None:
    from cooc.index.records import Filter

    where = Filter(folder or None, taken_from or None, taken_to or None, frozenset(tags or ()))
    return None if where == Filter() else where


def _queries(words: list[str], part: Box | None) -> Iterator[tuple[str, list[Picture]]]:
    """Pictures are one query together; each picture of a folder is one by itself."""
    from cooc.pictures.collection import is_web
    from cooc.pictures.folder import list_images

    folders = [word for word in words if not is_web(word) and word != "-" and Path(word).is_dir()]
    if not folders:
        if part is not None and len(words) > 1:
            raise InputError("--box is the part of one picture: search for one at a time.")
        yield ", ".join(words), [_source(word) for word in words]
        return
    if len(folders) < len(words):
        raise InputError("Give pictures, which make one query together, or folders of queries, but not both.")
    if part is not None:
        raise InputError("--box is the part of one picture, not of a folder.")
    for folder in folders:
        for path in list_images(folder):
            yield str(path), [path]


def _source(word: str) -> Picture:
    from cooc.pictures.collection import is_web

    if word != "-" and not is_web(word):
        return Path(word)
    from cooc.pictures.download import LARGEST, download, origin

    if word == "-":
        data = sys.stdin.buffer.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ImageError(f"Standard input gives more than {LARGEST >> 20} MB: give a file instead.")
        return data
    # The address that was typed may be one of this network; nobody is led to another such one.
    return download(word, allow={origin(word)})


def _ask(found: ImageSearch, title: str, sources: list[Picture], part: Box | None, ways: dict[str, Any]) -> Answer:
    from cooc.cli.showing import Answer
    from cooc.text import INSTALL, are_words, knows_words

    if len(sources) == 1 and are_words(title):
        if not knows_words(found.index_path):
            raise InputError(f"There is no file {title!r}, and this index knows no words. {INSTALL}")
        how = {name: ways[name] for name in ("k", "where", "min_score")}
        return Answer(title, [], None, found.search_text(title, **how))
    return Answer(title, sources, part, found.search(sources, [part] if part else None, **ways))


def _print(answer: Answer, found: ImageSearch, thumbnails: bool) -> None:
    from cooc.cli import showing

    out.print(f"{showing.shown(answer.title)}:", style="bold", markup=False)
    matches = answer.results.matches
    if matches:
        table = showing.table(answer, found.collection, thumbnails)
        if not out.is_terminal:  # in a file or a pipe, names stay whole
            table.width = Measurement.get(out, out.options.update(width=UNBOUNDED), table).maximum
        out.print(table, soft_wrap=False, crop=False)
    else:
        out.print("Nothing found: the index is empty, or nothing in it passes these filters.")
    if told := showing.note(answer.results):
        out.print(told, style="yellow")


def _as_json(answer: Answer, found: ImageSearch) -> dict[str, Any]:
    return {
        "query": answer.title,
        "box": answer.box,
        "no_match": answer.results.no_match,
        "checked": answer.results.checked,
        "calibrated": found.calibration is not None,
        "seconds": round(answer.results.seconds, 4),
        "matches": [_match(match, found) for match in answer.results.matches],
    }


def _match(match: Match, found: ImageSearch) -> dict[str, Any]:
    r = match.record
    return {
        "id": match.id,
        "path": match.path,
        "file": found.collection.address(match.path),
        "score": match.score,
        "probability": match.probability,
        "verified": match.verified,
        "agreement": match.agreement and match.agreement.as_dict() | {"query_picture": match.query},
        "width": r.width,
        "height": r.height,
        "taken": r.taken,
        "tags": sorted(r.tags),
        "away": match.away,
    }
