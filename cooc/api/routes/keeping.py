"""What requests may change, where the server allows it (`cooc serve --allow`): new pictures, removal, tags, marks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, File, Form, Query, UploadFile
from pydantic import Field

from cooc.api.indexing import FileProblem
from cooc.api.receiving import place, safe_name
from cooc.api.schemas import PREFIX, BoxQuery, Ids, Out, Picture, problems, shown
from cooc.api.security import told
from cooc.api.services import Changing, Shared
from cooc.bench.marks import Mark, keep_marks, kept_marks
from cooc.errors import InputError
from cooc.index.records import check_tags
from cooc.pictures.boxes import Box, parse_box

router = APIRouter(prefix=PREFIX, responses=problems(404, 409), tags=["keeping"])

Tag = Annotated[str, Field(min_length=1, max_length=100)]
Asked = Annotated[
    str,
    Field(
        pattern=r"^([0-9a-f]{32}|[0-9a-f]{64})$",
        description="What was searched for: the id of a picture of the index, or the sha256 of one that was sent "
        "(`uploads` of the results).",
    ),
]


Uploads = Annotated[list[UploadFile], File(description="Pictures, of any common format.")]
FolderForm = Annotated[
    str, Form(max_length=1000, description="Where they go, below the root of the collection; it is made if need be.")
]


class Added(Out):
    pictures: list[Picture]
    problems: list[FileProblem] = Field(description="What was left out.")


class Changed(Out):
    changed: int = Field(description="How many pictures.")


class Removal(Ids):
    files: bool = Field(default=False, description="Delete the files, too. Else the next indexing finds them again.")


class Tagging(Ids):
    add: list[Tag] = Field(default=[], max_length=20)
    remove: list[Tag] = Field(default=[], max_length=20)


class Marking(Ids):
    query: Asked
    box: str | None = Field(default=None, max_length=100, description="x0,y0,x1,y1: the part that was looked for.")
    mark: Literal["right", "wrong", "none"] = Field(description="none takes a mark back.")
    scores: list[Annotated[float, Field(ge=-1.01, le=1.01)]] | None = Field(
        default=None,
        max_length=1000,
        description="Of each picture, as in the results: without them nothing is learned from a query that was sent.",
    )


class MarkOut(Out):
    query: str = Field(description="The path of a picture of the index, or the sha256 of one that was sent.")
    path: str
    mark: Literal["right", "wrong"]
    box: tuple[float, float, float, float] | None
    score: float | None


@router.post("/images", status_code=201, responses=problems(400, 408, 413))
async def add_pictures(services: Changing, image: Uploads, folder: FolderForm = "") -> Added:
    """Add pictures to a folder of the collection, and to the index. No file is overwritten: a name gets a number.

    One that is no picture does not stop the others.
    """
    if len(image) > services.settings.upload_images:
        raise InputError(f"At most {services.settings.upload_images} pictures can be sent at once, not {len(image)}.")
    paths, left_out = list[Path](), list[FileProblem]()
    for one in image:
        name, data = one.filename or "", await one.read()
        try:
            picture = await services.decode_sent(data, None)  # in another process: it is known to be safe then
            file = safe_name(name, picture.info.format or "")
            paths.append(await services.searching.run(place, services.writer, folder, file, data))
        except InputError as error:
            left_out.append(FileProblem(path=shown(name), reason=told(error, services.search)))
    if not paths:
        raise InputError(left_out[0].reason)

    def work() -> Added:
        with services.writer.open() as index:
            report = index.add(paths)
            found = index.store.find([index.collection.name(path) for path in paths])
        more = [FileProblem(path=shown(one.path), reason=shown(one.reason)) for one in report.problems]
        return Added(pictures=[Picture.of(record) for record in found if record], problems=[*left_out, *more])

    return await services.describing.run(work)


@router.post("/images/remove")
async def remove_pictures(services: Changing, chosen: Removal) -> Changed:
    """Take pictures out of the index, and delete their files if that is asked for."""

    def work() -> int:
        records = services.writer.records(chosen.ids)
        with services.writer.open() as index:
            if chosen.files:
                services.pictures.delete(records)
            return index.remove([record.path for record in records])

    return Changed(changed=await services.searching.run(work))


@router.post("/images/tags")
async def tag_pictures(services: Changing, chosen: Tagging) -> Changed:
    """Give tags to pictures, and take others away."""
    check_tags([*chosen.add, *chosen.remove])

    def work() -> int:
        ids = [record.id for record in services.writer.records(chosen.ids)]
        with services.writer.open() as index:
            return index.store.tag(ids, chosen.add, chosen.remove)

    return Changed(changed=await services.searching.run(work))


@router.post("/marks")
async def mark_results(services: Changing, chosen: Marking) -> Changed:
    """Say of results of a search that they are right or wrong. `cooc calibrate --marked` learns from it."""
    box: Box | None = parse_box(chosen.box) if chosen.box else None

    def work() -> int:
        query = chosen.query if len(chosen.query) == 64 else services.pictures.record(chosen.query).path
        scores = dict(zip(chosen.ids, chosen.scores or [], strict=False))
        marks = [
            Mark(query, record.path, chosen.mark == "right", box, scores.get(record.id), services.search.space or "")
            for record in services.writer.records(chosen.ids)
        ]
        with services.writer.open() as index, services.writer.in_turn:  # what is kept is read before it is written
            keep_marks(index.store, marks, forget=chosen.mark == "none")
        return len(marks)

    return Changed(changed=await services.searching.run(work))


@router.get("/marks")
async def list_marks(
    services: Shared, query: Annotated[Asked | None, Query()] = None, box: BoxQuery = None
) -> list[MarkOut]:
    """All marks that are kept, or those of one search: a file for `cooc calibrate marks.json`."""
    part = parse_box(box) if box else None

    def work() -> list[MarkOut]:
        name = services.pictures.record(query).path if query and len(query) == 32 else query
        return [
            MarkOut(
                query=shown(mark.query),
                path=shown(mark.path),
                mark="right" if mark.right else "wrong",
                box=mark.box,
                score=mark.score,
            )
            for mark in kept_marks(services.search.store)
            if name is None or (mark.query, mark.box) == (name, part)
        ]

    return await services.searching.run(work)
