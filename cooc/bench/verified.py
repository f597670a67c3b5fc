"""What geometry adds to a ranking, stage by stage: `cooc bench DATASET --verify ENGINE`.

    agreements = Agreements()
    agreements.codes["sift"] = local_features(...), local_features(..., query=True)        # cached like raw vectors
    stages = verified_rankings(database, queries, agreements, ["sift"])                    # stage -> rankings (Q, N)

Each query's shortlist is verified and goes through the rounds of `cooc.verification.rounds`, as in a search; pictures
that no round has seen follow in the order of their cosines.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cooc.bench.describing import read_parts, write_part
from cooc.errors import CoocError, DatasetError
from cooc.index.inverted import Inverted
from cooc.pictures.batches import Item, decode
from cooc.reranking import rank
from cooc.verification.agreement import Agreement
from cooc.verification.engines import KEPT, LONGEST, QUERY, extract
from cooc.verification.features import unpack
from cooc.verification.rounds import LEAST, ONWARD, SHORTLIST, THOROUGH, TOP, rounds
from cooc.verification.verifier import verify
from cooc.verification.words import ENGINE, signatures
from cooc.verified_search import Features, in_turn

Vectors = NDArray[np.float32]
Indices = NDArray[np.int64]

STAGES = ("inliers first", "diffusion", "second round", "thorough")
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
        (found,) = extract(engine, pixels, box=box, limit=limit, device=device)
        return found.to_bytes(bits)

    def codes() -> Iterator[tuple[str, bytes]]:
        threads = (os.cpu_count() or 1) if engine == "sift" else 1  # OpenCV lets others run; a network has the device
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

    Queries are numbers; ~n is picture n of the database, asked for in turn.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self.codes: dict[str, tuple[list[bytes], list[bytes]]] = {}  # engine -> of the database, of the queries
        self.known: dict[tuple[str, int, bool], dict[int, Agreement]] = {}  # engine, query, screened -> by picture
        self._words: Inverted | None = None

    def look(self, engines: Sequence[str], query: int, pictures: Indices, *, screened: bool = False) -> list[Agreement]:
        """The strongest by any of the engines, for each picture; `screened` as a search does that is not thorough."""
        found = [self._known(engine, query, pictures.tolist(), screened) for engine in engines]
        return [max(of_one, key=lambda agreement: agreement.strength) for of_one in zip(*found, strict=True)]

    def by_words(self, query: int) -> list[int]:
        """The pictures that share most visual words with a query, where there are any."""
        database, _ = self.codes.get(ENGINE, ([], []))
        if not database:
            return []
        if self._words is None:
            blocks = (database[start : start + PART] for start in range(0, len(database), PART))
            found = (one for block in blocks for one in signatures([unpack(code) for code in block]))
            self._words = Inverted.of((number.to_bytes(16), one) for number, one in enumerate(found))
        (asked,) = signatures([self._asked(ENGINE, query)])
        return [int(name, 16) for name in self._words.search(asked, THOROUGH // 2)]

    def _known(self, engine: str, query: int, pictures: list[int], screened: bool) -> list[Agreement]:
        known = self.known.setdefault((engine, query, screened), {})
        new = [number for number in pictures if number not in known]
        features = [unpack(self.codes[engine][0][number]) for number in new]
        found = verify(self._asked(engine, query), features, device=self.device, screened=screened)
        known.update(zip(new, found, strict=True))
        return [known[number] for number in pictures]

    def _asked(self, engine: str, query: int) -> Features:
        database, queries = self.codes[engine]
        return unpack(queries[query] if query >= 0 else database[~query])


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

        words = agreements.by_words(query) if ENGINE in engines else []
        mixed = in_turn([row[:SHORTLIST].tolist(), [number for number in words if number != mine]])
        first, similar = np.array(mixed, np.int64), np.empty(len(database), np.float32)
        similar[row] = scores
        strengths = np.array([one.strength for one in look(first[:top])])
        led = first[:top][np.argsort(-np.where(strengths >= LEAST, strengths, 0), kind="stable")]
        stages["inliers first"].append(_complete(led, row, mine))

        def onward(number: int, without: Set[int], mine: int = mine) -> dict[int, Agreement]:
            near = nearest(database[number : number + 1], ONWARD, mine)[0].tolist()
            words = agreements.by_words(~number) if ENGINE in engines else []
            others = [n for n in in_turn([near, words]) if n not in without | {-1, mine}][:ONWARD]
            return dict(zip(others, agreements.look(engines, ~number, np.array(others, np.int64)), strict=True))

        for stage, repeats in (("diffusion", 1), ("second round", 2), ("thorough", 2)):
            found = rounds(
                first,
                similar[first],
                vectors=lambda numbers: database[numbers],
                verify=functools.partial(agreements.look, engines, query) if stage == "thorough" else look,
                nearest=nearest,
                onward=onward if stage == "thorough" else None,
                top=max(top, THOROUGH) if stage == "thorough" else top,
                repeats=repeats,
            )
            stages[stage].append(_complete(found.ids, row, mine))
    return {stage: np.stack(rankings) for stage, rankings in stages.items()}


def _complete(first: Indices, row: Indices, mine: int) -> Indices:
    """The ranking of all pictures: these first, the rest as it was, and the query's own at the end."""
    rest = row[~np.isin(row, first)]
    return np.concatenate([first, rest, np.array([mine] if mine >= 0 else [], np.int64)])
