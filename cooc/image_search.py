"""Search your own pictures: an index, and the descriptor that its vectors were made with, as one object.

    with ImageSearch.create("photos/.cooc", root="photos") as search:
        search.index(["photos"])                                     # again and again: only changes cost time
        for match in search.search("query.jpg", box=(40, 60, 300, 400)).matches:
            print(match.path, match.score)

The command line and the web page are this object and nothing else. Searching may go on in many threads and processes
while one process, which has opened the index with write=True, changes it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc import __version__
from cooc.activations import resolve_device
from cooc.descriptor import Descriptor
from cooc.errors import ImageError, InputError, StoreMissingError
from cooc.index import calibration, create_store, is_folder, open_store, sync, without_password
from cooc.index.away import away_folders, forget_marks, which_are_away
from cooc.index.calibration import Calibration
from cooc.index.completing import complete_features
from cooc.index.copying import restore, take_over
from cooc.index.engine import Engine, Here
from cooc.index.importing import Exported, import_index
from cooc.index.report import Progress, Report, Stop
from cooc.index.shortlist import (
    NEAR_DUPLICATE,
    Match,
    Options,
    Results,
    as_query,
    find_duplicates,
    find_matches,
    unit,
)
from cooc.index.store import FORMAT, Filter, Record, Store, StoreMeta, Vectors, check_same, id_bytes, several
from cooc.pictures import Folder, is_url, open_collection
from cooc.pictures.boxes import Box, check_box
from cooc.pictures.decode import Picture, is_picture, load_view
from cooc.recipes import DescriptorConfig, find_recipe
from cooc.verification.agreement import Agreement
from cooc.verification.engines import LONGEST, QUERY, extract
from cooc.verification.extraction import Extraction
from cooc.verification.features import unpack
from cooc.verification.verifier import verify as verify_features
from cooc.verified_duplicates import find_copies
from cooc.verified_search import Features, find_verified

if TYPE_CHECKING:
    from cooc.descriptor import Image

__all__ = ["ImageSearch", "Match", "Report", "Results", "Status"]

DEFAULT_RECIPE = "paper-linear"
DEFAULT_FEATURES = "sift"  # the engine of local features that a new index keeps
BLOCK = 1000  # pictures removed in one transaction
MISSING = 0.1  # share of the pictures without which a rebuilt index does not replace the old one

Path_ = str | os.PathLike[str]
Paths = Path_ | Iterable[Path_]


@dataclass(frozen=True)
class Status:
    index: str
    root: str
    recipe: str
    dim: int
    images: int
    away: dict[str, str]  # folders whose pictures are not there now, but may come back, and since when
    bad: int
    failed: int  # files that a machine failed on: the next run tries again
    bytes: int | None  # on disk, where that can be told
    calibrated: bool  # have results a probability?
    calibration: str | None  # what its curve was fitted on
    created: str
    cooc_version: str
    weights_hash: str
    config: dict[str, Any]
    features: str = ""  # engines of the local features that are kept
    with_features: int = 0  # pictures that have them
    feature_bytes: int = 0  # of all of these


class ImageSearch:
    """See the module. `descriptor`: one that is loaded already, instead of the one that the recipe names."""

    def __init__(self, store: Store, index: Path_, *, device: str = "auto", descriptor: Descriptor | None = None):
        self.store, self.meta = store, store.meta
        self.index_path = os.fspath(index)  # what opens it again
        self.index_name = without_password(self.index_path)  # what may be shown
        self.collection = open_collection(_root(self.index_path, self.meta))
        self.config = DescriptorConfig.from_dict(self.meta.config)
        self.space = self.config.score_space(self.meta.dim, self.meta.weights_hash)  # what its curve is kept by
        self.calibration = calibration.find(self.space, store.notes())
        self._device = device
        self._loading = threading.Lock()
        self._descriptor: Descriptor | None = None
        if descriptor is not None:
            self._use(descriptor)

    @classmethod
    def create(
        cls,
        path: Path_,
        *,
        recipe: str = DEFAULT_RECIPE,
        root: Path_ | None = None,
        storage: str = "float32",
        features: str = DEFAULT_FEATURES,
        device: str = "auto",
        descriptor: Descriptor | None = None,
    ) -> Self:
        """A new index, open for writing. Its pictures lie below `root`: by default the folder that it lies in.

        `storage`: how vectors are kept, see docs/index-format.md; smaller ones than float32 in a folder only.
        `features`: the engines of local features, by which matches are verified; "" for none.
        """
        if features:
            Extraction(features)  # or what cannot be made is refused
        if storage != "float32" and not is_folder(path):
            raise InputError(f"Storage {storage} is for an index in a folder; a server keeps float32.")
        config = _lasting(descriptor.config.replace(dtype="auto") if descriptor else find_recipe(recipe).config)
        descriptor = descriptor or Descriptor(config, device=device)
        meta = StoreMeta(
            recipe=recipe,
            config=config.as_dict(),
            config_hash=config.hash,
            weights_hash=descriptor.fingerprint,
            dim=descriptor.dim,
            root=_keep_root(path, root),
            cooc_version=__version__,
            storage=storage,
            features=features,
        )
        return cls(create_store(_address(path), meta), path, device=device, descriptor=descriptor)

    @classmethod
    def open(
        cls,
        path: Path_,
        *,
        write: bool = False,
        recipe: str | None = None,
        device: str = "auto",
        descriptor: Descriptor | None = None,
    ) -> Self:
        """An index that is there. Another recipe than its own is refused; its network is loaded when it is needed."""
        store = open_store(_address(path), write=write)
        try:
            search = cls(store, path, device=device, descriptor=descriptor)
            if recipe is not None:
                asked = _lasting(find_recipe(recipe).config)
                search._check(replace(search._own_meta(), recipe=recipe, config_hash=asked.hash))
            return search
        except BaseException:
            store.close()
            raise

    @classmethod
    def import_from(cls, file: Path_, index: Path_, *, root: Path_ | None = None) -> Self:
        """Add what `cooc export` wrote to an index, which is made if there is none; it is open for writing then.

        All of the file is checked before anything is written, and all of it is imported or nothing.
        """
        exported = Exported(Path(file))
        exported.check()
        try:
            config = DescriptorConfig.from_dict(exported.meta.config)
            meta = replace(exported.meta, config_hash=config.hash)
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{os.fspath(file)!r}: its descriptor is not known here. {error}") from error
        made = False
        try:
            search = cls.open(index, write=True)
        except StoreMissingError:
            made = is_folder(index) and not Path(index).exists()
            kept = replace(meta, root=_keep_root(index, root), format=FORMAT)
            search = cls(create_store(_address(index), kept), index)
        try:
            search._check(meta)
            import_index(search.store, exported)
        except BaseException:
            search.close()
            if made:  # an empty index would be in the way of another recipe
                shutil.rmtree(index)
            raise
        return search

    @classmethod
    def rebuild(
        cls,
        index: Path_,
        *,
        to: Path_ | None = None,
        recipe: str | None = None,
        storage: str | None = None,
        features: str | None = None,
        device: str = "auto",
        descriptor: Descriptor | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Describe all pictures of an index again, with this recipe or its own; tags and notes are taken over.

        `features`: other engines of local features than it has, or "" for none.

        The new index is made beside the old one, which it replaces when it is done. If it is interrupted, the next call
        goes on. `to` is where the new index stays instead, and must be said for one on a server.
        """
        if to is None and not is_folder(index):
            shown = without_password(os.fspath(index))
            raise InputError(f"The index at {shown} lies on a server: say where the new one goes, with --to INDEX.")
        place = Path(os.path.abspath(index)) if to is None else None  # noqa: PTH100 (a link keeps its name)
        target = place.with_name(f"{place.name}.rebuilt") if place is not None else to
        assert target is not None
        with cls.open(index, write=True) as old:  # so that nobody else changes it meanwhile
            config = find_recipe(recipe).config if recipe else old.config
            made = descriptor or Descriptor(_lasting(config), device=device)
            try:
                new = cls.open(target, write=True, descriptor=made)
            except StoreMissingError:
                new = cls.create(
                    target,
                    recipe=recipe or old.meta.recipe,
                    root=old.collection.url,
                    storage=storage or (old.meta.storage if is_folder(target) else "float32"),
                    features=old.meta.features if features is None else features,
                    descriptor=made,
                )
            with new:
                report = sync.add_files(
                    new.store,
                    new.collection,
                    new._here(workers),
                    (new.collection.address(path) for path in take_over(old.store, new.store)),
                    progress=progress,
                )
                new.store.compact()
                lost = len(old.store) - len(new.store)
                if (report.failed or lost > MISSING * len(old.store)) and not report.interrupted:
                    report.notes.append(
                        f"{lost} of {len(old.store)} pictures could not be described: are they there? The index stays "
                        f"as it was. If all is well: cooc restore {os.fspath(target)} {os.fspath(index)}"
                    )
        if place is not None and not report.interrupted and not report.notes:
            restore(os.fspath(target), os.fspath(index))
            shutil.rmtree(target)
        return report

    @property
    def root(self) -> Path:
        """The folder of the pictures, where they lie in one."""
        if not isinstance(self.collection, Folder):
            raise InputError(f"The pictures lie in {self.collection.url!r}, in no folder of this machine.")
        return self.collection.root

    @property
    def descriptor(self) -> Descriptor:
        """Loaded at first use, and checked to be the one that the vectors of the index come from."""
        with self._loading:
            if self._descriptor is None:
                self._use(Descriptor(self.config, device=self._device))
            assert self._descriptor is not None
            return self._descriptor

    def _use(self, descriptor: Descriptor) -> None:
        made = replace(
            self._own_meta(),
            config_hash=_lasting(descriptor.config).hash,
            weights_hash=descriptor.fingerprint,
            dim=descriptor.dim,
        )
        self._check(made)
        self._descriptor = descriptor

    def _own_meta(self) -> StoreMeta:
        """With the hash that this version of cooc gives the configuration: settings may have come since it was kept."""
        return replace(self.meta, config_hash=self.config.hash, root=self.collection.url)

    def _check(self, other: StoreMeta) -> None:
        check_same(self._own_meta(), other, self.index_name)

    # changes

    def add(self, paths: Paths, *, workers: int = 0, progress: Progress | None = None) -> Report:
        """Add these files, or replace what the index knows of them. Files that have not changed cost nothing."""
        return sync.add_files(self.store, self.collection, self._here(workers), several(paths), progress=progress)

    def index(
        self,
        folders: Paths,
        *,
        workers: int | None = None,
        engine: Engine | None = None,
        keep_missing: bool = False,
        prune: bool = False,
        retry: bool = False,
        follow: bool = False,
        check_features: bool = False,
        progress: Progress | None = None,
        stop: Stop | None = None,
    ) -> Report:
        """Bring the index up to date with folders below its root: see `cooc.index.sync.synchronise`.

        `engine` is what describes; by default this process, with so many others that decode. In an index that keeps
        local features, pictures that have none get them; `check_features` makes damaged ones again, for which all are
        read (in a small index that is done anyway).
        """
        report = sync.synchronise(
            self.store,
            self.collection,
            engine or self._here(workers),
            list(several(folders)),
            keep_missing=keep_missing,
            prune=prune,
            retry=retry,
            follow=follow,
            progress=progress,
            stop=stop,
        )
        if self.extraction is not None and not report.interrupted:
            complete_features(
                self.store,
                self.collection,
                self.extraction,
                report,
                workers=workers,
                device=resolve_device(self._device).type,
                check=check_features,
                progress=progress,
                stop=stop,
            )
        return report

    def keep_features(self, engines: str = DEFAULT_FEATURES) -> None:
        """From now on the index keeps local features. The next `index` makes them of what is there already."""
        Extraction(engines)
        self.store.set_feature_engines(engines)
        self.meta = self.store.meta

    @property
    def extraction(self) -> Extraction | None:
        """What makes the local features that the index keeps, if it keeps any."""
        return Extraction(self.meta.features) if self.meta.features else None

    def _here(self, workers: int | None) -> Here:
        return Here(self._get, workers, self.extraction)

    def _get(self) -> Descriptor:
        return self.descriptor

    def remove(self, paths: Paths) -> int:
        """Forget pictures, or all pictures of a folder; the files stay. Names as in results, or paths on disk."""
        removed = 0
        for name in (self.name(path) for path in several(paths)):
            where = Filter(prefix=name or None)
            while below := [record.path for record in self.store.records(where, limit=BLOCK)]:
                removed += self.store.remove(below)
            removed += self.store.remove([name]) if name else 0
        forget_marks(self.store)
        return removed

    def tag(self, paths: Paths, add: str | Iterable[str] = (), remove: str | Iterable[str] = ()) -> int:
        """Give tags to pictures, or to all pictures of folders, and take others away; how many pictures."""
        add, remove = list(several(add)), list(several(remove))
        records, count = self.records(paths), 0
        while block := [record.id for record in itertools.islice(records, BLOCK)]:
            count += self.store.tag(block, add, remove)
        return count

    def calibrate(self, curve: Calibration | None, about: Mapping[str, Any] | None = None) -> None:
        """Keep a curve in the index, for all who search in it; None forgets it. `cooc.bench.calibrating` fits one."""
        kept = dict(self.store.notes().get(calibration.NOTE) or {})
        kept.pop(self.space, None)
        if curve is not None:
            if not curve.sound:
                raise InputError(f"{curve} is no curve: slope and offset must be finite, and the slope more than 0.")
            kept[self.space] = {**(about or {}), **asdict(curve)}
        self.store.note(calibration.NOTE, kept or None)
        self.calibration = calibration.find(self.space, self.store.notes())

    def records(self, paths: Paths) -> Iterator[Record]:
        """What the index knows of pictures, or of all pictures of folders. A name that it does not know is an error."""
        for path in several(paths):
            name = self.name(path)
            (one,) = self.store.find([name]) if name else [None]
            found = iter([one]) if one else self.store.records(Filter(prefix=name or None))
            first = next(found, None)
            if first is None:
                raise InputError(f"{os.fspath(path)!r} is not in the index {self.index_name}.")
            yield first
            yield from found

    def name(self, path: Path_) -> str:
        """How the index names a picture: what it knows by that name, else a path on disk."""
        text = os.fsdecode(path)
        if not os.path.isabs(text) and text not in ("", "."):  # noqa: PTH117
            plain = text.removeprefix("./").rstrip("/")
            if self.store.find([plain])[0] or next(self.store.records(Filter(prefix=plain), limit=1), None):
                return plain
        return self.collection.name(text)

    # questions

    def search(
        self,
        image: Image | Sequence[Image],
        box: Box | Sequence[Box | None] | None = None,
        k: int = 20,
        *,
        expand: str | None = None,
        rerank: str | None = None,
        augment: bool = False,
        where: Filter | None = None,
        min_score: float | None = None,
        offset: int = 0,
        without: str | None = None,
        verify: bool | None = None,
    ) -> Results:
        """The k pictures that show the same as a picture, as the part of it in a box, or as several pictures joined.

        `verify` checks the best results by geometry: what agrees with the query leads, the rest is merely similar. By
        default it is done where the index keeps local features.

        `expand` (average, alpha) searches again with the query and its best results joined; `augment` compares with
        each result's own neighbours too; `rerank` (k-reciprocal, diffusion, superglobal) re-ranks the best results.
        `offset` leaves out as many of the first results, `without` the picture of that id.
        """
        started = time.monotonic()
        options = Options(k, expand, rerank, augment, where, min_score, offset)
        images, boxes = _together(image, box)
        asked = self._local(images, boxes) if self._verifies(verify) else []
        return self._found(self._describe(images, boxes), options, asked, without, started)

    def search_id(
        self,
        id: str,
        k: int = 20,
        *,
        box: Box | None = None,
        expand: str | None = None,
        rerank: str | None = None,
        augment: bool = False,
        where: Filter | None = None,
        min_score: float | None = None,
        offset: int = 0,
        verify: bool | None = None,
    ) -> Results:
        """The same for a picture of the index, by its vector, or for the part of it in a box; it is not among them."""
        started = time.monotonic()
        options = Options(k, expand, rerank, augment, where, min_score, offset)
        id_bytes(id)  # or results could hold it under another spelling
        asked: list[Features] = []
        if box is None:
            query = self.vectors([id])[0]
            if self._verifies(verify):
                asked = [unpack(code) for code in self.store.features([id]) if code is not None]
        else:
            picture, part = self.file(id), check_box(box)
            query = self._describe([picture], [part])
            asked = self._local([picture], [part]) if self._verifies(verify) else []
        return self._found(query, options, asked, id, started)

    def search_vector(
        self,
        vector: ArrayLike,
        k: int = 20,
        *,
        expand: str | None = None,
        rerank: str | None = None,
        augment: bool = False,
        where: Filter | None = None,
        min_score: float | None = None,
        offset: int = 0,
    ) -> Results:
        """The same for a vector (D,) of this descriptor."""
        options = Options(k, expand, rerank, augment, where, min_score, offset)
        return self._found(as_query(vector, self.meta.dim), options, [], None, time.monotonic())

    def _found(
        self, query: Vectors, options: Options, asked: Sequence[Features], without: str | None, started: float
    ) -> Results:
        """Verified by the local features of what was asked for, if there are any."""
        if any(len(part) for features in asked for part in features):
            device = resolve_device(self._device)
            found = find_verified(
                self.store,
                query,
                asked,
                options,
                without=without,
                device=None if device.type == "cpu" else str(device),
                started=started,
            )
        elif asked:  # pictures without any texture: nothing can be verified, and so nothing is claimed
            found = find_matches(self.store, query, options, without=without, started=started)
            found = replace(found, no_match=True, checked=True)
        else:
            found = find_matches(self.store, query, options, curve=self.calibration, without=without, started=started)
        return self._with_away(found)

    def agreement(
        self, id: str, *, image: Image | None = None, box: Box | None = None, query_id: str | None = None
    ) -> Agreement | None:
        """In what a picture of the index agrees with an image, or with another picture of the index.

        None where there are no local features to tell; inliers 0 where nothing agrees.
        """
        (code,) = self.store.features([id]) if self.meta.features else [None]
        asked: list[Features] = []
        if code is not None and query_id is not None and box is None:
            asked = [unpack(own) for own in self.store.features([query_id]) if own is not None]
        elif code is not None:
            part = None if box is None else check_box(box)
            asked = self._local([image if query_id is None else self.file(query_id)], [part])
        if not asked or code is None:
            return None
        return verify_features(asked[0], [unpack(code)])[0]

    def _verifies(self, wanted: bool | None) -> bool:
        if wanted and not self.meta.features:
            raise InputError(
                f"The index {self.index_name} keeps no local features to verify by. Add them: cooc index --verify sift"
            )
        return bool(self.meta.features) if wanted is None else wanted

    def _local(self, images: list[Any], boxes: list[Box | None]) -> list[Features]:
        """The local features of a query's pictures. Tensors have none: nobody knows how they were scaled."""
        found, device = list[Features](), str(resolve_device(self._device))
        for image, box in zip(images, boxes, strict=True):
            if is_picture(image):
                pixels, size, part = load_view(image, LONGEST, box)
                found.append(extract(self.meta.features, pixels, size=size, box=part, limit=QUERY, device=device))
        return found

    def _with_away(self, results: Results) -> Results:
        """It is said of each match whether its file is away."""
        away = which_are_away(self.store, self.collection, [match.record.entry for match in results.matches])
        if not away:
            return results
        return replace(results, matches=[replace(match, away=match.path in away) for match in results.matches])

    def _describe(self, images: list[Any], boxes: list[Box | None]) -> NDArray[np.float32]:
        """One query: the sum of what each picture gives, as a unit vector (D,)."""
        return unit(self.descriptor.describe(images, boxes).numpy().sum(axis=0))

    def vectors(self, ids: Sequence[str]) -> Vectors:
        return self.store.vectors(ids)

    def file(self, id: str) -> Picture:
        """A picture of the index, to be read from where it lies: a path, if that is on this machine."""
        (record,) = self.store.get([id])
        if record is None:
            raise InputError(f"There is no picture {id} in the index {self.index_name}: search again.")
        return self.collection.picture(record.entry)

    def duplicates(
        self, threshold: float | None = None, *, where: Filter | None = None, verify: bool | None = None
    ) -> Iterator[list[Record]]:
        """Groups of copies: re-saved, smaller, cropped, turned or mirrored.

        Where the index keeps local features, geometry decides, and `threshold` is only the least similarity of two
        (by default a low one). Without, or with `verify=False`, pictures are joined by a similarity of at least
        `threshold`, 0.8 by default: then smaller copies and crops are missed, and very similar views are joined.
        """
        if not self._verifies(verify):
            return find_duplicates(self.store, NEAR_DUPLICATE if threshold is None else threshold, where)
        device = resolve_device(self._device)
        return find_copies(
            self.store,
            threshold,
            where,
            mirrored=self._mirrored,
            device=None if device.type == "cpu" else str(device),
        )

    def _mirrored(self, id: str) -> Features:
        """Local features of a picture's mirror image; none if its file cannot be read now."""
        try:
            pixels, size, _ = load_view(self.file(id), LONGEST)
        except (ImageError, InputError):
            return ()
        flipped = np.ascontiguousarray(pixels[:, ::-1])
        return extract(self.meta.features, flipped, size=size, device=str(resolve_device(self._device)))

    def status(self) -> Status:
        with_features, feature_bytes = self.store.count_features()
        return Status(
            index=self.index_name,
            root=self.collection.url,
            recipe=self.meta.recipe,
            dim=self.meta.dim,
            images=len(self.store),
            away=away_folders(self.store),
            bad=sum(1 for _ in self.store.bad_files()),
            failed=sync.failed(self.store),
            bytes=self.store.disk_bytes(),
            calibrated=self.calibration is not None,
            calibration=self.calibration.fitted_on if self.calibration else None,
            created=self.meta.created,
            cooc_version=self.meta.cooc_version,
            weights_hash=self.meta.weights_hash,
            config=self.meta.config,
            features=self.meta.features,
            with_features=with_features,
            feature_bytes=feature_bytes,
        )

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _together(image: Any, box: Any) -> tuple[list[Any], list[Box | None]]:
    """One picture with its box, or several with a box or None for each."""
    images = list(image) if isinstance(image, (list, tuple)) else [image]
    if not images:
        raise InputError("There is no picture to search for: give at least one.")
    if box is None:
        return images, [None] * len(images)
    lists = (list, tuple, np.ndarray)
    boxes = list(box) if isinstance(box, lists) and any(n is None or isinstance(n, lists) for n in box) else [box]
    if len(boxes) != len(images):
        raise InputError(f"{len(images)} pictures came with {len(boxes)} boxes: give a box, or None, for each of them.")
    return images, [one if one is None else check_box(one) for one in boxes]


def _lasting(config: DescriptorConfig) -> DescriptorConfig:
    """Files that a config names are found from any folder."""
    files = {
        name: str(Path(value).absolute())
        for name, value in (("whitening", config.whitening), ("filter", config.filter))
        if Path(value).suffix
    }
    return config.replace(**files)


def _address(path: Path_) -> str | Path:
    return Path(path) if is_folder(path) else os.fspath(path)


def _keep_root(index: Path_, root: Path_ | None) -> str:
    """Relative to the index where that lies below the root: both may be moved together, or mounted elsewhere."""
    if root is not None and is_url(root):
        return open_collection(root).url
    if not is_folder(index):
        if root is None:
            shown = without_password(os.fspath(index))
            raise InputError(f"An index on a server ({shown}) needs a root: the folder of its pictures.")
        return str(Path(root).absolute())
    folder = Path(os.path.abspath(index))  # noqa: PTH100 (no links resolved: the index keeps the name that it has)
    pictures = folder.parent if root is None else Path(os.path.abspath(root))  # noqa: PTH100
    return os.path.relpath(pictures, folder) if folder.is_relative_to(pictures) else str(pictures)


def _root(index: str, meta: StoreMeta) -> Path_:
    if meta.root is not None and is_url(meta.root):
        return meta.root
    if not is_folder(index):
        return Path(meta.root or ".")
    return Path(os.path.abspath(Path(index) / (meta.root or "..")))  # noqa: PTH100
