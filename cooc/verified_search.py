"""Matches that geometry proves: the shortlist of an index, verified in rounds (`cooc.verification.rounds`).

    results = find_verified(store, query, [extract("sift", pixels)], options)
    results.matches[0].agreement.inliers        # points of both pictures that agree on one geometry

What is verified leads, with the probability that it shows the same thing; what follows is merely similar. Only the
shortlist and the neighbours of what is verified are looked at: the cost does not grow with the collection. The
shortlist is made of two, taken in turn: the nearest by their vectors, and those that share most visual words.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cooc.index.inverted import Inverted
from cooc.index.shortlist import Match, Options, Results, ranked
from cooc.index.store import Store, Vectors, blocks, intact
from cooc.verification.agreement import Agreement, on_what_is_shown
from cooc.verification.features import LocalFeatures, unpack
from cooc.verification.probability import PROVEN, same_thing
from cooc.verification.rounds import FAR, LEAST, ONWARD, SHORTLIST, THOROUGH, TOP, rounds
from cooc.verification.verifier import verify_each
from cooc.verification.words import signatures

Features = tuple[LocalFeatures, ...]  # of one picture, by one engine or more
Query = Callable[[], NDArray[np.float32]]  # gives a unit vector (D,), perhaps after a while
Numbers = NDArray[np.int64]
Id = TypeVar("Id", bound=Hashable)


def find_verified(
    store: Store,
    vector: NDArray[np.float32] | Query,
    asked: Sequence[Features],
    options: Options,
    *,
    words: Inverted | None = None,
    without: str | None = None,
    device: Callable[[], str | None] = lambda: None,
    started: float | None = None,
) -> Results:
    """The best matches of a unit vector (D,) and the local features of the pictures that it was made of.

    A vector that is still being made is asked for after what needs none, and so is `device`: the name of a GPU that
    compares the features, None for the CPU. `words` are those of the index's pictures.
    """
    started = time.monotonic() if started is None else started
    wanted = options.offset + options.k
    every = replace(options, k=max(SHORTLIST, wanted), offset=0, min_score=None)
    by_words = _by_words(store, words, asked, options) if words is not None else []
    query = vector() if callable(vector) else vector
    place = device()
    near, vectors, _ = ranked(store, query, every, without)
    seen = _Seen(store, query, without)
    first = seen.join(near, vectors)
    mixed = in_turn([first[:SHORTLIST].tolist(), *(seen.numbers(ids).tolist() for ids in by_words)])
    both = np.array([number for number in mixed if number >= 0], np.int64)
    agreements: dict[int, tuple[Agreement, int]] = {}

    def look(numbers: Numbers) -> list[Agreement]:
        names = [seen.names[n] for n in numbers.tolist()]
        found = verify_pictures(store, asked, names, place, screened=not options.thorough)
        agreements.update(zip(numbers.tolist(), found, strict=True))
        return [agreement for agreement, _ in found]

    def nearest(vectors: Vectors, k: int) -> Numbers:
        rows = store.search(vectors, k, where=options.where).ids
        known = dict(
            zip(names := list(dict.fromkeys(n for row in rows for n in row)), seen.numbers(names), strict=True)
        )
        return np.array([[known[name] for name in row] + [-1] * (k - len(row)) for row in rows])

    def onward(numbers: list[int], without: Set[int]) -> list[dict[int, Agreement]]:
        far, wide = (FAR, FAR) if options.thorough else (ONWARD, ONWARD + len(without))
        taken = {-1, *without}
        codes = store.features([seen.names[number] for number in numbers])
        shown: list[Features] = []
        for number, code in zip(numbers, codes, strict=True):
            agreement, which = agreements[number]
            shown.append(on_what_is_shown(unpack(code), asked[which], agreement) if code is not None else ())  # removed
        near = nearest(seen.rows(np.array(numbers)), wide).tolist()
        by_words = _by_words(store, words, shown, options) if words is not None else [[]] * len(shown)
        others: list[list[int]] = []
        for own, row, ids in zip(shown, near, by_words, strict=True):
            mixed = in_turn([row, seen.numbers(ids).tolist()])
            others.append([n for n in mixed if n not in taken][:far] if own else [])
            if not options.thorough:  # one witness is enough
                taken.update(others[-1])
        pairs = [(own, [seen.names[n] for n in some]) for own, some in zip(shown, others, strict=True)]
        found = _verify_each(store, pairs, place, not options.thorough)
        return [dict(zip(some, of_one, strict=True)) for some, of_one in zip(others, found, strict=True)]

    if not len(both):
        return Results([], True, query, time.monotonic() - started, checked=True)
    ranking = rounds(
        both,
        seen.cosines(both),
        vectors=seen.rows,
        verify=look,
        nearest=nearest,
        onward=onward,
        top=THOROUGH if options.thorough else TOP,
    )
    verified = any(agreement.strength >= LEAST for agreement in ranking.agreements.values())
    led = ranking.ids.tolist() if verified else []  # else the shortlist stays as it was
    order = list(dict.fromkeys([*led, *first.tolist()]))
    chances = {n: same_thing(agreement) for n, (agreement, _) in agreements.items() if agreement.inliers}
    proven = {n: chance for n, chance in chances.items() if chance >= PROVEN}
    scores = dict(zip(order, seen.cosines(np.array(order)).tolist(), strict=True))
    shown = [n for n in order if n in proven or options.min_score is None or scores[n] >= options.min_score]
    shown.sort(key=lambda n: -proven.get(n, 0.0))  # stable: what is not proven stays in its order
    matches = list[Match]()
    for part in blocks(shown, wanted):
        for n, record in zip(part, store.get([seen.names[n] for n in part]), strict=True):
            if record is not None:  # or it was removed by another process
                agreement, which = agreements[n] if n in proven else (None, 0)
                chance = proven.get(n)
                found = Match(record.id, record.path, scores[n], chance, record, False, n in proven, agreement, which)
                matches.append(found)
        if len(matches) >= wanted:
            break
    proof = any(match.verified for match in matches)
    return Results(matches[options.offset : wanted], not proof, query, time.monotonic() - started, checked=True)


def in_turn(lists: Iterable[Sequence[Id]]) -> list[Id]:
    """The first of each list, then the second of each, and so on; each once."""
    rows = itertools.zip_longest(*lists)
    return list(dict.fromkeys(one for row in rows for one in row if one is not None))


def _by_words(store: Store, words: Inverted, asked: Sequence[Features], options: Options) -> list[list[str]]:
    """For each picture that was asked for: which share most words with it, of those that count."""
    found = [words.search(signature, THOROUGH // 2) for signature in signatures(asked)]
    if options.where is None:
        return found
    names = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    records = zip(names, store.get(names), strict=True)
    good = {name for name, record in records if record is not None and options.where.matches(record)}
    return [[name for name in ids if name in good] for ids in found]


def verify_pictures(
    store: Store, asked: Sequence[Features], ids: Sequence[str], device: str | None = None, *, screened: bool = False
) -> list[tuple[Agreement, int]]:
    """For each picture of the index its strongest agreement, and with which of the pictures that were asked for."""
    found = _verify_each(store, [(features, ids) for features in asked], device, screened)
    best = [max(range(len(asked)), key=lambda which: found[which][n].strength) for n in range(len(ids))]
    return [(found[which][n], which) for n, which in enumerate(best)]


def _verify_each(
    store: Store, asked: Sequence[tuple[Features, Sequence[str]]], device: str | None, screened: bool
) -> list[list[Agreement]]:
    """For each of several pictures that are asked for its agreements with pictures of the index."""
    names = list(dict.fromkeys(name for _, ids in asked for name in ids))
    codes = dict(zip(names, store.features(names), strict=True))
    pictures = {name: unpack(code) if code is not None else () for name, code in codes.items()}
    pairs = [(features, [pictures[name] for name in ids]) for features, ids in asked]
    return verify_each(pairs, device=device, screened=screened)


class _Seen:
    """The pictures that a search has met, by numbers, with their vectors."""

    def __init__(self, store: Store, query: NDArray[np.float32], without: str | None) -> None:
        self.store, self.query, self.without = store, query, without
        self.names: list[str] = []
        self.place: dict[str, int] = {}
        self.blocks: list[Vectors] = []

    def numbers(self, ids: Iterable[str]) -> Numbers:
        """-1 for the query's own picture, and for what another process has removed or damage has spoiled."""
        wanted = list(ids)
        new = [name for name in dict.fromkeys(wanted) if name not in self.place and name != self.without]
        if new:
            self.join(*intact(self.store, new))
        return np.array([self.place.get(name, -1) for name in wanted], np.int64)

    def join(self, names: Sequence[str], vectors: Vectors) -> Numbers:
        """Pictures that were not met before, with their vectors; their numbers."""
        start = len(self.names)
        self.names += names
        self.place |= {name: start + n for n, name in enumerate(names)}
        self.blocks.append(vectors)
        return np.arange(start, len(self.names))

    def rows(self, numbers: Numbers) -> Vectors:
        if len(self.blocks) > 1:
            self.blocks = [np.concatenate(self.blocks)]
        return self.blocks[0][numbers]

    def cosines(self, numbers: Numbers) -> NDArray[np.float32]:
        return self.rows(numbers) @ self.query
