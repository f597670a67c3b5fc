"""Where the seconds of `cooc search` go: in a fresh process, and of those that a process that stays answers.

Each search is a command in a process of its own, by another picture; "in one process" is the library, by what the first
search has loaded (`cooc.query_network`, where it is kept), or by torch, as the page and the API have it. The
index may be filled up with pictures that nobody took, for describing ten thousand takes an hour. Beside the seconds of
a clock are those of the processor, of all processes together: the machine may be busy with other things.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cooc.image_search import ImageSearch
from cooc.index.records import Record
from cooc.index.store import blocks
from cooc.pictures.folder import list_images
from cooc.provenance import provenance
from cooc.vectors import unit_rows
from cooc.verification.features import pack, unpack
from cooc.weights import weights_home

STEPS = """
import json, sys, time
before, steps = time.process_time(), {}
def step(name):
    global before
    now = time.process_time()
    steps[name], before = round(now - before, 3), now
import cooc.cli; step("command line")
if sys.argv[1] == "torch": import torch; step("torch")
from cooc.image_search import ImageSearch; import cooc.cli.showing; step("cooc, OpenCV, faiss")
from cooc.pictures.malloc import keep_pyramids; keep_pyramids()
search = ImageSearch.open(sys.argv[2], device="cpu"); step("index")
if sys.argv[1] == "torch" or search.query_network is None: search.descriptor
step("network")
search.search(sys.argv[3]); step("first search")
search.search(sys.argv[3]); step("second search")
times = []
for query in sys.argv[3:]:
    began = time.monotonic(); search.search(query); times.append(time.monotonic() - began)
print(json.dumps([steps, times]))
"""


def measure_startup(
    folder: Path, recipe: str, pictures: int, rounds: int, filled: int = 0, known: Path | None = None
) -> dict[str, Any]:
    """Searches in an index of the first pictures of a folder, and of made-up ones until there are `filled`.

    With `known`, an index that is there, they are queries to that one, drawn at random.
    """
    with tempfile.TemporaryDirectory() as place:
        photos, found = Path(place) / "photos", list(list_images(folder))
        photos.mkdir()
        chosen = found[:pictures] if known is None else random.Random(0).sample(found, pictures)
        queries = [Path(shutil.copy(path, photos / f"{n}-{path.name}")) for n, path in enumerate(chosen)]
        index = known or photos / ".cooc"
        if known is None:
            with ImageSearch.create(index, recipe=recipe, device="cpu") as search:
                search.index([photos])
                _fill(search, filled)
        with ImageSearch.open(index) as search:
            recipe, features, count = search.meta.recipe, search.meta.features, len(search.store)
        steps, within = _steps("kept", index, queries[: rounds + 1])
        steps_by_torch, by_torch = _steps("torch", index, queries[: rounds + 1])
        settings = os.environ | {"COOC_INDEX": str(index), "XDG_RUNTIME_DIR": place}
        cold = [_search(query, settings | {"COOC_WARM": "0"}) for query in queries[:rounds]]
        without = {"COOC_WARM": "0", "COOC_HOME": str(_home_without(Path(place)))}
        by_loading = [_search(query, settings | without) for query in queries[:rounds]]
        first, *warm = (_search(query, settings | {"COOC_WARM": "1"}) for query in queries[: rounds + 1])
        (process,) = _staying(place)
        resident = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
        os.kill(process, 9)
    return {
        "benchmark": "startup",
        "recipe": recipe,
        "features": features,
        "pictures": count,
        "of these made up": count - pictures if known is None else 0,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "in a fresh process": _median(cold),
        "in a fresh process that loads torch": _median(by_loading),
        "starting the process that stays": _median([first]),
        "answered by it": _median(warm),
        "next ones in one process": _spread(within),
        "next ones in one process, by torch": _spread(by_torch),
        "processor seconds of the steps": steps,
        "processor seconds of the steps, by torch": steps_by_torch,
        "MB that the process holds": round(resident / 1e6),
        "load": round(os.getloadavg()[0], 2),
        **provenance("cpu"),
    }


def _fill(search: ImageSearch, count: int) -> None:
    """Made-up pictures: vectors between those of two real ones, local features of many real ones at random places."""
    chance, ids = np.random.default_rng(0), [record.id for record in search.store.records()]
    if count <= len(ids):
        return
    vectors = search.vectors(ids)
    real = [unpack(code)[0].take(slice(None)) for code in search.store.features(ids) if code is not None]
    pool = np.concatenate([features.descriptors for features in real])
    for numbers in blocks(range(len(ids), count), 500):
        records, codes = [], []
        for number in numbers:
            like = real[number % len(real)]
            points = (chance.random((len(like), 2)) * like.size).astype(np.float32)
            made = replace(like, points=points, descriptors=pool[chance.integers(len(pool), size=len(like))])
            codes.append(pack([made]))
            content = hashlib.sha256(str(number).encode()).hexdigest()
            records.append(Record(f"made/{number}.jpg", 1, 1, content, like.width, like.height))
        two = chance.integers(len(vectors), size=(2, len(records)))
        search.store.add(records, unit_rows(vectors[two[0]] + vectors[two[1]]), codes)
    search.find_words()


def _steps(way: str, index: Path, queries: list[Path]) -> tuple[dict[str, float], list[float]]:
    """What each step takes of the processor, and the seconds of all searches but the first."""
    command = [sys.executable, "-c", STEPS, way, str(index), *map(str, queries)]
    steps, times = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return steps, times[1:]


def _home_without(place: Path) -> Path:
    """A cache with weights, in which no network for queries can be kept."""
    home = place / "home"
    home.mkdir()
    (home / "weights").symlink_to(weights_home())
    (home / "queries").touch()
    return home


def _search(query: Path, settings: dict[str, str]) -> tuple[float, float]:
    """Seconds of a clock and of the processor."""
    command = [sys.executable, "-m", "cooc", "search", str(query), "--device", "cpu"]
    clock, processor = time.monotonic(), _processor(settings["XDG_RUNTIME_DIR"])
    subprocess.run(command, env=settings, capture_output=True, check=True)
    return time.monotonic() - clock, _processor(settings["XDG_RUNTIME_DIR"]) - processor


def _processor(place: str) -> float:
    """Of all commands that have ended, and of the process that stays."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for process in _staying(place):
        of_it = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += (int(of_it[11]) + int(of_it[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _staying(place: str) -> list[int]:
    command = ["pgrep", "-f", f"cooc.cli.warm.* {place}/"]
    return list(map(int, subprocess.run(command, capture_output=True, text=True).stdout.split()))


def _spread(times: list[float]) -> dict[str, float]:
    return {"seconds": round(statistics.median(times), 2), "seconds, 90 %": round(float(np.quantile(times, 0.9)), 2)}


def _median(times: list[tuple[float, float]]) -> dict[str, float]:
    clock, processor = (round(statistics.median(column), 2) for column in zip(*times, strict=True))
    return {"seconds": clock, "processor seconds": processor}
