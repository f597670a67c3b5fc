"""Milvus for the tests: the standalone server that the package `milvus` carries, and milvus-lite in a file."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cooc.index.records import Record

SPARE = 8  # collections that are made before they are asked for
DIM = 16  # of their vectors

# How often the server's parts look for something to do: as it comes, a strong read takes 400 ms, most of it waiting.
# And for how many seconds a killed server is taken for alive: for so long (as it comes 30), the next one waits for the
# other's proxy before it changes anything.
SETTINGS = {
    "COMMON_SESSION_TTL": "10",
    "GRPC_CLIENT_INITIALBACKOFF": "0.1",
    "GRPC_CLIENT_MAXBACKOFF": "0.5",
    "PROXY_TIMETICKINTERVAL": "20",
    "QUERYCOORD_CHECKCHANNELINTERVAL": "50",
    "QUERYCOORD_CHECKSEGMENTINTERVAL": "50",
    "QUERYCOORD_CHECKINTERVAL": "50",
    "QUERYCOORD_DISTPULLINTERVAL": "50",
}

# The package gives each part of the server a port that is free, but not this one; alone, it need not wait for others,
# nor for the disk: a slow one keeps it from renewing its session in time, and the whole server ends.
ETCD = """
name: default
listen-client-urls: http://127.0.0.1:{0}
advertise-client-urls: http://127.0.0.1:{0}
listen-peer-urls: http://127.0.0.1:{1}
initial-advertise-peer-urls: http://127.0.0.1:{1}
initial-cluster: default=http://127.0.0.1:{1}
heartbeat-interval: 10
election-timeout: 100
unsafe-no-fsync: true
"""

PREPARE = """
import sys, milvus
milvus.MilvusServerConfig(data_dir=sys.argv[1], proxy_port=int(sys.argv[2])).resolve()
milvus._initialize_data_files(sys.argv[1])
"""


class MilvusLite:
    """One process may open a file: what is about several is tested on the server."""

    requires = "milvus_lite"

    def address(self, folder: Path, dim: int | None = None) -> str:
        return f"milvus://{folder}/index.db/photos"

    def harm(self, folder: Path, image: Record, data: Callable[[bytes], bytes]) -> None:
        harm(self.address(folder), image, data)

    def harm_features(self, folder: Path, image: Record) -> None:
        harm_file(folder / "index.db.features" / "photos", image)

    def drop(self, folder: Path) -> None: ...


def harm_file(features: Path, image: Record) -> None:
    file = features / image.sha256[:2] / image.sha256
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def harm(address: str, image: Record, data: Callable[[bytes], bytes]) -> None:
    with connected(address) as (client, name):
        (row,) = client.query(name, filter=f'id == "{image.id}"', output_fields=["*"], consistency_level="Strong")
        vector = np.frombuffer(data(np.array(row["vector"], "<f4").tobytes()), "<f4")
        client.upsert(name, dict(row) | {"vector": vector})


@contextmanager
def connected(address: str) -> Iterator[tuple[Any, str]]:
    """A client, and the name of the collection."""
    from pymilvus import MilvusClient

    from cooc.index.milvus.server import Address

    where = Address.parse(address)
    with closing(MilvusClient(where.uri)) as client:
        yield client, where.name


class Milvus:
    """A server on a port of this machine.

    Loading a collection takes it three seconds, in which it mostly waits. So there are always some ahead, empty and
    loaded, that `create_store` finds as if somebody had been interrupted while making them: for vectors of 16
    dimensions, as most tests use.
    """

    requires = "milvus"

    def __init__(self, settings: dict[str, str] = SETTINGS, token: str = "") -> None:
        self.settings, self._token = settings, token
        self.folder = Path(tempfile.mkdtemp(prefix="cooc-milvus-"))
        self.port, self._health = free_port(), free_port()
        # What the package's own starter does, but for running the server: that has to be killed and started again.
        subprocess.run([sys.executable, "-c", PREPARE, str(self.folder), str(self.port)], check=True)
        (self.folder / "etcd.yaml").write_text(ETCD.format(free_port(), free_port()))
        self._makers, self._numbers = ThreadPoolExecutor(SPARE), itertools.count()
        self._ahead: deque[Future[str]] = deque()
        self._given: dict[Path, str] = {}
        self.start()

    def url(self, name: str, options: str = "") -> str:
        return f"milvus://127.0.0.1:{self.port}/{name}?timeout=10{options}"

    def address(self, folder: Path, dim: int | None = None) -> str:
        if folder not in self._given:
            while dim == DIM and len(self._ahead) <= SPARE:
                self._ahead.append(self._makers.submit(self._make, self._name()))
            self._given[folder] = self._ahead.popleft().result() if dim == DIM else self._name()
        return self._given[folder]

    def drop(self, folder: Path) -> None:
        """The more collections are loaded, the longer a server that was killed takes to load them again."""
        with connected(self._given.pop(folder)) as (client, name):
            client.drop_collection(name)

    def harm(self, folder: Path, image: Record, data: Callable[[bytes], bytes]) -> None:
        harm(self._given[folder], image, data)

    def harm_features(self, folder: Path, image: Record) -> None:
        """They lie where `tests.index.test_features` says."""
        name = self._given[folder].rpartition("/")[2].partition("?")[0]
        harm_file(folder / "features" / name, image)

    def _name(self) -> str:
        return self.url(f"test_{next(self._numbers)}")

    def _make(self, address: str) -> str:
        from cooc.index.milvus.opening import prepare_collection
        from cooc.index.milvus.server import Address

        prepare_collection(Address.parse(address), DIM)
        return address

    def start(self) -> None:
        programs = self.folder / "bin"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [programs / "milvus", "run", "standalone"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=os.environ
                | self.settings
                | {
                    "DEPLOY_MODE": "STANDALONE",
                    "ETCD_CONFIG_PATH": str(self.folder / "etcd.yaml"),
                    "LD_LIBRARY_PATH": str(programs),
                    "METRICS_PORT": str(self._health),
                    "MILVUS_RUN_DIR": str(self.folder / "run"),
                },
            )
        ends = time.monotonic() + 120
        while not self._healthy():
            assert self.process.poll() is None, (self.folder / "log").read_text()[-5000:]
            assert time.monotonic() < ends, (self.folder / "log").read_text()[-5000:]
            time.sleep(0.1)

    def _healthy(self) -> bool:
        """Does it answer? It says so before it does."""
        import grpc
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException

        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health}/healthz", timeout=5) as answer:
                if b"OK" not in answer.read():
                    return False
            client = MilvusClient(f"http://127.0.0.1:{self.port}", token=self._token, timeout=5)
            client.list_collections(timeout=5)
            client.close()
            return True
        except (OSError, MilvusException, grpc.RpcError):
            return False

    def kill(self) -> None:
        wait(self._ahead)  # what is being made is not what a test kills the server for
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self._makers.shutdown(cancel_futures=True)
        self.kill()
        shutil.rmtree(self.folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
