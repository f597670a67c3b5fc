"""An index that is open, and the descriptor that its vectors were made with: making it, opening it, what it holds.

What torch is needed for is imported where it is used: a search on a CPU needs it only where no network for queries was
kept (`cooc.query_network`), and makes its local features while it loads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cooc import __version__
from cooc.errors import InputError, StoreMismatchError
from cooc.index import calibration, create_store, is_folder, open_store, without_password
from cooc.index.away import away_folders
from cooc.index.inverted import Inverted
from cooc.index.records import Filter, Record, StoreMeta, check_same, several
from cooc.index.store import Store, Vectors, kept_open
from cooc.pictures import Folder, is_url, open_collection
from cooc.pictures.decode import Picture
from cooc.query_network.running import QueryNetwork, place_of, surely_cpu
from cooc.verification.extraction import Extraction
from cooc.verification.words import ENGINE

if TYPE_CHECKING:
    from cooc.descriptor import Descriptor
    from cooc.index.calibration import Calibration
    from cooc.recipes import DescriptorConfig

DEFAULT_FEATURES = "sift"  # the engine of local features that a new index keeps


@dataclass(frozen=True)
class Quality:
    """What a new index is made of, for those who know no recipes."""

    recipe: str
    features: str
    about: str


QUALITIES = {
    "fast": Quality("resnet-tuned+size=384", "", "what looks alike; nothing is proven"),
    "balanced": Quality("resnet-tuned", DEFAULT_FEATURES, "what geometry proves comes first"),
    "best": Quality("resnet-tuned", "sift+xfeat", "the same by two kinds of local features: more of it is found"),
}
DEFAULT_QUALITY = "balanced"
DEFAULT_RECIPE = QUALITIES[DEFAULT_QUALITY].recipe

_log = logging.getLogger("cooc")

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


class OpenIndex:
    """See the module. `descriptor`: one that is loaded already, instead of the one that the recipe names.

    `fingerprint`: that of the descriptor, for one who knows it: to make it takes a tenth of a second.
    """

    def __init__(
        self,
        store: Store,
        index: Path_,
        *,
        device: str = "auto",
        descriptor: Descriptor | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.store, self.meta = store, store.meta
        self.index_path = os.fspath(index)  # what opens it again
        self.index_name = without_password(self.index_path)  # what may be shown
        self.collection = open_collection(_root(self.index_path, self.meta))
        self._device = device
        self._loading, self._opening = threading.Lock(), threading.Lock()  # of a network; of the words
        self._descriptor: Descriptor | None = None
        self._query_network: QueryNetwork | None = None
        self._words: tuple[int, Inverted] | None = None  # and when the folder was changed
        if descriptor is not None:
            self._use(descriptor, fingerprint)

    @cached_property
    def config(self) -> DescriptorConfig:
        from cooc.recipes import DescriptorConfig

        return DescriptorConfig.from_dict(self.meta.config)

    @cached_property
    def space(self) -> str | None:
        """What its calibration is kept by."""
        if (network := self.query_network) is not None:
            return network.settings.space
        return self.config.score_space(self.meta.dim, self.meta.weights_hash)

    @cached_property
    def calibration(self) -> Calibration | None:
        return calibration.find(self.space, self.store.notes())

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
        from cooc.descriptor import Descriptor
        from cooc.recipes import find_recipe

        if features:
            Extraction(features)  # or what cannot be made is refused
        if storage != "float32" and not is_folder(path):
            raise InputError(f"Storage {storage} is for an index in a folder; a server keeps float32.")
        config = lasting(descriptor.config.replace(dtype="auto") if descriptor else find_recipe(recipe).config)
        descriptor = descriptor or Descriptor(config, device=device)
        meta = made_by(config, recipe, descriptor.fingerprint, descriptor.dim, keep_root(path, root))
        meta = replace(meta, storage=storage, features=features)
        return cls(create_store(address(path), meta), path, device=device, descriptor=descriptor)

    @classmethod
    def open(
        cls,
        path: Path_,
        *,
        write: bool = False,
        recipe: str | None = None,
        device: str = "auto",
        descriptor: Descriptor | None = None,
        fingerprint: str | None = None,
    ) -> Self:
        """An index that is there. Another recipe than its own is refused; its network is loaded when it is needed."""
        store = open_store(address(path), write=write)
        with kept_open(store):
            search = cls(store, path, device=device, descriptor=descriptor, fingerprint=fingerprint)
            if recipe is not None:
                from cooc.recipes import find_recipe

                asked = lasting(find_recipe(recipe).config)
                search._check(replace(search._own_meta(), recipe=recipe, config_hash=asked.hash))
            return search

    @property
    def words(self) -> Inverted | None:
        """The visual words of the pictures, as far as they are known; opened again when they have changed."""
        if ENGINE not in self.meta.features:
            return None
        folder = words_folder(self.index_path)
        try:
            state = folder.stat().st_mtime_ns
            with self._opening:
                if self._words is None or self._words[0] != state:
                    self._words = state, Inverted.open(folder)
                return self._words[1]
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("Visual words cannot be read now (%s); the search goes on without them.", error)
            return None

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
                from cooc.descriptor import Descriptor
                from cooc.weights import verify_weights

                try:
                    self._use(Descriptor(self.config, device=self._device, check=False))
                except StoreMismatchError:
                    verify_weights(self.config.weights)  # if these are damaged, that is what is wrong
                    raise
            assert self._descriptor is not None
            return self._descriptor

    @property
    def query_network(self) -> QueryNetwork | None:
        """What describes queries on a CPU while the descriptor is not loaded; None where nothing was kept."""
        with self._loading:
            if self._descriptor is not None or not surely_cpu(self._device):
                return None
            if self._query_network is None:
                self._query_network = QueryNetwork.find(self._kept_network(), self.meta.config["size"])
            return self._query_network

    def keep_query_network(self) -> None:
        """For the processes to come, if this one has loaded the descriptor on a CPU: see `cooc.query_network`."""
        if self._descriptor is not None and self._descriptor.device.type == "cpu":
            from cooc.query_network.writing import keep

            keep(self._descriptor, self._kept_network(), self.space)

    def _kept_network(self) -> Path:
        return place_of(self.meta.config, self.meta.weights_hash)

    def _use(self, descriptor: Descriptor, fingerprint: str | None = None) -> None:
        made = replace(
            self._own_meta(),
            config_hash=lasting(descriptor.config).hash,
            weights_hash=fingerprint or descriptor.fingerprint,
            dim=descriptor.dim,
        )
        self._check(made)
        self._descriptor, self._query_network = descriptor, None

    def _own_meta(self) -> StoreMeta:
        """With the hash that this version of cooc gives the configuration: settings may have come since it was kept."""
        return replace(self.meta, config_hash=self.config.hash, root=self.collection.url)

    def _check(self, other: StoreMeta) -> None:
        check_same(self._own_meta(), other, self.index_name)

    @property
    def extraction(self) -> Extraction | None:
        """What makes the local features that the index keeps, if it keeps any."""
        return Extraction(self.meta.features) if self.meta.features else None

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
            if self.store.find([plain])[0] or self.store.holds(plain):
                return plain
        return self.collection.name(text)

    def vectors(self, ids: Sequence[str]) -> Vectors:
        return self.store.vectors(ids)

    def file(self, id: str) -> Picture:
        """A picture of the index, to be read from where it lies: a path, if that is on this machine."""
        (record,) = self.store.get([id])
        if record is None:
            raise InputError(f"There is no picture {id} in the index {self.index_name}: search again.")
        return self.collection.picture(record.entry)

    def status(self) -> Status:
        from cooc.index import sync

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

    def __exit__(self, *error: object) -> None:
        self.close()


def made_by(config: DescriptorConfig, recipe: str, weights_hash: str, dim: int, root: str) -> StoreMeta:
    return StoreMeta(
        recipe=recipe,
        config=config.as_dict(),
        config_hash=config.hash,
        weights_hash=weights_hash,
        dim=dim,
        root=root,
        cooc_version=__version__,
    )


def lasting(config: DescriptorConfig) -> DescriptorConfig:
    """Files that a config names are found from any folder."""
    files = {
        name: str(Path(value).absolute())
        for name, value in (("whitening", config.whitening), ("filter", config.filter), ("tuning", config.tuning))
        if Path(value).suffix
    }
    return config.replace(**files)


def words_folder(index: Path_) -> Path:
    """Where the visual words of an index are kept: in its folder, or, of one on a server, in this user's cache."""
    if is_folder(index):
        return Path(index) / "words"
    from platformdirs import user_cache_path

    named = hashlib.sha256(without_password(os.fspath(index)).encode()).hexdigest()[:32]
    return user_cache_path("cooc") / "words" / named


def address(path: Path_) -> str | Path:
    return Path(path) if is_folder(path) else os.fspath(path)


def keep_root(index: Path_, root: Path_ | None) -> str:
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
