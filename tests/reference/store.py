"""An index as a dict, searched by a loop over everything: what every engine must agree with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cooc.index.store import Filter, Record


class Model:
    def __init__(self) -> None:
        self.images: dict[str, tuple[Record, np.ndarray]] = {}

    def add(self, records: list[Record], vectors: np.ndarray) -> None:
        for record, vector in zip(records, vectors, strict=True):
            had = self.images[record.path][0].tags if record.path in self.images else frozenset()
            self.images[record.path] = replace(record, tags=record.tags | had), vector

    def remove(self, paths: list[str]) -> int:
        return sum(self.images.pop(path, None) is not None for path in set(paths))

    def rename(self, moves: dict[str, str]) -> int:
        moving = {new: self.images.pop(old) for old, new in moves.items() if old != new and old in self.images}
        for new, (record, vector) in moving.items():
            self.images[new] = replace(record, path=new), vector
        return len(moving)

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
