"""A shortlist in rounds: what is verified leads, and what is near to it is looked at next.

    shortlist -> verified -> onward: the surest are queries in turn, and what agrees with one of them is found, too
    -> diffusion from all of that -> the shortlist that this gives, verified -> diffusion

Diffusion (Iscen et al., CVPR 2017) flows on a small graph: the shortlist and the nearest of what is verified. Its cost
does not grow with the collection, and (docs/verification.md) it ranks as diffusion on the graph of all pictures does.
Everything here works on plain arrays and three functions; it knows neither an index nor pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError
from cooc.reranking.diffusing import diffuse, knn_graph
from cooc.verification.agreement import Agreement

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]
Scores = NDArray[np.float64]

ALPHA = 0.99  # of what a picture has, how much comes from its neighbours
GAMMA = 3.0  # an edge weighs cosine ** GAMMA
EXACT = 1e-9  # of the seeds, what diffusion may leave over: as the solution itself, in a tenth of the time,
ENOUGH = 1000  # steps at most; it takes about a hundred
SHORTLIST = 400  # pictures by cosine that the graph begins with,
TOP = 40  # and those that a round verifies,
THOROUGH = 200  # or a thorough one
LEAST = 8.0  # strength from which a picture is verified: 4 inliers of SIFT, as 1 wrong pair in 1000 has; 27 of XFeat
SURE = 16.0  # and from which it stands before all others
NEIGHBOURS = 10  # of a picture in the graph; more blur it (docs/verification.md)
WITNESSES = 5  # pictures that are sure, from which a search looks onward,
ONWARD = 30  # at so many pictures from each,
FAR = 50  # or a thorough one at so many
EXPANSION = 50  # nearest pictures of each verified one that join the graph
NEAREST = 10  # of the query, which are seeds as well,
FAINT = 0.05  # but weak ones


@dataclass(frozen=True)
class Ranking:
    """The pictures that were looked at, best first."""

    ids: Ids
    scores: Scores  # over 1 for those that are sure, else what diffusion gives (0..1)
    agreements: dict[int, Agreement]  # of all that were verified, whatever came out


def rounds(
    ids: Sequence[int] | Ids,
    cosines: Sequence[float] | NDArray[np.floating],
    *,
    vectors: Callable[[Ids], Vectors],
    verify: Callable[[Ids], Sequence[Agreement]],
    nearest: Callable[[Vectors, int], Ids] | None = None,
    onward: Callable[[list[int], Set[int]], Sequence[dict[int, Agreement]]] | None = None,
    strength: Callable[[Agreement], float] = lambda agreement: agreement.strength,
    top: int = TOP,
    least: float = LEAST,
    sure: float = SURE,
    repeats: int = 2,
    neighbours: int = NEIGHBOURS,
    expansion: int = EXPANSION,
) -> Ranking:
    """Verify a shortlist `repeats` times, each time the best `top` of what the round before has found.

    `ids` and `cosines` are the shortlist, in the order in which it is to be verified. `vectors(ids)` gives unit vectors
    (N, D); `verify(ids)` one agreement for each; `nearest(vectors, k)` the ids (N, k) of the pictures nearest to each
    vector, -1 for none. A picture is verified from strength `least`, and sure from `sure`: those stand before all
    others. The graph joins each picture to its `neighbours`; the `expansion` nearest pictures of each verified one join
    it. `onward(ids, without)`, if given, is asked once, behind the first round: for each of the surest pictures its
    agreements with others that it leads to. What agrees with one of them is looked at by the round that follows.
    """
    ids, near = np.asarray(ids, np.int64), np.asarray(cosines, np.float64)
    if len(ids) != len(near) or len(np.unique(ids)) != len(ids):
        raise InputError(f"A shortlist needs each id once, with its cosine: {len(ids)} ids, {len(near)} cosines.")
    if repeats < 1 or top < 1:
        raise InputError(f"repeats is {repeats} and top is {top}: both must be at least 1.")
    known: dict[int, Agreement] = {}
    joined, order = ids, ids

    def flow(votes: dict[int, float]) -> tuple[Ids, Scores]:
        """All pictures that were met, best first: votes flow to what is near, and what is sure stands before."""
        nonlocal joined, near
        new = np.array(list(votes), np.int64)
        if nearest is not None and votes:
            found = nearest(vectors(new), expansion)
            new = np.append(new, found[found >= 0])
        new = np.setdiff1d(new, joined)  # not among the query's nearest: no seeds, cosine 0
        joined, near = np.concatenate([joined, new]), np.concatenate([near, np.zeros(len(new))])
        given = np.array([votes.get(i, 0.0) for i in joined.tolist()])
        graph = knn_graph(vectors(joined), neighbours, GAMMA)
        spread = diffuse(graph, seed(given, near), alpha=ALPHA, iterations=ENOUGH, tolerance=EXACT)
        scores = spread / max(spread.max(initial=0), np.finfo(float).tiny)
        scores = scores + np.where(given >= sure, 1 + given / (1 + given.max(initial=0)), 0)
        best = np.lexsort((-near, -scores))  # where nothing flows, the nearest first
        return joined[best], scores[best]

    led: dict[int, float] = {}  # what agrees with one that is sure, no stronger than that one itself
    for turn in range(repeats):
        asked = np.array([i for i in order[:top].tolist() if i not in known], np.int64)
        known |= dict(zip(asked.tolist(), verify(asked), strict=True)) if len(asked) else {}
        votes = {i: vote for i, agreement in known.items() if (vote := strength(agreement)) >= least}
        certain = sorted((i for i, vote in votes.items() if vote >= sure), key=lambda i: -votes[i])
        if turn == 0 and onward is not None and certain:
            witnesses = certain[:WITNESSES]
            for i, agreements in zip(witnesses, onward(witnesses, set(certain)), strict=True):
                for other, agreement in agreements.items():
                    if (vote := min(votes[i], strength(agreement))) >= least:
                        led[other] = max(led.get(other, 0.0), vote)
        order, scores = flow(votes | {i: max(votes.get(i, 0.0), vote) for i, vote in led.items()})
    return Ranking(order, scores, known)


def seed(votes: Scores, cosines: Scores) -> Scores:
    """Where diffusion starts: what is verified, by the root of its strength; the query's ten nearest, faintly."""
    seeds = np.sqrt(votes / votes.max()) if votes.max(initial=0) > 0 else np.zeros(len(votes))
    near = np.argsort(-cosines, kind="stable")[:NEAREST]
    seeds[near] += FAINT * np.maximum(cosines[near], 0) ** GAMMA
    return seeds
