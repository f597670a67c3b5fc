"""Where below a few folders a benchmark's pictures and its ground truth lie: archives are unpacked in many ways."""

from __future__ import annotations

import re
from pathlib import Path

from cooc.datasets.ground_truth import Truth, read_dat, read_json, read_pickle, read_text
from cooc.datasets.published import DATASETS, REVISITED, Spec
from cooc.errors import DatasetError, UnknownNameError
from cooc.pictures.folder import list_images

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")  # the best first; a copy in another format is as good, and reported
PICTURES = ("oxbuild_images", "jpg", "images", "paris")  # folders of the published archives
TRUTHS = ("", "gt", "groundtruth", "ground_truth", "lab", "gt_files_170407", "paris_120310")


def suffix_of(name: str) -> str:
    """Names in the official lists have no suffix: they are JPEG files."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), ".jpg")


def key_of(name: str) -> str:
    """A name without its suffix, so that a copy in another format is found too."""
    return name[: -len(suffix_of(name))] if name.lower().endswith(SUFFIXES) else name


def find_pictures(roots: list[Path], wanted: list[str], pattern: str) -> dict[str, Path]:
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
        found.setdefault(key_of(path.relative_to(folder).as_posix()), path)
    for path in files:
        found.setdefault(key_of(path.name), path)
    return found


def find_distractors(folder: Path) -> list[Path]:
    """All pictures of a folder, in the order of `revisitop1m.txt` where that list is beside or in it."""
    if not folder.is_dir():
        raise DatasetError(f"{folder} is no folder of distractors. {REVISITED.format('...')}")
    base = folder / "jpg" if (folder / "jpg").is_dir() else folder
    listing = next((f for f in (folder / "revisitop1m.txt", folder.parent / "revisitop1m.txt") if f.is_file()), None)
    if listing is None:
        return [path for path in list_images(base, follow_symlinks=True) if path.suffix.lower() in SUFFIXES]
    pictures, names = _pictures(base), listing.read_text().split()
    if missing := [name for name in names if key_of(name) not in pictures]:
        raise DatasetError(f"{len(missing)} of {len(names)} distractors of {listing} are missing: {missing[0]}, ...")
    return [pictures[key_of(name)] for name in names]


def find_truth(spec: Spec, roots: list[Path]) -> Truth:
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


def folder_truth(folder: Path) -> tuple[Truth, Spec]:
    file = folder / "ground_truth.json"
    if not file.is_file():
        if not folder.exists() and folder.name == str(folder):
            raise UnknownNameError("data set", str(folder), DATASETS)
        raise DatasetError(f"{file} is missing. Give a folder with ground_truth.json and jpg/.")
    truth = read_json(file)
    name = truth.name or folder.resolve().name
    return truth, DATASETS.get(name, Spec(name, (), f"{folder} (your own set)"))
