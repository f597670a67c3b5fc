"""`cooc bench index`: how much of the bare network's rate indexing reaches, and what kill -9 does to an index.

Both are run on the user's own pictures with the real recipe, and the tests run the same functions on small ones.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cooc.descriptor import Descriptor
from cooc.errors import StoreMissingError
from cooc.image_search import ImageSearch
from cooc.index import run
from cooc.index.store import Vectors
from cooc.pictures.batches import Batch, Item, batches, default_workers
from cooc.pictures.folder import list_images
from cooc.stream import batch_pixels

SAMPLE = 4096  # pictures at most that the bare network is given: they lie in memory

Open = Callable[[Path, Path], ImageSearch]  # index, root -> the index, made if it is not there, open for writing


def open_or_create(index: Path, root: Path, recipe: str, device: str = "auto") -> ImageSearch:
    try:
        return ImageSearch.open(index, write=True, descriptor=_descriptor(recipe, device))
    except StoreMissingError:
        return ImageSearch.create(index, recipe=recipe, root=root, descriptor=_descriptor(recipe, device))


@functools.cache
def _descriptor(recipe: str, device: str) -> Descriptor:
    return Descriptor.from_recipe(recipe, device=device)


def measure_throughput(
    folder: Path, recipe: str, device: str = "auto", workers: int | None = None, rounds: int = 3
) -> dict[str, Any]:
    """Pictures per second of the bare network on decoded pixels in its memory, and of indexing the files; in turns.

    The bare network gets all pictures, or the first `SAMPLE` of very many; its rate does not depend on their number.
    """
    descriptor = Descriptor.from_recipe(recipe, device=device)
    paths = list(list_images(folder))
    if workers is None:
        workers = default_workers(descriptor.device.type)
    items = (Item(None, path) for path in paths[:SAMPLE])
    size, least, most = descriptor.config.size, descriptor.backbone.stride, batch_pixels(descriptor.device)
    stacks = []
    for batch in batches(items, size=size, min_side=least, workers=workers, batch_pixels=most):
        if isinstance(batch, Batch):
            pixels = np.empty(batch.shape, np.uint8)
            batch.copy_to(pixels)
            stacks.append(torch.from_numpy(pixels).permute(0, 3, 1, 2).to(descriptor.device))  # no transfer
    count = sum(map(len, stacks))

    @torch.inference_mode()
    def bare() -> float:
        started = time.perf_counter()
        for stack in stacks:
            descriptor.backbone(stack).sum().item()
        return time.perf_counter() - started

    def whole() -> float:
        with (
            tempfile.TemporaryDirectory() as place,
            ImageSearch.create(Path(place) / "index", recipe=recipe, root=folder, descriptor=descriptor) as search,
        ):
            started = time.perf_counter()
            report = search.index([folder], workers=workers)
            assert report.described + report.copied + report.bad == len(paths)
            return time.perf_counter() - started

    bare()  # warm: memory, kernels
    times = [(bare() / count, whole() / len(paths)) for _ in range(rounds)]  # seconds for one picture
    return {
        "pictures": len(paths),
        "pictures, bare network": count,
        "pixels": sum(stack[:, 0].numel() for stack in stacks) // max(count, 1),
        "recipe": recipe,
        "workers": workers,
        "bare network, pictures per second": 1 / statistics.median(b for b, _ in times),
        "indexing, pictures per second": 1 / statistics.median(w for _, w in times),
        "share of the bare network": statistics.median(b / w for b, w in times),
        "rounds": [{"bare": 1 / b, "indexing": 1 / w} for b, w in times],
    }


def kill_and_resume(
    folder: Path, open_index: Open, kills: int, seed: int = 0, commit_images: int = run.COMMIT_IMAGES
) -> dict[str, Any]:
    """Kill indexing at random moments; each time the index must open, verify, and be completed by a second run.

    Children are forked from a server that has loaded everything, so that the moments fall into the work.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, getattr(open_index, "func", open_index).__module__])
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        _run(context, (whole, folder, open_index, commit_images), None)  # starts the server, too
        seconds = _run(context, (Path(place) / "timed", folder, open_index, commit_images), None) or 1.0
        expected = _contents(open_index(whole, folder))
        problems: list[str] = []
        killed = committed = 0
        worst = 0.0
        for number in range(kills):
            index = Path(place) / f"killed-{number}"
            after = draw.uniform(0, seconds)
            finished = _run(context, (index, folder, open_index, commit_images), after)
            killed += finished is None
            seconds = min(seconds, finished or seconds)  # a busy machine may have been slow at first
            with open_index(index, folder) as search:
                problems += [f"kill {number}: {problem}" for problem in search.store.verify()]
                committed += len(search.store)
                before = _contents(search, close=False)
                search.index([folder])
                problems += [f"second run {number}: {problem}" for problem in search.store.verify()]
                found = _contents(search, close=False)
            if found.keys() != expected.keys():
                problems.append(f"kill {number}: {len(found)} pictures, {len(expected)} expected")
            else:
                worst = max(worst, *(float(np.abs(found[name] - expected[name]).max()) for name in expected))
            if any((found[name] != before[name]).any() for name in before):
                problems.append(f"kill {number}: a committed vector changed")
        return {
            "kills": kills,
            "seed": seed,
            "pictures": len(expected),
            "seconds of a whole run": seconds,
            "killed before the end": killed,
            "mean share committed": committed / max(1, kills * len(expected)),
            "largest difference of a vector": worst,
            "problems": problems,
        }


def _contents(search: ImageSearch, close: bool = True) -> dict[str, Vectors]:
    records = list(search.store.records())
    vectors = search.store.vectors([record.id for record in records])
    if close:
        search.close()
    return {record.path: vector for record, vector in zip(records, vectors, strict=True)}


def _run(context: Any, arguments: tuple[Any, ...], kill_after: float | None) -> float | None:
    """Index in a process of its own: the seconds that it took, or None if it was killed meanwhile."""
    begun, told = context.Pipe(duplex=False)
    process = context.Process(target=_index, args=(told, *arguments))
    process.start()
    told.close()
    begun.recv()
    started = time.perf_counter()
    process.join(kill_after)
    seconds = time.perf_counter() - started
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    begun.close()
    return seconds if process.exitcode == 0 else None


def _index(told: Any, index: Path, folder: Path, open_index: Open, commit_images: int) -> None:
    run.COMMIT_IMAGES = commit_images
    told.send("begun")
    with open_index(index, folder) as search:
        search.index([folder], workers=0)
