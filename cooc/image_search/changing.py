"""Changes of an index: bringing it up to date, removing, tagging, importing, and describing all of it again.

What only changes need is imported where it is used: a search does not wait for it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cooc.errors import InputError, StoreMissingError
from cooc.image_search.opening import (
    DEFAULT_FEATURES,
    OpenIndex,
    Path_,
    Paths,
    address,
    keep_root,
    lasting,
    made_by,
    words_folder,
)
from cooc.index import calibration, create_store, inverted, is_folder, without_password
from cooc.index.away import forget_marks
from cooc.index.records import FORMAT, Filter, several
from cooc.index.store import blocks
from cooc.pictures import open_collection
from cooc.verification.extraction import Extraction
from cooc.verification.words import ENGINE

if TYPE_CHECKING:
    from cooc.descriptor import Descriptor
    from cooc.index.calibration import Calibration
    from cooc.index.engine import Engine, Here
    from cooc.index.report import Progress, Report, Stop

_log = logging.getLogger("cooc")

BLOCK = 1000  # pictures removed in one transaction
MISSING = 0.1  # share of the pictures without which a rebuilt index does not replace the old one


class ChangingIndex(OpenIndex):
    """An index that has been opened with write=True."""

    def add(self, paths: Paths, *, workers: int | None = 0, progress: Progress | None = None) -> Report:
        """Add these files, or replace what the index knows of them. Files that have not changed cost nothing."""
        from cooc.index import sync

        here = self._here(workers)
        report = sync.add_files(self.store, self.collection, here, several(paths), progress=progress)
        self.find_words()
        return report

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
        from cooc.index import sync
        from cooc.index.completing import complete_features

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
            from cooc.activations import resolve_device

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
        self.find_words()
        if not report.interrupted:
            self.keep_query_network()
        return report

    def find_words(self) -> None:
        """The visual words of pictures that have come: searches find these by their vectors alone until then."""
        if ENGINE not in self.meta.features:
            return
        try:
            inverted.update(words_folder(self.index_path), self.store)
        except OSError as error:  # a full disk, no file handles: what was there is there still
            _log.warning("Visual words were not brought up to date (%s). The next `cooc index` does it.", error)

    def keep_features(self, engines: str = DEFAULT_FEATURES) -> None:
        """From now on the index keeps local features. The next `index` makes them of what is there already."""
        Extraction(engines)
        self.store.set_feature_engines(engines)
        self.meta = self.store.meta

    def _here(self, workers: int | None) -> Here:
        from cooc.index.engine import Here

        return Here(lambda: self.descriptor, workers, self.extraction)

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
        found = blocks(self.records(paths), BLOCK)
        return sum(self.store.tag([record.id for record in block], add, remove) for block in found)

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

    @classmethod
    def import_from(cls, file: Path_, index: Path_, *, root: Path_ | None = None) -> Self:
        """Add what `cooc export` wrote to an index, which is made if there is none; it is open for writing then.

        All of the file is checked before anything is written, and all of it is imported or nothing.
        """
        from cooc.index.importing import Exported
        from cooc.recipes import DescriptorConfig

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
            kept = replace(meta, root=keep_root(index, root), format=FORMAT)
            search = cls(create_store(address(index), kept), index)
        try:
            search._check(meta)
            search.store.add_all(exported)
        except BaseException:
            search.close()
            if made:  # an empty index would be in the way of another recipe
                shutil.rmtree(index)
            raise
        return search

    @classmethod
    def import_vectors(
        cls, vectors: Path_, paths: Path_, index: Path_, *, root: Path_ | None = None, name: str
    ) -> tuple[Self, Report]:
        """An index of vectors that another method made, called `name`; into one of that name, those of new pictures.

        `vectors`: an .npy file (N, D). `paths`: a text file with N lines, the pictures below the root of the index.
        """
        from cooc.index import sync
        from cooc.index.given import Given
        from cooc.recipes import GIVEN, DescriptorConfig

        config = DescriptorConfig(backbone=GIVEN + name, pooling="spoc", cooccurrence="none")
        try:
            search = cls.open(index, write=True)
        except StoreMissingError:
            search = None
        place = open_collection(root or Path(index).absolute().parent) if search is None else search.collection
        try:
            given = Given(Path(vectors), Path(paths), place)
            kept = keep_root(index, root) if search is None else search.collection.url
            meta = made_by(config, name, config.hash, given.dim, kept)
            search = search or cls(create_store(address(index), meta), index)
            search._check(meta)
            return search, sync.add_files(search.store, search.collection, given, given.paths)
        except BaseException:
            if search is not None:
                search.close()
            raise

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
        from cooc.descriptor import Descriptor
        from cooc.index import sync
        from cooc.index.copying import restore, take_over
        from cooc.recipes import find_recipe

        if to is None and not is_folder(index):
            shown = without_password(os.fspath(index))
            raise InputError(f"The index at {shown} lies on a server: say where the new one goes, with --to INDEX.")
        place = Path(os.path.abspath(index)) if to is None else None  # noqa: PTH100 (a link keeps its name)
        target = place.with_name(f"{place.name}.rebuilt") if place is not None else to
        assert target is not None
        with cls.open(index, write=True) as old:  # so that nobody else changes it meanwhile
            config = find_recipe(recipe).config if recipe else old.config
            made = descriptor or Descriptor(lasting(config), device=device)
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
                new.find_words()
                new.keep_query_network()
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
