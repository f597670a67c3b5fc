"""Benchmarks as lists of pictures, query boxes and index sets, read from the files as their authors published them.

    dataset = load_dataset("roxford5k", "data")         # gnd_roxford5k.pkl and the pictures, somewhere below data/
    dataset = load_dataset("my/labelled/folder")        # any folder with ground_truth.json and jpg/
    print(check("paris6k", "data"))                     # what is there, what is missing, where it is published

Ground truth comes as `gnd_*.pkl` (the revisited sets), as `*_query.txt, *_good.txt, *_ok.txt, *_junk.txt` (the original
Oxford and Paris), as file names or `.dat` (Holidays), or as our `ground_truth.json`:

    {"name": ..., "database": [names], "queries": [{"image": name, "bbox": [x0, y0, x1, y1] or null,
                                                     "positives": [names], "junk": [names]}]}

with `easy` and `hard` in place of `positives` for a set of the revisited kind. A set that is not complete is refused:
its mAP would look like the published one and mean something else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cooc.datasets.finding import find_distractors, find_pictures, find_truth, folder_truth, key_of, suffix_of
from cooc.datasets.ground_truth import Question, Truth, questions_by_number
from cooc.datasets.published import DATASETS, Spec, find_spec
from cooc.errors import DatasetError
from cooc.evaluation import Query
from cooc.pictures.boxes import Box
from cooc.pictures.folder import list_images

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class QueryImage:
    path: Path
    box: Box | None  # pixels of the full-size picture; None is the whole of it


@dataclass(frozen=True, eq=False)
class Dataset:
    """Indices in `ground_truth` count `image_paths`; `ground_truth[i]` belongs to `queries[i]`."""

    name: str
    image_paths: list[Path]
    queries: list[QueryImage]
    ground_truth: list[Query]
    protocols: tuple[str, ...]
    reencoded: int = 0  # pictures that are not in the published format


@dataclass(frozen=True)
class Completeness:
    """What was found of a data set; `str(report)` says it in words."""

    name: str
    where: str
    ground_truth: Path | None = None
    expected: int = 0  # pictures, those of the queries included
    missing: tuple[str, ...] = ()
    reencoded: int = 0
    problem: str = ""  # anything but a missing picture

    @property
    def complete(self) -> bool:
        return not self.missing and not self.problem

    def __str__(self) -> str:
        lines = [f"{self.name}: {'complete' if self.complete else 'not usable as it is'}."]
        if self.problem:
            lines.append(self.problem)
        if self.expected:
            lines.append(f"{self.expected - len(self.missing)} of {self.expected} pictures found.")
        if self.missing:
            more = ", ..." if len(self.missing) > 5 else ""
            lines.append(f"Missing {len(self.missing)}: {', '.join(self.missing[:5])}{more}")
        if self.reencoded:
            lines.append(f"{self.reencoded} of them are re-encoded copies, not the published files.")
        if not self.complete and self.where:
            lines.append(f"Published at:\n{self.where}")
        return "\n".join(lines)


def where(name: str) -> str:
    """Where that data set is published."""
    return find_spec(name).where


def check(name: PathLike, data_dir: PathLike | Sequence[PathLike] | None = None) -> Completeness:
    """What of that data set is there, without failing."""
    return _assemble(name, data_dir, None)[1]


def load_dataset(
    name: PathLike, data_dir: PathLike | Sequence[PathLike] | None = None, *, distractors: PathLike | None = None
) -> Dataset:
    """A data set of DATASETS from below `data_dir`, or a folder with `ground_truth.json` and its pictures.

    `data_dir` may be several folders, for pictures and ground truth that lie apart. `distractors` is a folder of
    pictures that no query asks for, as the million of the revisited sets; they come last in the database.
    """
    dataset, report = _assemble(name, data_dir, distractors)
    if dataset is None:
        raise DatasetError(str(report))
    return dataset


def image_set(
    folder: PathLike, *, exclude_labels: Iterable[str] = (), exclude_names_of: Dataset | PathLike | None = None
) -> list[Path]:
    """The pictures below a folder of labelled folders, always in the same order: a set to fit whitening or train on.

    `exclude_labels` leaves whole folders out, by name: "Eiffel Tower" is `16.Eiffel_Tower`. `exclude_names_of` leaves
    out the photos of a set that is tested on: those of the same name, or with the same 16-digit id at the end of it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DatasetError(f"{root} is no folder. Give the folder that holds one folder of pictures for each label.")
    unwanted = {_label(name): name for name in exclude_labels}
    known = {_label(entry.name) for entry in root.iterdir() if entry.is_dir()}
    if strangers := [name for label, name in unwanted.items() if label not in known]:
        raise DatasetError(f"{root} has no label {strangers[0]!r} to leave out. Labels: {', '.join(sorted(known))}.")
    tested: Iterable[Path] = ()
    if isinstance(exclude_names_of, Dataset):
        tested = [*exclude_names_of.image_paths, *(query.path for query in exclude_names_of.queries)]
    elif exclude_names_of is not None:
        tested = list_images(exclude_names_of, follow_symlinks=True)
    ids = {_photo_id(path) for path in tested}
    return [
        path
        for path in list_images(root, follow_symlinks=True)
        if _photo_id(path) not in ids and _label(path.relative_to(root).parts[0]) not in unwanted
    ]


def _label(folder: str) -> str:
    """`16.Eiffel_Tower` -> `eiffel_tower`."""
    return re.sub(r"[\s_-]+", "_", re.sub(r"^\d+[._\s-]+", "", folder)).lower()


def _photo_id(path: Path) -> str:
    found = re.search(r"(?:^|_)([0-9a-f]{16})$", path.stem)
    return found[1] if found else path.stem


# Putting a data set together


def _assemble(
    name: PathLike, data_dir: PathLike | Sequence[PathLike] | None, distractors: PathLike | None
) -> tuple[Dataset | None, Completeness]:
    folders = [data_dir] if isinstance(data_dir, str | os.PathLike) else list(data_dir or ())
    data = [Path(folder) for folder in folders]
    report = Completeness(str(name), "")
    try:
        if str(name) in DATASETS:
            spec = find_spec(str(name))
            roots = [root / folder for root in data for folder in spec.folders] + data
            report = Completeness(spec.name, spec.where)
            truth = find_truth(spec, roots)
        else:
            truth, spec = folder_truth(Path(name))
            roots = [Path(name), *(root / folder for root in data for folder in spec.folders), *data]
        report = replace(report, name=spec.name, where=spec.where, ground_truth=truth.source)
        return _join(spec, truth, roots, distractors, report)
    except DatasetError as error:
        return None, replace(report, problem=str(error))


def _join(
    spec: Spec, truth: Truth, roots: list[Path], distractors: PathLike | None, report: Completeness
) -> tuple[Dataset | None, Completeness]:
    mentioned = set(truth.database or ())
    for question in truth.questions or ():
        mentioned.update([question.image], *question.groups.values())
    mentioned = {name for name in mentioned if key_of(name) not in spec.corrupt}
    pictures = find_pictures(roots, [key_of(name) for name in mentioned], spec.pattern)
    names = truth.database
    if names is None:
        names = sorted({key_of(name) for name in mentioned} | {k for k in pictures if re.fullmatch(spec.pattern, k)})
    names = [name for name in names if key_of(name) not in spec.corrupt]
    questions = questions_by_number(names) if truth.questions is None else truth.questions

    wanted = list(dict.fromkeys([*names, *(question.image for question in questions)]))
    missing = tuple(name for name in wanted if key_of(name) not in pictures)
    reencoded = sum(pictures[key_of(n)].suffix.lower() != suffix_of(n) for n in wanted if key_of(n) in pictures)
    report = replace(report, expected=len(wanted), missing=missing, reencoded=reencoded)
    if missing:
        return None, report
    for what, expected, found in (("pictures", spec.size, len(names)), ("queries", spec.queries, len(questions))):
        if expected is not None and expected != found:
            problem = f"{found} {what} instead of the published {expected}. Complete the files and try again."
            return None, replace(report, problem=problem)

    more = find_distractors(Path(distractors)) if distractors is not None else []
    dataset = Dataset(
        name=spec.name + (f"+{'1m' if len(more) == 1_001_001 else len(more)}" if more else ""),
        image_paths=[*(pictures[key_of(name)] for name in names), *more],
        queries=[QueryImage(pictures[key_of(question.image)], question.box) for question in questions],
        ground_truth=_index(truth.source, names, questions, spec.corrupt),
        protocols=spec.protocols or _protocols(questions),
        reencoded=reencoded,
    )
    return dataset, report


def _index(source: Path, names: list[str], questions: list[Question], corrupt: frozenset[str]) -> list[Query]:
    """Names -> indices of the database."""
    place = {key_of(name): i for i, name in enumerate(names)}
    if len(place) < len(names):
        twice = next(name for i, name in enumerate(names) if place[key_of(name)] != i)
        raise DatasetError(f"{source}: {twice} is twice in the database. Leave one out.")
    result = []
    for question in questions:
        groups: dict[str, list[int]] = {}
        for group, members in question.groups.items():
            keys = dict.fromkeys(key for key in map(key_of, members) if key not in corrupt)
            if strangers := [key for key in keys if key not in place]:
                raise DatasetError(
                    f"{source}: query {question.image} has {strangers[0]} under {group!r}, "
                    f"which is not in the database. Correct the name or add the picture."
                )
            groups[group] = sorted(place[key] for key in keys)
        own = place.get(key_of(question.image))
        result.append(Query(**groups, itself=None if own is None else [own]))
    return result


def _protocols(questions: list[Question]) -> tuple[str, ...]:
    revisited = any("easy" in question.groups for question in questions)
    return ("roxford-easy", "roxford-medium", "roxford-hard") if revisited else ("plain",)
