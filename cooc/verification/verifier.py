"""A query against many pictures: which of them show the same thing, and where.

    query = extract("sift", pixels, limit=QUERY)
    agreements = verify(query, [unpack(code) for code in codes])      # one for each picture, in their order

Each picture is one piece of work for a thread. The products of matrices inside are small, so BLAS gets one thread for
each: left to itself it shares every product among all cores and waits for them, ten times as long on a busy machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

from threadpoolctl import ThreadpoolController

from cooc.errors import InputError
from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.features import LocalFeatures
from cooc.verification.geometry import agree
from cooc.verification.matching import match
from cooc.verification.screening import Sought, is_promising, rough_matches, sought
from cooc.verification.words import ENGINE

Numbered = list[tuple[int, LocalFeatures]]  # pictures, and which of them

AT_ONCE = 30  # pictures that one thread screens together
MANY = 1 << 18  # pairs of features, below which a full comparison is quick, and a first look would miss too much


def verify(
    query: Sequence[LocalFeatures],
    pictures: Sequence[Sequence[LocalFeatures]],
    *,
    device: str | None = None,
    workers: int | None = None,
    screened: bool = False,
) -> list[Agreement]:
    """For each picture the strongest agreement by any engine that both it and the query have features of.

    Engines are compared by `Agreement.strength`. A query may hold several sets of one engine (its turns); the best
    counts. `device` names a GPU that matches; None is the CPU. `screened`: what shares nothing with the query at a
    first look (`screening.py`) agrees in nothing, in a third of the time. Of true pairs one in eighty is lost by
    that, of those that are sure one in two hundred (docs/verification.md).
    """
    if not query:
        raise InputError("The query has no local features: extract() makes them.")
    best: list[Agreement | None] = [None] * len(pictures)
    pool = _pool(workers or os.cpu_count() or 1)
    with _one_thread():
        waiting: list[tuple[list[int], Callable[[], list[Agreement]]]] = []
        for part in query:
            own = [(n, other) for n, sets in enumerate(pictures) for other in sets if other.engine == part.engine]
            few, many = own, []
            if screened and part.engine == ENGINE:
                few, many = ([one for one in own if _many(part, one[1]) == wanted] for wanted in (False, True))
            if device is None:
                waiting += _by_threads(part, few, many, pool)
            else:
                waiting.append(_by_gpu(part, few, many, pool, device))
        for number, agreement in (pair for numbers, wait in waiting for pair in zip(numbers, wait(), strict=True)):
            before = best[number]
            if before is None or agreement.strength > before.strength:
                best[number] = agreement
    return [agreement or no_agreement(query[0]) for agreement in best]


class Device(Protocol):
    """What is needed of a torch.device, which a search on a CPU does not load."""

    type: str


def gpu_of(device: Device) -> str | None:
    """Which GPU may verify for what runs on a device: CUDA's. Others lack numbers of 64 bits, or complex ones."""
    return str(device) if device.type == "cuda" else None


def _by_threads(
    query: LocalFeatures, few: Numbered, many: Numbered, pool: Executor
) -> Iterator[tuple[list[int], Callable[[], list[Agreement]]]]:
    """Work that has begun, and a call that waits for it: `many` are those that get a first look."""
    if many:
        lookup = sought(query)
        for some in (many[start : start + AT_ONCE] for start in range(0, len(many), AT_ONCE)):
            job = pool.submit(_screened, query, lookup, [other for _, other in some])
            yield [number for number, _ in some], job.result
    for number, other in few:
        yield [number], pool.submit(_agreement, query, other).result


def _by_gpu(
    query: LocalFeatures, few: Numbered, many: Numbered, pool: Executor, device: str
) -> tuple[list[int], Callable[[], list[Agreement]]]:
    from cooc.verification.geometry_on_device import agree_on_device

    screened = [False] * len(few) + [True] * len(many)
    found = agree_on_device(query, [other for _, other in few + many], device, pool, screened)
    return [number for number, _ in few + many], lambda: found


def _many(query: LocalFeatures, picture: LocalFeatures) -> bool:
    return len(query) * len(picture) >= MANY


def _agreement(query: LocalFeatures, picture: LocalFeatures) -> list[Agreement]:
    return [agree(query, picture, match(query, picture))]


def _screened(query: LocalFeatures, lookup: Sought, pictures: Sequence[LocalFeatures]) -> list[Agreement]:
    return [
        agree(query, picture, match(query, picture))
        if is_promising(query, picture, matches)
        else no_agreement(query, picture, len(matches.query))
        for picture, matches in zip(pictures, rough_matches(lookup, pictures), strict=True)
    ]


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that stay for the next query: to start sixteen takes longer than most of what they do."""
    return ThreadPoolExecutor(workers, "verify")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of these threads


@cache
def _blas() -> ThreadpoolController | None:
    """The BLAS libraries of this process, looked up once; None where the system does not tell."""
    try:
        return ThreadpoolController()
    except OSError:
        return None


def _one_thread() -> AbstractContextManager[Any]:
    blas = _blas()
    return nullcontext() if blas is None else blas.limit(limits=1, user_api="blas")
