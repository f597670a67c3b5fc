"""Which copies `cooc duplicates` finds among different photos, by kind, and whether it joins what is no copy.

Photos of a folder are indexed with altered copies of some of them. Whether two *photos* that are joined are copies of
one another in truth, only a person can say: those pairs are named in the result.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from cooc.image_search import ImageSearch
from cooc.pictures.decode import open_image
from cooc.pictures.folder import list_images
from cooc.provenance import provenance

KINDS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "re-saved": lambda p: p,
    "half-size": lambda p: p.resize((p.width // 2, p.height // 2)),
    "turned by 90": lambda p: p.transpose(Image.Transpose.ROTATE_90),
    "turned by 180": lambda p: p.transpose(Image.Transpose.ROTATE_180),
    "mirrored": ImageOps.mirror,
    "cropped": lambda p: p.crop((p.width // 5, p.height // 8, p.width * 9 // 10, p.height * 17 // 20)),  # to 51 %
    "half-size and turned": lambda p: p.resize((p.width // 2, p.height // 2)).transpose(Image.Transpose.ROTATE_270),
}


def measure_duplicates(
    folders: list[Path], recipe: str, count: int, copied: int, seed: int, keep: Path | None = None
) -> dict[str, Any]:
    """`keep`: a folder for photos, copies and index, which the next run uses again."""
    files = [path for folder in folders for path in list_images(folder)]
    chosen = random.Random(seed).sample(files, min(count, len(files)))
    with tempfile.TemporaryDirectory() as place:
        photos = keep or Path(place)
        if not (photos / ".cooc").is_dir():
            _write(photos, chosen, copied)
            with ImageSearch.create(photos / ".cooc", recipe=recipe, device="cpu") as search:
                search.index([photos])
        with ImageSearch.open(photos / ".cooc", recipe=recipe, device="cpu") as search:
            started = time.process_time()
            groups = [[record.path for record in group] for group in search.duplicates()]
            seconds = time.process_time() - started
            pictures, features = len(search.store), search.meta.features
    own = {f"{number:05}": path for number, path in enumerate(chosen)}
    names = [[name.partition(".")[0] for name in group] for group in groups]
    found = {name for group in names for name in group if name[:5] in group}
    false = [sorted({own[name[:5]].name for name in group}) for group in names if len({n[:5] for n in group}) > 1]
    return {
        "benchmark": "duplicates",
        "recipe": recipe,
        "features": features,
        "pictures": pictures,
        "photos": len(chosen),
        "copies of each kind": copied,
        "found": {kind: sum(f"{number:05}-{kind}" in found for number in range(copied)) for kind in KINDS},
        "photos that were joined": false,
        "processor seconds of a picture": round(seconds / pictures, 4),
        "load": round(os.getloadavg()[0], 2),
        **provenance("cpu"),
    }


def _write(photos: Path, chosen: list[Path], copied: int) -> None:
    photos.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(chosen):
        shutil.copy(path, photos / f"{number:05}{path.suffix.lower()}")
    for number, kind in itertools.product(range(copied), KINDS):
        altered = KINDS[kind](open_image(chosen[number]).convert("RGB"))
        altered.save(photos / f"{number:05}-{kind}.jpg", quality=70)
