"""What an index keeps, and the small interface that every engine implements.

An index holds one `Record` and one unit vector for each image, and a `StoreMeta` that says how the vectors were made.
It may hold local features too, as codes that only `cooc.verification` reads. They are kept by content: copies of a
picture share theirs, and a moved one has them still.
Images are named in two ways: by `path` (relative to the index's root; what a person sees, and what is unique) and by
`id` (a digest of content and path; what results carry, the same on every machine and in every engine).

Engines differ in where they keep this, never in what they answer: `Store` is the contract, `Filter.matches` and
`SearchResult` define the answers, and one conformance suite (tests/index/test_store.py) is run on all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cooc.errors import CoocError, InputError, StoreMismatchError, VectorDamagedError
from cooc.pictures.collection import Entry

FORMAT = 3  # raised when an older cooc could no longer read what is written
REMEMBERED = timedelta(days=90)  # how long the tags of removed pictures are kept
PAGE = 1000  # records read at once

Vectors = NDArray[np.float32]
Codes = Sequence[bytes | None]  # local features of pictures, None where there are none
STORAGES = ("float32", "float16", "int8", "int4", "pq")  # what an engine may keep of a vector, most precise first

FEATURES_DAMAGED = "its local features are damaged; `cooc index FOLDER --verify ENGINES` makes them again"

log = logging.getLogger("cooc")

_T = TypeVar("_T")
_Named = TypeVar("_Named", "Record", "BadFile")

_ID = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TAKEN = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d)?")
_MOMENT = re.compile(r"\d{4}(-\d\d(-\d\d(T\d\d(:\d\d(:\d\d)?)?)?)?)?")


def now() -> str:
    """ISO, UTC, seconds: such texts sort as their times do."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def long_ago() -> str:
    """What was removed before this moment may be forgotten for good."""
    return (datetime.now(UTC) - REMEMBERED).isoformat(timespec="seconds")


def path_bytes(path: str) -> bytes:
    """A path as its bytes on disk: names that are not UTF-8 survive, and the result does not depend on the locale."""
    try:
        data = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError(f"The path {path!r} cannot be written as bytes: rename the file.") from error
    if not data or b"\0" in data:
        raise InputError(f"{path!r} is no path of an image: it is empty or holds a NUL character.")
    return data


def path_text(data: bytes) -> str:
    """The inverse of `path_bytes`."""
    return data.decode("utf-8", "surrogateescape")


def id_bytes(name: str) -> bytes:
    """An id of an image as its 16 bytes. There is one way to write it, so that ids may be compared as they are."""
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise InputError(f"{name!r} is no id of an image: 32 digits 0-9a-f are expected.")
    return bytes.fromhex(name)


@dataclass(frozen=True, slots=True)
class Record:
    """One image, as it was when it was described."""

    path: str  # relative to the index's root, "/" between its parts
    size: int
    mtime_ns: int
    sha256: str
    width: int
    height: int
    taken: str | None = None  # 2024-05-31 or 2024-05-31T12:00:00, from EXIF
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        path_bytes(self.path)
        if not _SHA256.fullmatch(self.sha256):
            raise InputError(f"{self.sha256!r} of {self.path!r} is no sha256: 64 digits 0-9a-f are expected.")
        if self.taken is not None and not _TAKEN.fullmatch(self.taken):
            raise InputError(f"{self.taken!r} of {self.path!r} is no date: write 2024-05-31 or 2024-05-31T12:00:00.")
        check_tags(self.tags)

    @property
    def entry(self) -> Entry:
        """The file that it was made of."""
        return Entry(self.path, self.size, self.mtime_ns)

    @property
    def id(self) -> str:
        """32 hex digits of content and path: two copies of a picture differ, the same file elsewhere does not."""
        return hashlib.sha256(bytes.fromhex(self.sha256) + path_bytes(self.path)).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file that could not be described, kept so that it is reported once and tried again only when it changed."""

    path: str
    size: int
    mtime_ns: int
    reason: str
    since: str = ""  # ISO time of the first report in an unbroken row of them; engines fill it in when it is empty


class Forgotten(NamedTuple):
    """The tags of a picture that was removed: it gets them back if its content comes back, wherever that is."""

    sha256: str
    path: str
    tags: frozenset[str]
    removed: str  # ISO time


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """How the vectors were made: what makes them comparable with one another and with a query."""

    recipe: str
    config: dict[str, Any]  # the whole DescriptorConfig: a recipe's name may change its meaning, this does not
    config_hash: str
    weights_hash: str
    dim: int
    root: str | None = None
    cooc_version: str = ""
    created: str = field(default_factory=now)
    format: int = FORMAT
    storage: str = "float32"  # one of STORAGES
    features: str = ""  # engines of the local features that are kept, such as "sift+xfeat"; kept beside the rest

    def as_json(self) -> str:
        """Without the features: a cooc that knows none opens the index as well, and what it changes stays right."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "features"})


def check_same(meta: StoreMeta, other: StoreMeta, index: str = "the index") -> None:
    """Refuse to mix: `other` made the vectors at hand, `meta` those that are already in `index`."""
    pairs = {
        "recipe": (f"{meta.recipe} ({meta.config_hash[:12]})", f"{other.recipe} ({other.config_hash[:12]})"),
        "weights": (meta.weights_hash[:12], other.weights_hash[:12]),
        "dimension": (str(meta.dim), str(other.dim)),
    }
    same = {
        "recipe": meta.config_hash == other.config_hash,
        "weights": meta.weights_hash == other.weights_hash,
        "dimension": meta.dim == other.dim,
    }
    if all(same.values()):
        return
    found = "; ".join(
        f"{name} {pairs[name][0]} there, {pairs[name][1]} here" for name, equal in same.items() if not equal
    )
    raise StoreMismatchError(
        f"Vectors of two kinds cannot be compared. In {index}: {found}. Use recipe {meta.recipe!r} with the weights of "
        f"that index, or build another one: cooc index {meta.root or 'FOLDER'} --index NEW --recipe {other.recipe}"
    )


@dataclass(frozen=True, slots=True)
class Filter:
    """Which images count. Everything given must hold; nothing given means all."""

    prefix: str | None = None  # a folder, relative to the root: everything below it
    taken_from: str | None = None  # 2023, 2023-07, 2023-07-14, ...: that moment and later
    taken_to: str | None = None  # likewise, including the whole year, month or day that is named
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise InputError(f"{self.prefix!r} is no folder of an index: write its path below the root as text.")
        for moment in (self.taken_from, self.taken_to):
            if moment is not None and not (isinstance(moment, str) and _MOMENT.fullmatch(moment)):
                raise InputError(f"{moment!r} is no date: write 2023, 2023-07, 2023-07-14 or 2023-07-14T12:00.")
        tags = list(several(self.tags))
        check_tags(tags)
        object.__setattr__(self, "tags", frozenset(tags))

    @property
    def folder(self) -> bytes:
        """The prefix as path bytes that end in a slash; empty when every path will do."""
        name = (self.prefix or "").strip("/")
        return b"" if name in ("", ".") else path_bytes(name) + b"/"

    def matches(self, record: Record) -> bool:
        """The definition. Engines say the same in their own query language."""
        taken = record.taken
        return (
            path_bytes(record.path).startswith(self.folder)
            and (self.taken_from is None or (taken is not None and taken >= self.taken_from))
            and (self.taken_to is None or (taken is not None and taken[: len(self.taken_to)] <= self.taken_to))
            and self.tags <= record.tags
        )


class Block(NamedTuple):
    """Images to add: a vector for each record, (n, D), and local features where there are any."""

    records: Sequence[Record]
    vectors: Vectors
    features: Codes | None = None


class FeatureCount(NamedTuple):
    images: int  # that have local features
    bytes: int  # of all codes


class Code(NamedTuple):
    """The local features of an image."""

    id: str
    path: str
    code: bytes | None  # None: damaged


class SearchResult(NamedTuple):
    """Best first; equal scores in the order of their ids, so that an answer never depends on chance."""

    scores: Vectors  # (Q, k'), inner products; k' < k when fewer images match
    ids: list[list[str]]  # Q lists of k'


class Store(ABC):
    """An open index. Changes come one transaction for each call: wholly there or not at all, whatever happens.

    An engine without transactions (Milvus) says so, and gives less: a call is checked as a whole before anything is
    written, and then comes about image by image. Each image is wholly as it was or as it is to be, and none is lost; a
    call that was cut short is completed by calling again.

    A store may be read from many threads and processes while one process writes; each call sees one committed state, or
    committed images.
    Errors are those of `cooc.errors`; `InputError` for what the caller gave, `StoreError` for the rest.
    """

    _meta: StoreMeta
    shown: str  # for messages: "the index in FOLDER"

    @property
    def meta(self) -> StoreMeta:
        return self._meta

    @abstractmethod
    def __len__(self) -> int: ...

    # changes

    def add(self, records: Sequence[Record], vectors: Vectors, features: Codes | None = None) -> None:
        """Upsert by path. Tags that a path already had stay; its report as a bad file goes.

        A picture gets back the tags that were kept of its content: those of this path where there are any, else all
        that are left of it. Without features it has those that its content has in the index, if any.
        """
        self.add_all([Block(records, vectors, features)])

    @abstractmethod
    def add_all(self, blocks: Iterable[Block]) -> int:
        """`add` for many blocks as one change, all or nothing (see above); how many images. It may walk them twice."""

    def _checked(self, block: Block) -> tuple[Sequence[Record], Vectors, dict[str, bytes]]:
        """Records, vectors as every engine wants them, and features by content."""
        records, given, features = Block(*block)
        vectors = check_vectors(np.asarray(given), self.meta.dim)
        if len(records) != len(vectors):
            raise InputError(f"{len(records)} records came with {len(vectors)} vectors: one for each is needed.")
        return records, vectors, check_codes(self.meta, records, features)

    @abstractmethod
    def remove(self, paths: Iterable[str]) -> int:
        """How many there were to remove. Their tags are kept for `REMEMBERED`, by content."""

    @abstractmethod
    def rename(self, moves: Mapping[str, str]) -> int:
        """Moved files, old path -> new: vector and tags go along, whatever was at the new path is removed."""

    @abstractmethod
    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        """Files whose time changed and whose content did not."""

    @abstractmethod
    def tag(self, ids: Iterable[str], add: Iterable[str] = (), remove: Iterable[str] = ()) -> int: ...

    @abstractmethod
    def report_bad(self, files: Iterable[BadFile]) -> None:
        """A path that was reported before keeps its `since`."""

    @abstractmethod
    def clear_bad(self, paths: Iterable[str]) -> int: ...

    @abstractmethod
    def note(self, name: str, value: Any | None) -> None:
        """Keep a small JSON value about the index; None forgets it."""

    @abstractmethod
    def remember(self, tags: Iterable[Forgotten]) -> None:
        """Tags for pictures that are yet to come, as if they had been removed."""

    def set_feature_engines(self, engines: str) -> None:
        """From now on local features by these engines are kept. Once: other ones are refused."""
        if check_engines(self.meta, engines):
            self._set_engines(engines)

    @abstractmethod
    def _set_engines(self, engines: str) -> None: ...

    def set_features(self, codes: Mapping[str, bytes]) -> int:
        """Local features, by id, of images that are there; of how many. Ids that are gone are left out."""
        found = [one for one in self.get(list(codes)) if one is not None]
        self._set_features(check_codes(self.meta, found, [codes[one.id] for one in found]))
        return len(found)

    @abstractmethod
    def _set_features(self, codes: Mapping[str, bytes]) -> None:
        """By content. (What belongs to no image, since that was removed meanwhile, goes with the next `compact`.)"""

    # questions

    def get(self, ids: Sequence[str]) -> list[Record | None]:
        """None for those that are no longer there: another process may remove an image between search and get."""
        found = {one.id: one for one in self._images("id", [id_bytes(name) for name in ids])}
        return [found.get(name) for name in ids]

    def find(self, paths: Sequence[str]) -> list[Record | None]:
        found = {one.path: one for one in self._images("path", [path_bytes(path) for path in paths])}
        return [found.get(path) for path in paths]

    @abstractmethod
    def _images(self, field: Literal["id", "path"], values: list[bytes]) -> Iterable[Record]:
        """Those of these ids or paths that there are."""

    @abstractmethod
    def by_sha256(self, sha256: str) -> list[Record]: ...

    @abstractmethod
    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        """In the order of their paths (as bytes), from behind `after`; read in pages, so memory stays flat."""

    @abstractmethod
    def bad_files(self) -> Iterator[BadFile]: ...

    @abstractmethod
    def notes(self) -> dict[str, Any]: ...

    @abstractmethod
    def forgotten(self) -> Iterator[Forgotten]:
        """What is remembered of removed pictures, in the order of content and path."""

    @abstractmethod
    def damaged(self) -> Iterator[str]:
        """Paths, in order, of images whose vector is not what was written. `add` mends them."""

    def vectors(self, ids: Sequence[str]) -> Vectors:
        """(n, D), in the order asked for. Never a damaged one: that is a `VectorDamagedError` which names the image."""
        found = self._vectors({id_bytes(name) for name in ids})
        if missing := [name for name in ids if name not in found]:
            raise InputError(f"There is no image {missing[0]} in {self.shown}: search again.")
        if harmed := {name: path for name, (path, vector) in found.items() if vector is None}:
            raise damaged_vector(self.shown, harmed)
        return np.array([found[name][1] for name in ids], np.float32).reshape(len(ids), self.meta.dim)

    @abstractmethod
    def _vectors(self, ids: set[bytes]) -> dict[str, tuple[str, Vectors | None]]:
        """id -> path, and vector (D,) unless it is damaged."""

    def features(self, ids: Sequence[str]) -> list[bytes | None]:
        """Codes in the order asked for; None where there is none, or it is damaged, which is said in a warning."""
        wanted = {id_bytes(name) for name in ids}
        return chosen_codes(ids, self._codes(wanted) if self.meta.features else ())

    @abstractmethod
    def _codes(self, ids: set[bytes]) -> Iterable[Code]: ...

    @abstractmethod
    def without_features(self, *, check: bool = False) -> Iterator[Record]:
        """Images that have none, in the order of their paths; to `check` is to read all, and count damaged ones too."""

    def count_features(self) -> FeatureCount:
        return self._count_features() if self.meta.features else FeatureCount(0, 0)

    @abstractmethod
    def _count_features(self) -> FeatureCount: ...

    def search(
        self, queries: Vectors, k: int, *, where: Filter | None = None, exact: bool | None = None
    ) -> SearchResult:
        """The k nearest of (Q, D) unit vectors. `exact`: True demands it, False allows less, None leaves it to size.

        Images whose vector is damaged are left out, with a warning.
        """
        if k < 1:
            raise InputError(f"k must be at least 1, not {k}.")
        return self._search(check_vectors(np.asarray(queries), self.meta.dim), k, where, exact)

    @abstractmethod
    def _search(self, queries: Vectors, k: int, where: Filter | None, exact: bool | None) -> SearchResult: ...

    # upkeep

    @abstractmethod
    def snapshot(self, dest: str) -> None:
        """A copy of one committed state, which opens as an index of its own."""

    def verify(self) -> list[str]:
        """Problems found by reading everything; empty when all is well."""
        try:
            return list(self._problems())
        except CoocError as error:
            return [str(error)]

    @abstractmethod
    def _problems(self) -> Iterable[str]: ...

    @abstractmethod
    def compact(self) -> None:
        """Give back the space of what was removed, forget old tags, and bring the search structure up to date."""

    @abstractmethod
    def disk_bytes(self) -> int | None:
        """What it takes on disk, where that can be told."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def pages(
    page: Callable[[bytes, int], Sequence[_Named]], after: str | None = None, limit: int | None = None
) -> Iterator[_Named]:
    """What `page` lists behind a path, so many at a time: memory stays flat."""
    last = b"" if after is None else path_bytes(after)
    while limit is None or limit > 0:
        size = PAGE if limit is None else min(PAGE, limit)
        found = page(last, size)
        yield from found
        if len(found) < size:
            return
        last = path_bytes(found[-1].path)
        limit = None if limit is None else limit - size


def blocks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while block := list(itertools.islice(rest, size)):
        yield block


def chosen_codes(ids: Sequence[str], found: Iterable[Code]) -> list[bytes | None]:
    """Codes in the order asked for; of those that are damaged there is a warning."""
    found = list(found)
    damaged = [os.fsencode(one.path).decode("utf-8", "backslashreplace") for one in found if one.code is None]
    if damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        log.warning("The local features of %s%s are left out: %s.", damaged[0], more, FEATURES_DAMAGED)
    codes = {one.id: one.code for one in found}
    return [codes.get(name) for name in ids]


def moving(moves: Mapping[str, str]) -> dict[str, str]:
    """What a `rename` has to do."""
    if len(set(moves.values())) < len(moves):
        raise InputError("Two images cannot be moved to one path.")
    return {old: new for old, new in moves.items() if old != new}


def several(given: Any) -> Iterable[Any]:
    """Paths or tags, which may also be given alone: then it is that one, never its letters."""
    if isinstance(given, (str, os.PathLike)):
        return (given,)
    if not isinstance(given, Iterable):
        raise InputError(f"{given!r} is neither a name nor a list of names.")
    return given


def damaged_vector(index: str, images: Mapping[str, str]) -> VectorDamagedError:
    """For images (id -> path) whose vectors are not what was written to `index`."""
    names = sorted(images.values())
    shown = os.fsencode(names[0]).decode("utf-8", "backslashreplace")
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return VectorDamagedError(
        f"The vector of {shown}{more} in {index} is damaged: the next `cooc index` describes the picture again.", images
    )


def intact(store: Store, ids: Iterable[str]) -> tuple[list[str], Vectors]:
    """Vectors of the images that have good ones, and which these are."""
    wanted = list(ids)
    while True:
        try:
            return wanted, store.vectors(wanted)
        except VectorDamagedError as error:
            wanted = [name for name in wanted if name not in error.ids]


def given_back(records: Iterable[Record], kept: Iterable[Forgotten]) -> tuple[list[Record], set[tuple[str, str]]]:
    """Records with the tags that were kept of their content, and what is used up by that: (sha256, path).

    Of several copies of a picture each gets its own tags, if it comes back to its path; what is left goes to the rest.
    """
    records, by_content = list(records), dict[str, dict[str, frozenset[str]]]()
    for one in kept:
        by_content.setdefault(one.sha256, {})[one.path] = one.tags
    at_home = {(record.sha256, record.path) for record in records}
    found, used = list[Record](), set[tuple[str, str]]()
    for record in records:
        paths = by_content.get(record.sha256, {})
        own = [record.path] if record.path in paths else [p for p in paths if (record.sha256, p) not in at_home]
        found.append(replace(record, tags=record.tags.union(*(paths[path] for path in own))))
        used |= {(record.sha256, path) for path in own}
    return found, used


def check_codes(meta: StoreMeta, records: Sequence[Record], features: Codes | None) -> dict[str, bytes]:
    """Features by content, sha256 -> code."""
    if features is None:
        return {}
    if len(records) != len(features):
        raise InputError(f"{len(records)} records came with {len(features)} local features: one, or None, for each.")
    codes = {one.sha256: code for one, code in zip(records, features, strict=True) if code is not None}
    if codes and not meta.features:
        raise InputError("This index keeps no local features: set_feature_engines() says by which engines it is to.")
    return codes


def check_engines(meta: StoreMeta, engines: str) -> bool:
    """Must they be set? Others than those that there are would leave features of two kinds."""
    if not engines or not engines.isprintable():
        raise InputError(f"{engines!r} names no engine of local features.")
    if meta.features not in ("", engines):
        raise InputError(
            f"This index keeps local features by {meta.features}, not by {engines}. To change that, make it again: "
            f"cooc rebuild --verify {engines}"
        )
    return not meta.features


def check_tags(tags: Iterable[str]) -> None:
    for tag in tags:
        if not isinstance(tag, str) or not tag or not tag.isprintable():
            raise InputError(f"{tag!r} is no tag: it must have at least one character, all of them printable.")


def check_vectors(vectors: NDArray[Any], dim: int) -> Vectors:
    """Vectors as every engine wants them: (n, dim) float32, finite, of unit length, contiguous."""
    if vectors.dtype != np.float32 or vectors.ndim != 2 or vectors.shape[1] != dim:
        raise InputError(f"Vectors must be (n, {dim}) float32, not {vectors.shape} {vectors.dtype}.")
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    wrong = np.flatnonzero(~(np.abs(norms - 1) <= 1e-3))  # so written, NaN is wrong too
    if len(wrong):
        raise InputError(
            f"{len(wrong)} of {len(vectors)} vectors are not finite and of length 1 (row {wrong[0]} has length "
            f"{norms[wrong[0]]:.4g}). Divide each vector by its L2 norm."
        )
    return np.ascontiguousarray(vectors)
