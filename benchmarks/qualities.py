"""What indexing takes on this machine by the qualities of `cooc index`, and by the paper's recipe beside them.

Each is the command that a user gives, in a process of its own, on as many photos as are asked for: seconds of the clock
from the first photo on, so that what is loaded once does not count; the most memory that its processes held together;
bytes on disk; and the time left that it told after a minute, beside what was true.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

from cooc.image_search import QUALITIES
from cooc.pictures.folder import list_images
from cooc.provenance import provenance

BEFORE = "paper-linear"  # the default before there were qualities
OPTIONS = {BEFORE: ["-r", BEFORE, "--verify", "sift"]} | {name: ["--quality", name] for name in QUALITIES}


def measure_qualities(folder: Path, counts: Mapping[str, int]) -> dict[str, Any]:
    """`counts`: photos for each of `OPTIONS` that is to be measured."""
    load = [round(os.getloadavg()[0], 2)]
    rows = {}
    for name, count in counts.items():
        rows[name] = index_in_process(list(itertools.islice(list_images(folder), count)), OPTIONS[name])
        load.append(round(os.getloadavg()[0], 2))
    return {"benchmark": "qualities", "qualities": rows, "load": load, **provenance("cpu")}


def index_in_process(photos: list[Path], options: list[str]) -> dict[str, Any]:
    """`cooc index` with these options, on a copy of the photos."""
    with tempfile.TemporaryDirectory() as place:
        for photo in photos:
            shutil.copy(photo, place)
        command = [sys.executable, "-m", "cooc.cli", "index", place, *options, "--device", "cpu", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            most, ended = [0], threading.Event()
            watching = threading.Thread(target=_watch, args=(process.pid, most, ended))
            watching.start()
            events = [json.loads(line) for line in process.stdout]
            ended.set()
            watching.join()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        held = sum(file.stat().st_size for file in Path(place, ".cooc").rglob("*") if file.is_file())
    first, last = next(event for event in events if event["described"]), events[-1]
    several = last["described"] > first["described"]
    since = first if several else {"seconds": 0, "described": 0}
    told = next((event for event in events if event["seconds"] >= 60 and event["left"]), None)
    return {
        "photos": len(photos),
        "seconds of a photo": round((last["seconds"] - since["seconds"]) / (last["described"] - since["described"]), 3),
        "seconds in all": round(last["seconds"], 1),
        "MB of memory": round(most[0] / 1e6),
        "MB of a thousand photos": round(held / len(photos) / 1e3, 1),
        "seconds left, told after a minute": told and round(told["left"]),
        "seconds left, true": told and round(last["seconds"] - told["seconds"]),
    }


def _watch(pid: int, most: list[int], ended: threading.Event) -> None:
    """Memory of the process and those it starts; what they share counts once."""
    while not ended.wait(2):
        held = 0
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                held += process.memory_full_info().pss
            except psutil.Error:
                continue
        most[0] = max(most[0], held)
