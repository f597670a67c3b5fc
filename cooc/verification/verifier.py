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
from cooc.verification.engines import ENGINES
from cooc.verification.features import LocalFeatures
from cooc.verification.geometry import TOLERANCE, agree
from cooc.verification.matching import match, match_on_device

__all__ = ["verify"]


def verify(
    query: Sequence[LocalFeatures],
    pictures: Sequence[Sequence[LocalFeatures]],
    *,
    tolerance: float = TOLERANCE,
    ratio: float | None = None,
    similarity: float | None = None,
    device: str | None = None,
    workers: int | None = None,
) -> list[Agreement]:
    """For each picture the strongest agreement by any engine that both it and the query have features of.

    Engines are compared by `Agreement.strength`. A query may hold several sets of one engine (its turns); the best
    counts. `device` names a GPU that matches; None is the CPU. `ratio` and `similarity` replace the engines' own.
    """
    if not query:
        raise InputError("The query has no local features: extract() makes them.")
    best: list[Agreement | None] = [None] * len(pictures)
    with _one_thread(), ThreadPoolExecutor(workers or os.cpu_count() or 1, "verify") as pool:
        jobs: list[tuple[int, Future[Agreement]]] = []
        for part in query:
            own = [(n, other) for n, sets in enumerate(pictures) for other in sets if other.engine == part.engine]
            rule = {"ratio": ratio if ENGINES[part.engine].ratio else None,
                    "similarity": similarity if ENGINES[part.engine].similarity else None}  # fmt: skip
            if device is None:
                jobs += [(number, pool.submit(_agreement, part, other, tolerance, rule)) for number, other in own]
                continue
            found = match_on_device(part, [other for _, other in own], device, **rule)
            for (number, other), matches in zip(own, found, strict=True):
                jobs.append((number, pool.submit(agree, part, other, matches, tolerance=tolerance)))
        for number, job in jobs:
            agreement, before = job.result(), best[number]
            if before is None or agreement.strength > before.strength:
                best[number] = agreement
    return [agreement or no_agreement(query[0]) for agreement in best]


def _agreement(
    query: LocalFeatures, picture: LocalFeatures, tolerance: float, rule: dict[str, float | None]
) -> Agreement:
    return agree(query, picture, match(query, picture, **rule), tolerance=tolerance)


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
