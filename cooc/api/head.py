"""HEAD is answered as GET, without a body: for caches, and for programs that ask whether something has changed."""

from __future__ import annotations

from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Enough(Exception):
    """No error: the answer is complete."""


class Head:
    """Routes see a GET. As soon as they begin with the body they are stopped: nobody reads a file for nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send({"type": "http.response.body", "body": b""})
                raise _Enough
            await send(message)

        with suppress(_Enough):
            await self.app(dict(scope, method="GET"), receive, without_body)
