"""A server that strangers try to hold up: with connections, with answers they do not read, with slow pictures."""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from cooc.api import Settings, create_app, open_files
from cooc.api.connections import Crowd, _network
from cooc.api.open_files import is_shortage, room, tell_shortage
from cooc.image_search import ImageSearch
from tests.hostile import many_scans, png, slow_icon
from tests.serving import encoded, make_index, photo, serving, write_collection

ROOT = Path(__file__).parents[2]
API = "/api/v1"
MB = 1 << 20


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageSearch]:
    root = write_collection(tmp_path_factory.mktemp("photos"))
    noise = np.random.default_rng(0).integers(0, 256, (1800, 1800, 3), np.uint8)
    Image.fromarray(noise).save(root / "large.png")  # 10 MB, more than any buffer between the server and a client
    with make_index(root) as search:
        yield search


@pytest.fixture
def serve(search: ImageSearch) -> Iterator[Callable[..., str]]:
    with ExitStack() as stack:

        def start(**changes: Any) -> str:
            return stack.enter_context(serving(create_app(search, Settings(rate=0, **changes))))

        yield start


def large(address: str) -> str:
    pictures = httpx.get(f"{address}{API}/images").json()["pictures"]
    return next(f"{API}/images/{one['id']}/file" for one in pictures if one["path"] == "large.png")


@contextmanager
def connected(address: str, count: int, said: str = "", buffer: int = 4096) -> Iterator[list[socket.socket]]:
    """Connections that say something, and then neither speak nor listen."""
    host = urlsplit(address)
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            one.settimeout(60)
            one.connect((host.hostname, host.port))
            one.sendall(said.encode())
            made.append(one)
        yield made


def hung_up(one: socket.socket) -> bool:
    """By the server. What it had sent before need not be read."""
    ended = select.poll()
    ended.register(one, select.POLLRDHUP)
    return bool(ended.poll(0))


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert until()


# Connections


def test_idle_connections_make_room_for_those_that_ask(serve: Callable[..., str]) -> None:
    """Three hundred of one address, of which twenty may be: whoever asks is answered, the silent ones have to go."""
    address = serve(connections=40, connections_each=20)
    with connected(address, 300) as silent:
        for _ in range(5):
            assert httpx.get(f"{address}{API}/health").status_code == 200
        wait(lambda: all(hung_up(one) for one in silent[:280]))


def test_one_that_waits_for_us_is_not_hung_up_on(serve: Callable[..., str], search: ImageSearch) -> None:
    """Its request is being worked on, while a crowd pushes in behind it."""
    address = serve(connections=10, connections_each=4)
    going, go = threading.Event(), threading.Event()
    describe = search.descriptor.describe

    def slowly(*args: Any) -> Any:
        going.set()
        assert go.wait(60)
        return describe(*args)

    search.descriptor.describe = slowly  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(1) as threads:
            files = {"image": ("a.png", encoded(photo("animals/cat")))}
            asked = threads.submit(httpx.post, f"{address}{API}/search", files=files, timeout=60)
            assert going.wait(60)
            with connected(address, 30) as silent:
                wait(lambda: sum(hung_up(one) for one in silent) == 27)
                go.set()
                assert asked.result().status_code == 200
    finally:
        del search.descriptor.describe


def test_slow_readers_are_hung_up_on(serve: Callable[..., str]) -> None:
    """They ask for a large picture and do not take it: by a deadline, without a crowd."""
    address = serve(write_seconds=0.5)
    line = f"GET {large(address)} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(address, 20, line) as slow:
        assert httpx.get(f"{address}{API}/health").status_code == 200
        wait(lambda: all(hung_up(one) for one in slow))


def test_a_reader_that_is_only_not_fast_gets_all(serve: Callable[..., str], search: ImageSearch) -> None:
    """Ten times as long as the deadline, but some of it all the time."""
    address = serve(write_seconds=1)
    line = f"GET {large(address)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connected(address, 1, line, buffer=128 << 10) as (one,):
        data, began = b"", time.monotonic()
        while part := one.recv(1 << 20):
            data += part
            time.sleep(max(0, began + len(data) / MB - time.monotonic()))  # a megabyte in a second
    assert data.endswith((search.root / "large.png").read_bytes())


def test_slow_readers_make_room(serve: Callable[..., str]) -> None:
    """No deadline helps here, but whoever asks is let in as soon as all of these keep us waiting."""
    address = serve(connections=40, connections_each=20, write_seconds=1000)
    path = large(address)
    with connected(address, 60, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"):

        def is_served() -> bool:
            try:
                return len(httpx.get(f"{address}{path}", timeout=60).content) > 9 * MB
            except httpx.TransportError:
                return False

        wait(is_served)


class Guest:
    def __init__(self) -> None:
        self.there = True

    def hang_up(self) -> None:
        self.there = False


def test_who_makes_room() -> None:
    crowd = Crowd(most=6, each=3)
    a, b, c = Guest(), Guest(), Guest()
    assert all(crowd.enter(one, "1.1.1.1") for one in (a, b, c))
    crowd.waits(a, for_it=False)  # we work for it
    crowd.waits(b, for_it=True)  # it has said something since c came
    d = Guest()
    assert crowd.enter(d, "1.1.1.1")
    assert [one.there for one in (a, b, c, d)] == [True, True, False, True]  # c had kept us waiting longest
    others = [Guest() for _ in range(3)]
    assert all(crowd.enter(one, f"2.2.2.{n}") for n, one in enumerate(others))
    assert len(crowd) == 6
    assert crowd.enter(Guest(), "3.3.3.3")  # all are too many: the address with most of them gives one up
    assert [one.there for one in (a, b, d, *others)] == [True, False, True, True, True, True]
    for one in (a, d):
        crowd.waits(one, for_it=False)
    assert crowd.enter(Guest(), "1.1.1.1")
    assert not others[0].there
    crowd = Crowd(most=2, each=1)
    busy = Guest()
    assert crowd.enter(busy, "1.1.1.1")
    crowd.waits(busy, for_it=False)
    assert not crowd.enter(Guest(), "1.1.1.1")  # nobody can go
    assert busy.there
    crowd.leave(busy)
    crowd.leave(busy)
    assert len(crowd) == 0
    assert crowd.enter(Guest(), "1.1.1.1")
    assert not crowd._addresses.keys() - {"1.1.1.1"}


def test_what_counts_as_one_address() -> None:
    assert _network(("10.0.0.1", 80)) == "10.0.0.1"
    assert (
        _network(("2001:db8:1:2:3:4:5:6", 80)) == _network(("2001:db8:1:2::1", 80)) != _network(("2001:db8:1:3::1", 80))
    )
    assert _network(None) == ""


# Open files


def test_connections_are_as_many_as_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, wanted in (
        (20_000, (1000, 250)),
        (1024, (384, 192)),
        (256, (64, 32)),
        (resource.RLIM_INFINITY, (1000, 250)),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert room(1000, 250) == wanted


def test_the_limit_is_raised() -> None:
    code = "import resource; from cooc.api.open_files import raise_limit; raise_limit(); print(*resource.getrlimit(7))"
    assert resource.RLIMIT_NOFILE == 7 or sys.platform != "linux"
    command = f"ulimit -Sn 300; ulimit -Hn 900; exec {sys.executable} -c '{code}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["900", "900"]


def test_a_shortage_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    monkeypatch.setattr(open_files, "_told", -60.0)
    full = OSError(errno.EMFILE, "Too many open files")
    assert is_shortage(full)
    assert is_shortage(MemoryError())
    assert not is_shortage(OSError(errno.ENOENT, "no"))
    assert not is_shortage(RuntimeError())
    with caplog.at_level(logging.ERROR, "cooc.api"):
        for _ in range(100):
            tell_shortage(full, lambda: now)
        now += 61
        tell_shortage(full, lambda: now)
    assert len(caplog.records) == 2
    assert "Too many open files" in caplog.text
    assert "Traceback" not in caplog.text


def test_no_more_files(search: ImageSearch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Every file that this process may open is: new connections wait, nothing falls, one line says so."""
    monkeypatch.setattr(open_files, "_told", -60.0)
    with serving(create_app(search, Settings(rate=0))) as address, ExitStack() as stack:
        host = urlsplit(address)
        kept = httpx.Client(base_url=address, timeout=60)
        assert kept.get(f"{API}/health").status_code == 200
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = [stack.enter_context(socket.socket()) for _ in range(50)]
        most = max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + 1
        with caplog.at_level(logging.ERROR):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            try:
                while True:
                    stack.enter_context(open(os.devnull))  # noqa: PTH123
            except OSError:
                pass
            try:
                for one in waiting:
                    one.connect((host.hostname, host.port))
                time.sleep(0.5)
                assert kept.get(f"{API}/health").status_code == 200  # this connection is there already
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert httpx.get(f"{address}{API}/health", timeout=60).status_code == 200  # and new ones again
        kept.close()
    told = [record for record in caplog.records if record.name in ("cooc.api", "asyncio")]
    assert [record.getMessage() for record in told] == [
        "This machine has too little for all requests (Too many open files): see `ulimit -n`, and free memory."
    ]


# Pictures


def test_a_picture_with_a_thousand_scans_is_refused_at_once(serve: Callable[..., str]) -> None:
    address = serve()
    answer = httpx.post(f"{address}{API}/search", files={"image": ("a.jpg", many_scans(8900, 1000))}, timeout=60)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("This file has more than 63 scans")


def test_slow_pictures_do_not_hold_others(serve: Callable[..., str]) -> None:
    """Three of them, for two processes; each would take minutes. Others search, browse and upload meanwhile."""
    address = serve(decode_seconds=1000, decode_turn=0.5)
    first = httpx.get(f"{address}{API}/images").json()["pictures"][0]["id"]

    def upload(data: bytes) -> httpx.Response:
        return httpx.post(f"{address}{API}/search", files={"image": ("a", data)}, timeout=120)

    with ThreadPoolExecutor(3) as threads:
        slow = [threads.submit(upload, slow_icon()) for _ in range(3)]
        good = encoded(photo("animals/cat"))
        assert upload(good).status_code == 200
        assert httpx.get(f"{address}{API}/images/{first}/thumbnail", timeout=60).status_code == 200
        assert httpx.get(f"{address}{API}/images/{first}/similar?box=0,0,90,90", timeout=60).status_code == 200
        while not all(one.done() for one in slow):  # each uploads makes one of them give way
            assert upload(good).status_code in (200, 503)
            with ThreadPoolExecutor(3) as more:
                list(more.map(upload, [good] * 3))
        assert {one.result().status_code for one in slow} == {503}


def test_a_slow_picture_is_given_up(serve: Callable[..., str]) -> None:
    address = serve(decode_seconds=0.3)
    for _ in range(2):
        answer = httpx.post(f"{address}{API}/search", files={"image": ("a", slow_icon())}, timeout=120)
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith("This file takes longer than 0.3 s to decode")
    id = httpx.get(f"{address}{API}/images").json()["pictures"][0]["id"]
    answer = httpx.post(f"{address}{API}/images/{id}/explanation", files={"image": ("a", slow_icon())}, timeout=120)
    assert answer.status_code == 422


def test_a_slow_picture_of_the_index(tmp_path: Path) -> None:
    """It was another one when it was indexed."""
    photo("animals/cat").save(tmp_path / "a.ico")
    with make_index(tmp_path) as search, serving(create_app(search, Settings(decode_seconds=0.3))) as address:
        id = httpx.get(f"{address}{API}/images").json()["pictures"][0]["id"]
        (tmp_path / "a.ico").write_bytes(slow_icon())
        for what in ("thumbnail", "similar?box=0,0,10,10", f"explanation?query={id}"):
            answer = httpx.get(f"{address}{API}/images/{id}/{what}", timeout=120)
            assert answer.status_code == 422
            assert answer.json()["detail"].startswith("'a.ico' takes longer than 0.3 s")
        file = httpx.get(f"{address}{API}/images/{id}/file", timeout=120)
        assert file.status_code == 200
        assert file.headers["content-type"] == "application/octet-stream"


@contextmanager
def command(search: ImageSearch) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = [sys.executable, "-m", "cooc.cli", "serve", "--index", search.index_path, "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()[3]
        finally:
            process.kill()


def most_memory(process: int) -> int:
    """Bytes that it has ever held."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def test_a_large_upload_leaves_no_memory_behind(search: ImageSearch) -> None:
    """79 megapixels are 300 MB, more than once: the server itself never has them, and its processes give them back."""
    with command(search) as (process, address):

        def held() -> int:
            all_of_it = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
            return sum(one.memory_info().rss for one in all_of_it)

        for _ in range(2):
            httpx.post(f"{address}{API}/search", files={"image": ("a.png", encoded(photo("animals/cat")))}, timeout=60)
        before, most = held(), most_memory(process.pid)
        for _ in range(2):
            answer = httpx.post(f"{address}{API}/search", files={"image": ("a.png", png(8900))}, timeout=120)
            assert answer.status_code == 200
        assert most_memory(process.pid) < most + 100 * MB
        assert held() < before + 100 * MB


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_while_a_picture_is_being_decoded(search: ImageSearch, number: int) -> None:
    """It would take minutes: what is being decoded when the time of grace is over is killed."""
    with command(search) as (process, address), ThreadPoolExecutor(1) as threads:
        slow = threads.submit(httpx.post, f"{address}{API}/search", files={"image": ("a", slow_icon())}, timeout=120)

        def busy() -> list[int]:
            return [one.pid for one in psutil.Process(process.pid).children() if one.cpu_times().user > 1]

        wait(lambda: bool(busy()))  # more than a second of work for one picture
        (decoder,) = busy()
        process.send_signal(number)
        _, complaints = process.communicate(timeout=60)
        assert not Path(f"/proc/{decoder}").exists()
        assert slow.result().status_code == 503
        assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)
        assert "Traceback" not in complaints


# HEAD


def test_head_is_get_without_a_body(serve: Callable[..., str]) -> None:
    address = serve()
    id = httpx.get(f"{address}{API}/images").json()["pictures"][0]["id"]
    paths = ["/", "/app.js", "/docs", "/metrics", f"{API}/openapi.json", f"{API}/health", f"{API}/status"]
    paths += [f"{API}/images/{id}{what}" for what in ("", "/file", "/thumbnail", "/similar")]
    paths += [large(address), f"{API}/images/{'0' * 32}/file", f"{API}/nothing"]
    with httpx.Client(
        base_url=address, timeout=60
    ) as client:  # one connection: a body would be seen in the next answer
        for path in paths:
            get, head = client.get(path), client.head(path)
            assert head.status_code == get.status_code, path
            assert head.content == b""
            for name in ("content-type", "etag", "cache-control", "content-disposition", "last-modified"):
                assert head.headers.get(name) == get.headers.get(name), (path, name)
            if path not in ("/metrics", f"{API}/images/{id}/similar"):  # which hold times
                assert head.headers["content-length"] == str(len(get.content)), path
        etag = client.get(f"{API}/images/{id}/file").headers["etag"]
        assert client.head(f"{API}/images/{id}/file", headers={"If-None-Match": etag}).status_code == 304
        part = client.head(f"{API}/images/{id}/file", headers={"Range": "bytes=0-9"})
        assert (part.status_code, part.headers["content-length"]) == (206, "10")
        assert client.head(f"{API}/indexing/events").status_code == 200
        assert client.head(f"{API}/search").status_code in (404, 405)
        schema = client.get(f"{API}/openapi.json").json()
        assert not any("head" in methods for methods in schema["paths"].values())
