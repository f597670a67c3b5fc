"""A query vector -> matches: nearest pictures, expanded, augmented and re-ranked as asked, with their probabilities.

Everything here works on a `Store` and plain arrays, whatever engine holds the index: expansion, augmentation and
re-ranking look at a shortlist, so that their cost does not grow with the collection.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError, UnknownNameError
from cooc.index.calibration import THRESHOLD, Calibration
from cooc.index.records import Filter, Record
from cooc.index.store import Store, Vectors, blocks, intact
from cooc.reranking import EXPANSIONS, RERANKERS, alpha_expansion, expand, rerank
from cooc.verification.agreement import Agreement

NEAR_DUPLICATE = 0.8  # measured: copies saved at quality 40 or cropped by 10 % have 0.79 to 0.97, other views less
NEIGHBOURS = 10  # of an expansion and of database augmentation
SHORTLIST = 400  # best results that re-ranking and database augmentation look at
BLOCK = 256  # vectors searched at once


@dataclass(frozen=True)
class Match:
    id: str
    path: str  # relative to the index's root
    score: float  # inner product with the query, however the results were ordered
    probability: float | None  # that it shows the same thing, where it is verified; else by the index's own curve
    record: Record
    away: bool = False  # its file is not there now, but may come back with its folder
    verified: bool = False  # do both pictures agree in more than their vectors? If not, it is merely similar
    agreement: Agreement | None = None  # in what, if it is verified: inliers, regions, transform
    query: int = 0  # with which of the query's pictures


@dataclass(frozen=True, eq=False)
class Results:
    matches: list[Match]  # best first
    no_match: bool  # nothing is verified; without verification: even the best result is more likely another thing
    query_vector: NDArray[np.float32]  # (D,)
    seconds: float
    checked: bool = False  # by geometry? Then what is not verified is merely similar


class Ways(TypedDict, total=False):
    """See `ImageSearch.search`."""

    expand: str | None
    rerank: str | None
    augment: bool
    where: Filter | None
    min_score: float | None
    offset: int
    thorough: bool


@dataclass(frozen=True)
class Options:
    """What `ImageSearch.search` takes besides the picture."""

    k: int = 20
    expand: str | None = None
    rerank: str | None = None
    augment: bool = False
    where: Filter | None = None
    min_score: float | None = None
    offset: int = 0
    thorough: bool = False

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("offset", 0)):
            object.__setattr__(self, name, _whole(name, getattr(self, name), least))
        for kind, way, known in (("expansion", self.expand, EXPANSIONS), ("re-ranking", self.rerank, RERANKERS)):
            if way is not None and (not isinstance(way, str) or way not in known):
                raise UnknownNameError(kind, way, known)
        score: Any = self.min_score
        if score is not None and (not hasattr(score, "__float__") or math.isnan(score)):
            raise InputError(f"min_score must be a number, the least similarity of a result, not {score!r}.")
        where: Any = self.where
        if where is not None and not isinstance(where, Filter):
            raise InputError(f"where must be a Filter, such as Filter(prefix='2023', tags={{'car'}}), not {where!r}.")


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)  # any kind of whole number, and nothing that must be rounded
    except TypeError:
        number = least - 1
    if number < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return number


def find_matches(
    store: Store,
    query: NDArray[np.float32],
    options: Options,
    *,
    curve: Calibration | None = None,
    without: str | None = None,
    started: float | None = None,
) -> Results:
    """The best matches of a unit vector (D,); `without` is the id of the picture that it comes from."""
    started = time.monotonic() if started is None else started
    ids, vectors, first = ranked(store, query, options, without)
    scores = vectors @ query
    chances: list[float | None] = [None] * len(ids) if curve is None else curve(scores).tolist()
    matches = [
        Match(name, record.path, score, chance, record)
        for name, score, chance, record in zip(ids, scores.tolist(), chances, store.get(ids), strict=True)
        if record is not None and (options.min_score is None or score >= options.min_score)
    ]
    best = max((match.probability or 0.0 for match in matches), default=0.0)
    no_match = curve is not None and best < THRESHOLD
    return Results(matches[first : first + options.k], no_match, query, time.monotonic() - started)


def ranked(
    store: Store, query: NDArray[np.float32], options: Options, without: str | None
) -> tuple[list[str], Vectors, int]:
    """The ids of the nearest pictures, best first, their vectors, and where among them the page begins."""
    asked = query[None]  # (1, D)
    if options.expand not in (None, "none"):
        ids, vectors = intact(store, _nearest(store, asked, NEIGHBOURS, options.where, without))
        asked = expand(options.expand, asked, vectors, n=NEIGHBOURS) if ids else asked
    wanted = options.offset + options.k
    reordered = options.augment or options.rerank not in (None, "none")
    ids = _nearest(store, asked, max(wanted, SHORTLIST) if reordered else wanted, options.where, without)
    first = options.offset
    if first and not reordered and options.min_score is None:  # all that is looked up is the page that was asked for,
        ids, first = ids[:1] + ids[first:], 1  # and the best one, which tells whether there is a match
    ids, vectors = intact(store, ids)
    if options.augment and ids:
        order = np.argsort(-(_augmented(store, ids, vectors, options.where) @ asked[0]), kind="stable")
        ids, vectors = [ids[i] for i in order], vectors[order]
    if options.rerank not in (None, "none") and ids:
        order = rerank(options.rerank, asked, vectors)[0]
        ids, vectors = [ids[i] for i in order], vectors[order]
    return ids, vectors, first


def _nearest(store: Store, query: Vectors, k: int, where: Filter | None, without: str | None) -> list[str]:
    ids = store.search(query, k + (without is not None), where=where).ids[0]
    return [name for name in ids if name != without][:k]


def _augmented(store: Store, ids: list[str], vectors: Vectors, where: Filter | None) -> Vectors:
    """alpha-DBA of the shortlist alone: each of its vectors joined with its neighbours in the whole index."""
    found = store.search(vectors, NEIGHBOURS + 1, where=where)
    names, database = intact(store, list(dict.fromkeys([*ids, *(name for row in found.ids for name in row)])))
    place = {name: i for i, name in enumerate(names)}
    indices = np.array([[place.get(name, -1) for name in row] for row in found.ids])
    own = np.array([place.get(name, -1) for name in ids])
    return alpha_expansion(vectors, database, NEIGHBOURS, exclude=own, found=(indices, found.scores))


def find_duplicates(store: Store, threshold: float, where: Filter | None = None) -> Iterator[list[Record]]:
    """Groups of pictures joined by similarities of at least `threshold`, each in the order of its paths.

    Each picture is searched once, in blocks: time grows with what a search costs, memory with the duplicates alone.
    """
    groups = Groups()
    for name, others in neighbours(store, threshold, where):
        for other, _ in others:
            groups.join(name, other)
    return groups.records(store)


class Groups:
    """Pictures that are joined in pairs: a forest, one tree for each group."""

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}  # of pictures that have a duplicate

    def top(self, name: str) -> str:
        parent = self.parent
        while parent.get(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    def join(self, name: str, other: str) -> None:
        first, second = sorted((self.top(name), self.top(other)))
        self.parent[first] = self.parent[second] = first

    def joined(self, name: str, other: str) -> bool:
        return self.top(name) == self.top(other)

    def records(self, store: Store) -> Iterator[list[Record]]:
        members: dict[str, list[str]] = {}
        for name in self.parent:
            members.setdefault(self.top(name), []).append(name)
        groups = [sorted((r for r in store.get(ids) if r), key=lambda r: r.path) for ids in members.values()]
        yield from sorted((group for group in groups if len(group) > 1), key=lambda group: group[0].path)


def neighbours(
    store: Store, threshold: float, where: Filter | None = None, *, nearest: int = 0, least: float = 1.0
) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Each picture with all others whose similarity reaches the threshold, and its `nearest` ones from `least` on."""
    for block in blocks(store.records(where), BLOCK):
        ids, vectors = intact(store, [record.id for record in block])
        k = max(16, nearest + 1)
        while ids:
            found = store.search(vectors, k, where=where)
            more = []  # are asked for while all that came reach the threshold
            for row, (name, scores, names) in enumerate(zip(ids, found.scores, found.ids, strict=True)):
                if len(names) == k and scores[-1] >= threshold:
                    more.append(row)
                    continue
                others = [pair for pair in zip(names, scores.tolist(), strict=True) if pair[0] != name]
                yield (
                    name,
                    [
                        (other, score)
                        for place, (other, score) in enumerate(others)
                        if score >= threshold or (place < nearest and score >= least)
                    ],
                )
            ids, vectors, k = [ids[row] for row in more], vectors[more], 4 * k


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    norm = float(np.linalg.norm(vector))
    if not norm > 0:
        raise InputError("The network finds nothing in this picture (is it of one colour?): search with another one.")
    return (vector / norm).astype(np.float32)


def as_query(vector: Any, dim: int) -> NDArray[np.float32]:
    """A vector that a caller gave, as a list, an array or a tensor, of any length but 0: a unit vector (D,)."""
    try:
        values = np.asarray(vector, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor that wants to be detached
        raise InputError(f"A {type(vector).__name__} is no vector ({error}): give {dim} numbers.") from error
    if values.shape != (dim,):
        raise InputError(f"The vectors of this index have shape ({dim},), not {values.shape}.")
    length = float(np.linalg.norm(values))
    if not 0 < length < math.inf:
        raise InputError(f"A vector of length {length} has no direction: give finite numbers, not all of them 0.")
    return (values / length).astype(np.float32)
