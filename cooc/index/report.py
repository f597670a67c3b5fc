"""What a run of `cooc.index.sync` did, while it runs and when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A file, or a folder, that was left out."""

    path: str
    reason: str
    machine: bool = False  # this machine failed, not the file: the next run tries again


@dataclass
class Report:
    """What a run did. Each picture found is one of unchanged, described, copied, moved, bad or failed."""

    total: int | None = None  # pictures there are, once they have been counted
    found: int = 0
    unchanged: int = 0
    described: int = 0
    copied: int = 0  # same content as another picture: its vector was taken
    moved: int = 0
    completed: int = 0  # were there, without local features, and have them now
    removed: int = 0
    away: int = 0  # not there, but their folder may come back: kept
    bad: int = 0  # left out for what they are
    failed: int = 0  # left out, because this machine failed
    interrupted: bool = False
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # what was not done, and why
    problems: list[Problem] = field(default_factory=list)  # of this run: what is bad, and what failed

    @property
    def done(self) -> int:
        return self.unchanged + self.described + self.copied + self.moved + self.bad + self.failed

    @property
    def left(self) -> float | None:
        """Seconds that the rest may take, once that can be told. What is unchanged takes none, and where a run goes on
        it comes first."""
        worked = self.described + self.completed + self.bad + self.failed
        return (self.total - self.done) * self.seconds / worked if self.total and worked else None

    def as_dict(self) -> dict[str, Any]:
        """Without the problems, which may be many."""
        return asdict(replace(self, problems=[])) | {"done": self.done, "left": self.left}


Progress = Callable[[Report], None]
Stop = Callable[[], bool]
