"""One picture of the index: what is known of it, its file, and small versions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from cooc.api.schemas import PREFIX, ImageId, Picture, Side, problems
from cooc.api.services import Shared

CACHED = "private, max-age=3600"

router = APIRouter(prefix=PREFIX, responses=problems())


@router.get("/images/{id}", tags=["pictures"], responses=problems(404))
async def get_picture(services: Shared, id: ImageId) -> Picture:
    """What the index knows of a picture."""
    return Picture.of(await services.searching.run(services.pictures.record, id))


@router.get(
    "/images/{id}/file",
    tags=["pictures"],
    response_class=Response,
    responses=problems(404) | {200: {"content": {"image/*": {}}}, 206: {}, 304: {}, 416: {}},
)
async def get_file(services: Shared, id: ImageId, request: Request) -> Response:
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
async def get_thumbnail(
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
