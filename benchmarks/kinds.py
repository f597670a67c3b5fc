"""What a search finds first among pictures of other kinds than landmarks: the chain of a user, from file to result.

Each kind is a labelled folder (`jpg/`, `ground_truth.json` with `database`, `queries` and, if it likes, `absent`) below
one root; `benchmarks/flat.py` makes prints and covers, `make_seen_again` everyday photos. The databases of all kinds,
and every picture of the other folders of the root, lie in one index: each is searched among all of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from cooc.image_search import ImageSearch, Match, Results
from cooc.pictures.folder import list_images
from cooc.provenance import provenance


def measure_kinds(root: Path, kinds: Sequence[str], recipe: str, most: int) -> dict[str, Any]:
    """`most`: queries of a kind that are asked, and as many that are absent."""
    truths = {kind: json.loads((root / kind / "ground_truth.json").read_text()) for kind in kinds}
    index = root / ".cooc"
    others = [folder for folder in sorted(root.iterdir()) if folder.is_dir() and folder.name not in {*kinds, ".cooc"}]
    with ImageSearch.open(index, write=True) if index.exists() else ImageSearch.create(index, recipe=recipe) as search:
        search.index(others)
        for kind, truth in truths.items():
            search.add([root / kind / "jpg" / name for name in truth["database"]])
        rows = {kind: _searched(search, root / kind / "jpg", truth, most) for kind, truth in truths.items()}
        about = {"recipe": search.meta.recipe, "features": search.meta.features, "pictures": len(search.store)}
    return {"benchmark": "kinds", **about, "kinds": rows, **provenance("cpu")}


def _searched(search: ImageSearch, folder: Path, truth: dict[str, Any], most: int) -> dict[str, Any]:
    def paths(names: Sequence[str]) -> set[str]:
        return {f"{folder.parent.name}/jpg/{name}" for name in names}

    def first(query: dict[str, Any], found: Results) -> Match:
        return next(match for match in found.matches if match.path not in paths(query["junk"]))

    by_vector, right, proven = [], [], []
    boxed, proven_by_box = [], []
    for query in truth["queries"][:most]:
        found = search.search(folder / query["image"])
        if query.get("bbox"):
            drawn = first(query, search.search(folder / query["image"], box=tuple(query["bbox"])))
            boxed.append(drawn.path in paths(query["positives"]))
            proven_by_box.append(boxed[-1] and drawn.verified)
        best, near = first(query, found), first(query, search.search_vector(found.query_vector))
        by_vector.append(near.path in paths(query["positives"]))
        right.append(best.path in paths(query["positives"]))
        proven.append(right[-1] and best.verified)
    asked = truth.get("absent", [])[:most]
    absent = [first(query, search.search(folder / query["image"])).verified for query in asked]
    return {
        "queries": len(right),
        "recall at 1 by vector": round(float(np.mean(by_vector)), 3),
        "recall at 1": round(float(np.mean(right)), 3),
        "first and proven": round(float(np.mean(proven)), 3),
        "recall at 1 with a box": round(float(np.mean(boxed)), 3) if boxed else None,
        "first and proven with a box": round(float(np.mean(proven_by_box)), 3) if boxed else None,
        "absent": len(absent),
        "wrongly proven": round(float(np.mean(absent)), 3) if absent else None,
    }


def make_seen_again(photos: Path, out: Path, count: int, seed: int = 0) -> None:
    """Everyday photos, each with another view of it: a part of it, turned, in other light, smaller, as a poor JPEG.

    As many photos again have a view only, and are absent.
    """
    chance = random.Random(seed)
    chosen = chance.sample(list(list_images(photos)), 2 * count)
    (out / "jpg").mkdir(parents=True)
    views = []
    for number, path in enumerate(chosen):
        with Image.open(path) as opened:
            photo = opened.convert("RGB")
        name = f"{number:05}.jpg"
        if number < count:
            photo.save(out / "jpg" / name, quality=95)
        view = _again(photo, chance)
        view.save(out / "jpg" / f"view_{name}", quality=chance.randint(40, 80))
        views.append({"image": f"view_{name}", "positives": [name][: number < count], "junk": []})
    truth = {"database": [f"{n:05}.jpg" for n in range(count)], "queries": views[:count], "absent": views[count:]}
    (out / "ground_truth.json").write_text(json.dumps(truth))


def _again(photo: Image.Image, chance: random.Random) -> Image.Image:
    share = chance.uniform(0.5, 0.8)  # of each side
    turned = photo.rotate(chance.uniform(-20, 20), Image.Resampling.BICUBIC)
    width, height = (round(side * share) for side in photo.size)
    x, y = (chance.randint(0, round(side * (1 - share))) for side in photo.size)
    view = turned.crop((x, y, x + width, y + height))
    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        view = kind(view).enhance(chance.uniform(0.6, 1.4))
    smaller = chance.uniform(0.6, 1.0)
    return view.resize((round(width * smaller), round(height * smaller)), Image.Resampling.LANCZOS)
