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

from cooc.datasets.ground_truth import Question, Truth, questions_by_number, read_dat, read_json, read_pickle, read_text
from cooc.errors import DatasetError, UnknownNameError
from cooc.evaluation import Query
from cooc.pictures.boxes import Box
from cooc.pictures.folder import list_images

__all__ = ["DATASETS", "Completeness", "Dataset", "QueryImage", "Spec", "check", "image_set", "load_dataset", "where"]

PathLike = str | os.PathLike[str]

SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
)  # in order of preference; a copy in another format is as good, and reported
PICTURES = ("oxbuild_images", "jpg", "images", "paris")  # folders of the published archives
TRUTHS = ("", "gt", "groundtruth", "ground_truth", "lab", "gt_files_170407", "paris_120310")

# The Paris page's own list (corrupt.txt): files that hold an error page instead of a picture.
CORRUPT_PARIS = frozenset(
    f"paris_{place}_{number:06d}"
    for place, numbers in {
        "louvre": (136, 146),
        "moulinrouge": (422,),
        "museedorsay": (1059,),
        "notredame": (188,),
        "pantheon": (284, 960, 974),
        "pompidou": (195, 196, 201, 467, 640),
        "sacrecoeur": (299, 330, 353),
        "triomphe": (662, 833, 863, 867),
    }.items()
    for number in numbers
)


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
class Spec:
    """What is known of a published set before its files are read."""

    name: str
    protocols: tuple[str, ...]
    where: str
    size: int | None = None  # pictures in the database
    queries: int | None = None
    folders: tuple[str, ...] = ()  # names that its folder may have below the data folder
    pattern: str = r".+"  # of its pictures' names, where the ground truth does not list the database
    corrupt: frozenset[str] = frozenset()


_OXFORD = "Oxford Buildings (pictures and ground truth): https://www.robots.ox.ac.uk/~vgg/data/oxbuildings/"
_PARIS = "Paris Buildings (pictures and ground truth): https://www.robots.ox.ac.uk/~vgg/data/parisbuildings/"
_REVISITED = "gnd_{}.pkl and the million distractors: http://cmp.felk.cvut.cz/revisitop/"
_HOLIDAYS = "INRIA Holidays (jpg1, jpg2 and the evaluation package): https://lear.inrialpes.fr/people/jegou/data.php"
_OXFORD_FOLDERS = ("oxford5k", "roxford5k", "oxford", "oxbuildings")
_PARIS_FOLDERS = ("paris6k", "rparis6k", "paris", "parisbuildings")

DATASETS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("oxford5k", ("oxford",), _OXFORD, 5063, 55, _OXFORD_FOLDERS, r"(?!paris_)[a-z_]+_\d{6}"),
        Spec(
            "roxford5k",
            ("roxford-easy", "roxford-medium", "roxford-hard"),
            f"{_OXFORD}\n{_REVISITED.format('roxford5k')}",
            4993,
            70,
            ("roxford5k", *_OXFORD_FOLDERS),
        ),
        Spec("paris6k", ("paris",), _PARIS, 6392, 55, _PARIS_FOLDERS, r"paris_[a-z]+_\d{6}", CORRUPT_PARIS),
        Spec(
            "rparis6k",
            ("rparis-easy", "rparis-medium", "rparis-hard"),
            f"{_PARIS}\n{_REVISITED.format('rparis6k')}",
            6322,
            70,
            ("rparis6k", *_PARIS_FOLDERS),
            corrupt=CORRUPT_PARIS,
        ),
        Spec("holidays", ("holidays",), _HOLIDAYS, 1491, 500, ("holidays", "Holidays"), r"\d{6}"),
    )
}


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
    return _spec(name).where


def check(
    name: PathLike, data_dir: PathLike | Sequence[PathLike] | None = None, *, distractors: PathLike | None = None
) -> Completeness:
    """What of that data set is there, without failing."""
    return _assemble(name, data_dir, distractors)[1]


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
            spec = _spec(str(name))
            roots = [root / folder for root in data for folder in spec.folders] + data
            report = Completeness(spec.name, spec.where)
            truth = _find_truth(spec, roots)
        else:
            truth, spec = _folder_truth(Path(name))
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
    mentioned = {name for name in mentioned if _key(name) not in spec.corrupt}
    pictures = _find_pictures(roots, [_key(name) for name in mentioned], spec.pattern)
    names = truth.database
    if names is None:
        names = sorted({_key(name) for name in mentioned} | {k for k in pictures if re.fullmatch(spec.pattern, k)})
    names = [name for name in names if _key(name) not in spec.corrupt]
    questions = questions_by_number(names) if truth.questions is None else truth.questions

    wanted = list(dict.fromkeys([*names, *(question.image for question in questions)]))
    missing = tuple(name for name in wanted if _key(name) not in pictures)
    reencoded = sum(pictures[_key(n)].suffix.lower() != _suffix(n) for n in wanted if _key(n) in pictures)
    report = replace(report, expected=len(wanted), missing=missing, reencoded=reencoded)
    if missing:
        return None, report
    for what, expected, found in (("pictures", spec.size, len(names)), ("queries", spec.queries, len(questions))):
        if expected is not None and expected != found:
            problem = f"{found} {what} instead of the published {expected}. Complete the files and try again."
            return None, replace(report, problem=problem)

    more = _distractors(Path(distractors)) if distractors is not None else []
    dataset = Dataset(
        name=spec.name + (f"+{'1m' if len(more) == 1_001_001 else len(more)}" if more else ""),
        image_paths=[*(pictures[_key(name)] for name in names), *more],
        queries=[QueryImage(pictures[_key(question.image)], question.box) for question in questions],
        ground_truth=_index(truth.source, names, questions, spec.corrupt),
        protocols=spec.protocols or _protocols(questions),
        reencoded=reencoded,
    )
    return dataset, report


def _index(source: Path, names: list[str], questions: list[Question], corrupt: frozenset[str]) -> list[Query]:
    """Names -> indices of the database."""
    place = {_key(name): i for i, name in enumerate(names)}
    if len(place) < len(names):
        twice = next(name for i, name in enumerate(names) if place[_key(name)] != i)
        raise DatasetError(f"{source}: {twice} is twice in the database. Leave one out.")
    result = []
    for question in questions:
        groups: dict[str, list[int]] = {}
        for group, members in question.groups.items():
            keys = dict.fromkeys(key for key in map(_key, members) if key not in corrupt)
            if strangers := [key for key in keys if key not in place]:
                raise DatasetError(
                    f"{source}: query {question.image} has {strangers[0]} under {group!r}, "
                    f"which is not in the database. Correct the name or add the picture."
                )
            groups[group] = sorted(place[key] for key in keys)
        own = place.get(_key(question.image))
        result.append(Query(**groups, itself=None if own is None else [own]))
    return result


def _protocols(questions: list[Question]) -> tuple[str, ...]:
    revisited = any("easy" in question.groups for question in questions)
    return ("roxford-easy", "roxford-medium", "roxford-hard") if revisited else ("plain",)


def _spec(name: str) -> Spec:
    if name not in DATASETS:
        raise UnknownNameError("data set", name, DATASETS)
    return DATASETS[name]


# Pictures


def _suffix(name: str) -> str:
    """Names in the official lists have no suffix: they are JPEG files."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), ".jpg")


def _key(name: str) -> str:
    """A name without its suffix, so that a copy in another format is found too."""
    return name[: -len(_suffix(name))] if name.lower().endswith(SUFFIXES) else name


def _find_pictures(roots: list[Path], wanted: list[str], pattern: str) -> dict[str, Path]:
    """Key -> file, from the folder that has most of the wanted ones; usual places are looked at before whole roots."""
    places = [root / name for root in roots for name in PICTURES] + roots
    best: dict[str, Path] = {}
    most = 0
    for folder in dict.fromkeys(place for place in places if place.is_dir()):
        pictures = _pictures(folder)
        have = (
            sum(key in pictures for key in wanted) if wanted else sum(bool(re.fullmatch(pattern, k)) for k in pictures)
        )
        if have > most:
            best, most = pictures, have
        if wanted and most == len(wanted):
            break
    return best


def _pictures(folder: Path) -> dict[str, Path]:
    """Pictures below a folder by relative path and, since archives differ in subfolders, by bare name; no suffixes.

    Files are only ever looked up in this listing, so that no name in a ground truth leads out of the folder.
    """
    files = [path for path in list_images(folder, follow_symlinks=True) if path.suffix.lower() in SUFFIXES]
    files.sort(key=lambda path: SUFFIXES.index(path.suffix.lower()))  # stable: else in the order of the folder
    found: dict[str, Path] = {}
    for path in files:
        found.setdefault(_key(path.relative_to(folder).as_posix()), path)
    for path in files:
        found.setdefault(_key(path.name), path)
    return found


def _distractors(folder: Path) -> list[Path]:
    """All pictures of a folder, in the order of `revisitop1m.txt` where that list is beside or in it."""
    if not folder.is_dir():
        raise DatasetError(f"{folder} is no folder of distractors. {_REVISITED.format('...')}")
    base = folder / "jpg" if (folder / "jpg").is_dir() else folder
    listing = next((f for f in (folder / "revisitop1m.txt", folder.parent / "revisitop1m.txt") if f.is_file()), None)
    if listing is None:
        return [path for path in list_images(base, follow_symlinks=True) if path.suffix.lower() in SUFFIXES]
    pictures, names = _pictures(base), listing.read_text().split()
    if missing := [name for name in names if _key(name) not in pictures]:
        raise DatasetError(f"{len(missing)} of {len(names)} distractors of {listing} are missing: {missing[0]}, ...")
    return [pictures[_key(name)] for name in names]


# Ground truth


def _find_truth(spec: Spec, roots: list[Path]) -> Truth:
    for place in dict.fromkeys(root / sub for root in roots for sub in TRUTHS if (root / sub).is_dir()):
        if (file := place / f"gnd_{spec.name}.pkl").is_file():
            return read_pickle(file)
        for name in ("ground_truth.json", "ground_truth_original.json"):
            if (file := place / name).is_file() and (truth := read_json(file)).name == spec.name:
                return truth
        if spec.name in ("oxford5k", "paris6k") and any(place.glob("*_query.txt")):
            truth = read_text(place)
            if all(q.image.startswith("paris_") == (spec.name == "paris6k") for q in truth.questions or ()):
                return truth
        for name in ("perfect_result.dat", "holidays_images.dat") if spec.name == "holidays" else ():
            if (file := place / name).is_file():
                return read_dat(file)
    folders = [root for root in roots if root.is_dir()]
    if spec.name == "holidays" and folders:
        return Truth(folders[0], None, None)
    searched = ", ".join(map(str, folders)) or "no folder that exists"
    raise DatasetError(f"No ground truth of {spec.name} found (searched: {searched}).")


def _folder_truth(folder: Path) -> tuple[Truth, Spec]:
    file = folder / "ground_truth.json"
    if not file.is_file():
        if not folder.exists() and folder.name == str(folder):
            raise UnknownNameError("data set", str(folder), DATASETS)
        raise DatasetError(f"{file} is missing. Give a folder with ground_truth.json and jpg/.")
    truth = read_json(file)
    name = truth.name or folder.resolve().name
    return truth, DATASETS.get(name, Spec(name, (), f"{folder} (your own set)"))
