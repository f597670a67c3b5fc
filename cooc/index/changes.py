"""Changes to an index that wait to be committed together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cooc.index.engine import Made
from cooc.index.store import BadFile, Record, Store


@dataclass
class Changes:
    described: list[tuple[Record, Made]] = field(default_factory=list)
    moves: dict[str, str] = field(default_factory=dict)  # old path -> new
    touches: dict[str, int] = field(default_factory=dict)  # path -> time
    removals: list[str] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)
    clear: list[str] = field(default_factory=list)  # bad files that are not bad any more, or not there

    def __len__(self) -> int:
        return len(self.described) + len(self.moves) + len(self.touches) + len(self.removals) + len(self.bad)

    def commit(self, store: Store) -> None:
        """Each of these is one transaction, and whatever comes between two of them the next run repairs."""
        if self.moves:
            store.rename(self.moves)
        if self.described:
            records, made = zip(*self.described, strict=True)
            store.add(records, np.stack([one.vector for one in made]), [one.features for one in made])
        if self.removals:
            store.remove(self.removals)
        if self.touches:
            store.touch(self.touches)
        if cleared := [*self.clear, *self.touches]:
            store.clear_bad(cleared)
        if self.bad:
            store.report_bad(self.bad)
