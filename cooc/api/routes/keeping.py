"""What a request may change, where the server allows it (`cooc serve --allow FOLDER`): removal, tags, marks."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from cooc.api.schemas import PREFIX, BoxQuery, Ids, Out, problems, shown
from cooc.api.services import Changing, Shared
from cooc.bench.marks import Mark, keep_marks, kept_marks
from cooc.index.store import check_tags
from cooc.pictures.boxes import Box, parse_box

__all__ = ["router"]

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
