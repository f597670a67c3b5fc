"""A labelled folder of which half is thumbnails: are small pictures found, and do they find?

    python -m benchmarks thumbnails data/gldv2_dev data              # data/half and data/half-by-thumbnail
    cooc bench data/half -r resnet-tuned,resnet-tuned+least=0 --verify sift

In both every second picture of the database is a copy of 100 to 256 pixels; in the second one the queries are, too.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from PIL import Image

SIDES = 100, 256  # pixels of a thumbnail's longer side
NAMES = "half", "half-by-thumbnail"


def write_thumbnails(folder: Path, out: Path, seed: int = 0) -> list[Path]:
    """Both folders, from one with `jpg/` and `ground_truth.json` whose queries are not in its database, without boxes.

    A picture that is reduced is reduced to the same pixels in both.
    """
    truth = json.loads((folder / "ground_truth.json").read_text(encoding="utf-8"))
    asked = {query["image"] for query in truth["queries"]}
    some = set(sorted(truth["database"])[::2])
    made = [out / name for name in NAMES]
    for new, small in zip(made, (some, some | asked), strict=True):
        (new / "jpg").mkdir(parents=True)
        for name in sorted({*truth["database"], *asked}):
            longest = random.Random(f"{seed}/{name}").randint(*SIDES)
            if name in small:
                with Image.open(folder / "jpg" / name) as picture:
                    picture.thumbnail((longest, longest), Image.Resampling.LANCZOS)
                    picture.save(new / "jpg" / name, quality=85)
            else:
                shutil.copyfile(folder / "jpg" / name, new / "jpg" / name)
        (new / "ground_truth.json").write_text(json.dumps(truth | {"name": new.name}), encoding="utf-8")
    return made
