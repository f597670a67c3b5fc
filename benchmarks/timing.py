"""Fair timing: forms take turns, inputs rotate, a GPU is timed by its own events.

samples = {name: sampler(call, inputs, device) for name, call in forms.items()}
milliseconds = measure(samples, seconds=0.4)       # name -> list
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

LEAST, MOST = 3, 50  # samples of one form
SAMPLE_MS = 4.0  # a sample on a GPU is as many calls as take so long,
ROTATION = 64  # but no more than this; nor are there more inputs

Call = Callable[[Tensor], Tensor]


def measure(samples: Mapping[str, Callable[[], float]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each, in turns: at least LEAST samples, then until its time or MOST is reached."""
    times: dict[str, list[float]] = {name: [] for name in samples}
    while waiting := [n for n, t in times.items() if len(t) < LEAST or (len(t) < MOST and sum(t) < 1e3 * seconds)]:
        for name in waiting:
            times[name].append(samples[name]())
    return times


def sampler(call: Call, inputs: Sequence[Tensor], device: torch.device, graph: bool = False) -> Callable[[], float]:
    """A function that takes the next inputs and gives the milliseconds of one call."""
    turn = itertools.cycle(inputs)
    if device.type == "cpu":

        def sample() -> float:
            A = next(turn)
            start = time.perf_counter()
            call(A)
            return 1e3 * (time.perf_counter() - start)

        return sample

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def timed(work: Callable[[], object], calls: int) -> float:
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / calls

    def some(calls: int) -> None:
        for A in itertools.islice(turn, calls):
            call(A)

    once = timed(partial(some, 1), 1)
    if once < SAMPLE_MS:  # what is quick may still have been warming up
        once = min(timed(partial(some, 1), 1) for _ in range(3))
    calls = max(1, min(ROTATION, round(SAMPLE_MS / once)))
    work: Callable[[], object] = partial(some, calls)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        work = captured.replay
    return lambda: timed(work, calls)
