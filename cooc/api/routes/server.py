"""The server itself: is it up, what does it hold, who are you."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from cooc import __version__
from cooc.api import security
from cooc.api.schemas import PREFIX, Health, Login, StatusOut, problems, shown
from cooc.api.services import Shared, may_change
from cooc.text import knows_words

router = APIRouter(prefix=PREFIX, responses=problems())


@router.get("/health", tags=["server"])
async def get_health() -> Health:
    """Is it up? Needs no token."""
    return Health()


@router.get("/status", tags=["server"])
async def get_status(services: Shared, request: Request) -> StatusOut:
    """What the index holds."""
    search = services.search
    found = await services.searching.run(search.status)
    more = {
        "name": shown(search.collection.url.rpartition("/")[2]),
        "folders": [shown(str(folder)) for folder in services.settings.folders],
        "writable": may_change(services.settings, request),
        "words": knows_words(search.index_path),
        "urls": services.settings.allow_url,
        "keep_seconds": services.settings.keep_seconds,
        "version": __version__,
    }
    return StatusOut(**vars(found) | more)  # which leaves out where the collection lies


@router.post("/session", tags=["server"], status_code=204, responses=problems(400))
async def log_in(login: Login, request: Request, services: Shared) -> Response:
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
