"""What a server allows, and how much of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cooc.errors import InputError
from cooc.pictures.download import Origin

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True)
class Settings:
    token: str | None = None  # None: whoever reaches the server may ask, so it must be bound to loopback
    hosts: frozenset[str] = LOOPBACK  # names in a browser's address bar that are ours, where there is no token
    folders: tuple[Path, ...] = ()  # that requests may change, with all below them: indexing, removal, tags, marks

    cors: frozenset[str] = frozenset()  # origins of other pages that may use the API, such as https://photos.example
    allow_url: bool = False  # may pictures be fetched from the web, to search by them?
    url_origins: frozenset[Origin] = frozenset()  # hosts and ports that may be fetched from although they are private

    upload_bytes: int = 32 << 20  # of a whole request
    upload_pixels: int = 80_000_000  # of one picture
    upload_images: int = 8
    upload_seconds: float = 30.0  # for a whole request to arrive
    keep_seconds: float = 0.0  # for which a query that was sent is kept in memory, to be shown again; 0: not at all
    keep_bytes: int = 256 << 20  # of all of them
    decode_seconds: float = 30.0  # of processor time for one picture, sent or of the index
    decode_bytes: int = 4 << 30  # of memory for it
    decode_turn: float = 5.0  # seconds after which one that was sent makes room for others, if any wait

    # What serves the application has to see to these: `uvicorn.Config(http=impatient(settings))`.
    head_seconds: float = 10.0  # for the first lines of a request to arrive
    write_seconds: float = 20.0  # for a client to take 64 kB of an answer
    connections: int = 1000  # at a time; fewer, where the system lets us open fewer files
    connections_each: int = 250  # of one address
    grace_seconds: int = 5  # for requests under way when the server is told to end

    rate: float = 50.0  # requests of one client in a second, on average; 0 does not limit
    burst: int = 400  # requests that it may send at once: a page of thumbnails
    describing: int = 1  # threads that run the network, which uses all cores by itself
    describing_waiting: int = 8  # requests that may wait for one of them; more are told to come again
    searching: int = min(4, os.cpu_count() or 1)  # threads that search; the engine uses all cores, too
    searching_waiting: int = 256
    decoding: int = 2  # processes that decode what is sent
    decoding_waiting: int = 8
    showing: int = max(2, min(4, os.cpu_count() or 1))  # processes that decode pictures of the index, for thumbnails
    showing_waiting: int = 256
    fetching: int = 4  # threads that fetch pictures from the web
    fetching_waiting: int = 8
    streams: int = 16  # that may listen to the progress of indexing
    zip_bytes: int = 2 << 30  # of all files in one ZIP
    downloads: int = 4  # ZIPs that are sent at a time; others wait
    thumbnail_bytes: int = 64 << 20  # kept in memory

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < 16:
            raise InputError("A token needs at least 16 characters: `openssl rand -hex 16` makes a good one.")
        for origin in self.cors:
            if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", origin):
                raise InputError(f"{origin!r} is no origin: write https://photos.example, without a path.")


def check_host(host: str, token: str | None) -> None:
    """Anything but loopback can be reached by others, so it demands a token."""
    if host not in LOOPBACK and token is None:
        raise InputError(
            f"Others can reach a server on {host}, so it needs a token: --token T, or COOC_TOKEN in the environment; "
            "`openssl rand -hex 16` makes a good one. Without --host, only this machine can reach it."
        )
