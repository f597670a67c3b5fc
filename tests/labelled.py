"""A small labelled folder of generated pictures, as a user would make one: three things, three views of each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image


def write_labelled_folder(folder: Path, side: int = 80) -> Path:
    """folder/ground_truth.json and folder/jpg/: two views of each thing, or a part of them, ask for the other views."""
    rng = np.random.default_rng(0)
    (folder / "jpg").mkdir(parents=True)
    views: dict[str, list[str]] = {}
    for thing in ("arch", "gate", "tower"):
        pattern = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((side + 16, side + 16), 0)
        for view, (x, y) in enumerate(((0, 0), (12, 4), (5, 15))):
            name = f"{thing}_{view:06d}"
            pattern.crop((x, y, x + side, y + side - 8 * view)).save(folder / "jpg" / f"{name}.jpg")
            views.setdefault(thing, []).append(name)
    queries = [
        {"image": name, "bbox": [0, 0, side, side - 10], "positives": [n for n in names if n != name], "junk": [name]}
        for names in views.values()
        for name in names[:2]
    ]
    database = [name for names in views.values() for name in names]
    truth = {"name": folder.name, "database": database, "queries": queries}
    (folder / "ground_truth.json").write_text(json.dumps(truth))
    return folder
