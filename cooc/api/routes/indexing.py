"""Bringing the index up to date: one run at a time."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from cooc.api.indexing import IndexingOut, Job
from cooc.api.schemas import PREFIX, problems
from cooc.api.services import Changing, Shared

router = APIRouter(prefix=PREFIX, responses=problems())


@router.get("/indexing", tags=["indexing"])
async def get_indexing(services: Shared) -> IndexingOut:
    """How far the indexing run is, or how the last one ended."""
    return services.indexing.state


@router.post("/indexing", tags=["indexing"], status_code=202, responses=problems(400, 404, 409))
async def start_indexing(services: Changing, job: Job) -> IndexingOut:
    """Bring the index up to date with a folder, if the server allows that (`cooc serve --allow FOLDER`)."""
    return await services.describing.run(services.indexing.start, job.folder, job.retry)


@router.delete("/indexing", tags=["indexing"], status_code=202, responses=problems(409))
async def stop_indexing(services: Changing) -> IndexingOut:
    """Stop it. What was done stays, and the next run goes on from there."""
    return await services.searching.run(services.indexing.stop)


@router.get("/indexing/jobs", tags=["indexing"])
async def list_indexing_jobs(services: Shared) -> list[IndexingOut]:
    """The last runs, the latest first: how each ended, and which files were left out."""
    return [*reversed(services.indexing.jobs)]


@router.get(
    "/indexing/events",
    tags=["indexing"],
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "`progress` events, with the state in JSON."}
    },
)
async def follow_indexing(services: Shared) -> StreamingResponse:
    """The state of indexing now, and each time it changes, as server-sent events, until the run ends."""
    events = services.indexing.listen()
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
