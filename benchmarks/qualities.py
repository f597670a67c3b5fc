"""What a photo costs by the qualities of `cooc index`: seconds of one core, and bytes on disk.

Seconds are processor time of all threads and processes together: the machine may be busy with other things.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

from cooc.image_search import QUALITIES, ImageSearch
from cooc.pictures.folder import list_images
from cooc.provenance import provenance


def measure_qualities(folder: Path, count: int) -> dict[str, Any]:
    photos = list(itertools.islice(list_images(folder), count + 1))
    rows = {}
    for name, quality in QUALITIES.items():
        with tempfile.TemporaryDirectory() as place:
            shutil.copy(photos[0], place)
            with ImageSearch.create(
                Path(place) / ".cooc", recipe=quality.recipe, features=quality.features, device="cpu"
            ) as search:
                search.index([place], workers=0)  # what is loaded, and takes room, once
                fixed = _held(search, place)
                for photo in photos[1:]:
                    shutil.copy(photo, place)
                before = _processor()
                search.index([place], workers=0)
                seconds = _processor() - before
                held = _held(search, place) - fixed
                rows[name] = {
                    "recipe": quality.recipe,
                    "features": quality.features,
                    "processor seconds of a photo": round(seconds / count, 3),
                    "MB of a thousand photos": round(held / count / 1e3, 1),
                }
    load = round(os.getloadavg()[0], 2)
    return {"benchmark": "qualities", "photos": count, "qualities": rows, "load": load, **provenance("cpu")}


def _held(search: ImageSearch, place: str) -> int:
    search.store.compact()
    return sum(file.stat().st_size for file in (Path(place) / ".cooc").rglob("*") if file.is_file())


def _processor() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)
