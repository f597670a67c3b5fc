"""Right and wrong results, as a person marked them: what an index's own calibration may be fitted on.

    photo.jpg,2019/tower.jpg,right
    photo.jpg,2020/gate.jpg,wrong,"40,60,300,400"

A .csv as above (query, picture of the index, mark, and the box of the query if it had one; a first line that names the
columns is understood), or a .json with a list of {"query": ..., "path": ..., "mark": ..., "box": [...] or null}.
Marks made on the page are kept in the index itself. There a query may be a picture that is nowhere any more, known by
its sha256: then the score that it had is kept.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cooc.errors import InputError
from cooc.index.store import Store
from cooc.pictures.boxes import Box, check_box, parse_box

ENDINGS = (".csv", ".json")
COLUMNS = ("query", "path", "mark", "box")
MARKS = {"right": True, "wrong": False}
NOTE = "marks"  # of an index
MOST = 2000  # that an index keeps: its notes are read with each search


@dataclass(frozen=True)
class Mark:
    query: str  # a picture: one of the index, or a file
    path: str  # a picture of the index, as results name it
    right: bool
    box: Box | None = None  # the part of the query that was looked for
    score: float | None = None  # that the picture had, for a query that cannot be described again
    space: str = ""  # what kind of score (`ImageSearch.space`)

    @property
    def key(self) -> tuple[str, str, Box | None]:
        return self.query, self.path, self.box


def kept_marks(store: Store) -> list[Mark]:
    """Marks that the index keeps, the oldest first."""
    rows = store.notes().get(NOTE) or []
    return [Mark(**{**row, "box": None if row["box"] is None else check_box(row["box"])}) for row in rows]


def keep_marks(store: Store, marks: Iterable[Mark], *, forget: bool = False) -> None:
    """Keep these, each in the place of an earlier mark of the same result; or forget them."""
    kept = {mark.key: mark for mark in kept_marks(store)}
    for mark in marks:
        kept.pop(mark.key, None)
        if not forget:
            kept[mark.key] = mark
    if len(kept) > MOST:
        raise InputError(
            f"An index keeps at most {MOST} marks: learn from them (cooc calibrate --marked), take some back."
        )
    store.note(NOTE, [asdict(mark) for mark in kept.values()] or None)


def read_marks(file: Path) -> list[Mark]:
    """All marks of a file. One result marked twice counts as it was marked last."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as text ({error}).") from error
    rows = _json_rows(text, file) if file.suffix.lower() == ".json" else _csv_rows(text, file)
    marks = {}
    for place, row in rows:
        try:
            mark = _mark(row)
        except InputError as error:
            raise InputError(f"{file}, {place}: {error} Write query,path,right or query,path,wrong.") from error
        marks[mark.key] = mark
    if not marks:
        raise InputError(f"There are no marks in {file}. Write lines of query,path,right and query,path,wrong.")
    return list(marks.values())


def _mark(row: Sequence[Any]) -> Mark:
    if len(row) not in (3, 4):
        raise InputError(f"There are {len(row)} values where 3 or 4 are expected.")
    query, path, mark = row[:3]
    box = row[3] if len(row) == 4 else None
    if not (isinstance(query, str) and isinstance(path, str) and query and path):
        raise InputError("A mark needs the names of two pictures.")
    if not isinstance(mark, str) or mark.strip().lower() not in MARKS:
        raise InputError(f"{mark!r} is neither right nor wrong.")
    part = None if box in (None, "") else parse_box(box) if isinstance(box, str) else check_box(box)
    return Mark(query, path, MARKS[mark.strip().lower()], part)


def _csv_rows(text: str, file: Path) -> Iterator[tuple[str, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            titles = reader.line_num == 1 and [word.strip().lower() for word in row] == list(COLUMNS[: len(row)])
            if row and not titles:
                yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise InputError(f"{file}, line {reader.line_num}: this is no CSV ({error}).") from error


def _json_rows(text: str, file: Path) -> Iterator[tuple[str, list[Any]]]:
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise InputError(f"{file} is no JSON ({error}).") from error
    if not isinstance(rows, list):
        raise InputError(f"{file} must hold a list of marks.")
    for number, row in enumerate(rows, start=1):
        yield f"mark {number}", [row.get(name) for name in COLUMNS] if isinstance(row, dict) else []
