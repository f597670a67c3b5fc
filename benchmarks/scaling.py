"""`cooc bench scale`: what describing by Ray costs over the plain loop, what a second worker brings, and whether the
index is the same.

The pictures are made: small ones, many, for a light network, so that the engine's own work shows. Rates are taken
between the first tenth of the pictures and the last: processes that start and networks that load are not in them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from cooc.descriptor import Descriptor
from cooc.image_search import ImageSearch
from cooc.index import run
from cooc.index.engine import Engine
from cooc.index.ray import OnRay
from cooc.index.report import Report

FOLDER = 1000  # pictures in each


def write_pictures(folder: Path, count: int, side: int, seed: int = 0) -> None:
    """Gradients with shapes and noise, all different, landscape and portrait; the same for the same seed."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        width, height = (side, side * 3 // 4) if number % 2 else (side * 3 // 4, side)
        rough = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
        picture = rough.resize((width, height), Image.Resampling.BICUBIC)
        draw = ImageDraw.Draw(picture)
        for _ in range(3):
            x, y, half = rng.integers(0, (width, height, side // 4)).tolist()
            shape = (draw.ellipse, draw.rectangle)[rng.integers(2)]
            shape((x - half, y - half, x + half, y + half), fill=tuple(rng.integers(0, 256, 3).tolist()))
        pixels = np.asarray(picture, dtype=np.int16) + rng.integers(-12, 13, (height, width, 3), dtype=np.int16)
        path = folder / f"{number // FOLDER:03}" / f"{number % FOLDER:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def measure_scaling(
    place: Path,
    recipe: str,
    count: int = 20_000,
    sample: int = 5_000,
    side: int = 96,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One process and Ray on the same pictures: all of them with all cores, a sample of them with one core each."""
    say(f"Writing {count} pictures ...")
    write_pictures(place / "all", count, side)
    write_pictures(place / "sample", sample, side)
    descriptor = Descriptor.from_recipe(recipe, device="cpu")
    config, weights = descriptor.config, descriptor.fingerprint

    def build(device: str, threads: int) -> Descriptor:
        torch.set_num_threads(threads)
        return Descriptor(config, device=device)

    def run(name: str, pictures: str, engine: Engine | None, threads: int, workers: int | None) -> dict[str, Any]:
        say(f"Indexing: {name} ...")
        root = place / pictures
        with (
            _threads(threads),
            ImageSearch.create(place / name, recipe=recipe, root=root, descriptor=descriptor) as search,
        ):
            marks: list[tuple[int, float]] = []
            report = search.index(
                [root],
                engine=engine,
                workers=workers,
                progress=lambda report: marks.append((report.described, time.perf_counter())),
            )
            return _measured(report, marks)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    whole = run("plain", "all", None, cores, None)
    spread = run("ray", "all", OnRay(build, weights, workers=cores, device="cpu"), 1, None)
    single = run("plain-one-core", "sample", None, 1, 0)
    one = run("ray-1", "sample", OnRay(build, weights, workers=1, device="cpu"), 1, None)
    two = run("ray-2", "sample", OnRay(build, weights, workers=2, device="cpu"), 1, None)
    say("Comparing ...")
    return {
        "pictures": count,
        "sample": sample,
        "side": side,
        "recipe": recipe,
        "all cores": cores,
        "plain loop, all cores": whole,
        "ray, a worker for each core": spread,
        "plain loop, one core": single,
        "ray, 1 worker": one,
        "ray, 2 workers": two,
        "efficiency of 2 workers": two["pictures per second"] / (2 * one["pictures per second"]),
        "overhead of ray on one core": 1 - one["pictures per second"] / single["pictures per second"],
        "overhead of ray on all cores": 1 - spread["pictures per second"] / whole["pictures per second"],
        **_compared(place / "plain", place / "ray", descriptor),
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before, every = torch.get_num_threads(), run.PROGRESS_SECONDS
    torch.set_num_threads(count)
    run.PROGRESS_SECONDS = 0.02
    try:
        yield
    finally:
        torch.set_num_threads(before)
        run.PROGRESS_SECONDS = every


def _measured(report: Report, marks: list[tuple[int, float]]) -> dict[str, Any]:
    end, stop = marks[-1]
    begin, start = next((mark for mark in marks if mark[0] >= max(1, end // 10)), marks[-1])
    return {
        "pictures per second": (end - begin) / (stop - start) if end > begin else end / report.seconds,
        "seconds": report.seconds,
        "described": report.described,
        "bad": report.bad,
    }


def _compared(first: Path, second: Path, descriptor: Descriptor) -> dict[str, Any]:
    with ImageSearch.open(first, descriptor=descriptor) as a, ImageSearch.open(second, descriptor=descriptor) as b:
        left, right = [r.id for r in a.store.records()], [r.id for r in b.store.records()]
        worst = 0.0
        if left == right:
            for start in range(0, len(left), FOLDER):
                ids = left[start : start + FOLDER]
                worst = max(worst, float(np.abs(a.vectors(ids) - b.vectors(ids)).max()))
        return {
            "same pictures in both indexes": left == right,
            "pictures in the index of ray": len(right),
            "largest difference of a vector": worst if left == right else None,
            "problems": a.store.verify() + b.store.verify(),
        }
