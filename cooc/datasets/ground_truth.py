"""Ground truth files, as their authors published them, read into names: who asks, with which box, for which pictures.

    read_pickle   gnd_roxford5k.pkl, gnd_rparis6k.pkl (and gnd_oxford5k.pkl, gnd_paris6k.pkl in the same layout)
    read_text     all_souls_1_query.txt with its _good.txt, _ok.txt and _junk.txt: the original Oxford and Paris
    read_dat      perfect_result.dat or holidays_images.dat: INRIA Holidays
    read_json     ground_truth.json: ours

These files come from strangers: whatever is wrong with one is a DatasetError with its name, and nothing in it is run.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cooc.errors import DatasetError
from cooc.pictures.boxes import Box
from cooc.unpickling import load_arrays

LARGEST_PICKLE = 64 << 20  # bytes; the official ones have 0.3 MB


@dataclass(frozen=True)
class Question:
    """One query as the ground truth has it: by names."""

    image: str
    box: Box | None
    groups: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Truth:
    """All queries of a set and the names of its database."""

    source: Path
    database: list[str] | None  # None: whatever pictures of the set there are
    questions: list[Question] | None  # None: Holidays, where the names tell
    name: str = ""


def read_pickle(file: Path) -> Truth:
    """`imlist`, `qimlist` and, for each query, `gnd`: index lists `easy, hard, junk` (or `ok, junk`) and box `bbx`."""
    try:
        if file.stat().st_size > LARGEST_PICKLE:
            raise pickle.UnpicklingError("it is far larger than any ground truth")
        with file.open("rb") as stream:
            content = load_arrays(stream)
        names, images = [str(name) for name in content["imlist"]], [str(name) for name in content["qimlist"]]
        questions = []
        for image, entry in zip(images, content["gnd"], strict=True):
            groups = {
                {"ok": "positives"}.get(group, group): [names[i] for i in _indices(entry[group], len(names))]
                for group in ("easy", "hard", "ok", "junk")
                if group in entry
            }
            questions.append(Question(image, _box(entry.get("bbx"), file, image), groups))
    except DatasetError:
        raise
    except Exception as error:  # whatever a damaged or hostile file leads to
        raise DatasetError(f"{file} is not a ground truth as published ({error}). Fetch it again.") from error
    return Truth(file, names, questions)


def _indices(values: Any, count: int) -> list[int]:
    array = np.asarray(values).ravel()
    if len(array) and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= count):
        raise ValueError(f"indices that are no numbers from 0 to {count - 1}")
    return [int(i) for i in array]


def read_text(folder: Path) -> Truth:
    """`*_query.txt` holds `oxc1_all_souls_000013 136.5 34.1 648.5 955.7`; `_good`, `_ok` and `_junk` hold names."""
    questions = []
    for file in sorted(folder.glob("*_query.txt")):
        fields = _text(file).split()
        if len(fields) != 5:
            raise DatasetError(f"{file}: expected a name and four numbers. Fetch it again.")
        image = fields[0].removeprefix("oxc1_")
        lists = {}
        for group in ("good", "ok", "junk"):
            part = file.with_name(file.name.replace("_query.txt", f"_{group}.txt"))
            if not part.is_file():
                raise DatasetError(f"{part} is missing. Fetch the ground truth again.")
            lists[group] = _text(part).split()
        groups = {"positives": lists["good"] + lists["ok"], "junk": lists["junk"]}
        questions.append(Question(image, _box(fields[1:], file, image), groups))
    return Truth(folder, None, questions)


def read_dat(file: Path) -> Truth:
    """Holidays: lines `100000.jpg 0 100001.jpg 1 100002.jpg` of a perfect result, or one name in each line."""
    lines = [line.split() for line in _text(file).splitlines() if line.strip()]
    if all(len(line) == 1 for line in lines):
        return Truth(file, [line[0] for line in lines], None)
    questions = []
    for number, (image, *results) in enumerate(lines, start=1):
        if len(results) % 2 or not all(rank.isdecimal() for rank in results[::2]):
            raise DatasetError(f"{file}, line {number}: expected a name, then pairs of rank and name. Fetch it again.")
        positives = [name for name in results[1::2] if name != image]
        questions.append(Question(image, None, {"positives": positives}))
    names = {name for question in questions for name in (question.image, *question.groups["positives"])}
    return Truth(file, sorted(names), questions)


def questions_by_number(names: list[str]) -> list[Question]:
    """Holidays: 100000 is the query of group 1000, 100001 and so on are its positives."""
    groups: dict[int, list[str]] = {}
    for name in names:
        if not _number(name).isdecimal():
            raise DatasetError(f"{name} is no picture of Holidays: their names are numbers, as 100000.jpg.")
        groups.setdefault(int(_number(name)) // 100, []).append(name)
    return [
        Question(query, None, {"positives": [name for name in members if name != query]})
        for members in groups.values()
        for query in members
        if int(_number(query)) % 100 == 0
    ]


def _number(name: str) -> str:
    return name.partition(".")[0]


def read_json(file: Path) -> Truth:
    content = _json(file)
    try:
        database = _names(content["database"])
        questions = []
        for entry in content["queries"]:
            revisited = "easy" in entry or "hard" in entry
            kinds = ("easy", "hard", "junk") if revisited else ("positives", "junk")
            groups = {kind: _names(entry.get(kind, [])) for kind in kinds}
            questions.append(Question(str(entry["image"]), _box(entry.get("bbox"), file, str(entry["image"])), groups))
    except (KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"{file}: not as expected ({error!r}). The format is in cooc/datasets/retrieval.py."
        ) from error
    return Truth(file, database, questions, str(content.get("name", "")))


def _names(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("a list of names was expected")
    return value


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(file))
    except ValueError as error:
        raise DatasetError(f"{file} is no JSON ({error}). Write it again.") from error
    if not isinstance(content, dict):
        raise DatasetError(f"{file}: expected an object with 'database' and 'queries'.")
    return content


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{file} cannot be read ({error}). Fetch it again.") from error


def _box(values: Any, file: Path, image: str) -> Box | None:
    if values is None or len(values) == 0:
        return None
    try:
        x0, y0, x1, y1 = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{file}: the box of {image} is not four numbers.") from error
    if not (all(map(math.isfinite, (x0, y0, x1, y1))) and x0 < x1 and y0 < y1):
        raise DatasetError(f"{file}: the box of {image}, {x0, y0, x1, y1}, is empty.")
    return x0, y0, x1, y1
