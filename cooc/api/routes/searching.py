"""Searching, near duplicates, and why a picture was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Path, Query, Response, UploadFile

from cooc.api.schemas import (
    DEEPEST,
    PREFIX,
    BoxQuery,
    ExplanationOut,
    GroupsOut,
    ImageId,
    Limit,
    ResultsOut,
    SearchOptions,
    Side,
    WhereQuery,
    problems,
)
from cooc.api.services import Services, Shared
from cooc.errors import InputError, counted
from cooc.explanation import explain
from cooc.index.shortlist import NEAR_DUPLICATE
from cooc.pictures.boxes import Box, parse_box
from cooc.pictures.decode import Decoded
from cooc.verification.agreement import Agreement

router = APIRouter(prefix=PREFIX, responses=problems())
WAYS = {"k", "offset", "min_score", "expand", "rerank", "augment", "thorough"}  # that all kinds of queries have

Asked = Annotated[SearchOptions, Query()]
LeastSimilarity = Annotated[float, Query(ge=0.5, le=1, description="Least similarity.")]
GroupSimilarity = Annotated[
    float | None,
    Query(ge=0.1, le=1, description="Least similarity of two: by default 0.8, or 0.15 where geometry decides."),
]
Offset = Annotated[int, Query(ge=0, le=DEEPEST, description="`next_offset` of the last answer.")]
Upload = Annotated[UploadFile, File(description="A picture, of any common format.")]
Uploads = Annotated[list[UploadFile], File(description="A picture, or several that are joined into one query.")]
BoxForm = Annotated[str, Form(description="x0,y0,x1,y1: the part of the picture that is looked for.")]
BoxForms = Annotated[list[str], Form(description="For each picture in turn x0,y0,x1,y1, or nothing for all of it.")]


@router.post("/search", tags=["search"], responses=problems(400, 408, 413))
async def search_by_upload(services: Shared, image: Uploads, options: Asked, box: BoxForms = []) -> ResultsOut:  # noqa: B006
    """The pictures most similar to one picture, to the part of it in a box, or to several joined."""
    if len(image) > services.settings.upload_images:
        raise InputError(f"At most {services.settings.upload_images} pictures can be joined, not {len(image)}.")
    if len(box) > len(image):
        raise InputError(f"{counted(len(image), 'picture')} came with {counted(len(box), 'box')}.")
    boxes = [parse_box(text) if text else None for text in box] + [None] * (len(image) - len(box))
    sent = [await one.read() for one in image]
    pictures = [await services.decode_sent(data, part) for data, part in zip(sent, boxes, strict=True)]
    names = [services.uploads.keep(data) for data in sent]
    return await services.describing.run(partial(find, services, options, image=pictures, box=boxes, names=names))


@router.get(
    "/queries/{sha256}",
    tags=["search"],
    response_class=Response,
    responses=problems(404) | {200: {"content": {"application/octet-stream": {}}}},
)
async def get_query(
    services: Shared, sha256: Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="One of `uploads`.")]
) -> Response:
    """A picture that was searched for, while the server keeps it (`cooc serve --keep MINUTES`)."""
    data = services.uploads.get(sha256)
    return Response(data, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})


@router.post(
    "/preview",
    tags=["search"],
    response_class=Response,
    responses=problems(400, 408, 413) | {200: {"content": {"image/jpeg": {}}}},
)
async def preview_upload(
    services: Shared,
    image: Upload,
    side: Annotated[Side, Query(description="The longest side, in pixels.")] = Side.SCREEN,
) -> Response:
    """A small JPEG of a picture that is sent, upright: HEIC and TIFF for browsers. `Full-Size` says how large it is."""
    info, data = await services.preview_sent(await image.read(), int(side))
    headers = {"Full-Size": f"{info.width}x{info.height}", "Cache-Control": "no-store"}
    return Response(data, media_type="image/jpeg", headers=headers)


@router.get("/images/{id}/similar", tags=["search"], responses=problems(404))
async def search_by_id(services: Shared, id: ImageId, options: Asked, box: BoxQuery = None) -> ResultsOut:
    """The same for a picture of the index, or for a part of it; it is not among the results itself."""
    if box:
        part = parse_box(box)
        picture = await services.decode_own(id, part)
        return await services.describing.run(partial(find, services, options, image=picture, box=part, without=id))

    def work() -> ResultsOut:
        services.pictures.record(id)
        return find(services, options, id=id)

    return await services.searching.run(work)


def find(
    services: Services,
    options: SearchOptions,
    *,
    image: Any = None,
    box: Any = None,
    id: str = "",
    without: str = "",
    vector: Sequence[float] = (),
    names: Sequence[str] = (),
) -> ResultsOut:
    """The one place where a request becomes a search: by an id, a vector, or pictures with their boxes."""
    settings = options.model_dump(include=WAYS) | {"where": options.filter()}
    if vector:
        return ResultsOut.of(services.search.search_vector(vector, **settings), options)
    settings["verify"] = options.verify
    if id:
        return ResultsOut.of(services.search.search_id(id, **settings), options)
    return ResultsOut.of(services.search.search(image, box, without=without, **settings), options, names)


@router.get("/images/{id}/near-duplicates", tags=["search"], responses=problems(404))
async def list_near_duplicates_of(
    services: Shared, id: ImageId, threshold: LeastSimilarity = NEAR_DUPLICATE, k: Limit = 50
) -> ResultsOut:
    """Pictures that are almost the same as this one."""
    return await search_by_id(services, id, SearchOptions(k=k, min_score=threshold, verify=False))


@router.get("/near-duplicates", tags=["search"])
async def list_near_duplicates(
    services: Shared, where: WhereQuery, threshold: GroupSimilarity = None, offset: Offset = 0, limit: Limit = 20
) -> GroupsOut:
    """Groups of copies among at most 5000 pictures, and which one of each to keep.

    Where the index has local features, geometry tells copies from other views of the same thing. That may take minutes:
    `compared` says how far it is, and the same request again waits on. The groups are kept until the index changes.
    """
    return await services.copies.page((where.filter(), threshold), offset, limit)


# Why


@router.post("/images/{id}/explanation", tags=["explanation"], responses=problems(400, 404, 408, 413))
async def explain_upload(services: Shared, id: ImageId, image: Upload, box: BoxForm = "") -> ExplanationOut:
    """Why this picture is similar to an uploaded one: the score as a sum over positions, and points that agree."""
    part = parse_box(box) if box else None
    query = await services.decode_sent(await image.read(), part)
    return await _explain(services, query, part, id, partial(services.search.agreement, id, image=query, box=part))


@router.get("/images/{id}/explanation", tags=["explanation"], responses=problems(404))
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
