"""An index's own calibration: from labelled queries, or from results that its user marked right or wrong.

    curve, report = from_dataset(search, load_dataset("labelled/folder"))
    curve, report, left_out = from_marks(search, read_marks(Path("marks.csv")))
    search.calibrate(curve, about(report))

`cooc.index.calibration` fits and judges; here is where the scores come from: always from the descriptor of the index,
with whatever whitening and filter it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cooc import __version__
from cooc.bench.marks import Mark
from cooc.datasets.retrieval import Dataset
from cooc.errors import CoocError, DatasetError, InputError
from cooc.evaluation import PROTOCOLS
from cooc.files import file_hash
from cooc.image_search import ImageSearch
from cooc.index.calibration import Calibration, Scored, calibrate, judge
from cooc.index.records import Record
from cooc.pictures.batches import Item
from cooc.pictures.boxes import Box

LEAST = 10  # marks of either kind: fewer say nothing

Vectors = NDArray[np.float32]
Counted = Callable[[int, int], None]  # pictures described, pictures to describe


def from_dataset(
    search: ImageSearch, dataset: Dataset, *, workers: int | None = None, progress: Counted | None = None
) -> tuple[Calibration, dict[str, Any]]:
    """Fitted on half of the labelled queries, judged on the other half."""
    database = [Item(None, path) for path in dataset.image_paths]
    queries = [Item(None, query.path, query.box) for query in dataset.queries]
    vectors = _vectors(search, [*database, *queries], workers, progress)  # (N + Q, D)
    protocol = PROTOCOLS[dataset.protocols[0]]
    curve, report = calibrate(
        vectors[len(database) :],
        vectors[: len(database)],
        [query.select(protocol.positive) for query in dataset.ground_truth],
        [query.select((*protocol.ignored, "itself")) for query in dataset.ground_truth],
    )
    return _named(curve, report, search, f"{dataset.name}, {len(queries)} queries")


def from_marks(
    search: ImageSearch,
    marks: Iterable[Mark],
    *,
    folder: Path | None = None,
    workers: int | None = None,
    progress: Counted | None = None,
) -> tuple[Calibration, dict[str, Any], list[str]]:
    """Fitted on all marks; the last value says which were left out, and why. `folder`: where queries may lie, too.

    Of a query that is nowhere any more the score counts that was kept with the mark, if such scores are still made.
    """
    asked: dict[tuple[str, Box | None], tuple[int, Item | Record | None]] = {}
    used, left_out = list[tuple[int, Record, Mark]](), list[str]()
    for mark in marks:
        try:
            (record,) = search.store.find([mark.path])
            if record is None:
                raise InputError(f"{mark.path} is not in the index {search.index_name}.")
            key = (mark.query, mark.box)
            row, query = asked[key] if key in asked else (len(asked), _query(search, mark, folder))
            if isinstance(query, Record) and query.id == record.id:
                raise InputError(f"{mark.path} is the query itself.")
        except InputError as error:
            left_out.append(str(error))
            continue
        asked[key] = row, query
        used.append((row, record, mark))
    right = sum(mark.right for _, _, mark in used)
    wrong = len(used) - right
    if min(right, wrong) < LEAST:
        said = f"{right} right and {wrong} wrong marks are too few: mark at least {LEAST} of either kind."
        raise InputError(" ".join([said, *left_out[:3]]))
    known = {row: query for row, query in asked.values() if query is not None}
    queries = dict(zip(known, _vectors(search, list(known.values()), workers, progress), strict=True))  # row -> (D,)
    pictures = _vectors(search, [record for _, record, _ in used])  # (marks, D)
    rows = np.array([row for row, _, _ in used])
    scores = [
        float(queries[row] @ picture) if row in queries else mark.score
        for (row, _, mark), picture in zip(used, pictures, strict=True)
    ]
    curve, report = judge(Scored(rows, np.array(scores, np.float64), np.array([mark.right for _, _, mark in used])))
    return *_named(curve, report, search, f"{right} right and {wrong} wrong marks"), left_out


def about(report: dict[str, Any]) -> dict[str, Any]:
    """What an index keeps of a report beside its curve."""
    judged = {key: (report["test"] or {}).get(key) for key in ("brier", "brier of the base rate", "ece", "results")}
    return {**judged, "made": datetime.now(UTC).isoformat(timespec="seconds"), "cooc": __version__}


def _named(
    curve: Calibration, report: dict[str, Any], search: ImageSearch, fitted_on: str
) -> tuple[Calibration, dict[str, Any]]:
    return replace(curve, fitted_on=fitted_on), {"space": search.space, "fitted_on": fitted_on, **report}


def _query(search: ImageSearch, mark: Mark, folder: Path | None) -> Item | Record | None:
    """A picture of the index by that name, or a file: from here, or beside the marks; None: its score stands for it."""
    (record,) = search.store.find([mark.query])
    if record is not None:
        return record if mark.box is None else Item(None, search.file(record.id), mark.box)
    for path in (Path(mark.query), *([folder / mark.query] if folder else [])):
        if path.is_file():
            return Item(None, path, mark.box)
    if mark.score is not None and mark.space == search.space:
        return None
    raise InputError(f"The query {mark.query} is neither a file nor in the index {search.index_name}.")


def _vectors(
    search: ImageSearch, pictures: Sequence[Item | Record], workers: int | None = None, progress: Counted | None = None
) -> Vectors:
    """(N, D). What the index knows, by its content too, is taken from there: indexed pictures cost nothing."""
    vectors = np.zeros((len(pictures), search.meta.dim), np.float32)
    known, todo = dict[int, str](), list[Item]()  # row -> id
    for row, picture in enumerate(pictures):
        if isinstance(picture, Record):
            known[row] = picture.id
        elif twins := _twins(search, picture):
            known[row] = twins[0].id
        else:
            todo.append(Item(row, picture.picture, picture.box))
    if known:
        vectors[list(known)] = search.vectors(list(known.values()))
    stream = search.descriptor.stream(todo, workers=workers) if todo else ()
    for done, (item, found) in enumerate(stream, start=1):
        if isinstance(found, CoocError):
            raise DatasetError(f"A calibration needs all of its pictures. {found}") from found
        vectors[item.key] = found
        if progress is not None:
            progress(done, len(todo))
    return vectors


def _twins(search: ImageSearch, item: Item) -> list[Record]:
    """Pictures of the index with the same content."""
    if item.box is not None or not isinstance(item.picture, Path):
        return []
    try:
        return search.store.by_sha256(file_hash(item.picture))
    except OSError as error:
        raise DatasetError(f"{item.picture} cannot be read ({error.strerror}). Copy it again.") from error
