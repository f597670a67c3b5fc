"""What local features cost in an index: seconds and bytes of a picture, beside what its vector takes.

Seconds are processor time of all threads together: the machine may be busy with other things, and a share of the work
that is done in one thread is compared with one that is done in all.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from cooc.descriptor import Descriptor
from cooc.image_search import ImageSearch
from cooc.pictures.decode import EXTENSIONS, load_image
from cooc.provenance import provenance
from cooc.verification.extraction import Extraction
from cooc.verification.features import unpack


def measure_features(folder: Path, engines: str, recipe: str, count: int) -> dict[str, Any]:
    files = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in EXTENSIONS)
    paths = list(itertools.islice(files, count))
    extraction, describe = Extraction(engines), Descriptor.from_pretrained(recipe, device="cpu")
    pixels = [load_image(path, size=extraction.size) for path in paths]
    codes = []

    def extract(number: int) -> None:
        height, width = pixels[number].shape[:2]
        codes.append(extraction.finish(extraction(pixels[number], (width, height))))

    def vector(number: int) -> None:
        describe(describe.load(pixels[number])[None])

    extract(0)  # what is made once
    vector(0)
    codes.clear()
    features, network = (_seconds(work, len(paths)) for work in (extract, vector))
    decoding = _seconds(lambda number: load_image(paths[number], size=extraction.size), len(paths))
    return {
        "benchmark": "features",
        "engines": engines,
        "recipe": recipe,
        "pictures": len(paths),
        "mean pixels": round(mean(one.shape[0] * one.shape[1] for one in pixels)),
        "features of a picture": round(mean(sum(map(len, unpack(code))) for code in codes), 1),
        "bytes of a picture": round(mean(map(len, codes)), 1),
        "bytes on disk for a picture": _on_disk(paths, codes, describe, recipe, engines),
        "processor seconds of a picture": {
            "features": round(features, 4),
            "vector": round(network, 4),
            "decoding": round(decoding, 4),
        },
        "features beside the vector": round(features / network, 4),
        "load": round(os.getloadavg()[0], 2),
        **provenance("cpu"),
    }


def _seconds(work: Callable[[int], object], count: int) -> float:
    started = time.process_time()
    for number in range(count):
        work(number)
    return (time.process_time() - started) / count


def _on_disk(paths: list[Path], codes: list[bytes], describe: Descriptor, recipe: str, engines: str) -> float:
    """What an index in a folder grows by."""
    with tempfile.TemporaryDirectory() as place:
        for i, path in enumerate(paths):
            (Path(place) / f"{i}{path.suffix}").symlink_to(path.absolute())
        index = Path(place) / ".cooc"
        with ImageSearch.create(index, recipe=recipe, root=place, features="", descriptor=describe) as search:
            search.index([place], follow=True)
            search.store.compact()
            before = search.store.disk_bytes() or 0
            search.keep_features(engines)
            ids = [record.id for record in search.store.records()]
            search.store.set_features(dict(zip(ids, codes, strict=False)))
            search.store.compact()
            return round(((search.store.disk_bytes() or 0) - before) / len(ids), 1)
