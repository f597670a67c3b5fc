"""How many files and connections this process may have open, and what happens when there are no more."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("cooc.api")
RESERVED = 256  # files that are no connections: the index, decoding processes, uploads, what was just accepted
PERIOD = 60.0  # seconds in which a shortage is told once
SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def raise_limit() -> None:
    """As many open files as the system lets us have without asking anybody."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ImportError, OSError, ValueError):  # Windows has no limit; macOS calls it unlimited, and refuses that
        return


def _limit() -> float:
    try:
        import resource
    except ImportError:
        return math.inf
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def room(connections: int, each: int) -> tuple[int, int]:
    """Connections there may be, in all and of one address: a connection may need a second file, that of a picture. One
    address never has room for all, so that others are let in."""
    if (limit := _limit()) < math.inf:
        connections = min(connections, int(limit - min(RESERVED, limit // 2)) // 2)
    return connections, min(each, max(connections // 2, 1))


def is_shortage(error: BaseException) -> bool:
    """Has the machine too little of something, which is nobody's fault and passes?"""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in SHORT)


_told = -PERIOD


def tell_shortage(error: BaseException, clock: Callable[[], float] = time.monotonic) -> None:
    """One line in a minute. A flood of requests would otherwise fill the disk with the news that it is a flood."""
    global _told
    if clock() - _told >= PERIOD:
        _told = clock()
        what = getattr(error, "strerror", None) or type(error).__name__
        log.error("This machine has too little for all requests (%s): see `ulimit -n`, and free memory.", what)


def quieten(loop: asyncio.AbstractEventLoop) -> None:
    """asyncio pauses for a second when no connection can be accepted, but first logs a traceback for each that waits.

    (CPython's loop asks again for each place of the backlog before it pauses.)
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and is_shortage(error):
            tell_shortage(error)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
