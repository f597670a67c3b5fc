"""What an index keeps beside vectors: records of images, bad files, tags of what was removed, how vectors were made.

Images are named in two ways: by `path` (relative to the index's root; what a person sees, and what is unique) and by
`id` (a digest of content and path; what results carry, the same on every machine and in every engine).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from cooc.errors import InputError, StoreMismatchError
from cooc.pictures.collection import Entry

FORMAT = 3  # raised when an older cooc could no longer read what is written
REMEMBERED = timedelta(days=90)  # how long the tags of removed pictures are kept
STORAGES = ("float32", "float16", "int8", "int4", "pq")  # what an engine may keep of a vector, most precise first

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


def show(path: str | bytes | os.PathLike[str]) -> str:
    """A path that can be printed whatever bytes it holds."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


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
    differ = []
    if meta.config_hash != other.config_hash:
        shown = (f"{one.recipe} ({one.config_hash[:12]})" for one in (meta, other))
        differ.append("recipe {} there, {} here".format(*shown))
    if meta.weights_hash != other.weights_hash:
        differ.append(f"weights {meta.weights_hash[:12]} there, {other.weights_hash[:12]} here")
    if meta.dim != other.dim:
        differ.append(f"dimension {meta.dim} there, {other.dim} here")
    if not differ:
        return
    raise StoreMismatchError(
        f"Vectors of two kinds cannot be compared. In {index}: {'; '.join(differ)}. Use recipe {meta.recipe!r} with "
        "the weights of that index, or build another one: cooc index "
        f"{meta.root or 'FOLDER'} --index NEW --recipe {other.recipe}"
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


def in_words(
    where: Filter | None, after: bytes = b"", *, value: str, tagged: str, path: str = "path"
) -> tuple[str, list[Any]]:
    """`Filter.matches` for paths behind `after`; how an engine writes a value, that an image has a tag, and a path."""
    where, clauses = where or Filter(), list[tuple[str, Any]]()
    if first := max(after, where.folder):  # one bound: of two, SQLite would take the first to begin with
        clauses.append((f"{path} > {value}", first))
    if where.folder:
        clauses.append((f"{path} < {value}", where.folder[:-1] + b"0"))  # "0" comes right after "/"
    if where.taken_from is not None or where.taken_to is not None:
        clauses.append((f"taken >= {value}", where.taken_from or "0"))  # which no image without a date is
    if where.taken_to is not None:
        clauses.append((f"taken < {value}", where.taken_to + "~"))  # which is after everything that a date holds
    clauses += [(tagged, tag) for tag in sorted(where.tags)]
    return " and ".join(clause for clause, _ in clauses) or "true", [given for _, given in clauses]


def given_back(
    records: Iterable[Record], kept: Iterable[Forgotten], had: Mapping[str, frozenset[str]]
) -> tuple[list[Record], set[tuple[str, str]]]:
    """Records with the tags that their paths had and those kept of their content; what is used up: (sha256, path).

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
        tags = record.tags.union(had.get(record.path, ()), *(paths[path] for path in own))
        found.append(replace(record, tags=tags))
        used |= {(record.sha256, path) for path in own}
    return found, used


def check_tags(tags: Iterable[str]) -> None:
    for tag in tags:
        if not isinstance(tag, str) or not tag or not tag.isprintable():
            raise InputError(f"{tag!r} is no tag: it must have at least one character, all of them printable.")


def several(given: Any) -> Iterable[Any]:
    """Paths or tags, which may also be given alone: then it is that one, never its letters."""
    if isinstance(given, (str, os.PathLike)):
        return (given,)
    if not isinstance(given, Iterable):
        raise InputError(f"{given!r} is neither a name nor a list of names.")
    return given
