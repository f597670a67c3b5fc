"""A query against many pictures: which of them show the same thing, and where.

    query = extract("sift", pixels, limit=QUERY)
    agreements = verify(query, [unpack(code) for code in codes])      # one for each picture, in their order

Each picture is one piece of work for a thread. The products of matrices inside are small, so BLAS gets one thread for
each: left to itself it shares every product among all cores and waits for them, ten times as long on a busy machine.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
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
    return verify_each([(query, pictures)], device=device, workers=workers, screened=screened)[0]


def verify_each(
    asked: Sequence[tuple[Sequence[LocalFeatures], Sequence[Sequence[LocalFeatures]]]],
    *,
    device: str | None = None,
    workers: int | None = None,
    screened: bool = False,
) -> list[list[Agreement]]:
    """`verify` of several queries, each with pictures of its own: threads work on all of them at once."""
    pool = _pool(count := workers or os.cpu_count() or 1)
    best: list[list[Agreement | None]] = [[None] * len(pictures) for _, pictures in asked]
    with _one_thread():
        waiting: list[tuple[int, int, Callable[[], Agreement]]] = []
        for which, (query, pictures) in enumerate(asked):
            for part in query:
                own = [(n, other) for n, sets in enumerate(pictures) for other in sets if other.engine == part.engine]
                few, many = own, []
                if screened and part.engine == ENGINE:
                    few, many = ([one for one in own if _many(part, one[1]) == wanted] for wanted in (False, True))
                if device is None:
                    begun = _by_threads(part, few, many, pool, count)
                else:
                    begun = _by_gpu(part, few, many, pool, device)
                waiting += [(which, number, wait) for number, wait in begun]
        for which, number, wait in waiting:
            agreement, before = wait(), best[which][number]
            if before is None or agreement.strength > before.strength:
                best[which][number] = agreement
    return [
        [agreement or no_agreement(query[0]) for agreement in found]
        for (query, _), found in zip(asked, best, strict=True)
    ]


class Device(Protocol):
    """What is needed of a torch.device, which a search on a CPU does not load."""

    type: str


def gpu_of(device: Device) -> str | None:
    """Which GPU may verify for what runs on a device: CUDA's. Others lack numbers of 64 bits, or complex ones."""
    return str(device) if device.type == "cuda" else None


def _by_threads(
    query: LocalFeatures, few: Numbered, many: Numbered, pool: Executor, workers: int
) -> Iterator[tuple[int, Callable[[], Agreement]]]:
    """Work that has begun: for each picture a call that waits for it. `many` are those that get a first look."""
    if many:
        lookup = pool.submit(sought, query)
        step = min(AT_ONCE, math.ceil(len(many) / workers))
        for some in (many[start : start + step] for start in range(0, len(many), step)):
            job = pool.submit(_screened, query, lookup, [other for _, other in some], pool)
            yield from ((number, functools.partial(_one_of, job, place)) for place, (number, _) in enumerate(some))
    yield from ((number, pool.submit(_agreement, query, other).result) for number, other in few)


def _by_gpu(
    query: LocalFeatures, few: Numbered, many: Numbered, pool: Executor, device: str
) -> Iterator[tuple[int, Callable[[], Agreement]]]:
    from cooc.verification.geometry_on_device import agree_on_device

    screened = [False] * len(few) + [True] * len(many)
    found = agree_on_device(query, [other for _, other in few + many], device, pool, screened)
    yield from ((number, functools.partial(found.__getitem__, place)) for place, (number, _) in enumerate(few + many))


def _many(query: LocalFeatures, picture: LocalFeatures) -> bool:
    return len(query) * len(picture) >= MANY


def _agreement(query: LocalFeatures, picture: LocalFeatures) -> Agreement:
    return agree(query, picture, match(query, picture))


def _one_of(job: Future[list[Callable[[], Agreement]]], place: int) -> Agreement:
    return job.result()[place]()


def _screened(
    query: LocalFeatures, lookup: Future[Sought], pictures: Sequence[LocalFeatures], pool: Executor
) -> list[Callable[[], Agreement]]:
    """For each picture a call that waits for its agreement. A full comparison is work of its own: most need none."""
    return [
        pool.submit(_agreement, query, picture).result
        if is_promising(query, picture, matches)
        else functools.partial(no_agreement, query, picture, len(matches.query))
        for picture, matches in zip(pictures, rough_matches(lookup.result(), pictures), strict=True)
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
