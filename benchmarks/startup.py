"""Where the seconds of `cooc search` go: of one that loads everything, and of those that a process that stays answers.

Each search is a command in a process of its own, by another picture. Beside the seconds of a clock are those of the
processor, of all processes together: the machine may be busy with other things.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cooc.image_search import ImageSearch
from cooc.pictures.folder import list_images
from cooc.provenance import provenance

STEPS = """
import json, sys, time
before, steps = time.process_time(), {}
def step(name):
    global before
    now = time.process_time()
    steps[name], before = round(now - before, 3), now
import cooc.cli; step("command line")
import torch; step("torch")
from cooc.image_search import ImageSearch; import cooc.cli.showing; step("cooc, OpenCV, faiss")
search = ImageSearch.open(sys.argv[1], device="cpu"); step("index")
search.descriptor; step("network")
search.search(sys.argv[2]); step("first search")
search.search(sys.argv[2]); step("second search")
print(json.dumps(steps))
"""


def measure_startup(folder: Path, recipe: str, pictures: int, rounds: int) -> dict[str, Any]:
    """Searches in an index of the first pictures of a folder."""
    with tempfile.TemporaryDirectory() as place:
        photos = Path(place) / "photos"
        photos.mkdir()
        queries = [Path(shutil.copy(path, photos)) for path in list(list_images(folder))[:pictures]]
        index = photos / ".cooc"
        with ImageSearch.create(index, recipe=recipe, device="cpu") as search:
            search.index([photos])
            features = search.meta.features
        steps = subprocess.run([sys.executable, "-c", STEPS, index, queries[0]], capture_output=True, check=True).stdout
        settings = os.environ | {"COOC_INDEX": str(index), "XDG_RUNTIME_DIR": place}
        cold = [_search(query, settings | {"COOC_WARM": "0"}) for query in queries[:rounds]]
        first, *warm = (_search(query, settings | {"COOC_WARM": "1"}) for query in queries[: rounds + 1])
        (process,) = _staying(place)
        resident = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
        os.kill(process, 9)
    return {
        "benchmark": "startup",
        "recipe": recipe,
        "features": features,
        "pictures": pictures,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "loading everything": _median(cold),
        "starting the process that stays": _median([first]),
        "answered by it": _median(warm),
        "processor seconds of the steps": json.loads(steps),
        "MB that the process holds": round(resident / 1e6),
        "load": round(os.getloadavg()[0], 2),
        **provenance("cpu"),
    }


def _search(query: Path, settings: dict[str, str]) -> tuple[float, float]:
    """Seconds of a clock and of the processor."""
    command = [sys.executable, "-m", "cooc.cli", "search", str(query), "--device", "cpu"]
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


def _median(times: list[tuple[float, float]]) -> dict[str, float]:
    clock, processor = (round(statistics.median(column), 2) for column in zip(*times, strict=True))
    return {"seconds": clock, "processor seconds": processor}
