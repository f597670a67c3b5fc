"""What is found out of the whole index, which takes a while: kept until the index has changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from cooc.api.writing import Writer

T = TypeVar("T")
FRESH = 10.0  # seconds for which something is used in any case: another process may change tags
RARELY = 50  # finding it takes at most one part in so many of the time
MOST = 8  # questions whose answers are kept


class _Found(NamedTuple):
    value: Any
    since: float
    state: tuple[int, int]  # of the index: changes by request, and pictures
    until: float


class Kept(Generic[T]):
    """`work(*question)`, done again where its answer is old."""

    def __init__(self, writer: Writer, work: Callable[..., T], least: float = 0.0) -> None:
        """`least`: seconds for which an answer is good, whatever changes."""
        self.writer, self.work, self.least = writer, work, least
        self._lock = threading.Lock()
        self._found: dict[Hashable, _Found] = {}  # the oldest first

    def __call__(self, *question: Hashable, old: bool = False) -> T:
        """`old`: as it was before, if it was asked for."""
        with self._lock:  # who comes meanwhile waits for the same pass
            state = (self.writer.changes, len(self.writer.search.store))
            started = time.monotonic()
            found = self._found.get(question)
            good = found and (
                old or started < found.since + self.least or (state == found.state and started < found.until)
            )
            if not found or not good:
                value = self.work(*question)
                now = time.monotonic()
                found = _Found(value, now, state, now + max(FRESH, RARELY * (now - started)))
                self._found.pop(question, None)
                self._found[question] = found
                if len(self._found) > MOST:
                    del self._found[next(iter(self._found))]
            return found.value  # type: ignore[no-any-return]
