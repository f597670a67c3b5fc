"""What geometry proves: pairs of pictures whose truth is known -> probabilities, false alarms, flat things found.

A kind of pictures is a labelled folder, as `cooc bench` reads and `benchmarks/flat.py` writes: `jpg/`, and
`ground_truth.json` with `database`, `queries` and, if it likes, `absent` (queries whose thing is not in the database).
Every query is compared with every picture of its database, or with the `top` nearest where vectors are given.

    rows = measured(folder, "sift", cache)                     # one for each pair, kept in the cache
    calibration = fit([rows, more_rows])                       # each kind counts the same
    alarms(rows, calibration)                                  # what a search would show
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.fitting import fit_calibration, reliability
from cooc.files import write_whole
from cooc.index.inverted import Inverted
from cooc.verification.engines import KEPT, LONGEST, QUERY, extract
from cooc.verification.features import LocalFeatures
from cooc.verification.probability import Calibration
from cooc.verification.verifier import verify
from cooc.verification.words import ENGINE, Signature, signatures

Vectors = Mapping[str, NDArray[np.float32]]  # name of a picture -> its vector
SHOWN = 0.5  # probability from which a result is shown as found


@dataclass(frozen=True)
class Row:
    """A query beside one picture."""

    query: str
    picture: str
    same: bool
    inliers: int
    spread: float
    cosine: float | None = None


# ---- measuring -----------------------------------------------------------------------------------------------------


def measured(
    folder: Path, engine: str, cache: Path, *, top: int | None = None, vectors: Vectors | None = None
) -> list[Row]:
    """All pairs of a kind, from the cache where they are there."""
    file = cache / folder.name / f"pairs-{engine}.json"
    if not file.exists():
        rows = [asdict(row) for row in _compare(folder, engine, cache, top, vectors)]
        write_whole(file, json.dumps(rows))
    return [Row(**row) for row in json.loads(file.read_text())]


def _compare(folder: Path, engine: str, cache: Path, top: int | None, vectors: Vectors | None) -> Iterable[Row]:
    truth = json.loads((folder / "ground_truth.json").read_text())
    kept = {name: _features(folder, name, engine, cache, KEPT) for name in truth["database"]}
    for query in [*truth["queries"], *truth.get("absent", [])]:
        name = query["image"]
        names = [n for n in truth["database"] if n != name and n not in query["junk"]]
        cosines = {n: float(vectors[n] @ vectors[name]) for n in names} if vectors else {}
        if top and cosines:
            names = sorted(names, key=lambda n: -cosines[n])[:top]
        found = verify([_features(folder, name, engine, cache, QUERY)], [[kept[n]] for n in names])
        for other, agreement in zip(names, found, strict=True):
            same = other in query["positives"]
            yield Row(name, other, same, agreement.inliers, round(agreement.spread, 4), cosines.get(other))


def _features(folder: Path, name: str, engine: str, cache: Path, limit: int) -> LocalFeatures:
    """As a query has them (8 bits) or as an index keeps them (4 bits); the cache holds those of a query."""
    file = cache / folder.name / engine / f"{name}.bin"
    if not file.exists():
        with Image.open(folder / "jpg" / name) as image:
            size = image.size
            image.draft("RGB", (LONGEST, LONGEST))
            rgb = image.convert("RGB")
        rgb.thumbnail((LONGEST, LONGEST))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, extract(engine, np.array(rgb), size=size, limit=QUERY)[0].to_bytes(8))
    features = LocalFeatures.from_bytes(file.read_bytes())
    return features if limit == QUERY else LocalFeatures.from_bytes(features.take(slice(limit)).to_bytes(4))


# ---- probabilities -------------------------------------------------------------------------------------------------


def fit(kinds: Sequence[Sequence[Row]]) -> Calibration:
    """On each query's hardest pairs; a kind weighs the same whatever its number of queries.

    So the percentage is that of a search's best result, if the thing is there as often as it is not. All pairs together
    would be fitted to the many wrong ones that no search shows first.
    """
    rows = [row for part in kinds for row in hardest(part)]
    weights = [1 / len(_by_query(part)) for part in kinds for _ in hardest(part)]
    return fit_calibration([r.inliers for r in rows], [r.spread for r in rows], [r.same for r in rows], weights)


def hardest(rows: Sequence[Row]) -> list[Row]:
    """Of each query the strongest true pair and the strongest wrong one, where they agree in something."""
    chosen = []
    for part in _by_query(rows):
        for same in (True, False):
            best = max((row for row in part if row.same == same), key=lambda r: r.inliers, default=None)
            if best is not None and best.inliers:
                chosen.append(best)
    return chosen


def probability(calibration: Calibration, row: Row) -> float:
    return 1 / (1 + np.exp(-calibration.log_odds(row.inliers, row.spread))) if row.inliers else 0.0


def judge(rows: Sequence[Row], calibration: Calibration) -> dict[str, Any]:
    """How true the probabilities of one kind are, over the hardest pairs."""
    some = hardest(rows)
    if not some:
        return {"pairs": len(rows), "hardest": 0}
    said = np.array([probability(calibration, row) for row in some])
    same = np.array([row.same for row in some])
    table = reliability(said, same)
    return {
        "pairs": len(rows),
        "hardest": len(some),
        "true among them": int(same.sum()),
        "brier": float(np.mean((said - same) ** 2)),
        "ece": float(sum(bin["pairs"] * abs(bin["said"] - bin["true"]) for bin in table) / len(some)),
        "reliability": table,
    }


def alarms(rows: Sequence[Row], said: Callable[[Row], float], order: Callable[[Row], float]) -> dict[str, Any]:
    """What a search would show at 50 % or more: of a thing that is not there, and of one that is and comes first.

    A query whose thing is in the database also stands for one whose thing is not, with its positives left out.
    """
    queries = _by_query(rows)
    wrong = [max((said(r) for r in part if not r.same), default=0.0) for part in queries]
    first = [max(part, key=order) for part in queries if any(r.same for r in part)]
    right = [said(row) for row in first if row.same]
    return {
        "absent": len(wrong),
        "absent shown": _share(p >= SHOWN for p in wrong),
        "present": len(first),
        "first": _share(row.same for row in first),
        "first shown": _share(p >= SHOWN for p in right),
    }


def found_first(rows: Sequence[Row], order: Callable[[Row], float]) -> float | None:
    """Recall at 1, over the queries whose thing is in the database (whether or not `rows` still hold it)."""
    return _share(max(part, key=order).same for part in _by_query(rows))


def words_of(folder: Path, cache: Path) -> tuple[Mapping[str, Signature], Mapping[str, Signature]]:
    """The visual words of a kind's pictures, and of its queries."""
    truth = json.loads((folder / "ground_truth.json").read_text())
    pictures, queries = truth["database"], [query["image"] for query in truth["queries"]]
    kept = signatures([[_features(folder, name, ENGINE, cache, KEPT)] for name in pictures])
    asked = signatures([[_features(folder, name, ENGINE, cache, QUERY)] for name in queries])
    return dict(zip(pictures, kept, strict=True)), dict(zip(queries, asked, strict=True))


def first_by_words(
    pictures: Mapping[str, Signature], queries: Mapping[str, Signature], others: Sequence[Signature], k: int
) -> dict[str, set[str]]:
    """Of each query the pictures of the kind that are among the first k, `others` included."""
    names = list(pictures)
    everything = [*pictures.values(), *others]
    index = Inverted.of((number.to_bytes(16), one) for number, one in enumerate(everything))
    found = {query: [int(name, 16) for name in index.search(one, k)] for query, one in queries.items()}
    return {query: {names[n] for n in numbers if n < len(names)} for query, numbers in found.items()}


def flat_recall(
    rows: Sequence[Row], vectors: Vectors, others: NDArray[np.float32], by_words: Mapping[str, set[str]]
) -> dict[str, Any]:
    """Recall at 1 by the vector, by geometry over all pictures of the kind, and over a shortlist among `others` too.

    `by_words` are the first 50 of each query by visual words, which a search joins with the first 50 by vector.
    """
    present = [part for part in _by_query(rows) if any(row.same for row in part)]
    report: dict[str, Any] = {"queries": len(present), "distractors": len(others)}
    ranked = []  # for each query its rows, each with the place of its picture by cosine
    for part in present:
        query = vectors[part[0].query]
        own, far = [float(vectors[row.picture] @ query) for row in part], np.sort(others @ query)
        above = [sum(c > mine for c in own) + len(far) - int(np.searchsorted(far, mine, "right")) for mine in own]
        ranked.append(list(zip(part, above, strict=True)))
    report["vector alone"] = _share(any(row.same and place == 0 for row, place in part) for part in ranked)
    report["geometry over everything"] = found_first([r for part in present for r in part], lambda r: r.inliers)
    for k in (50, 100, 200):
        near = [[row for row, place in part if place < k] for part in ranked]
        report[f"in the first {k} by vector"] = _share(any(row.same for row in part) for part in near)
        report[f"geometry over the first {k}"] = _share(
            bool(part) and max(part, key=lambda r: (r.inliers, vectors[r.picture] @ vectors[r.query])).same
            for part in near
        )
    both = [[row for row, place in part if place < 50 or row.picture in by_words[row.query]] for part in ranked]
    report["in the first 50 by words"] = _share(
        any(row.same and row.picture in by_words[row.query] for row, _ in part) for part in ranked
    )
    report["geometry over the first 50 by vector and 50 by words"] = _share(
        bool(part) and max(part, key=lambda r: (r.inliers, vectors[r.picture] @ vectors[r.query])).same for part in both
    )
    return report


def _by_query(rows: Sequence[Row]) -> list[list[Row]]:
    queries: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        queries[row.query].append(row)
    return list(queries.values())


def _share(values: Iterable[bool]) -> float | None:
    found = list(values)
    return round(sum(found) / len(found), 4) if found else None
