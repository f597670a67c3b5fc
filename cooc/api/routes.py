"""One function for each route: it calls the search object, in a bounded pool, and shapes the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Form, Query, Request, Response, UploadFile
from fastapi.responses import FileResponse, StreamingResponse
from starlette.exceptions import HTTPException

from cooc import __version__
from cooc.api import security
from cooc.api.schemas import (
    BoxQuery,
    ExplanationOut,
    Folder,
    FoldersOut,
    GroupsOut,
    Health,
    ImageId,
    IndexingOut,
    Login,
    Picture,
    PicturesOut,
    Problem,
    ResultsOut,
    SearchOptions,
    Side,
    StatusOut,
    Where,
    shown,
)
from cooc.api.services import Services
from cooc.errors import InputError
from cooc.explanation import explain
from cooc.image_search import ImageSearch
from cooc.index.shortlist import NEAR_DUPLICATE
from cooc.index.store import Filter
from cooc.pictures.boxes import Box, parse_box
from cooc.pictures.decode import Decoded
from cooc.verification.agreement import Agreement

__all__ = ["router"]

CACHED = "private, max-age=3600"
STEPS = 2000  # looks into the index for one list of folders
COMPARED = 5000  # pictures that one request may compare with one another


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Shared = Annotated[Services, Depends(_services)]
Asked = Annotated[SearchOptions, Query()]
WhereQuery = Annotated[Where, Query()]
Limit = Annotated[int, Query(ge=1, le=200)]
LeastSimilarity = Annotated[float, Query(ge=0.5, le=1, description="Least similarity.")]
GroupSimilarity = Annotated[
    float | None,
    Query(ge=0.1, le=1, description="Least similarity of two: by default 0.8, or 0.15 where geometry decides."),
]
Upload = Annotated[UploadFile, File(description="A picture, of any common format.")]
Uploads = Annotated[list[UploadFile], File(description="A picture, or several that are joined into one query.")]
BoxForm = Annotated[str, Form(description="x0,y0,x1,y1: the part of the picture that is looked for.")]
BoxForms = Annotated[list[str], Form(description="For each picture in turn x0,y0,x1,y1, or nothing for all of it.")]


def _problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    """401, 403, 421, 422, 429 and 503 may come from anywhere; what a route adds is named there."""
    return {code: {"model": Problem} for code in sorted({401, 403, 421, 422, 429, 503, *codes})}


router = APIRouter(prefix="/api/v1", responses=_problems())


@router.get("/health", tags=["server"])
async def health() -> Health:
    """Is it up? Needs no token."""
    return Health()


@router.get("/status", tags=["server"])
async def status(services: Shared) -> StatusOut:
    """What the index holds."""
    search = services.search
    found = await services.searching.run(search.status)
    return StatusOut(
        name=shown(search.collection.url.rpartition("/")[2]),
        images=found.images,
        bad=found.bad,
        recipe=found.recipe,
        dim=found.dim,
        calibrated=found.calibrated,
        features=found.features,
        with_features=found.with_features,
        folders=[shown(str(folder)) for folder in services.settings.folders],
        version=__version__,
    )


@router.post("/session", tags=["server"], status_code=204, responses=_problems(400))
async def session(login: Login, request: Request, services: Shared) -> Response:
    """A cookie for the token, since pictures in a page cannot send headers. For browsers; programs send the token."""
    if services.settings.token is not None and not security.check_token(login.token, services.settings):
        raise HTTPException(401, "This is not the server's token.", {"WWW-Authenticate": "Bearer"})
    response = Response(status_code=204)
    response.set_cookie(
        security.COOKIE,
        security.session(services.settings),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


# Searching


@router.post("/search", tags=["search"], responses=_problems(400, 408, 413))
async def search_by_upload(services: Shared, image: Uploads, options: Asked, box: BoxForms = []) -> ResultsOut:  # noqa: B006
    """The pictures most similar to one picture, to the part of it in a box, or to several joined."""
    if len(image) > services.settings.upload_images:
        raise InputError(f"At most {services.settings.upload_images} pictures can be joined, not {len(image)}.")
    if len(box) > len(image):
        raise InputError(f"{len(image)} pictures came with {len(box)} boxes.")
    boxes = [parse_box(text) if text else None for text in box] + [None] * (len(image) - len(box))
    pictures = [await services.decode_sent(await one.read(), part) for one, part in zip(image, boxes, strict=True)]
    return await services.describing.run(partial(_search, services, options, image=pictures, box=boxes))


@router.get("/images/{id}/similar", tags=["search"], responses=_problems(404))
async def search_by_id(services: Shared, id: ImageId, options: Asked, box: BoxQuery = None) -> ResultsOut:
    """The same for a picture of the index, or for a part of it; it is not among the results itself."""
    if box:
        part = parse_box(box)
        picture = await services.decode_own(id, part)
        return await services.describing.run(partial(_search, services, options, image=picture, box=part, without=id))

    def work() -> ResultsOut:
        services.pictures.record(id)
        return _search(services, options, id=id)

    return await services.searching.run(work)


def _search(
    services: Services, options: SearchOptions, *, image: Any = None, box: Any = None, id: str = "", without: str = ""
) -> ResultsOut:
    settings: dict[str, Any] = {
        "k": options.k,
        "offset": options.offset,
        "expand": options.expand,
        "rerank": options.rerank,
        "augment": options.augment,
        "where": options.filter(),
        "min_score": options.min_score,
        "verify": options.verify,
    }
    if id:
        return ResultsOut.of(services.search.search_id(id, **settings), options)
    return ResultsOut.of(services.search.search(image, box, without=without, **settings), options)


@router.get("/images/{id}/near-duplicates", tags=["search"], responses=_problems(404))
async def near_duplicates_of(
    services: Shared, id: ImageId, threshold: LeastSimilarity = NEAR_DUPLICATE, k: Limit = 50
) -> ResultsOut:
    """Pictures that are almost the same as this one."""
    options = SearchOptions(k=k, min_score=threshold, verify=False)

    def work() -> ResultsOut:
        services.pictures.record(id)
        return _search(services, options, id=id)

    return await services.searching.run(work)


@router.get("/near-duplicates", tags=["search"])
async def near_duplicates(
    services: Shared, where: WhereQuery, threshold: GroupSimilarity = None, limit: Limit = 50
) -> GroupsOut:
    """Groups of copies in a part of the collection that is not large: a folder, a month.

    Where the index has local features, geometry tells copies from other views of the same thing.
    """
    chosen = where.filter()

    def work() -> GroupsOut:
        count = sum(1 for _ in services.search.store.records(chosen, limit=COMPARED + 1))
        if count > COMPARED:
            raise InputError(f"More than {COMPARED} pictures: choose a folder or a time, or use `cooc duplicates`.")
        groups = services.search.duplicates(threshold, where=chosen)
        found = [[Picture.of(record) for record in group] for group in islice(groups, limit + 1)]
        return GroupsOut(groups=found[:limit], complete=len(found) <= limit)

    return await services.searching.run(work)


# Why


@router.post("/images/{id}/explanation", tags=["explanation"], responses=_problems(400, 404, 408, 413))
async def explain_upload(services: Shared, id: ImageId, image: Upload, box: BoxForm = "") -> ExplanationOut:
    """Why this picture is similar to an uploaded one: the score as a sum over positions, and points that agree."""
    part = parse_box(box) if box else None
    query = await services.decode_sent(await image.read(), part)
    return await _explain(services, query, part, id, partial(services.search.agreement, id, image=query, box=part))


@router.get("/images/{id}/explanation", tags=["explanation"], responses=_problems(404))
async def explain_id(
    services: Shared,
    id: ImageId,
    query: Annotated[str, Query(pattern=r"^[0-9a-f]{32}$", description="The picture that was searched for.")],
    box: BoxQuery = None,
) -> ExplanationOut:
    """Why this picture is similar to another one of the index, or to a part of it."""
    part = parse_box(box) if box else None
    picture = await services.decode_own(query, part)
    if part is None:
        agreement = partial(services.search.agreement, id, query_id=query)  # as kept in the index, and as searched with
    else:
        agreement = partial(services.search.agreement, id, image=picture, box=part)
    return await _explain(services, picture, part, id, agreement)


async def _explain(
    services: Services, query: Decoded, box: Box | None, id: str, agreement: Callable[[], Agreement | None]
) -> ExplanationOut:
    match = await services.decode_own(id)

    def work() -> ExplanationOut:
        why = explain(services.search.descriptor, query, match, query_box=box)
        return ExplanationOut.of(why, agreement())

    return await services.describing.run(work)


# Pictures


@router.get("/images", tags=["pictures"], responses=_problems(404))
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


@router.get("/images/{id}", tags=["pictures"], responses=_problems(404))
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
    responses=_problems(404) | {200: {"content": {"image/*": {}}}, 206: {}, 304: {}, 416: {}},
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
    responses=_problems(404) | {200: {"content": {"image/jpeg": {}}}, 304: {}},
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
    data = await services.showing.run(services.pictures.thumbnail, found, side)
    return Response(data, media_type="image/jpeg", headers=cached)


def _matches(request: Request, etag: str) -> bool:
    given = request.headers.get("if-none-match", "")
    return given.strip() == "*" or etag in (one.strip().removeprefix("W/") for one in given.split(","))


# Indexing


@router.get("/indexing", tags=["indexing"])
async def indexing_state(services: Shared) -> IndexingOut:
    """How far the indexing run is, or how the last one ended."""
    return services.indexing.state


@router.post("/indexing", tags=["indexing"], status_code=202, responses=_problems(400, 404, 409))
async def start_indexing(services: Shared, folder: Folder) -> IndexingOut:
    """Bring the index up to date with a folder, if the server allows that (`cooc serve --allow FOLDER`)."""
    return await services.describing.run(services.indexing.start, folder.folder)


@router.delete("/indexing", tags=["indexing"], status_code=202, responses=_problems(409))
async def stop_indexing(services: Shared) -> IndexingOut:
    """Stop it. What was done stays, and the next run goes on from there."""
    return await services.searching.run(services.indexing.stop)


@router.get(
    "/indexing/events",
    tags=["indexing"],
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "`progress` events, with the state in JSON."}
    },
)
async def indexing_events(services: Shared) -> StreamingResponse:
    """The state of indexing now, and each time it changes, as server-sent events, until the run ends."""
    events = services.indexing.listen()
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
