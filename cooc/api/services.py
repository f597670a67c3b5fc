"""What the routes share: the search object, the processes that decode, and the threads that wait for either.

Each kind of work has its own threads, so that none holds the others: a picture that takes long to decode keeps neither
a search nor the thumbnails of a page waiting. No picture is opened in this process: see `cooc.pictures.decoders`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException

from cooc.api.copies import Copies
from cooc.api.indexing import Indexing
from cooc.api.kept import Kept
from cooc.api.limits import Pool
from cooc.api.metrics import Metrics
from cooc.api.overview import overview
from cooc.api.pictures import Pictures
from cooc.api.settings import Settings
from cooc.api.uploads import Uploads
from cooc.api.writing import Writer, check_change
from cooc.errors import MachineError
from cooc.image_search import ImageSearch
from cooc.pictures.boxes import Box
from cooc.pictures.decode import MAX_PIXELS, Decoded, ImageInfo, Picture, decode_ahead, image_info
from cooc.pictures.decoders import Decoders, Limits
from cooc.pictures.download import download
from cooc.pictures.thumbnails import thumbnail
from cooc.verification.engines import LONGEST

log = logging.getLogger("cooc.api")
LAST = 1.0  # seconds for what still runs when everybody has been answered; a network cannot be interrupted


class Services:
    def __init__(self, search: ImageSearch, settings: Settings) -> None:
        self.search, self.settings = search, settings
        seconds, memory = settings.decode_seconds, settings.decode_bytes
        self.decoders = Decoders(Limits(seconds, max(4 * seconds, 120), memory, keep=0, turn=settings.decode_turn))
        self.describing = Pool("describing", settings.describing, settings.describing_waiting)
        self.searching = Pool("searching", settings.searching, settings.searching_waiting)
        self.decoding = Pool("decoding", settings.decoding, settings.decoding_waiting)  # what clients send
        self.showing = Pool("showing", settings.showing, settings.showing_waiting)  # pictures of the index
        self.exporting = Pool("exporting", 1, 1)  # writes as much as the index has vectors
        self.fetching = Pool("fetching", settings.fetching, settings.fetching_waiting)
        self.comparing = Pool("comparing", 1, settings.describing_waiting)  # all pictures with one another
        self.pools = [self.describing, self.searching, self.decoding, self.showing]
        self.pools += [self.exporting, self.fetching, self.comparing]
        self.pictures = Pictures(search, self.decoders, settings.thumbnail_bytes)
        self.uploads = Uploads(settings.keep_seconds, settings.keep_bytes)
        self.writer = Writer(search, settings)
        self.overview = Kept(self.writer, partial(overview, search.store))
        self.copies = Copies(search, self.writer, self.decoders, self.comparing, self.showing)
        self.indexing = Indexing(search, self.writer)
        self._streams = asyncio.Semaphore(settings.downloads)
        self.metrics = Metrics(search, self.pools)
        self.ended = False

    async def decode_sent(self, picture: bytes, box: Box | None) -> Decoded:
        """A picture that a client has sent, ready to be described. One that takes long makes room for others."""

        def others_wait() -> bool:
            return self.decoding.busy > self.decoding.workers

        most = self.settings.upload_pixels
        return await self.decoding.run(self._decode, picture, box, most, others_wait)

    async def fetch(self, url: str) -> bytes:
        """What lies in the web at this address, where the server may look there."""
        settings = self.settings
        if not settings.allow_url:
            raise HTTPException(403, "This server fetches nothing from the web: `cooc serve --allow-url` lets it.")
        limited = partial(download, largest=settings.upload_bytes, seconds=settings.upload_seconds)
        return await self.fetching.run(partial(limited, url, allow=settings.url_origins))

    async def preview_sent(self, picture: bytes, side: int) -> tuple[ImageInfo, bytes]:
        """Its size, and a small JPEG of it: for formats that browsers do not show."""

        def work() -> tuple[ImageInfo, bytes]:
            info = self.decoders.run(image_info, picture, max_pixels=self.settings.upload_pixels)
            return info, self.decoders.run(thumbnail, picture, side)

        return await self.decoding.run(work)

    async def decode_own(self, id: str, box: Box | None = None) -> Decoded:
        """The same for a picture of the index, which is waited for: it is known to be one."""

        def work() -> Decoded:
            return self._decode(self.pictures.content(self.pictures.find(id)), box, MAX_PIXELS, lambda: False)

        return await self.showing.run(work)

    def _decode(self, picture: Picture, box: Box | None, most: int, others_wait: Callable[[], bool]) -> Decoded:
        return self.decoders.run(
            decode_ahead,
            picture,
            size=self.search.config.size,
            box=box,
            min_side=self.search.descriptor.backbone.stride,
            least=self.search.config.least,
            view=LONGEST if self.search.meta.features else None,
            max_pixels=most,
            others_wait=others_wait,
        )

    async def stream(self, blocks: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Blocks that are made while they are sent; where too many are being sent, it waits for its turn."""
        async with self._streams:
            async for block in iterate_in_threadpool(blocks):
                yield block

    def start(self) -> None:
        """Have processes ready, so that the first request does not wait for one, nor a thumbnail behind uploads."""
        with suppress(MachineError):  # it is said when one is needed
            self.decoders.start(self.settings.decoding + 1)

    def close(self) -> None:
        """Everybody has been answered or given up: what is being decoded is killed, and the rest hardly waited for."""
        until = time.monotonic() + LAST
        self.decoders.close()
        self.indexing.stop_for_good()
        ended = [pool.close(until) for pool in self.pools] + [self.indexing.close(until)]
        self.ended = all(ended)
        if not self.ended:
            log.warning("What was being described was not waited for.")


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _changing(request: Request) -> Services:
    services = _services(request)
    check_change(services.settings, request.client.host if request.client else "")
    return services


def may_change(settings: Settings, request: Request) -> bool:
    with suppress(HTTPException):
        check_change(settings, request.client.host if request.client else "")
        return True
    return False


Changing = Annotated[Services, Depends(_changing)]  # what a route asks for that changes something
Shared = Annotated[Services, Depends(_services)]  # what a route asks for
