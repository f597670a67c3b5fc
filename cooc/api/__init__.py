"""The page and the REST API over one `ImageSearch`.

settings = Settings()
uvicorn.run(create_app(ImageSearch.open("photos/.cooc"), settings), http=impatient(settings))    what `cooc serve` does

settings.py     what may be done, by whom, and how much of it
schemas.py      what goes in and out, as OpenAPI shows it
routes/         one function for each route: it calls the search object and shapes the answer
services.py     what the routes share: the search object, processes that decode, bounded pools of threads
pictures.py     files of the index, and small versions of them
archive.py      files of the index as one ZIP
uploads.py      queries that were sent, kept for a while
overview.py     how many pictures each folder, tag and month has
copies.py       groups of copies, and which one of each to keep
kept.py         what is found out of the whole index, kept until that changes
receiving.py    pictures that clients add to the collection
writing.py      who may change the index, where, and the opening of it that changes share
indexing.py     one indexing run at a time, with its progress
security.py     who may ask: token, host, origin; headers; nothing inside shows outside
limits.py       how much may be asked: rates, sizes, times, bounded pools
connections.py  how many may be connected, how long they are waited for
open_files.py   how many files a process may have open, and what is said when there are no more
head.py         HEAD for every GET
metrics.py      numbers for Prometheus, lines for the log
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from fastapi_swagger import resources as swagger
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from cooc import __version__
from cooc.api import metrics, routes, security
from cooc.api.connections import impatient
from cooc.api.head import Head
from cooc.api.limits import BodyLimits
from cooc.api.open_files import quieten
from cooc.api.schemas import PREFIX
from cooc.api.services import Services
from cooc.api.settings import Settings
from cooc.image_search import ImageSearch

__all__ = ["Settings", "create_app", "impatient"]

DESCRIPTION = """Find the pictures of a collection that show the same thing as a picture, or as a part of one.

Pictures are named by `id`, never by path. Boxes are `x0,y0,x1,y1` in pixels of the upright, full-size picture. A wrong
request is answered with `{"detail": "what was wrong, and how to repair it"}`; 503 and 429 say in `Retry-After` when to
ask again. Where the server has a token, send it as `Authorization: Bearer TOKEN`."""


def create_app(search: ImageSearch, settings: Settings | None = None) -> FastAPI:
    """The whole application. The search object stays the caller's: it is not closed."""
    settings = settings or Settings()
    services = Services(search, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        quieten(asyncio.get_running_loop())
        threading.Thread(target=services.start, daemon=True).start()
        yield
        await asyncio.to_thread(services.close)  # those who are told so meanwhile still get their answer

    app = FastAPI(
        title="cooc",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # the usual page loads scripts from elsewhere; web/docs.html has them from a package
        redoc_url=None,
        openapi_url=f"{PREFIX}/openapi.json",
        generate_unique_id_function=lambda route: route.name,  # short names for whoever generates a client
    )
    app.state.services = services
    for router in (*routes.ROUTERS, metrics.router):
        app.include_router(router)
    app.mount("/swagger", StaticFiles(directory=Path(str(resources.files(swagger)))), name="swagger")
    app.mount("/", Page(), name="page")
    security.hide_errors(app)
    # The last one added is the first to see a request.
    app.add_middleware(Head)
    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(security.Guard, settings=settings)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(settings.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["Full-Size", "Retry-After", "Content-Disposition"],
        )
    app.add_middleware(metrics.Observer, metrics=services.metrics)
    return app


class Page(StaticFiles):
    """The files of web/: / is the page, /docs what the API can do."""

    def __init__(self) -> None:
        super().__init__(directory=Path(str(resources.files("cooc"))) / "web", html=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/docs":
            scope = dict(scope, path="/docs.html")
        await super().__call__(scope, receive, send)
