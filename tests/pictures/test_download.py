"""Pictures from the web: from a real server on loopback, which is allowed by name, and led astray from there."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cooc.errors import ImageError
from cooc.pictures import download as module
from cooc.pictures.collection import is_web
from cooc.pictures.download import Origin, download, is_public, origin

DATA = bytes(range(256)) * 1000


class Site(BaseHTTPRequestHandler):
    asked: list[str]
    headers_seen: dict[str, str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.headers_seen.update(self.headers)
        path, _, rest = self.path[1:].partition("/")
        if path == "to":  # /to/302/WHERE
            code, _, where = rest.partition("/")
            self.send_response(int(code))
            self.send_header("Location", where)
            self.end_headers()
        elif path == "status":
            self.send_error(int(rest))
        elif path == "short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"1" * 10)
        elif path == "raw":
            self.wfile.write(b"not HTTP at all\r\n\r\n")
        elif path == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(bytes(1 << 16))
        elif path in ("drip-head", "drip-body"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"X: " if path == "drip-head" else b"\r\n"))
            while not self.server.over.wait(0.05):  # type: ignore[attr-defined]
                self.wfile.write(b"x")
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(DATA)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[type[Site]]:
    """A server, as its handler with an address: `site.at`."""
    handler: Any = type("Handler", (Site,), {"asked": [], "headers_seen": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.over = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        handler.at = f"http://127.0.0.1:{server.server_port}"
        yield handler
        server.over.set()  # type: ignore[attr-defined]
        server.shutdown()


def fetch(site: Any, path: str, **options: Any) -> bytes:
    return download(site.at + path, allow={origin(site.at)}, **options)


def test_what_is_allowed_is_fetched(site: Any) -> None:
    assert fetch(site, "/a.jpg") == DATA
    assert fetch(site, "/\u00e4 b?q=\u20ac&r=%20#part") == DATA
    assert site.asked == ["/a.jpg", "/%C3%A4%20b?q=%E2%82%AC&r=%20"]
    assert site.headers_seen["Host"] == site.at.removeprefix("http://")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_to_the_same_place(site: Any, code: int) -> None:
    for there in ("/b.jpg", "../../b.jpg", site.at.removeprefix("http:") + "/b.jpg", site.at + "/b.jpg"):
        assert fetch(site, f"/to/{code}/{there}") == DATA
        assert site.asked[-1] == "/b.jpg"


def test_loopback_is_not_fetched_unless_it_is_allowed(site: Any) -> None:
    port = origin(site.at).port
    for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "0.0.0.0"):
        with pytest.raises(ImageError, match="no public address"):
            download(f"http://{host}:{port}/a.jpg")
    with pytest.raises(ImageError, match="no public address"):
        download(site.at, allow={Origin("127.0.0.1", port + 1), Origin("localhost", port)})
    assert site.asked == []


def test_nobody_is_led_to_another_private_address(site: Any) -> None:
    """Loopback was allowed by its port: another one is another service."""
    with socket.create_server(("127.0.0.1", 0)) as secret:
        secret.settimeout(0.1)
        port = secret.getsockname()[1]
        for there in (f"http://127.0.0.1:{port}/", f"//localhost:{port}/x", f"http://[::ffff:7f00:1]:{port}/"):
            with pytest.raises(ImageError, match="no public address"):
                fetch(site, f"/to/302/{there}")
        with pytest.raises(TimeoutError):
            secret.accept()
    for there in ("ftp://example.org/a.jpg", "file:///etc/passwd", "gopher://127.0.0.1/", "data:image/png,a"):
        with pytest.raises(ImageError, match="only http and https"):
            fetch(site, f"/to/302/{there}")
    with pytest.raises(ImageError, match=r"169\.254\.169\.254, which is no public"):
        fetch(site, "/to/307/http://169.254.169.254/latest/meta-data")


def test_the_address_that_was_checked_is_the_one_that_is_asked(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is public when it is looked up, and loopback a moment later."""
    answers = iter(["8.8.8.8", "127.0.0.1", "127.0.0.1"])
    reached = []

    def look_up(host: str, port: int, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        reached.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ImageError, match="refused"):
        download("http://rebinding.example/a.jpg")
    assert reached == [("8.8.8.8", 80)]
    with pytest.raises(ImageError, match="no public address"):
        download("http://rebinding.example/a.jpg")


def test_one_private_address_of_a_name_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = ["8.8.8.8", "10.0.0.1"]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, 80)) for number in numbers]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **options: found)
    with pytest.raises(ImageError, match=r"10\.0\.0\.1"):
        download("http://both.example/")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/status/404", "404 Not Found"),
        ("/status/500", "500"),
        ("/short", "ended too early"),
        ("/raw", "not HTTP"),
        ("/to/302/", "302"),
        ("/to/302/http://[", "no address"),
        ("/to/302/http://x:y@127.0.0.1/", "no user name"),
    ],
)
def test_answers_that_are_no_picture(site: Any, path: str, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        fetch(site, path)


def test_going_round_in_circles_ends(site: Any) -> None:
    with pytest.raises(ImageError, match="more than 5 times"):
        fetch(site, "/to/302//to/302//to/302//to/302//to/302//to/302//to/302/a")
    assert len(site.asked) == 6


def test_size_is_bounded(site: Any) -> None:
    with pytest.raises(ImageError, match=r"more than 0\.1 MB"):
        fetch(site, "/a.jpg", largest=100_000)
    with pytest.raises(ImageError, match="more than 1 MB"):
        fetch(site, "/endless", largest=1_000_000)


@pytest.mark.parametrize("path", ["/drip-head", "/drip-body"])
def test_time_is_bounded_also_when_something_comes_all_the_time(site: Any, path: str) -> None:
    with pytest.raises(ImageError, match="takes too long"):
        fetch(site, path, seconds=1)


def test_time_is_bounded_where_nothing_comes() -> None:
    """A name server, a connection and a TLS handshake that never answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for scheme in ("http", "https"):
            with pytest.raises(ImageError, match="takes too long"):
                download(f"{scheme}://127.0.0.1:{port}/", allow={Origin("127.0.0.1", port)}, seconds=0.5)


def test_names_that_are_never_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **options: over.wait(60))
    with pytest.raises(ImageError, match="takes too long"):
        download("http://slow.example/", seconds=0.2)
    over.set()


def test_certificates_are_checked(site: Any) -> None:
    """Here the other end does not even speak TLS."""
    with pytest.raises(ImageError, match="cannot be fetched") as refused:
        download(site.at.replace("http:", "https:"), allow={origin(site.at)}, seconds=10)
    assert isinstance(refused.value.__cause__, ssl.SSLError)
    assert ssl.create_default_context().check_hostname


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://[",
        "http://[::1",
        "http://a:999999/",
        "http://h:port/",
        "http://:80/",
        "http:///path",
        "http://\0/",
        "https://exa mple/",
        "http://a b/\r\nX: y",
        f"http://{'a' * 70}.com/",
        "http://.../",
        "http://\u2100.com/",
        "http://\ud800/",
        "http://user:word@example.org/",
        "ftp://example.org/a",
        "HTTP://[::1]/",
        f"http://127.0.0.1/{'x' * 100_000}",
    ],
)
def test_odd_addresses_are_told_in_a_line(url: str) -> None:
    with pytest.raises(ImageError) as told:
        download(url, seconds=10)
    assert len(str(told.value)) < 600
    assert str(told.value).isprintable()


PUBLIC = ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808", "2001:4860:4860::8888"]
PRIVATE = """127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 0.0.0.0 255.255.255.255 224.0.0.1 239.1.1.1 198.18.0.1 240.0.0.1
169.254.169.254 168.63.129.16 192.0.0.192 100.100.100.200 fd00:ec2::254
::1 :: fe80::1%eth0 fec0::1 ff02::1 2001:db8::1 ::127.0.0.1
::ffff:127.0.0.1 64:ff9b::7f00:1 64:ff9b:1::1 2002:7f00:1:: 2001:0:53aa:64c:0:0:80ff:fffe""".split()  # noqa: SIM905


def test_public_addresses() -> None:
    assert [one for one in PUBLIC if not is_public(one)] == []
    assert [one for one in PRIVATE if is_public(one)] == []


def test_what_is_an_address() -> None:
    assert is_web("https://example.org")
    assert is_web("HTTP://example.org")
    assert not is_web("httpd.jpg")
    assert not is_web("ftp://example.org/a.jpg")
    assert origin("https://Example.org/a") == Origin("example.org", 443)
    assert module.LARGEST == 64 << 20
