"""Bounds: how often one client may ask, how large a request may be, how long it may take to arrive, and how many wait.

What is over a bound is refused at once, with the time to come again, so that a flood costs little.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cooc.api.settings import Settings

T = TypeVar("T")
CLIENTS = 10_000  # remembered by a rate limit


class Pool:
    """Threads for one kind of work, and a bounded number of requests that wait for them."""

    def __init__(self, name: str, workers: int, waiting: int) -> None:
        self.name, self.workers, self.limit = name, workers, workers + waiting
        self.busy = 0  # running and waiting; touched by the event loop's thread alone
        self._seconds = 0.1  # that a piece of work takes, lately
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._futures: set[Future[Any]] = set()

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        if self.busy >= self.limit:
            seconds = math.ceil(self._seconds * self.busy / self.workers)
            raise HTTPException(
                503,
                "There is more to do than this server can: try again.",
                {"Retry-After": str(min(max(seconds, 1), 60))},
            )
        loop = asyncio.get_running_loop()
        self.busy += 1
        started = time.monotonic()

        def done(future: Future[T]) -> None:  # also when nobody waits for it any more
            self._futures.discard(future)
            with suppress(RuntimeError):  # the loop may have ended before
                loop.call_soon_threadsafe(self._done, started)

        future = self._threads.submit(work, *args)
        self._futures.add(future)
        future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    def _done(self, started: float) -> None:
        took = (time.monotonic() - started) * self.workers / self.busy  # others were before it
        self._seconds += 0.1 * (took - self._seconds)
        self.busy -= 1

    def close(self, until: float) -> bool:
        """Nothing more is begun. Has all ended by then? A thread cannot be stopped, only waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        return not wait(self._futures.copy(), max(until - time.monotonic(), 0)).not_done


class RateLimit:
    """A bucket of `burst` requests for each client, filled at `rate` in a second."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (left, when), oldest first

    def wait(self, client: str) -> float:
        """Seconds until this client may ask again; 0 lets it, and counts."""
        if not self.rate:
            return 0.0
        now = self._clock()
        left, when = self._buckets.pop(client, (float(self.burst), now))
        left = min(self.burst, left + (now - when) * self.rate)
        allowed = left >= 1
        self._buckets[client] = (left - allowed, now)
        if len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self.rate


class BodyLimits:
    """A request's body may be so large, and take so long to arrive. Refused as soon as it is known."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        most, seconds = self.settings.upload_bytes, self.settings.upload_seconds
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        size, complete = 0, False
        deadline = time.monotonic() + seconds

        async def limited() -> Message:
            nonlocal size, complete
            if complete:  # only the news that the client has gone is left to come
                return await receive()
            if declared.isdigit() and int(declared) > most:
                raise _too_large(most)
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                text = f"The request took longer than {seconds:g} s to arrive: send smaller pictures."
                raise HTTPException(408, text, {"Connection": "close"}) from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > most:
                raise _too_large(most)
            return message

        await self.app(scope, limited, send)


def _too_large(most: int) -> HTTPException:
    text = f"The request is larger than {most / 1e6:.0f} MB: send fewer or smaller pictures."
    return HTTPException(413, text, {"Connection": "close"})
