"""A query against many pictures: which of them show the same thing, and where.

    query = extract("sift", pixels, limit=QUERY)
    agreements = verify(query, [unpack(code) for code in codes])      # one for each picture, in their order

Each picture is one piece of work for a thread. The products of matrices inside are small, so BLAS gets one thread for
each: left to itself it shares every product among all cores and waits for them, ten times as long on a busy machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

from cooc.errors import InputError
from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.features import LocalFeatures
from cooc.verification.geometry import agree
from cooc.verification.matching import match
from cooc.verification.screening import Sought, is_promising, rough_matches, sought
from cooc.verification.words import ENGINE

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
    with _one_thread(), ThreadPoolExecutor(workers or os.cpu_count() or 1, "verify") as pool:
        jobs: list[tuple[int, Future[Agreement]]] = []
        looks: list[tuple[list[int], Future[list[Agreement]]]] = []
        done: list[tuple[int, Agreement]] = []
        for part in query:
            own = [(n, other) for n, sets in enumerate(pictures) for other in sets if other.engine == part.engine]
            if device is None and screened and part.engine == ENGINE:
                lookup, many = sought(part), [(n, other) for n, other in own if _many(part, other)]
                for some in (many[start : start + AT_ONCE] for start in range(0, len(many), AT_ONCE)):
                    numbers, others = [n for n, _ in some], [other for _, other in some]
                    looks.append((numbers, pool.submit(_screened, part, lookup, others)))
                own = [(n, other) for n, other in own if not _many(part, other)]
            if device is None:
                jobs += [(number, pool.submit(_agreement, part, other)) for number, other in own]
                continue
            from cooc.verification.geometry_on_device import agree_on_device

            others = [other for _, other in own]
            looked = [screened and part.engine == ENGINE and _many(part, other) for other in others]
            found = agree_on_device(part, others, device, pool, looked)
            done += [(n, agreement) for (n, _), agreement in zip(own, found, strict=True)]
        done += [(n, one) for numbers, job in looks for n, one in zip(numbers, job.result(), strict=True)]
        done += [(number, job.result()) for number, job in jobs]
        for number, agreement in done:
            before = best[number]
            if before is None or agreement.strength > before.strength:
                best[number] = agreement
    return [agreement or no_agreement(query[0]) for agreement in best]


def _many(query: LocalFeatures, picture: LocalFeatures) -> bool:
    return len(query) * len(picture) >= MANY


def _agreement(query: LocalFeatures, picture: LocalFeatures) -> Agreement:
    return agree(query, picture, match(query, picture))


def _screened(query: LocalFeatures, lookup: Sought, pictures: Sequence[LocalFeatures]) -> list[Agreement]:
    return [
        _agreement(query, picture)
        if is_promising(query, picture, matches)
        else no_agreement(query, picture, len(matches.query))
        for picture, matches in zip(pictures, rough_matches(lookup, pictures), strict=True)
    ]


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
