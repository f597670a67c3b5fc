"""memory://NAME: an index that lives as long as its process. The smallest whole store: see docs/extending.md.

A change is made to a copy of the tables, which then takes their place: all or nothing, and readers never wait. A search
is one product with all vectors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cooc.errors import StoreError, StoreMissingError
from cooc.index.checks import moving
from cooc.index.copying import copy_to_folder
from cooc.index.records import (
    BadFile,
    Filter,
    Forgotten,
    Record,
    StoreMeta,
    given_back,
    id_bytes,
    long_ago,
    now,
    path_bytes,
    several,
)
from cooc.index.store import Block, Code, FeatureCount, SearchResult, Store, Vectors


@dataclass
class Tables:
    images: dict[str, tuple[Record, Vectors]] = field(default_factory=dict)  # by path
    bad: dict[str, BadFile] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    forgotten: dict[tuple[str, str], Forgotten] = field(default_factory=dict)  # by content and path
    codes: dict[str, bytes] = field(default_factory=dict)  # local features, by content

    def copy(self) -> Tables:
        return Tables(*(dict(table) for table in vars(self).values()))

    def take_out(self, path: str) -> bool:
        record, _ = self.images.pop(path, (None, None))
        if record is not None and record.tags:
            self.forgotten[record.sha256, path] = Forgotten(record.sha256, path, record.tags, now())
        return record is not None


@dataclass
class Kept:
    meta: StoreMeta
    tables: Tables = field(default_factory=Tables)
    lock: threading.RLock = field(default_factory=threading.RLock)  # of the one that writes


INDEXES: dict[str, Kept] = {}  # by address


def create_store(address: str, meta: StoreMeta) -> Memory:
    if address in INDEXES:
        raise StoreError(f"There is an index at {address} already.")
    return Memory(address, INDEXES.setdefault(address, Kept(meta)), write=True)


def open_store(address: str, *, write: bool = False) -> Memory:
    if address not in INDEXES:
        raise StoreMissingError(f"There is no index at {address}. Make one: cooc index FOLDER --index {address}")
    return Memory(address, INDEXES[address], write)


class Memory(Store):
    def __init__(self, address: str, kept: Kept, write: bool) -> None:
        self.shown = f"the index at {address}"
        self._kept, self._write, self._open = kept, write, True

    @property
    def meta(self) -> StoreMeta:
        return self._kept.meta

    @property
    def _now(self) -> Tables:
        if not self._open:
            raise StoreError("This index is closed. Open it again.")
        return self._kept.tables

    @contextmanager
    def _change(self) -> Iterator[Tables]:
        if not self._write:
            raise StoreError("This index was opened to be read. Open it with write=True.")
        with self._kept.lock:
            new = self._now.copy()
            yield new
            contents = {record.sha256 for record, _ in new.images.values()}
            new.codes = {content: code for content, code in new.codes.items() if content in contents}
            self._kept.tables = new

    def __len__(self) -> int:
        return len(self._now.images)

    # changes

    def add_all(self, blocks: Iterable[Block]) -> int:
        count = 0
        with self._change() as new:
            for records, vectors, codes in map(self._checked, blocks):
                new.codes |= codes
                latest = {record.path: (record, row) for record, row in zip(records, vectors.copy(), strict=True)}
                had = {path: new.images[path][0].tags for path in latest if path in new.images}
                tagged, used = given_back([record for record, _ in latest.values()], new.forgotten.values(), had)
                for record in tagged:
                    new.images[record.path] = record, latest[record.path][1]
                    new.bad.pop(record.path, None)
                for key in used:
                    del new.forgotten[key]
                count += len(tagged)
        return count

    def remove(self, paths: Iterable[str]) -> int:
        with self._change() as new:
            return sum([new.take_out(path) for path in several(paths)])

    def rename(self, moves: Mapping[str, str]) -> int:
        with self._change() as new:
            wanted = {old: to for old, to in moving(moves).items() if old in new.images}
            images = [(to, new.images.pop(old)) for old, to in wanted.items()]
            for to, (record, vector) in images:
                new.take_out(to)
                new.images[to] = replace(record, path=to), vector
            return len(images)

    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        with self._change() as new:
            known = {path: time for path, time in mtimes_ns.items() if path in new.images}
            for path, time in known.items():
                new.images[path] = replace(new.images[path][0], mtime_ns=time), new.images[path][1]
            return len(known)

    def _tag(self, ids: list[bytes], add: frozenset[str], remove: frozenset[str]) -> int:
        with self._change() as new:
            found = self._images("id", ids)
            for record in found:
                changed = replace(record, tags=(record.tags - remove) | add)
                new.images[record.path] = changed, new.images[record.path][1]
            return len(found)

    def report_bad(self, files: Iterable[BadFile]) -> None:
        with self._change() as new:
            for file in files:
                known = new.bad.get(file.path)
                new.bad[file.path] = replace(file, since=known.since if known else file.since or now())

    def clear_bad(self, paths: Iterable[str]) -> int:
        with self._change() as new:
            return sum([new.bad.pop(path, None) is not None for path in several(paths)])

    def note(self, name: str, value: Any | None) -> None:
        with self._change() as new:
            new.notes.pop(name, None)
            if value is not None:
                new.notes[name] = value

    def remember(self, tags: Iterable[Forgotten]) -> None:
        with self._change() as new:
            new.forgotten.update({(one.sha256, one.path): one for one in tags})

    def _set_engines(self, engines: str) -> None:
        with self._change():
            self._kept.meta = replace(self.meta, features=engines)

    def _set_features(self, codes: Mapping[str, bytes]) -> None:
        with self._change() as new:
            new.codes |= codes

    # questions

    def _images(self, field: str, values: list[bytes]) -> list[Record]:
        wanted = set(values)
        images = (record for record, _ in self._now.images.values())
        return [one for one in images if (id_bytes(one.id) if field == "id" else path_bytes(one.path)) in wanted]

    def by_sha256(self, sha256: str) -> list[Record]:
        return [record for record in self.records() if record.sha256 == sha256]

    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        """Each as it is when it is asked for: one that was removed since is left out."""
        begin = b"" if after is None else path_bytes(after)
        for path in sorted((path for path in self._now.images if path_bytes(path) > begin), key=path_bytes):
            if limit is not None and limit <= 0:
                return
            record = self._now.images.get(path, (None,))[0]
            if record is not None and (where is None or where.matches(record)):
                limit = None if limit is None else limit - 1
                yield record

    def bad_files(self) -> Iterator[BadFile]:
        return iter(sorted(self._now.bad.values(), key=lambda file: path_bytes(file.path)))

    def notes(self) -> dict[str, Any]:
        return dict(self._now.notes)

    def forgotten(self) -> Iterator[Forgotten]:
        return iter(sorted(self._now.forgotten.values(), key=lambda one: (one.sha256, path_bytes(one.path))))

    def damaged(self) -> Iterator[str]:
        return iter(())  # memory is trusted; what lies on a disk or a server needs a checksum for each vector

    def _vectors(self, ids: set[bytes]) -> dict[str, tuple[str, Vectors | None]]:
        images = self._now.images.values()
        return {record.id: (record.path, vector) for record, vector in images if id_bytes(record.id) in ids}

    def _codes(self, ids: set[bytes]) -> list[Code]:
        codes = self._now.codes
        return [Code(r.id, r.path, codes[r.sha256]) for r in self._images("id", list(ids)) if r.sha256 in codes]

    def without_features(self, *, check: bool = False) -> Iterator[Record]:
        return (record for record in self.records() if record.sha256 not in self._now.codes)

    def _count_features(self) -> FeatureCount:
        now = self._now
        having = [record for record, _ in now.images.values() if record.sha256 in now.codes]
        return FeatureCount(len(having), sum(map(len, now.codes.values())))

    def _search(self, queries: Vectors, k: int, where: Filter | None, exact: bool | None) -> SearchResult:
        images = self._now.images.values()
        found = sorted(((r.id, v) for r, v in images if where is None or where.matches(r)), key=lambda pair: pair[0])
        names = [name for name, _ in found]  # by id, which decides between equal scores
        database = np.array([vector for _, vector in found], np.float32).reshape(-1, self.meta.dim)  # (N, D)
        scores = np.einsum("qd,nd->qn", queries, database)  # (Q, N), each the same in any batch of queries
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return SearchResult(np.take_along_axis(scores, order, 1), [[names[i] for i in row] for row in order])

    # upkeep

    def snapshot(self, dest: str) -> None:
        with self._kept.lock:  # nobody changes it meanwhile
            copy_to_folder(dest, self)

    def _problems(self) -> list[str]:
        return [path for path, (record, _) in self._now.images.items() if path != record.path]

    def compact(self) -> None:
        with self._change() as new:
            new.forgotten = {key: one for key, one in new.forgotten.items() if one.removed >= long_ago()}

    def disk_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        self._open = False
