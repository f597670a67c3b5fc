"""`cooc bench serve`: how many requests a server on this machine answers, and what its HTTP costs over the bare engine.

Everything in one run: an index of made-up clustered vectors, `cooc serve` in a process of its own, and clients in this
one that keep their connections and ask again as soon as they are answered. First the engine alone, called by threads;
then the same questions over HTTP; then a mixture with uploads, which run the network. A client that is told to come
again (503) waits as long as it was told, as a browser's page does.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cooc.benchmark.run import provenance
from cooc.errors import CoocError
from cooc.image_search import ImageSearch
from cooc.store import Record

__all__ = ["Options", "run_serving", "write_serving"]

BLOCK = 10_000  # vectors added at once
K = 20
WARM = 3.0  # seconds before anything is counted
MOMENTS = 10  # at which memory is looked at


@dataclass(frozen=True)
class Options:
    images: int = 100_000
    recipe: str = "paper-linear+size=256"
    clients: int = 50
    seconds: float = 60.0  # of the mixture; the engine alone and search by id take a quarter of it each
    uploads: float = 0.1  # of the requests of the mixture
    device: str = "auto"
    progress: Callable[[str], None] = lambda what: None


def run_serving(options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options.progress("building the index")
        index = Path(folder) / ".cooc"
        ids = _build(index, options)
        options.progress("the engine alone")
        engine = _engine(index, ids, options)
        with _server(index, options.device) as (port, process):
            short = options.seconds / 4
            options.progress("search by id over HTTP")
            by_id, _ = asyncio.run(_load(process, port, ids, 0.0, options.clients, short))
            options.progress("the mixture")
            mixed, memory = asyncio.run(_load(process, port, ids, options.uploads, options.clients, options.seconds))
    told = {key: value for key, value in asdict(options).items() if key != "progress"}
    return {
        "options": told,
        "engine": engine,
        "by id": by_id,
        "by id over engine": by_id["requests/s"] / engine["searches/s"],
        "mixed": mixed,
        "server MB during the mixture": memory,
        "load of the machine": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **provenance(options.device),
    }


def write_serving(result: dict[str, Any], folder: str | Path) -> Path:
    path = Path(folder) / "serving.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def _build(index: Path, options: Options) -> list[str]:
    """Clustered unit vectors under made-up names; ids of some of them."""
    rng = np.random.default_rng(0)
    ids: list[str] = []
    with ImageSearch.create(index, recipe=options.recipe, device=options.device) as search:
        centres = rng.standard_normal((max(options.images // 50, 1), search.meta.dim), dtype=np.float32)
        for first in range(0, options.images, BLOCK):
            count = min(BLOCK, options.images - first)
            vectors = centres[rng.integers(len(centres), size=count)]
            vectors = vectors + rng.standard_normal(vectors.shape, dtype=np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            records = [Record(f"{n // 1000}/{n}.jpg", 1, 1, f"{n:064x}", 640, 480) for n in range(first, first + count)]
            search.store.add(records, vectors)
            ids += [record.id for record in records[:: max(1, BLOCK // 100)]]
        search.store.compact()
    return ids


def _engine(index: Path, ids: list[str], options: Options) -> dict[str, Any]:
    """Searches by id in a second without any HTTP: the best over numbers of threads."""
    rates: dict[str, float] = {}
    with ImageSearch.open(index) as search:
        search.search_id(ids[0], K)  # opens the cache
        for threads in (1, 2, options.clients):
            end = time.monotonic() + options.seconds / 12

            def ask(seed: int, end: float = end) -> int:
                choose, count = random.Random(seed), 0
                while time.monotonic() < end:
                    search.search_id(choose.choice(ids), K)
                    count += 1
                return count

            started = time.monotonic()
            with ThreadPoolExecutor(threads) as pool:
                done = sum(pool.map(ask, range(threads)))
            rates[str(threads)] = done / (time.monotonic() - started)
    return {"searches/s": max(rates.values()), "searches/s by threads": rates}


@contextmanager
def _server(index: Path, device: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "cooc.cli", "serve", "--index", str(index), "--port", "0", "--rate", "0"]
    process = subprocess.Popen([*command, "--device", device], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()  # "N pictures at http://127.0.0.1:PORT ..."
        if "http://" not in said:
            raise CoocError("The server did not start; see above.")
        yield int(said.split("http://")[1].split()[0].rpartition(":")[2]), process
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _resident(process: subprocess.Popen[str]) -> float | None:
    """MB that the process holds in memory; None where the system does not say."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))


async def _load(
    process: subprocess.Popen[str], port: int, ids: list[str], uploads: float, clients: int, seconds: float
) -> tuple[dict[str, Any], list[float | None]]:
    """What the clients saw, and the server's memory at ten moments."""
    took: dict[str, list[float]] = {"id": [], "upload": []}
    codes: Counter[str] = Counter()
    counting = time.monotonic() + WARM
    end = counting + seconds
    picture = _picture()

    async def client(seed: int) -> None:
        choose = random.Random(seed)
        connection = await _Connection.open(port)
        while time.monotonic() < end:
            kind = "upload" if choose.random() < uploads else "id"
            path = f"/api/v1/images/{choose.choice(ids)}/similar?k={K}" if kind == "id" else f"/api/v1/search?k={K}"
            started = time.monotonic()
            code, headers = await connection.ask(path, picture if kind == "upload" else None)
            if started >= counting:
                codes[str(code)] += 1
                if code == 200:
                    took[kind].append(1000 * (time.monotonic() - started))
            if code == 503:
                await connection.close()  # a server does not keep idle ones for long
                await asyncio.sleep(float(headers.get("retry-after", "1")))
                connection = await _Connection.open(port)
        await connection.close()

    async def watch() -> list[float | None]:
        await asyncio.sleep(WARM)
        memory = []
        for _ in range(MOMENTS):
            await asyncio.sleep(seconds / MOMENTS)
            memory.append(_resident(process))
        return memory

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(seed) for seed in range(clients)))
    answered = sum(map(len, took.values()))
    times = {
        kind: {"count": len(ms), **{f"p{q} ms": float(np.percentile(ms, q)) for q in (50, 99)}}
        for kind, ms in took.items()
        if ms
    }
    seen = {"requests/s": answered / seconds, "clients": clients, "codes": dict(sorted(codes.items())), **times}
    return seen, await watching


class _Connection:
    """HTTP/1.1 with as little as possible: on one machine, what the clients use is taken from the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> _Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, path: str, body: bytes | None) -> tuple[int, dict[str, str]]:
        head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\n"
        if body:
            head += f"Content-Type: multipart/form-data; boundary=cooc\r\nContent-Length: {len(body)}\r\n"
        self.writer.write(head.encode() + b"\r\n" + (body or b""))
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in answer[1:] if line)}
        await self.reader.readexactly(int(headers["content-length"]))
        return int(answer[0].split()[1]), headers

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def _picture() -> bytes:
    """A form with one JPEG of 256 x 192 pixels."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize((256, 192), Image.Resampling.BICUBIC).save(stream, "JPEG")
    head = b'--cooc\r\nContent-Disposition: form-data; name="image"; filename="q.jpg"\r\n\r\n'
    return head + stream.getvalue() + b"\r\n--cooc--\r\n"
