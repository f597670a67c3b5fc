"""Who may ask, and what an answer gives away.

Without a token the server trusts whoever reaches it, which on loopback is this machine's users, and any page in their
browsers. So a foreign `Host` (a name that someone made point here) and a foreign `Origin` (a page that posts to us) are
refused. With a token every request to the API carries it, as `Authorization: Bearer`, or, since pictures in a page
cannot have headers, as the cookie that `POST /api/v1/session` gives for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cooc.api.limits import RateLimit
from cooc.api.open_files import is_shortage, tell_shortage
from cooc.api.settings import Settings
from cooc.errors import CoocError, InputError, MachineError, StoreLockedError
from cooc.image_search import ImageSearch

log = logging.getLogger("cooc.api")

COOKIE = "cooc_session"
OPEN = {"/api/v1/health", "/api/v1/session"}  # what may be asked without a token, besides the page itself
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
DOCS_HEADERS = HEADERS | {  # Swagger UI's style sheet holds its icons
    "Content-Security-Policy": HEADERS["Content-Security-Policy"].replace("img-src 'self'", "img-src 'self' data:")
}
_KEY = secrets.token_bytes(32)  # sessions end with the process


def check_token(given: str, settings: Settings) -> bool:
    """In a time that does not depend on how much of it is right."""
    return settings.token is not None and hmac.compare_digest(_digest(given), _digest(settings.token))


def session(settings: Settings) -> str:
    """The cookie's value: shows that its owner knew the token, without being it."""
    return _digest(settings.token or "").hex()


def _digest(text: str) -> bytes:
    return hmac.digest(_KEY, text.encode("utf-8", "surrogateescape"), hashlib.sha256)


class Guard:
    """Every request passes here first, every answer last."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.rates = RateLimit(settings.rate, settings.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in (DOCS_HEADERS if scope["path"] == "/docs" else HEADERS).items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await (self._refuse(scope) or self.app)(scope, receive, with_headers)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            if not started:
                await _answer(503, "The server is being stopped.")(scope, receive, with_headers)
        except Exception as error:
            if is_shortage(error):
                tell_shortage(error)
                answer = _answer(503, "This machine has too much to do: try again.", {"Retry-After": "5"})
            else:
                log.exception("%s %s", scope["method"], scope["path"])
                answer = _answer(500, "Something went wrong here; the server's log says what.")
            if not started:
                await answer(scope, receive, with_headers)

    def _refuse(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.settings.token is None and _name(host) not in self.settings.hosts:
            return _answer(421, f"This server does not answer to the name {_name(host)!r}.")
        if origin is not None and origin.split("://")[-1] != host and origin not in self.settings.cors:
            return _answer(403, "Pages of other sites may not use this server.")
        if origin is None and _embedded_elsewhere(headers):
            return _answer(403, "Pages of other sites may link to this server, not load anything from it.")
        wait = self.rates.wait(scope["client"][0] if scope["client"] else "")
        if wait:
            return _answer(429, "Too many requests: slow down.", {"Retry-After": str(math.ceil(wait))})
        if self.settings.token is not None and _needs_token(path) and not self._knows_token(headers):
            text = "This server wants its token: send it as `Authorization: Bearer TOKEN`."
            return _answer(401, text, {"WWW-Authenticate": "Bearer"})
        return None

    def _knows_token(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and check_token(given.strip(), self.settings):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), session(self.settings).encode())


def _needs_token(path: str) -> bool:
    return (path.startswith("/api/") or path == "/metrics") and path not in OPEN


def _embedded_elsewhere(headers: Headers) -> bool:
    """As a picture or a frame of another page: no `Origin` is sent then, and an export would be made for nobody."""
    link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return headers.get("sec-fetch-site") in ("cross-site", "same-site") and not link


def _name(host: str) -> str:
    """The host without its port: 127.0.0.1:8765 -> 127.0.0.1, [::1]:8765 -> ::1"""
    found = re.fullmatch(r"\[([^\]]*)\](?::\d*)?|([^:]*)(?::\d*)?", host)
    return (found[1] or found[2] or "").lower() if found else host


def _answer(status: int, text: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    printable = text.encode("utf-8", "replace").decode()  # names of files and parameters may be anything
    return JSONResponse({"detail": printable}, status, headers)


def told(error: InputError, search: ImageSearch) -> str:
    """What a client did wrong, without where the collection lies."""
    return str(error).replace(f"{search.collection.url}/", "").replace("<bytes>", "This file")


def hide_errors(app: FastAPI) -> None:
    """Errors become one JSON shape. What was meant for the caller is told; the rest (see `Guard`) stays in the log."""

    @app.exception_handler(CoocError)
    async def known(request: Request, error: CoocError) -> Response:
        if isinstance(error, InputError):
            return _answer(422, told(error, request.app.state.services.search))
        if isinstance(error, MachineError):
            log.error("%s %s: %s", request.method, request.url.path, error)
            return _answer(503, "This machine could not do it at the moment: try again.", {"Retry-After": "10"})
        if isinstance(error, StoreLockedError):
            return _answer(409, "The index is being changed by another process: wait until it is done.")
        log.error("%s %s: %s", request.method, request.url.path, error)
        return _answer(503, "The index cannot be used at the moment; the server's log says why.", {"Retry-After": "10"})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problems = [f"{'.'.join(str(part) for part in one['loc'][1:])}: {one['msg']}" for one in error.errors()]
        return _answer(422, "; ".join(problems))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _answer(error.status_code, str(error.detail), error.headers)
