"""What geometry adds to a ranking, stage by stage: `cooc bench DATASET --verify ENGINE`.

    agreements = Agreements()
    agreements.codes["sift"] = local_features(...), local_features(..., query=True)        # cached like raw vectors
    stages = verified_rankings(database, queries, agreements, ["sift"])                    # stage -> rankings (Q, N)

Each query's shortlist is verified and goes through the rounds of `cooc.verification.rounds`, as in a search; pictures
that no round has seen follow in the order of their cosines.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cooc.bench.describing import read_parts, write_part
from cooc.errors import CoocError, DatasetError
from cooc.index.inverted import Inverted
from cooc.pictures.batches import Item, decode
from cooc.reranking import rank
from cooc.verification.agreement import Agreement, on_what_is_shown
from cooc.verification.engines import ENGINES, KEPT, LONGEST, QUERY, extract
from cooc.verification.features import pack, unpack
from cooc.verification.rounds import FAR, LEAST, ONWARD, SHORTLIST, THOROUGH, TOP, rounds
from cooc.verification.verifier import verify
from cooc.verification.words import ENGINE, signatures
from cooc.verified_search import Features, in_turn

Vectors = NDArray[np.float32]
Indices = NDArray[np.int64]

STAGES = ("inliers first", "diffusion", "search", "thorough")
PART = 256  # pictures in one part of the cache


def local_features(
    items: Sequence[Item],
    engine: str,
    *,
    keys: Sequence[str],
    cache: Path,
    device: str = "cpu",
    workers: int = 0,
    query: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[bytes]:
    """The code of each picture's features by one engine. `keys` name the pictures in the cache, a folder.

    Those of a `query` are more, and are kept without loss of precision: a search does not store them.
    """
    limit, bits = (QUERY, 8) if query else (KEPT, 4)
    folder = cache / f"features-{engine}-{limit}"
    known = _read(folder)
    todo = {key: item for key, item in zip(keys, items, strict=True) if key not in known}
    made: dict[str, bytes] = {}

    def code(pixels: NDArray[np.uint8], cropped: bool) -> bytes:
        height, width = map(float, pixels.shape[:2])
        box = (0.0, 0.0, width, height) if cropped else None  # a small crop is enlarged
        return pack(extract(engine, pixels, box=box, limit=limit, enlarge=query and not cropped, device=device), bits)

    def codes() -> Iterator[tuple[str, bytes]]:
        light = ENGINES[engine].weights is None  # OpenCV lets others run; a network has the cores, and a GPU waits
        threads = (os.cpu_count() or 1) if light else 1 if device == "cpu" else 4
        waiting: deque[tuple[str, Future[bytes]]] = deque()
        wanted = [Item(key, item.picture, item.box) for key, item in todo.items()]
        with ThreadPoolExecutor(threads) as pool:
            for item, pixels in decode(wanted, size=LONGEST, workers=workers):
                if isinstance(pixels, CoocError):
                    raise DatasetError(f"A benchmark needs all of its pictures. {pixels}") from pixels
                waiting.append((item.key, pool.submit(code, np.array(pixels), item.box is not None)))
                while len(waiting) > 4 * threads:
                    key, job = waiting.popleft()
                    yield key, job.result()
            for key, job in waiting:
                yield key, job.result()

    for done, (key, data) in enumerate(codes() if todo else (), start=1):
        made[key] = data
        if len(made) == PART or done == len(todo):
            _write(folder, made)
            known |= made
            made = {}
            progress(done, len(todo))
    return [known[key] for key in keys]


def _read(folder: Path) -> dict[str, bytes]:
    known: dict[str, bytes] = {}
    for part in read_parts(folder):
        data, ends = part["codes"].tobytes(), part["ends"].tolist()
        known |= {
            key: data[start:end] for key, start, end in zip(part["keys"].tolist(), [0, *ends], ends, strict=False)
        }
    return known


def _write(folder: Path, codes: dict[str, bytes]) -> None:
    ends = np.cumsum([len(code) for code in codes.values()])
    write_part(folder, list(codes), ends=ends, codes=np.frombuffer(b"".join(codes.values()), np.uint8))


class Agreements:
    """What queries and pictures agree on, by each engine: looked at once, whatever the ranking that asks.

    Behind `onward`, a picture of the database is asked for in turn, as far as it shows what the query shows.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self.codes: dict[str, tuple[list[bytes], list[bytes]]] = {}  # engine -> of the database, of the queries
        self.known: dict[tuple[Any, ...], dict[int, Agreement]] = {}  # engine, what is asked, screened -> by picture
        self._words: Inverted | None = None

    def look(
        self,
        engines: Sequence[str],
        query: int,
        pictures: Indices,
        *,
        onward: int | None = None,
        screened: bool = False,
    ) -> list[Agreement]:
        """The strongest by any of the engines, for each picture; `screened` as a search does that is not thorough."""
        asked = self._asked(engines, query, onward)
        about = (query,) if onward is None else (query, onward, *engines)
        by_engine = [tuple(features for features in asked if features.engine == name) for name in engines]
        found = [self._known(features, about, pictures.tolist(), screened) for features in by_engine]
        return [max(of_one, key=lambda agreement: agreement.strength) for of_one in zip(*found, strict=True)]

    def by_words(self, engines: Sequence[str], query: int, onward: int | None = None) -> list[int]:
        """The pictures that share most visual words with what is asked, where an engine has words."""
        if ENGINE not in engines:
            return []
        if self._words is None:
            database, _ = self.codes[ENGINE]
            blocks = (database[start : start + PART] for start in range(0, len(database), PART))
            found = (one for block in blocks for one in signatures([unpack(code) for code in block]))
            self._words = Inverted.of((number.to_bytes(16), one) for number, one in enumerate(found))
        (asked,) = signatures([self._asked(engines, query, onward)])
        return [int(name, 16) for name in self._words.search(asked, THOROUGH // 2)]

    def _known(self, asked: Features, about: tuple[Any, ...], pictures: list[int], screened: bool) -> list[Agreement]:
        engine = asked[0].engine
        known = self.known.setdefault((engine, *about, screened), {})
        new = [number for number in pictures if number not in known]
        features = [unpack(self.codes[engine][0][number]) for number in new]
        known.update(zip(new, verify(asked, features, device=self.device, screened=screened), strict=True))
        return [known[number] for number in pictures]

    def _asked(self, engines: Sequence[str], query: int, onward: int | None) -> Features:
        asked = _unpacked(self.codes[engine][1][query] for engine in engines)
        if onward is None:
            return asked
        (agreement,) = self.look(engines, query, np.array([onward]))
        return on_what_is_shown(_unpacked(self.codes[engine][0][onward] for engine in engines), asked, agreement)


def _unpacked(codes: Iterable[bytes]) -> Features:
    return tuple(itertools.chain.from_iterable(map(unpack, codes)))


def verified_rankings(
    database: Vectors,
    queries: Vectors,
    agreements: Agreements,
    engines: Sequence[str],
    *,
    own: Indices | None = None,
    top: int = TOP,
) -> dict[str, Indices]:
    """Stage -> rankings (Q, N). `own` (Q,) is the row of each query's own picture, which takes no part, or -1."""
    order, cosines = rank(queries, database)
    stages: dict[str, list[Indices]] = {stage: [] for stage in STAGES}
    for query, (row, scores) in enumerate(zip(order, cosines, strict=True)):
        mine = -1 if own is None else int(own[query])
        look = functools.partial(agreements.look, engines, query, screened=True)
        scores, row = scores[row != mine], row[row != mine]

        def nearest(vectors: Vectors, k: int, mine: int = mine) -> Indices:
            found = rank(vectors, database, k)[0]
            return np.where(found == mine, -1, found)

        words = agreements.by_words(engines, query)
        mixed = in_turn([row[:SHORTLIST].tolist(), [number for number in words if number != mine]])
        first, similar = np.array(mixed, np.int64), np.empty(len(database), np.float32)
        similar[row] = scores
        strengths = np.array([one.strength for one in look(first[:top])])
        led = first[:top][np.argsort(-np.where(strengths >= LEAST, strengths, 0), kind="stable")]
        stages["inliers first"].append(_complete(led, row, mine))

        def onward(
            numbers: list[int], without: Set[int], mine: int = mine, query: int = query, thorough: bool = False
        ) -> list[dict[int, Agreement]]:
            far, wide = (FAR, FAR) if thorough else (ONWARD, ONWARD + len(without))
            taken, found = without | {-1, mine}, []
            for number, near in zip(numbers, nearest(database[numbers], wide, mine).tolist(), strict=True):
                lists = [near, agreements.by_words(engines, query, number)]
                others = [n for n in in_turn(lists) if n not in taken][:far]
                if not thorough:  # one witness is enough
                    taken |= set(others)
                asked = np.array(others, np.int64)
                seen = agreements.look(engines, query, asked, onward=number, screened=not thorough)
                found.append(dict(zip(others, seen, strict=True)))
            return found

        for stage, repeats, further in (
            ("diffusion", 1, None),
            ("search", 2, onward),
            ("thorough", 2, functools.partial(onward, thorough=True)),
        ):
            thorough = stage == "thorough"
            found = rounds(
                first,
                similar[first],
                vectors=lambda numbers: database[numbers],
                verify=functools.partial(agreements.look, engines, query, screened=not thorough),
                nearest=nearest,
                onward=further,
                top=max(top, THOROUGH) if thorough else top,
                repeats=repeats,
            )
            stages[stage].append(_complete(found.ids, row, mine))
    return {stage: np.stack(rankings) for stage, rankings in stages.items()}


def _complete(first: Indices, row: Indices, mine: int) -> Indices:
    """The ranking of all pictures: these first, the rest as it was, and the query's own at the end."""
    rest = row[~np.isin(row, first)]
    return np.concatenate([first, rest, np.array([mine] if mine >= 0 else [], np.int64)])
