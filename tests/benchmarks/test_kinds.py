"""Kinds of pictures, searched as a user does."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

from PIL import Image

from benchmarks.kinds import make_seen_again, measure_kinds


def test_photos_seen_again_are_found_first(tmp_path: Path) -> None:
    data = Path(str(resources.files("skimage"))) / "data"
    for folder, names in {
        "photos": ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"),
        "root/others": ("brick.png",),
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            shutil.copy(data / name, tmp_path / folder)
    kind = tmp_path / "root" / "everyday"
    make_seen_again(tmp_path / "photos", kind, 2)
    truth = json.loads((kind / "ground_truth.json").read_text())
    assert [query["positives"] for query in truth["queries"] + truth["absent"]] == [
        ["00000.jpg"],
        ["00001.jpg"],
        [],
        [],
    ]
    with Image.open(kind / "jpg/00000.jpg") as photo, Image.open(kind / "jpg/view_00000.jpg") as view:
        assert view.width < photo.width
    found = measure_kinds(tmp_path / "root", ["everyday"], "light+size=256", 5)
    assert (found["pictures"], found["features"]) == (3, "sift")
    row = found["kinds"]["everyday"]
    assert (row["queries"], row["absent"]) == (2, 2)
    assert (row["recall at 1"], row["first and proven"], row["wrongly proven"]) == (1.0, 1.0, 0.0)
    assert (
        measure_kinds(tmp_path / "root", ["everyday"], "light+size=256", 1)["kinds"]["everyday"]["absent"] == 1
    )  # again
