"""Pictures of the index: lists, folders, files and small versions of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from cooc.api.schemas import PREFIX, FoldersOut, ImageId, Limit, Picture, PicturesOut, Side, WhereQuery, problems, shown
from cooc.api.services import Shared
from cooc.image_search import ImageSearch
from cooc.index.store import Filter

__all__ = ["router"]

CACHED = "private, max-age=3600"
STEPS = 2000  # looks into the index for one list of folders

router = APIRouter(prefix=PREFIX, responses=problems())


@router.get("/images", tags=["pictures"], responses=problems(404))
async def pictures(
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


@router.get("/images/{id}", tags=["pictures"], responses=problems(404))
async def picture(services: Shared, id: ImageId) -> Picture:
    """What the index knows of a picture."""
    return Picture.of(await services.searching.run(services.pictures.record, id))


@router.get("/folders", tags=["pictures"])
async def folders(services: Shared, below: Annotated[str, Query(max_length=1000)] = "") -> FoldersOut:
    """Folders directly below one, for a menu of filters."""

    def work() -> FoldersOut:
        found = list(islice(_folders(services.search, below.strip("/")), 201))
        return FoldersOut(folders=[shown(name) for name in found[:200]], complete=len(found) <= 200)

    return await services.searching.run(work)


def _folders(search: ImageSearch, parent: str) -> Iterator[str]:
    """In one look for each folder, however many pictures it holds: the next look begins behind its last path."""
    start = f"{parent}/" if parent else ""
    where, after, last = Filter(prefix=parent or None), None, ""
    for _ in range(STEPS):
        record = next(search.store.records(where, after=after, limit=1), None)
        if record is None:
            return
        name, below, _ = record.path.removeprefix(start).partition("/")
        after = record.path
        if below:
            after = f"{start}{name}/\U0010ffff"
            if name == last:  # a name that sorts behind even that
                after = record.path
            else:
                last = name
                yield start + name


@router.get(
    "/images/{id}/file",
    tags=["pictures"],
    response_class=Response,
    responses=problems(404) | {200: {"content": {"image/*": {}}}, 206: {}, 304: {}, 416: {}},
)
async def file(services: Shared, id: ImageId, request: Request) -> Response:
    """The file itself. Parts of it by `Range`, nothing if the `If-None-Match` still holds."""
    found = await services.searching.run(services.pictures.find, id)
    cached = {"ETag": found.etag(), "Cache-Control": CACHED}
    if _matches(request, found.etag()):
        return Response(status_code=304, headers=cached)
    content = await services.showing.run(services.pictures.content, found)
    headers = cached | await services.showing.run(services.pictures.headers, found, content)
    if isinstance(content, bytes):
        return Response(content, headers=headers)
    return FileResponse(content, stat_result=found.status, headers=headers)


@router.get(
    "/images/{id}/thumbnail",
    tags=["pictures"],
    response_class=Response,
    responses=problems(404) | {200: {"content": {"image/jpeg": {}}}, 304: {}},
)
async def thumbnail(
    services: Shared,
    id: ImageId,
    request: Request,
    side: Annotated[Side, Query(description="The longest side, in pixels.")] = Side.MEDIUM,
) -> Response:
    """A small JPEG of it, upright."""
    found = await services.searching.run(services.pictures.find, id)
    cached = {"ETag": found.etag(str(int(side))), "Cache-Control": CACHED}
    if _matches(request, cached["ETag"]):
        return Response(status_code=304, headers=cached)
    data = await services.showing.run(services.pictures.thumbnail, found, int(side))  # a plain number: see Decoders
    return Response(data, media_type="image/jpeg", headers=cached)


def _matches(request: Request, etag: str) -> bool:
    given = request.headers.get("if-none-match", "")
    return given.strip() == "*" or etag in (one.strip().removeprefix("W/") for one in given.split(","))
