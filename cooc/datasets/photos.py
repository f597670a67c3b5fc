"""Sets of photos to learn from: which photos there are, what they show, and which of them match.

    photos = load_photos("landmarks/")     a folder of folders, one for each label
    photos = load_photos("sfm/")           retrieval-SfM-120k as published: retrieval-SfM-120k.pkl and ims/
    photos = load_photos("my-set/")        a folder with ground_truth.json

Photos of one label, cluster or answer are never negatives for each other. Whether they are positives is another matter:
two photos of a castle may show its gate and its dungeon. SfM clusters and ground truths say which pairs match; labels
do not, and their pairs are verified first (cooc/training/verification.py). An index has pairs, too
(cooc/training/mining.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cooc.datasets.retrieval import Dataset, image_set, load_dataset
from cooc.errors import DatasetError, ImageError, InputError
from cooc.evaluation import Query
from cooc.pictures.batches import Item
from cooc.pictures.boxes import Box
from cooc.pictures.decode import image_info
from cooc.unpickling import load_arrays

Ints = NDArray[np.int64]

ENOUGH = 2000  # photos: of fewer, half are held out to judge by, and no whitening is fitted, about 4 to a dimension
PARTS, GRID = (0.5, 0.65, 0.8), 32  # of a photo's sides, and pixels that those of its crop are rounded down to


@dataclass(frozen=True, eq=False)
class Photos:
    """N photos. `positives`: query -> the photos that match it; None where there are only labels, to be verified."""

    name: str
    items: list[Item]
    clusters: Ints  # (N,)
    positives: Mapping[int, Ints] | None
    held_out: NDArray[np.bool_]  # (N,) for validation only
    crops: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))  # (N,) a part of another of them

    def __post_init__(self) -> None:
        if len(self.crops) != len(self.items):
            object.__setattr__(self, "crops", np.zeros(len(self.items), bool))

    def __len__(self) -> int:
        return len(self.items)

    @property
    def matches(self) -> Mapping[int, Ints]:
        if self.positives is None:
            raise InputError(f"The pairs of {self.name} are not verified yet: labels alone do not say what matches.")
        return self.positives

    def alone(self) -> NDArray[np.bool_]:
        """(N,) Whole photos whose label no other has: only a part of it can match one."""
        whole, counts = np.unique(self.clusters[~self.crops], return_counts=True)
        return ~self.crops & np.isin(self.clusters, whole[counts == 1])

    def subset(self, rows: Sequence[int]) -> Photos:
        """Those photos, numbered again; matches with others are dropped."""
        place = {row: i for i, row in enumerate(rows)}
        positives = None
        if self.positives is not None:
            kept = {q: [place[int(p)] for p in match if int(p) in place] for q, match in self.positives.items()}
            positives = {place[q]: np.array(match, np.int64) for q, match in kept.items() if q in place and match}
        chosen = np.asarray(rows, np.int64)
        items = [self.items[row] for row in rows]
        return Photos(self.name, items, self.clusters[chosen], positives, self.held_out[chosen], self.crops[chosen])

    def queries(self, held_out: bool = False) -> Ints:
        """Photos of one of the two parts that have a match."""
        return np.array([q for q in self.matches if self.held_out[q] == held_out], np.int64)

    def pairs(self, held_out: bool | None = None) -> tuple[Ints, Ints]:
        """All matching pairs, query and positive; of one part, or of both."""
        rows = [(q, int(p)) for q, m in self.matches.items() if held_out in (None, self.held_out[q]) for p in m]
        pairs = np.array(rows, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def validation(self) -> tuple[Ints, Ints, list[Query]]:
        """The held-out part as a data set: query rows, database rows, and the ground truth in terms of the latter.

        A photo of the same cluster that was not verified is neither right nor wrong: it is junk. Those that are trained
        on are not searched in: a whitening of few photos sets them apart from all others, which would be taken for a
        gain. Crops are asked for, and not searched in.
        """
        database = np.flatnonzero(self.held_out & ~self.crops)
        place = {int(row): i for i, row in enumerate(database)}
        queries, truth = self.queries(held_out=True), []
        for q in queries:
            positives = [place[int(p)] for p in self.matches[int(q)] if int(p) in place]
            same = np.flatnonzero(self.clusters[database] == self.clusters[q])
            itself = [place[int(q)]] if int(q) in place else []
            junk = np.setdiff1d(same, [*positives, *itself])
            truth.append(Query(positives=positives, junk=junk, itself=itself))
        return queries, database, truth


def load_photos(
    folder: str | Path,
    *,
    exclude: Iterable[str] = (),
    not_in: str | Path | None = None,
    held_out: float | None = None,
    seed: int = 0,
) -> Photos:
    """Photos in any of the three layouts; part of the labels held out, unless the data set says which.

    exclude: labels to leave out. not_in: a folder of pictures to be tested on, none of which may be trained on.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DatasetError(f"{folder} is no folder. Give one of labelled folders, with ground_truth.json, or SfM's.")
    published = sorted(folder.glob("retrieval-SfM-*.pkl"))
    if published:
        return retrieval_sfm(published[0])
    if (folder / "ground_truth.json").is_file():
        photos = from_dataset(load_dataset(folder))
    else:
        photos = labelled_folders(folder, image_set(folder, exclude_labels=exclude, exclude_names_of=not_in))
    return hold_out(photos, held_out, seed)


def labelled_folders(root: Path, paths: Sequence[Path]) -> Photos:
    """The first folder below `root` is a photo's label."""
    labels = [path.relative_to(root).parts[0] for path in paths]
    names = sorted(set(labels))
    if len(names) < 2:
        raise DatasetError(
            f"{root} has {len(names)} folders with pictures. Learning needs labels that differ: one folder each."
        )
    clusters = np.array([names.index(label) for label in labels], np.int64)
    items = [Item(i, path) for i, path in enumerate(paths)]
    return Photos(root.name, items, clusters, None, np.zeros(len(items), bool))


def from_dataset(dataset: Dataset) -> Photos:
    """A retrieval data set: what is positive matches; what is positive or junk is of the query's cluster."""
    items = [Item(i, path) for i, path in enumerate(dataset.image_paths)]
    known: dict[tuple[str, Box | None], int] = {(str(item.picture), None): i for i, item in enumerate(items)}
    positives: dict[int, list[int]] = {}
    parent = list(range(len(items) + len(dataset.queries)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for query, truth in zip(dataset.queries, dataset.ground_truth, strict=True):
        q = known.setdefault((str(query.path), query.box), len(items))
        if q == len(items):
            items.append(Item(q, query.path, query.box))
        right = [int(i) for i in truth.select(("positives", "easy", "hard")) if i != q]
        for i in (*right, *truth.select(("junk", "itself"))):
            parent[root(int(i))] = root(q)
        positives.setdefault(q, []).extend(right)
        for i in right:
            positives.setdefault(i, []).append(q)
    clusters = np.array([root(i) for i in range(len(items))], np.int64)
    matches = {q: np.unique(np.array(m, np.int64)) for q, m in positives.items() if m}
    return Photos(dataset.name, items, clusters, matches, np.zeros(len(items), bool))


def retrieval_sfm(file: Path) -> Photos:
    """retrieval-SfM-30k or -120k (Radenovic et al. 2018) as published; its part `val` is held out.

    `cids` names the photos, `ims/EF/CD/AB/...ABCDEF`; `cluster` says what they show, `qidxs` and `pidxs` which match.
    """
    content = _unpickle(file)
    images = file.parent / "ims"
    items: list[Item] = []
    clusters: list[int] = []
    held_out: list[bool] = []
    positives: dict[int, list[int]] = {}
    try:
        for part in ("train", "val"):
            first = len(items)
            names = [str(cid) for cid in content[part]["cids"]]
            items += [Item(first + i, images / n[-2:] / n[-4:-2] / n[-6:-4] / n) for i, n in enumerate(names)]
            clusters += [int(c) for c in _of_length(content[part]["cluster"], len(names))]
            held_out += [part == "val"] * len(names)
            queries = list(content[part]["qidxs"])
            for q, p in zip(queries, _of_length(content[part]["pidxs"], len(queries)), strict=True):
                if not 0 <= int(q) < len(names) or not 0 <= int(p) < len(names):
                    raise ValueError(f"pair {q}, {p} of {part} is beyond its {len(names)} photos")
                positives.setdefault(first + int(q), []).append(first + int(p))
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{file} is not as published ({error!r}). Fetch it again.") from error
    missing = [path for path in (Path(str(item.picture)) for item in items) if not path.is_file()]
    if missing:
        raise DatasetError(
            f"{len(missing)} of the {len(items)} photos of {file.name} are missing, first {missing[0]}. "
            "Unpack ims/ beside it; published at http://cmp.felk.cvut.cz/cnnimageretrieval/"
        )
    matches = {q: np.array(m, np.int64) for q, m in positives.items()}
    return Photos(file.stem, items, np.array(clusters, np.int64), matches, np.array(held_out, bool))


def _unpickle(file: Path) -> Any:
    """Pickles come from strangers: only containers and arrays are admitted."""
    try:
        with file.open("rb") as stream:
            return load_arrays(stream)
    except Exception as error:  # whatever a damaged or hostile file leads to
        raise DatasetError(f"{file} is not as published ({error}). Fetch it again.") from error


def _of_length(values: Any, length: int) -> Any:
    if len(values) != length:
        raise ValueError(f"{len(values)} values for {length}")
    return values


def add_unlabelled(photos: Photos, paths: Sequence[Path], *, held_out: bool) -> Photos:
    """Pictures that show nothing of the labels, each a thing of its own.

    Those that are held out are distractors, to be searched among: among few all is found. The others are learned from,
    if they have crops to be found by: labels are few, and what a network learns to tell apart should not be.
    """
    rows = len(photos)
    items = [*photos.items, *(Item(rows + i, path) for i, path in enumerate(paths))]
    clusters = np.concatenate([photos.clusters, photos.clusters.max(initial=0) + 1 + np.arange(len(paths))])
    part = np.concatenate([photos.held_out, np.full(len(paths), held_out)])
    crops = np.concatenate([photos.crops, np.zeros(len(paths), bool)])
    return replace(photos, items=items, clusters=clusters, held_out=part, crops=crops)


def add_crops(photos: Photos, seed: int = 0) -> Photos:
    """Each labelled photo once more as a part of it, to be asked for. Sides are few, so that a GPU can batch them.

    One whose size cannot be read is left out here, and named when it is read as a whole.
    """
    rng, items, rows = np.random.default_rng(seed), list(photos.items), list[int]()
    for row, item in enumerate(photos.items):
        size = np.array(_size(Path(str(item.picture))))
        part = (rng.choice(PARTS) * size / GRID).astype(int) * GRID
        left, top = (rng.uniform(0, 1, 2) * (size - part)).round().tolist()
        if part.min() > 0:
            items.append(Item(len(items), item.picture, (left, top, left + float(part[0]), top + float(part[1]))))
            rows.append(row)
    known = photos.positives
    if known is not None:
        own = {r: np.array([r]) for r in np.flatnonzero(photos.alone()).tolist()} | dict(known)
        known = {**known, **{len(photos) + i: own[r] for i, r in enumerate(rows) if r in own}}
    return Photos(
        photos.name,
        items,
        np.concatenate([photos.clusters, photos.clusters[rows]]),
        known,
        np.concatenate([photos.held_out, photos.held_out[rows]]),
        np.arange(len(items)) >= len(photos),
    )


def _size(path: Path) -> tuple[int, int]:
    """Width and height when upright; nothing of a file that is no picture."""
    try:
        info = image_info(path)
        return info.width, info.height
    except ImageError:
        return 0, 0


def hold_out(photos: Photos, fraction: float | None = None, seed: int = 0) -> Photos:
    """Whole clusters, of two photos at least, held out for validation: what was never seen must be found too.

    A fifth of them, or half of a few: less of these could not tell what is better.
    """
    fraction = (0.2 if len(photos) >= ENOUGH else 0.5) if fraction is None else fraction
    if not 0 <= fraction < 1:
        raise InputError(f"The part held out is at least 0 and less than 1, not {fraction}.")
    clusters, counts = np.unique(photos.clusters, return_counts=True)
    large = clusters[counts > 1]
    count = min(round(fraction * len(large)) or int(fraction > 0), len(large) - 1)
    chosen = np.random.default_rng(seed).choice(large, size=max(count, 0), replace=False)
    return replace(photos, held_out=np.isin(photos.clusters, chosen))
