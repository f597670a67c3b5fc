"""Connections that keep a server waiting: who has not sent the head of a request in time is hung up on.

uvicorn waits for it for ever, and a thousand such connections are as many as it takes.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["impatient"]


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`."""

    class Impatient(H11Protocol):
        """The clock runs from the opening, and in a connection that is kept from the first byte of the next request."""

        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # asyncio does so only where a socket names its protocol, and uvicorn's does not: 40 ms for each answer.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            else:
                self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._late is None:
                self._late = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    protocol: Any = Impatient
    return protocol  # type: ignore[no-any-return]
