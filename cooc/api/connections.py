"""Connections that keep a server waiting, or are too many.

uvicorn waits for ever for the head of a request, and for a client to take an answer; a thousand such connections are as
many as a process may have. So there is a deadline for both, and a bound on how many there are, in all and of one
address. Where there is no room for another one, the one that has kept us waiting longest makes room: a client that
asks is always let in before one that is silent. What the server itself is working on is never cut off for that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from uvicorn.protocols.http.h11_impl import H11Protocol

from cooc.api.open_files import room
from cooc.api.settings import Settings

BACKLOG = 128  # connections that may wait to be accepted, and as many are accepted at once
LEAST = 64 << 10  # bytes that a client has to take in each period of `write_seconds`
AT_ONCE = struct.pack("ii", 1, 0)  # linger for no time
UNSENT = 128 << 10  # bytes that the system holds for a client besides those on their way


def impatient(settings: Settings) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`."""
    crowd = Crowd(*room(settings.connections, settings.connections_each))

    class Impatient(H11Protocol):
        """The clock runs from the opening, and in a connection that is kept from the first byte of the next request."""

        _late: asyncio.TimerHandle | None = None  # to send the head of a request
        _slow: asyncio.TimerHandle | None = None  # to take an answer
        _unsent = 0  # bytes, when it was looked at last

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if not crowd.enter(self, _network(self.client)):
                self.hang_up()
                return
            transport.set_write_buffer_limits(high=0)  # we are told of whatever a client does not take at once
            _tune(transport.get_extra_info("socket"))
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            else:
                self._stop()
            self._tell()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._tell()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._look_later()
            self._tell()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._taken()
            self._tell()

        def connection_lost(self, exc: Exception | None) -> None:
            crowd.leave(self)
            self._stop()
            self._taken()
            super().connection_lost(exc)

        def hang_up(self) -> None:
            """close() would wait until the client has taken all that was written, and so would the system itself."""
            with suppress(OSError):
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self.transport.abort()

        def _tell(self) -> None:
            """Is it we who wait, for the rest of a request or until an answer is taken?"""
            cycle = self.cycle
            crowd.waits(self, cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused)

        def _wait(self) -> None:
            if self._late is None:
                self._late = self.loop.call_later(settings.head_seconds, self.transport.close)

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _look_later(self) -> None:
            self._taken()
            self._unsent = self.transport.get_write_buffer_size()
            self._slow = self.loop.call_later(settings.write_seconds, self._look)

        def _look(self) -> None:
            if self.transport.get_write_buffer_size() > self._unsent - LEAST:
                self.hang_up()
            else:
                self._look_later()

        def _taken(self) -> None:
            if self._slow is not None:
                self._slow.cancel()
                self._slow = None

    protocol: Any = Impatient
    return protocol  # type: ignore[no-any-return]


class Member(Protocol):
    def hang_up(self) -> None: ...


@dataclass
class _Guests:
    """Those of one address."""

    count: int = 0
    keep_us_waiting: OrderedDict[Member, None] = field(default_factory=OrderedDict)  # the longest first


class Crowd:
    """Who is connected: at most `most` in all, and `each` of one address."""

    def __init__(self, most: int, each: int) -> None:
        self.most, self.each = most, each
        self._members: dict[Member, str] = {}
        self._addresses: dict[str, _Guests] = {}

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, member: Member, address: str) -> bool:
        """Is there room, or can some be made? Where all are too many, the address with most of them makes it."""
        guests = self._addresses.get(address) or _Guests()
        crowded: list[_Guests] | None = None
        if guests.count >= self.each:
            crowded = [guests]
        elif len(self) >= self.most:
            crowded = sorted(self._addresses.values(), key=lambda one: one.count, reverse=True)
        if crowded is not None:
            longest = next((next(iter(one.keep_us_waiting)) for one in crowded if one.keep_us_waiting), None)
            if longest is None:
                return False
            self.leave(longest)
            longest.hang_up()
        guests = self._addresses.setdefault(address, guests)
        self._members[member] = address
        guests.count += 1
        guests.keep_us_waiting[member] = None
        return True

    def leave(self, member: Member) -> None:
        address = self._members.pop(member, None)
        if address is None:
            return
        guests = self._addresses[address]
        guests.count -= 1
        guests.keep_us_waiting.pop(member, None)
        if not guests.count:
            del self._addresses[address]

    def waits(self, member: Member, for_it: bool) -> None:
        """From now on we wait for it, or it for us."""
        if member in self._members:
            late = self._addresses[self._members[member]].keep_us_waiting
            late.pop(member, None)
            if for_it:
                late[member] = None


def _network(client: tuple[str, int] | None) -> str:
    """What counts as one address: with IPv6 a whole network, since a customer has as many addresses as he likes."""
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return ""
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))


def _tune(connection: Any) -> None:
    """asyncio sets the first only where a socket names its protocol, and uvicorn's does not: 40 ms for each answer."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
