"""The collection without a query: pictures by folder, date and tag, and what there is to choose from."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from cooc.api import overview
from cooc.api.schemas import PREFIX, Limit, Out, Picture, PicturesOut, WhereQuery, problems, shown
from cooc.api.services import Shared

MOST = 1000  # folders, tags or months in one answer

router = APIRouter(prefix=PREFIX, responses=problems(), tags=["pictures"])


class FolderOut(Out):
    path: str
    pictures: int = Field(description="In it and in all folders below.")


class FoldersOut(Out):
    folders: list[FolderOut] = Field(description="Directly below the one asked for.")
    complete: bool = Field(description="False: there are more.")


class TagOut(Out):
    tag: str
    pictures: int


class TagsOut(Out):
    tags: list[TagOut] = Field(description="In the order of their names.")
    complete: bool = Field(description="False: there are more.")


class MonthOut(Out):
    month: str = Field(description="2023-08")
    pictures: int


class MonthsOut(Out):
    months: list[MonthOut] = Field(description="The latest first.")
    undated: int = Field(description="Pictures without a date of the camera.")


class BadFileOut(Out):
    path: str
    reason: str = Field(description="Why it could not be described.")
    since: str = Field(description="When that was found first.")


class BadFilesOut(Out):
    files: list[BadFileOut]
    complete: bool = Field(description="False: there are more.")


@router.get("/images", responses=problems(404))
async def list_pictures(
    services: Shared,
    where: WhereQuery,
    after: Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$", description="`next_after` of the last list.")] = None,
    limit: Limit = 50,
) -> PicturesOut:
    """Pictures of the index in the order of their paths, page by page."""

    def work() -> PicturesOut:
        start = services.pictures.record(after).path if after else None
        records = list(services.search.store.records(where.filter(), after=start, limit=limit))
        following = records[-1].id if len(records) == limit else None
        return PicturesOut(pictures=[Picture.of(record) for record in records], next_after=following)

    return await services.searching.run(work)


@router.get("/folders")
async def list_folders(services: Shared, below: Annotated[str, Query(max_length=1000)] = "") -> FoldersOut:
    """Folders directly below one, and how many pictures each has."""

    def work() -> FoldersOut:
        found = overview.below(services.overview().folders, below.strip("/"))
        folders = [FolderOut(path=shown(name), pictures=count) for name, count in islice(found.items(), MOST)]
        return FoldersOut(folders=folders, complete=len(found) <= MOST)

    return await services.searching.run(work)


@router.get("/tags")
async def list_tags(services: Shared) -> TagsOut:
    """The tags that pictures have, and how many have each."""

    def work() -> TagsOut:
        found = sorted(services.overview().tags.items())
        return TagsOut(
            tags=[TagOut(tag=tag, pictures=count) for tag, count in found[:MOST]], complete=len(found) <= MOST
        )

    return await services.searching.run(work)


@router.get("/months")
async def list_months(services: Shared) -> MonthsOut:
    """The months in which pictures were taken, and how many in each: `taken_from` and `taken_to` choose them."""

    def work() -> MonthsOut:
        found = dict(services.overview().months)
        undated = found.pop("", 0)
        months = sorted(found.items(), reverse=True)[:MOST]
        return MonthsOut(months=[MonthOut(month=month, pictures=count) for month, count in months], undated=undated)

    return await services.searching.run(work)


@router.get("/bad-files")
async def list_bad_files(services: Shared, limit: Limit = 50) -> BadFilesOut:
    """Files that could not be described, with reasons."""

    def work() -> BadFilesOut:
        found = list(islice(services.search.store.bad_files(), limit + 1))
        files = [BadFileOut(path=shown(one.path), reason=shown(one.reason), since=one.since) for one in found[:limit]]
        return BadFilesOut(files=files, complete=len(found) <= limit)

    return await services.searching.run(work)
