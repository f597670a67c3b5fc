"""How far a run is: a bar in a terminal; elsewhere, in a log file say, a line every ten seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from cooc.cli import err

P = ParamSpec("P")
SECONDS = 10.0  # between two lines where there is no terminal


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """What to call with (done, total)."""
    if not err.is_terminal:
        yield now_and_then(SECONDS, lambda done, total: err.print(f"{what}: {done} of {total}", markup=False))
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def now_and_then(seconds: float, say: Callable[P, None], *, at_once: bool = False) -> Callable[P, None]:
    """`say`, but not more often than that; the first time at once, or only when a run takes so long."""
    last = -math.inf if at_once else time.monotonic()

    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            say(*args, **kwargs)

    return told
