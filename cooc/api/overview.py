"""How many pictures each folder, tag and month has: what a person chooses from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cooc.image_search import ImageSearch


@dataclass
class Counts:
    folders: Counter[str] = field(default_factory=Counter)  # of all below each
    tags: Counter[str] = field(default_factory=Counter)
    months: Counter[str] = field(default_factory=Counter)  # 2023-08; "" for pictures without a date

    @classmethod
    def of(cls, search: ImageSearch) -> Counts:
        found = search.store.tally()
        counts = cls(tags=found.tags, months=found.months)
        for folder, count in found.folders.items():
            while folder:
                counts.folders[folder] += count
                folder = folder.rpartition("/")[0]
        return counts

    def below(self, parent: str) -> dict[str, int]:
        """Folders directly below one, in order."""
        start = f"{parent}/" if parent else ""
        return {
            name: self.folders[name]
            for name in sorted(self.folders)
            if name.startswith(start) and "/" not in name[len(start) :]
        }
