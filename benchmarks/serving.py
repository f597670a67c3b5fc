"""`cooc bench serve`: how many requests a server on this machine answers, and what its HTTP costs over the bare engine.

Everything in one run: an index of made-up clustered vectors, `cooc serve` in a process of its own, and clients in this
one that keep their connections and ask again as soon as they are answered. First the engine alone, called by threads;
then each route by one client, to find those that grow with the collection; then search by id from all clients; then a
mixture with uploads, which run the network. A client that is told to come again (503) waits as long as it was told, as
a browser's page does.
"""

from __future__ import annotations

import asyncio
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
from urllib.parse import quote

import numpy as np

from benchmarks.synthetic import make_index, picture
from cooc.errors import CoocError
from cooc.files import write_whole
from cooc.image_search import ImageSearch
from cooc.index.records import Record
from cooc.provenance import provenance

SAMPLE = 1000  # pictures that are asked for
ASKED = 200  # times that each route is asked, if there is time
K = 20
WARM = 3.0  # seconds before anything is counted
MOMENTS = 10  # at which memory is looked at


@dataclass(frozen=True)
class Options:
    images: int = 100_000
    index: Path | None = None  # instead of a made-up one
    recipe: str = "paper-linear+size=256"
    clients: int = 50
    seconds: float = 60.0  # of the mixture; the engine alone and search by id take a quarter of it each
    uploads: float = 0.1  # of the requests of the mixture
    device: str = "auto"
    progress: Callable[[str], None] = lambda what: None


def run_serving(options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options.progress("building the index")
        index = options.index
        if index is None:
            index = make_index(Path(folder), options.images, recipe=options.recipe, graph=False).index
        with ImageSearch.open(index) as search:
            images, recipe = len(search.store), search.meta.recipe
            sample = [record for n, record in enumerate(search.store.records()) if n % -(-images // SAMPLE) == 0]
            there = [record for record in sample if (search.root / record.path).is_file()]
        ids = [record.id for record in sample]
        options.progress("the engine alone")
        engine = _engine(index, ids, options)
        with _server(index, options.device) as (port, process):
            short = options.seconds / 4
            options.progress("each route")
            routes = asyncio.run(_routes(process, port, sample, there, options.seconds / 12))
            options.progress("search by id over HTTP")
            by_id, _ = asyncio.run(_load(process, port, ids, 0.0, options.clients, short))
            options.progress("the mixture")
            mixed, memory = asyncio.run(_load(process, port, ids, options.uploads, options.clients, options.seconds))
    told = {key: value for key, value in asdict(options).items() if key not in ("progress", "index")}
    return {
        "options": told | {"images": images, "recipe": recipe},
        "engine": engine,
        "routes": routes,
        "by id": by_id,
        "by id over engine": by_id["requests/s"] / engine["searches/s"],
        "mixed": mixed,
        "server MB during the mixture": memory,
        "load of the machine": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **provenance(options.device),
    }


def write_serving(result: dict[str, Any], folder: str | Path) -> Path:
    """serving-100k.json, serving-1m.json, ..."""
    images = result["options"]["images"]
    size = f"{images // 1_000_000}m" if images >= 1_000_000 else f"{images // 1000}k" if images >= 1000 else str(images)
    path = Path(folder) / f"serving-{size}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")
    return path


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


def _questions(some: Record, there: Record, middle: str) -> dict[str, str]:
    """What the page asks, about one picture; `middle` is a date in the middle of the collection's."""
    one, folder = f"/images/{some.id}", quote(some.path.rpartition("/")[0])
    like, day = f"{one}/similar?k={K}", (some.taken or middle)[:10]
    return {
        "status": "/status",
        "picture": one,
        "thumbnail": f"/images/{there.id}/thumbnail",
        "file": f"/images/{there.id}/file",
        "folders": "/folders",
        "pictures, first page": "/images",
        "pictures, some page": f"/images?after={some.id}",
        "pictures of a folder": f"/images?folder={folder}",
        "pictures of a day": f"/images?taken_from={day}&taken_to={day}",
        "pictures of a year": f"/images?taken_from={day[:4]}&taken_to={day[:4]}",
        "similar": like,
        "similar, page 50": f"{like}&offset={49 * K}",
        "similar, last page": f"{like}&offset=10000",
        "similar in a folder": f"{like}&folder={folder}",
        "similar of a day": f"{like}&taken_from={day}&taken_to={day}",
        "similar of a year": f"{like}&taken_from={day[:4]}&taken_to={day[:4]}",
        "similar of half the time": f"{like}&taken_from={middle}",
        "similar, expanded": f"{like}&expand=alpha",
        "similar, re-ranked": f"{like}&rerank=k-reciprocal",
        "similar, augmented": f"{like}&augment=true",
        "near-duplicates of one": f"{one}/near-duplicates",
        "near-duplicates in a folder": f"/near-duplicates?folder={folder}",
    }


async def _routes(
    process: subprocess.Popen[str], port: int, sample: list[Record], there: list[Record], seconds: float
) -> dict[str, Any]:
    """Milliseconds of each route, for one client that asks about another picture each time."""
    choose, connection = random.Random(0), await _Connection.open(port)
    days = sorted(record.taken[:10] for record in sample if record.taken) or ["2000-01-01"]
    middle = days[len(days) // 2]
    first = _questions(sample[0], sample[0], middle)
    seen: dict[str, Any] = {}
    for name in first if there else first.keys() - {"thumbnail", "file"}:
        took, codes, size, end = list[float](), Counter[str](), 0, time.monotonic() + seconds
        while len(took) < ASKED and time.monotonic() < end:
            question = _questions(choose.choice(sample), choose.choice(there or sample), middle)[name]
            started = time.monotonic()
            code, headers = await connection.ask(f"/api/v1{question}", None)
            took.append(1000 * (time.monotonic() - started))
            codes[str(code)] += 1
            size = max(size, int(headers["content-length"]))
        seen[name] = {"count": len(took), "codes": dict(codes), "largest answer": size, **_percentiles(took)}
        seen[name]["server MB"] = _resident(process)
    await connection.close()
    return seen


def _percentiles(ms: list[float]) -> dict[str, float]:
    return {f"p{q} ms": float(np.percentile(ms, q)) for q in (50, 99)}


async def _load(
    process: subprocess.Popen[str], port: int, ids: list[str], uploads: float, clients: int, seconds: float
) -> tuple[dict[str, Any], list[float | None]]:
    """What the clients saw, and the server's memory at ten moments."""
    took: dict[str, list[float]] = {"id": [], "upload": []}
    codes: Counter[str] = Counter()
    counting = time.monotonic() + WARM
    end = counting + seconds
    form = _form()

    async def client(seed: int) -> None:
        choose = random.Random(seed)
        connection = await _Connection.open(port)
        while time.monotonic() < end:
            kind = "upload" if choose.random() < uploads else "id"
            path = f"/api/v1/images/{choose.choice(ids)}/similar?k={K}" if kind == "id" else f"/api/v1/search?k={K}"
            started = time.monotonic()
            code, headers = await connection.ask(path, form if kind == "upload" else None)
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
    times = {kind: {"count": len(ms), **_percentiles(ms)} for kind, ms in took.items() if ms}
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


def _form() -> bytes:
    """A form with one picture."""
    head = b'--cooc\r\nContent-Disposition: form-data; name="image"; filename="q.jpg"\r\n\r\n'
    return head + picture(256, 192) + b"\r\n--cooc--\r\n"
