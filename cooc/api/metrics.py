"""Numbers for Prometheus, and one line in the log for each request: never a picture, a query or a token."""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cooc.api.limits import Pool
from cooc.image_search import ImageSearch

log = logging.getLogger("cooc.api")
router = APIRouter()

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """A registry of its own, so that two applications in one process do not share their numbers."""

    def __init__(self, search: ImageSearch, pools: list[Pool]) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("cooc_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "cooc_request_seconds", "Time to answer.", labels[:2], buckets=BUCKETS, registry=self.registry
        )
        Gauge("cooc_images", "Pictures in the index.", registry=self.registry).set_function(lambda: len(search.store))
        busy = Gauge("cooc_pool_busy", "Requests running or waiting in a pool.", ("pool",), registry=self.registry)
        limit = Gauge("cooc_pool_limit", "Requests that it takes before it refuses.", ("pool",), registry=self.registry)
        for pool in pools:
            busy.labels(pool.name).set_function(lambda pool=pool: pool.busy)  # type: ignore[misc]
            limit.labels(pool.name).set(pool.limit)


class Observer:
    """Counts and logs every request, whoever answered it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 499  # the client left before there was an answer

        async def watching(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watching)
        finally:
            took = time.monotonic() - started
            route = getattr(scope.get("route"), "path", "page" if status < 400 else "none")  # a bounded set of names
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE") else "other"
            self.metrics.requests.labels(method, route, str(status)).inc()
            self.metrics.seconds.labels(method, route).observe(took)
            client = scope["client"][0] if scope["client"] else "-"
            log.info("%s %s %s %d %.0f ms", client, method, _printable(scope["path"]), status, 1000 * took)


def _printable(path: str) -> str:
    """Nobody writes lines of their own into the log."""
    return "".join(c if c.isprintable() else "?" for c in path[:200])


@router.get("/metrics", include_in_schema=False)
def metrics(request: Request) -> Response:
    registry = request.app.state.services.metrics.registry
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
