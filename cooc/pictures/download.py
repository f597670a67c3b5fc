"""A picture from an address in the web, without becoming a way into the network that this machine stands in.

    data = download("https://example.org/tower.jpg")

Names are resolved here, their addresses are checked, and the connection is made to an address that was checked: a name
that points elsewhere a moment later is of no use. Each redirect is checked again. Only public addresses are fetched,
besides those that the caller allows by host and port. Size and time are bounded, in whatever way the other end tries to
take longer. Proxies are not asked: they would resolve names for us.

Whatever is wrong, with the address or behind it, becomes an ImageError that says so.
"""

from __future__ import annotations

import http.client
import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from cooc.errors import ImageError

LARGEST = 64 << 20  # bytes
SECONDS = 30.0
REDIRECTS = 5

_BLOCK = 1 << 16
_PORTS = {"http": 80, "https": 443}
_MOVED = {301, 302, 303, 307, 308}
_SAFE = "/?#%:@!$&'()*+,;=~[]"  # what an address may hold besides letters and digits
_GLOBAL_6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the rest of such an address is one of IPv4
_CLOUD = [ipaddress.ip_network(one) for one in ("168.63.129.16/32", "192.0.0.0/24")]  # their own services


class Origin(NamedTuple):
    host: str
    port: int


class _Address(NamedTuple):
    text: str
    secure: bool
    origin: Origin
    target: str  # what is asked for there


class _Moved(NamedTuple):
    location: str


def origin(url: str) -> Origin:
    """Host and port of an address, as `download` wants them allowed."""
    return _parse(url).origin


def is_public(address: str) -> bool:
    """Is this number one of the whole internet, none of this machine, its network or its cloud's own services?"""
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        inner = number.ipv4_mapped or number.sixtofour or (number.teredo or (None, None))[1]
        if number in _NAT64:
            inner = ipaddress.IPv4Address(int(number) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        return number in _GLOBAL_6 and number.is_global
    return number.is_global and not number.is_multicast and not any(number in network for network in _CLOUD)


def download(url: str, *, allow: Container[Origin] = (), largest: int = LARGEST, seconds: float = SECONDS) -> bytes:
    """What an http or https address gives. `allow`: hosts and ports that may be private."""
    ends = time.monotonic() + seconds
    address = _parse(url)
    for _ in range(REDIRECTS + 1):
        try:
            found = _fetch(address, allow, largest, ends)
        except ImageError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: names that cannot be encoded
            reason = "it takes too long" if time.monotonic() >= ends else _reason(error)
            raise ImageError(f"{_shown(address.text)} cannot be fetched ({reason}). Check the address.") from error
        if isinstance(found, bytes):
            return found
        address = _parse(found.location, base=address.text)
    raise ImageError(f"{_shown(url)} leads from one address to another more than {REDIRECTS} times.")


def _parse(url: str, base: str = "") -> _Address:
    try:
        text = quote(urljoin(base, url), safe=_SAFE)
        parts = urlsplit(text)
        host, port = urlsplit(urljoin(base, url)).hostname, parts.port
    except ValueError as error:
        raise ImageError(f"{_shown(url)} is no address ({error}). Check it.") from error
    if parts.scheme not in _PORTS:
        led = f"{_shown(base)} leads to " if base else ""
        raise ImageError(f"{led}{_shown(url)}: only http and https are fetched.")
    if not host or "@" in parts.netloc:
        raise ImageError(f"{_shown(url)} is no address that can be fetched: it needs a host, and no user name.")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Address(text, parts.scheme == "https", Origin(host, port or _PORTS[parts.scheme]), target)


def _fetch(address: _Address, allow: Container[Origin], largest: int, ends: float) -> bytes | _Moved:
    host, port = address.origin
    numbers = _resolve(host, port, ends)
    private = [number for number in numbers if not is_public(number)]
    if private and address.origin not in allow:
        raise ImageError(
            f"{_shown(address.text)} leads to {private[0]}, which is no public address: it is not fetched."
        )
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    with closing(kind(host, port)) as connection, _reach(numbers, port, ends) as plain:
        connection.sock = plain
        if address.secure:
            connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        data = _ask(connection, address, largest)
    if isinstance(data, bytes) and time.monotonic() >= ends:
        raise TimeoutError
    return data


def _ask(connection: http.client.HTTPConnection, address: _Address, largest: int) -> bytes | _Moved:
    headers = {"User-Agent": "cooc", "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
    connection.request("GET", address.target, headers=headers)
    with connection.getresponse() as response:
        location = response.getheader("Location")
        if response.status in _MOVED and location:
            return _Moved(quote(location.encode("latin-1", "replace"), safe=_SAFE))
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status} {response.reason}")
        parts, size = [], 0
        while part := response.read(_BLOCK):
            parts.append(part)
            size += len(part)
            if size > largest:
                raise ImageError(f"{_shown(address.text)} gives more than {largest / 1e6:.3g} MB: fetch it yourself.")
        if response.length:  # that are still to come
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts)


def _resolve(host: str, port: int, ends: float) -> list[str]:
    """All numbers of a name. The system's own function knows no deadline, so a thread may be left behind."""
    answer: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.put(list(dict.fromkeys(str(one[4][0]) for one in found)))
        except Exception as error:
            answer.put(error)

    threading.Thread(target=look_up, daemon=True).start()
    try:
        result = answer.get(timeout=max(ends - time.monotonic(), 0))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(result, Exception):
        raise result
    return result


@contextmanager
def _reach(numbers: list[str], port: int, ends: float) -> Iterator[socket.socket]:
    """A connection to the first of the addresses that answers, cut off when the time is over.

    Times of a socket are for each read, and a header may come in drops for ever: this one is for all of them.
    """
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        try:  # each gets its share of the time
            found = socket.create_connection((number, port), max((ends - time.monotonic()) / left, 0.001))
            break
        except OSError:
            if left == 1:
                raise
    with found, found.dup() as other:  # TLS takes the first one over
        found.settimeout(max(ends - time.monotonic(), 0.001))
        alarm = threading.Timer(max(ends - time.monotonic(), 0), _cut, [other])
        alarm.daemon = True
        alarm.start()
        try:
            yield found
        finally:
            alarm.cancel()
            alarm.join()


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "it ended too early"
    return _shown(str(getattr(error, "strerror", None) or error) or type(error).__name__)


def _shown(text: str) -> str:
    """On one line, and not a long one."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= 200 else line[:200] + " ..."
