"""Pictures that were sent as queries, kept in memory for a while where the server allows it.

They are known by the sha256 of their content: a link to a search holds that, and survives a reload.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.exceptions import HTTPException


class Uploads:
    """Used by the event loop's thread alone."""

    def __init__(self, seconds: float, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.most, self._clock = seconds, most, clock
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # the oldest first
        self._size = 0

    def keep(self, data: bytes) -> str:
        """Its name, whether it is kept or not."""
        name = hashlib.sha256(data).hexdigest()
        if self.seconds > 0:
            self._forget(name)
            self._kept[name] = (self._clock(), data)
            self._size += len(data)
            self._tidy()
        return name

    def get(self, name: str) -> bytes:
        self._tidy()
        if name not in self._kept:
            raise HTTPException(404, "This photo is not kept any more: give it again.")
        return self._kept[name][1]

    def _tidy(self) -> None:
        while self._kept:
            name, (when, _) = next(iter(self._kept.items()))
            if self._size <= self.most and self._clock() - when < self.seconds:
                return
            self._forget(name)

    def _forget(self, name: str) -> None:
        _, data = self._kept.pop(name, (0.0, b""))
        self._size -= len(data)
