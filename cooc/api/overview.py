"""How many pictures each folder, tag and month has: what a person chooses from.

One pass over the records (150,000 in a second) counts them all, and is kept until the index has changed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from cooc.api.writing import Writer
from cooc.image_search import ImageSearch

__all__ = ["Counts", "Overview"]

FRESH = 10.0  # seconds for which counts are used in any case: another process may change tags
RARELY = 50  # counting takes at most one part in so many of the time


@dataclass
class Counts:
    folders: Counter[str] = field(default_factory=Counter)  # of all below each
    tags: Counter[str] = field(default_factory=Counter)
    months: Counter[str] = field(default_factory=Counter)  # 2023-08; "" for pictures without a date

    @classmethod
    def of(cls, search: ImageSearch) -> Counts:
        counts = cls()
        for record in search.store.records():
            folder = record.path
            while "/" in folder:
                folder = folder.rpartition("/")[0]
                counts.folders[folder] += 1
            counts.tags.update(record.tags)
            counts.months[(record.taken or "")[:7]] += 1
        return counts

    def below(self, parent: str) -> dict[str, int]:
        """Folders directly below one, in order."""
        start = f"{parent}/" if parent else ""
        return {
            name: self.folders[name]
            for name in sorted(self.folders)
            if name.startswith(start) and "/" not in name[len(start) :]
        }


class Overview:
    def __init__(self, search: ImageSearch, writer: Writer) -> None:
        self.search, self.writer = search, writer
        self._lock = threading.Lock()
        self._counts = Counts()
        self._state: tuple[int, int] | None = None
        self._until = 0.0

    def __call__(self) -> Counts:
        with self._lock:  # who comes meanwhile waits for the same pass
            state = (self.writer.changes, len(self.search.store))
            if state != self._state or time.monotonic() > self._until:
                started = time.monotonic()
                self._counts, self._state = Counts.of(self.search), state
                took = time.monotonic() - started
                self._until = time.monotonic() + max(FRESH, RARELY * took)
            return self._counts
