"""An index as a dict, searched by a loop over everything: what every engine must agree with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cooc.index.records import BadFile, Filter, Record


class Model:
    def __init__(self) -> None:
        self.images: dict[str, tuple[Record, np.ndarray]] = {}
        self.forgotten: dict[tuple[str, str], frozenset[str]] = {}  # (content, path) -> tags of what was removed
        self.bad: dict[str, BadFile] = {}
        self.notes: dict[str, Any] = {}

    def add(self, records: list[Record], vectors: np.ndarray) -> None:
        """Upsert. A record gets the tags that its path had, and those that are kept of its content."""
        latest = {record.path: (record, vector) for record, vector in zip(records, vectors, strict=True)}
        homes = {(record.sha256, path) for path, (record, _) in latest.items()}
        used = set()
        for path, (record, vector) in latest.items():
            tags = set(record.tags)
            if path in self.images:
                tags |= self.images[path][0].tags
            for content, place in self.forgotten:
                same_picture = content == record.sha256
                comes_home = (record.sha256, path) in self.forgotten
                if same_picture and (place == path if comes_home else (content, place) not in homes):
                    tags |= self.forgotten[content, place]
                    used.add((content, place))
            self.images[path] = replace(record, tags=frozenset(tags)), vector
            self.bad.pop(path, None)
        for key in used:
            del self.forgotten[key]

    def remove(self, paths: list[str]) -> int:
        return sum(self._remove(path) for path in set(paths))

    def _remove(self, path: str) -> bool:
        record, _ = self.images.pop(path, (None, None))
        if record is not None and record.tags:
            self.forgotten[record.sha256, path] = record.tags
        return record is not None

    def rename(self, moves: dict[str, str]) -> int:
        moving = {new: self.images.pop(old) for old, new in moves.items() if old != new and old in self.images}
        for new, (record, vector) in moving.items():
            self._remove(new)
            self.images[new] = replace(record, path=new), vector
        return len(moving)

    def report_bad(self, files: list[BadFile]) -> None:
        for file in files:
            known = self.bad.get(file.path)
            self.bad[file.path] = replace(file, since=known.since) if known else file

    def clear_bad(self, paths: list[str]) -> int:
        return sum(self.bad.pop(path, None) is not None for path in set(paths))

    def note(self, name: str, value: Any) -> None:
        if value is None:
            self.notes.pop(name, None)
        else:
            self.notes[name] = value

    def tag(self, ids: list[str], add: set[str], remove: set[str]) -> None:
        for path, (record, vector) in self.images.items():
            if record.id in ids:
                self.images[path] = replace(record, tags=(record.tags - remove) | add), vector

    def records(self, where: Filter | None = None) -> list[Record]:
        found = [record for record, _ in self.images.values() if where is None or where.matches(record)]
        return sorted(found, key=lambda record: record.path.encode("utf-8", "surrogateescape"))

    def search(self, query: np.ndarray, k: int, where: Filter | None = None) -> list[tuple[float, str]]:
        """Scores and ids, best first, equal scores by id."""
        hits = []
        for record, vector in self.images.values():
            if where is None or where.matches(record):
                score = np.float32(sum(float(a) * float(b) for a, b in zip(query, vector, strict=True)))
                hits.append((-float(score), record.id))
        return [(-score, name) for score, name in sorted(hits)[:k]]
