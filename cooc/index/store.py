"""The small interface that every engine of an index implements, and what they share.

An index holds one `Record` and one unit vector for each image, and a `StoreMeta` that says how the vectors were made
(`records.py`). It may hold local features too, as codes that only `cooc.verification` reads. They are kept by content:
copies of a picture share theirs, and a moved one has them still.

Engines differ in where they keep this, never in what they answer: `Store` is the contract, `Filter.matches` and
`SearchResult` define the answers, and one conformance suite (tests/index/test_store.py) is run on all of them.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cooc.errors import CoocError, InputError, VectorDamagedError
from cooc.index.checks import FEATURES_DAMAGED, check_codes, check_engines, check_vectors, first_of
from cooc.index.records import BadFile, Filter, Forgotten, Record, StoreMeta, check_tags, id_bytes, path_bytes

PAGE = 1000  # records read at once

Vectors = NDArray[np.float32]
Codes = Sequence[bytes | None]  # local features of pictures, None where there are none

log = logging.getLogger("cooc")

_T = TypeVar("_T")
_Named = TypeVar("_Named", Record, BadFile)


class Block(NamedTuple):
    """Images to add: a vector for each record, (n, D), and local features where there are any."""

    records: Sequence[Record]
    vectors: Vectors
    features: Codes | None = None


class FeatureCount(NamedTuple):
    images: int  # that have local features
    bytes: int  # of all codes


class Tally(NamedTuple):
    """How many images there are in each place: what a person chooses from."""

    folders: Counter[str]  # directly in each; "" is the root
    months: Counter[str]  # 2023-08; "" for images without a date
    tags: Counter[str]


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
    _said = False  # that pictures are not searched

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
        """Records, vectors as every engine wants them, and features by content. Of one path the last counts."""
        records, given, features = Block(*block)
        vectors = check_vectors(np.asarray(given), self.meta.dim)
        if len(records) != len(vectors):
            raise InputError(f"{len(records)} records came with {len(vectors)} vectors: one for each is needed.")
        codes = check_codes(self.meta, records, features)
        latest = list({one.path: row for row, one in enumerate(records)}.values())
        records = [records[row] for row in latest]
        return records, vectors[latest], {one.sha256: codes[one.sha256] for one in records if one.sha256 in codes}

    @abstractmethod
    def remove(self, paths: Iterable[str]) -> int:
        """How many there were to remove. Their tags are kept for `REMEMBERED`, by content."""

    @abstractmethod
    def rename(self, moves: Mapping[str, str]) -> int:
        """Moved files, old path -> new: vector and tags go along, whatever was at the new path is removed."""

    @abstractmethod
    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        """Files whose time changed and whose content did not."""

    def tag(self, ids: Iterable[str], add: Iterable[str] = (), remove: Iterable[str] = ()) -> int:
        """Of how many images there were."""
        more, less = frozenset(add), frozenset(remove)
        check_tags(more)
        return self._tag([id_bytes(name) for name in ids], more, less)

    @abstractmethod
    def _tag(self, ids: list[bytes], add: frozenset[str], remove: frozenset[str]) -> int: ...

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

    def holds(self, folder: str) -> bool:
        """Is there any image below it? "" is the root."""
        return next(self.records(Filter(prefix=folder or None), limit=1), None) is not None

    def tally(self) -> Tally:
        """By reading all records; an engine may know a faster way."""
        tally = Tally(Counter(), Counter(), Counter())
        for one in self.records():
            tally.folders[one.path.rpartition("/")[0]] += 1
            tally.months[(one.taken or "")[:7]] += 1
            tally.tags.update(one.tags)
        return tally

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
            which = f"The vector of {first_of(harmed.values())} in {self.shown}"
            raise VectorDamagedError(f"{which} is damaged: the next `cooc index` describes the picture again.", harmed)
        return np.array([found[name][1] for name in ids], np.float32).reshape(len(ids), self.meta.dim)

    @abstractmethod
    def _vectors(self, ids: set[bytes]) -> dict[str, tuple[str, Vectors | None]]:
        """id -> path, and vector (D,) unless it is damaged."""

    def features(self, ids: Sequence[str]) -> list[bytes | None]:
        """Codes in the order asked for; None where there is none, or it is damaged, which is said in a warning."""
        wanted = {id_bytes(name) for name in ids}
        found = list(self._codes(wanted)) if self.meta.features else []
        if damaged := [one.path for one in found if one.code is None]:
            log.warning("The local features of %s are left out: %s.", first_of(damaged), FEATURES_DAMAGED)
        codes = {one.id: one.code for one in found}
        return [codes.get(name) for name in ids]

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

    def _left_out(self, damaged: int) -> None:
        """By a search, for their vectors. It is said once, however often it happens."""
        if damaged and not self._said:
            self._said = True
            log.warning(
                "%d pictures are not searched: their vectors are damaged. The next `cooc index` describes them again.",
                damaged,
            )

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


@contextmanager
def kept_open(opened: Any) -> Iterator[None]:
    """It stays open for who comes next, unless the block fails."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def blocks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while block := list(itertools.islice(rest, size)):
        yield block


def intact(store: Store, ids: Iterable[str]) -> tuple[list[str], Vectors]:
    """Which of these images are still there (another process may have removed some) and have good vectors; these."""
    wanted = list(ids)
    found = store._vectors({id_bytes(name) for name in wanted})
    good = [name for name in wanted if name in found and found[name][1] is not None]
    return good, np.array([found[name][1] for name in good], np.float32).reshape(len(good), store.meta.dim)
