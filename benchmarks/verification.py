"""What geometry proves: pairs of pictures whose truth is known -> probabilities, false alarms, flat things found.

A kind of pictures is a labelled folder, as `cooc bench` reads and `benchmarks/flat.py` writes: `jpg/`, and
`ground_truth.json` with `database`, `queries` and, if it likes, `absent` (queries whose thing is not in the database).
Where vectors are given, every query is searched for as an index does it: a shortlist by vector and words, verified in
rounds. Where none are, it is compared with every picture.

    rows = measured(folder, "sift", cache)                     # one for each pair, kept in the cache
    calibration = fit({"covers": rows, "books": more_rows})    # each family of kinds counts the same
    shares(alarms(rows, *by_geometry(calibration)))            # what a search would show
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.fitting import SEEN, fit_calibration, reliability
from cooc.files import write_whole
from cooc.index.inverted import Inverted
from cooc.reranking import rank
from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.engines import KEPT, LONGEST, QUERY, extract
from cooc.verification.features import LocalFeatures
from cooc.verification.probability import PROVEN, Calibration
from cooc.verification.rounds import LEAST, SHORTLIST, TOP, rounds
from cooc.verification.verifier import verify
from cooc.verification.words import ENGINE, Signature, signatures
from cooc.verified_search import in_turn

Vectors = Mapping[str, NDArray[np.float32]]  # name of a picture -> its vector
FITS = 6  # the hardest pairs no longer change after about three
Said = tuple[Callable[["Row"], float], Callable[["Row"], Any]]  # how likely a row is, and what the first has most of


@dataclass(frozen=True)
class Row:
    """A query beside one picture."""

    query: str
    picture: str
    same: bool
    inliers: int
    evidence: float
    inside: float
    place: int = 0  # in the ranking, as long as nothing is proven
    cosine: float | None = None

    @property
    def seen(self) -> tuple[float, float, float]:
        return self.inliers, self.evidence, self.inside


# ---- measuring -----------------------------------------------------------------------------------------------------


def measured(folder: Path, engine: str, cache: Path, vectors: Vectors | None = None) -> list[Row]:
    """All pairs of a kind that a search looks at, from the cache where they are there."""
    file = cache / folder.name / f"pairs-{engine}.json"
    if not file.exists():
        rows = [asdict(row) for row in _compare(folder, engine, cache, vectors)]
        write_whole(file, json.dumps(rows))
    return [Row(**row) for row in json.loads(file.read_text())]


def _compare(folder: Path, engine: str, cache: Path, vectors: Vectors | None) -> Iterable[Row]:
    truth = json.loads((folder / "ground_truth.json").read_text())
    kept = {name: _features(folder, name, engine, cache, KEPT) for name in truth["database"]}
    words = _inverted(kept.values()) if vectors and engine == ENGINE else None
    for query in [*truth["queries"], *truth.get("absent", [])]:
        name, same, out = query["image"], set(query["positives"]), {query["image"], *query["junk"]}
        asked = _features(folder, name, engine, cache, QUERY)
        others = {n: one for n, one in kept.items() if n not in out}
        cosines = {n: float(vectors[n] @ vectors[name]) for n in others} if vectors else {}
        if vectors is None:
            found = dict(zip(others, verify([asked], [[one] for one in others.values()]), strict=True))
            order = sorted(others, key=lambda n: -found[n].strength)
        else:
            ids = words.search(signatures([[asked]])[0], TOP + len(out)) if words else []
            alike = [n for n in (truth["database"][int(one, 16)] for one in ids) if n in others][:TOP]
            order, found = _searched(asked, others, cosines, alike, vectors)
        nearest, true = max(cosines, key=cosines.__getitem__, default=order[0]), [n for n in order if n in same]
        for other in dict.fromkeys([order[0], nearest, *true[:1], *found]):
            one = found.get(other, no_agreement(asked))
            seen = round(one.evidence, 3), round(one.inside, 4)
            yield Row(name, other, other in same, one.inliers, *seen, order.index(other), cosines.get(other))


def _searched(
    asked: LocalFeatures,
    others: Mapping[str, LocalFeatures],
    cosines: Mapping[str, float],
    by_words: Sequence[str],
    vectors: Vectors,
) -> tuple[list[str], dict[str, Agreement]]:
    """All names, the best first, and what was verified: the rounds of `cooc.verified_search`."""
    nearest = sorted(cosines, key=lambda n: -cosines[n])
    place = {name: number for number, name in enumerate(nearest)}
    rows = np.stack([vectors[name] for name in nearest])
    first = [place[name] for name in in_turn([nearest[:SHORTLIST], by_words])]
    ranking = rounds(
        first,
        [cosines[nearest[n]] for n in first],
        vectors=lambda numbers: rows[numbers],
        verify=lambda numbers: verify([asked], [[others[nearest[n]]] for n in numbers], screened=True),
        nearest=lambda some, k: rank(some, rows, k)[0],
    )
    verified = any(agreement.strength >= LEAST for agreement in ranking.agreements.values())
    led = [nearest[n] for n in ranking.ids] if verified else []
    return list(dict.fromkeys([*led, *nearest])), {nearest[n]: one for n, one in ranking.agreements.items()}


def _inverted(pictures: Iterable[LocalFeatures]) -> Inverted:
    return Inverted.of((number.to_bytes(16), signatures([[one]])[0]) for number, one in enumerate(pictures))


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


def fit(kinds: Mapping[str, Sequence[Row]], used: Sequence[str] = SEEN) -> Calibration:
    """On each query's hardest pairs; a family of kinds weighs the same whatever its number of kinds and queries.

    So the percentage is that of a search's best result, if the thing is there as often as it is not: the true pairs of
    a kind weigh as much as if each query had its thing in the database, the wrong ones as if none had. All pairs
    together would be fitted to the many wrong ones that no search shows first. Which are the hardest is for the fit to
    say: it begins with those of most inliers, and goes on with those that it takes for the likeliest.
    """
    strength: Callable[[Row], float] = attrgetter("inliers")
    families = Counter(map(family, kinds))
    asked = {
        kind: {True: sum(any(row.same for row in part) for part in queries), False: len(queries)}
        for kind, queries in ((kind, _by_query(rows)) for kind, rows in kinds.items())
    }
    for _ in range(FITS):
        chosen = [(kind, row) for kind, rows in kinds.items() for row in hardest(rows, strength)]
        weights = [1 / asked[kind][row.same] / families[family(kind)] for kind, row in chosen]
        found = fit_calibration([row.seen for _, row in chosen], [row.same for _, row in chosen], weights, used)
        strength = partial(probability, found)
    return found


def family(kind: str) -> str:
    """`landmarks-places` is of the family `landmarks`."""
    return re.split("[-_]", kind)[0]


def hardest(rows: Sequence[Row], strength: Callable[[Row], float]) -> list[Row]:
    """Of each query the strongest true pair and the strongest wrong one, where they agree in something."""
    chosen = []
    for part in _by_query(rows):
        for same in (True, False):
            some = [row for row in part if row.same == same and row.inliers]
            chosen += [max(some, key=strength)] if some else []
    return chosen


def probability(calibration: Calibration, row: Row) -> float:
    return float(1 / (1 + np.exp(-calibration.log_odds(*row.seen)))) if row.inliers else 0.0


def judge(rows: Sequence[Row], calibration: Calibration) -> dict[str, Any]:
    """How true the probabilities of one kind are, over the hardest pairs."""
    some = hardest(rows, partial(probability, calibration))
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


def by_geometry(calibration: Calibration) -> Said:
    """What is proven comes first, the likeliest before the others; the rest stays in its order."""
    said = partial(probability, calibration)
    return said, lambda row: (chance if (chance := said(row)) >= PROVEN else 0.0, -row.place)


def by_cosine(slope: float, offset: float) -> Said:
    """The curve of a recipe's cosines (`cooc/data/calibration.json`)."""
    return lambda row: float(1 / (1 + np.exp(-slope * (row.cosine or 0.0) - offset))), lambda row: row.cosine


def alarms(rows: Sequence[Row], said: Callable[[Row], float], order: Callable[[Row], Any]) -> dict[str, int]:
    """What a search would show at 50 % or more: of a thing that is not there, and of one that is and comes first.

    A query whose thing is in the database also stands for one whose thing is not, with its positives left out.
    """
    queries = _by_query(rows)
    present = [part for part in queries if any(row.same for row in part)]
    wrong = [max((said(row) for row in part if not row.same), default=0.0) for part in queries]
    first = [row for part in present if (row := max(part, key=order)).same]
    return {
        "absent": len(wrong),
        "shown wrongly": sum(chance >= PROVEN for chance in wrong),
        "present": len(present),
        "first": len(first),
        "shown rightly": sum(said(row) >= PROVEN for row in first),
    }


def shares(counts: Mapping[str, int]) -> dict[str, Any]:
    """The counts, and what share was shown, with its 95 % interval."""
    found: dict[str, Any] = dict(counts)
    for name, of in (("shown wrongly", "absent"), ("shown rightly", "first")):
        if counts[of]:
            found[f"{name}, share"] = round(counts[name] / counts[of], 4)
            found[f"{name}, 95 %"] = interval(counts[name], counts[of])
    return found


def interval(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's, of a share: true near 0 and 1 as well."""
    share, room = count / total, z * z / total
    middle, half = share + room / 2, z * sqrt(share * (1 - share) / total + room / total / 4)
    return round(max((middle - half) / (1 + room), 0), 4), round(min((middle + half) / (1 + room), 1), 4)


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
