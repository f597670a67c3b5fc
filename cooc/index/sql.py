"""What the engines that speak SQL, in a folder and in PostgreSQL, ask in the same words: their tables are alike.

A value in a statement is written %s.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cooc.index.records import BadFile, Forgotten, Record, path_text
from cooc.index.store import FeatureCount, Store, pages

HAS_NONE = "NOT EXISTS (SELECT 1 FROM features WHERE features.sha256 = images.sha256)"
UNUSED = "NOT EXISTS (SELECT 1 FROM images WHERE images.sha256 = features.sha256)"
FORGOTTEN = "SELECT sha256, path, tags, removed FROM forgotten"


def record(row: Sequence[Any]) -> Record:
    """Of its columns; whatever comes behind them belongs to the engine."""
    path, size, mtime_ns, sha256, width, height, taken, tags, *_ = row
    return Record(path_text(path), size, mtime_ns, sha256.hex(), width, height, taken, _tags(tags))


def forgotten(row: Sequence[Any]) -> Forgotten:
    sha256, path, tags, removed = row
    return Forgotten(sha256.hex(), path_text(path), _tags(tags), removed)


def _tags(kept: str | list[str]) -> frozenset[str]:
    """SQLite has no lists: there they are JSON."""
    return frozenset(json.loads(kept) if isinstance(kept, str) else kept)


class SqlStore(Store):
    """A `Store` of tables."""

    @abstractmethod
    def _rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def _rows_since_3(self, statement: str) -> list[tuple[Any, ...]]:
        """Of a table that older formats have not."""

    @abstractmethod
    def _records(self, condition: str, *values: object) -> list[Record]:
        """Of the images that meet it."""

    @abstractmethod
    def _change(self, statement: str, *values: object) -> int:
        """A change of one statement; how many rows it has changed."""

    def note(self, name: str, value: Any | None) -> None:
        if value is None:
            self._change("DELETE FROM notes WHERE name = %s", name)
        else:
            insert = "INSERT INTO notes VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET json = excluded.json"
            self._change(insert, name, json.dumps(value))

    def by_sha256(self, sha256: str) -> list[Record]:
        return self._records("sha256 = %s ORDER BY path", bytes.fromhex(sha256))

    def bad_files(self) -> Iterator[BadFile]:
        query = "SELECT * FROM bad WHERE path > %s ORDER BY path LIMIT %s"
        return pages(
            lambda last, size: [BadFile(path_text(path), *rest) for path, *rest in self._rows(query, last, size)]
        )

    def notes(self) -> dict[str, Any]:
        return {name: json.loads(text) for name, text in self._rows_since_3("SELECT name, json FROM notes")}

    def forgotten(self) -> Iterator[Forgotten]:
        return map(forgotten, self._rows_since_3(f"{FORGOTTEN} ORDER BY sha256, path"))

    def without_features(self, *, check: bool = False) -> Iterator[Record]:
        if not self.meta.features:
            yield from self.records()
            return
        condition = f"path > %s AND {HAS_NONE} ORDER BY path LIMIT %s"
        yield from pages(lambda last, size: self._records(condition, last, size))
        if check:
            yield from self._features_damaged()

    @abstractmethod
    def _features_damaged(self) -> Iterable[Record]: ...

    def _count_features(self) -> FeatureCount:
        images = f"SELECT count(*) FROM images WHERE NOT {HAS_NONE}"
        size = "SELECT coalesce(sum(length(code)), 0) FROM features"
        (found,) = self._rows(f"SELECT ({images}), ({size})")
        return FeatureCount(*found)
