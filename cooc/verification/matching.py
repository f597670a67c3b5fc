"""Which features of a query and of a picture are each other's nearest.

One query is matched against many pictures. On a CPU the similarities are made in blocks that stay in the cache and are
never kept; on a GPU the pictures are padded to one length and matched in batches. Both give the matches that two loops
would give, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cooc.verification.coding import vectors
from cooc.verification.engines import ENGINES
from cooc.verification.features import LocalFeatures

if TYPE_CHECKING:  # imported where a GPU matches: on a CPU a search verifies while torch is still loading
    import torch
    from torch import Tensor

Floats = NDArray[np.float32]

ROWS = 256  # of the query at a time: 256 x 1000 similarities are a megabyte
SAME = 1e-6  # 1 - cosine of vectors that are equal: two such are as near as each other, and a ratio of 1 apart
BATCH = 1 << 28  # similarities at a time on a GPU: a gigabyte


class Matches(NamedTuple):
    """Pairs of features, the most certain first."""

    query: NDArray[np.int64]  # (M,)
    picture: NDArray[np.int64]  # (M,)


NONE = Matches(np.zeros(0, np.int64), np.zeros(0, np.int64))


def match(
    query: LocalFeatures, picture: LocalFeatures, *, ratio: float | None = None, similarity: float | None = None
) -> Matches:
    """Mutual nearest neighbours; the engine's own `ratio` or `similarity` unless others are given.

    With `ratio`, a match's distance is under `ratio` times that of the query's second nearest. With `similarity`, its
    cosine is over it.
    """
    ratio, similarity = _rule(query, ratio, similarity)
    return _match(vectors(query.descriptors), vectors(picture.descriptors), ratio, similarity)


def _rule(query: LocalFeatures, ratio: float | None, similarity: float | None) -> tuple[float | None, float | None]:
    if ratio is None and similarity is None:
        engine = ENGINES[query.engine]
        return engine.ratio, engine.similarity
    return ratio, similarity


def _match(query: Floats, picture: Floats, ratio: float | None, similarity: float | None) -> Matches:
    if not len(query) or not len(picture) or (ratio is not None and len(picture) < 2):
        return NONE
    partner = np.empty(len(query), np.int64)
    best, second = np.empty(len(query), np.float32), np.full(len(query), -1, np.float32)
    block = np.empty((min(ROWS, len(query)), len(picture)), np.float32)
    row = np.arange(len(block))
    other = np.ascontiguousarray(picture.T)
    for start in range(0, len(query), ROWS):
        part = slice(start, min(start + ROWS, len(query)))
        scores = block[: part.stop - start]
        np.matmul(query[part], other, out=scores)
        partner[part] = nearest = scores.argmax(1)
        best[part] = scores[row[: len(scores)], nearest]
        if ratio is not None:
            scores[row[: len(scores)], nearest] = -2
            second[part] = scores.max(1)
    certain, good = _certainty(best, second, ratio, similarity)
    kept = np.flatnonzero(good)
    back = (query @ other[:, partner[kept]]).argmax(0)  # only those columns: a tenth of the work above
    kept = kept[back == kept]
    kept = kept[np.argsort(-certain[kept], kind="stable")]
    return Matches(kept, partner[kept])


def _certainty(
    best: Floats, second: Floats, ratio: float | None, similarity: float | None
) -> tuple[Floats, NDArray[np.bool_]]:
    """How certain each match is, and whether it is good enough. Distances of unit vectors are sqrt(2 - 2 cosine)."""
    good = np.ones(len(best), bool)
    certain = best
    if similarity is not None:
        good &= best > similarity
    if ratio is not None:
        certain = np.asarray(-np.maximum(1 - best, SAME) / np.maximum(1 - second, SAME), np.float32)
        good &= certain > -(ratio**2)
    return certain, good


def match_on_device(
    query: LocalFeatures,
    pictures: Sequence[LocalFeatures],
    device: str | torch.device,
    *,
    ratio: float | None = None,
    similarity: float | None = None,
) -> list[Matches]:
    """`match` with each of many pictures, by torch on `device`."""
    import torch

    ratio, similarity = _rule(query, ratio, similarity)
    longest = max((len(p) for p in pictures), default=0)
    if not len(query) or not longest:
        return [NONE] * len(pictures)
    own = _units(torch.from_numpy(np.array(query.descriptors)).to(device))
    found: list[Matches] = []
    step = max(1, BATCH // (len(query) * longest))
    for start in range(0, len(pictures), step):
        found += _match_batch(own, pictures[start : start + step], ratio, similarity)
    return found


def _units(codes: Tensor) -> Tensor:
    from torch.nn import functional as F

    return F.normalize(codes.float() - 127.5, dim=-1)


def _match_batch(
    query: Tensor, pictures: Sequence[LocalFeatures], ratio: float | None, similarity: float | None
) -> list[Matches]:
    import torch

    counts = [len(p) for p in pictures]
    padded = np.zeros((len(pictures), max(*counts, 2), query.shape[1]), np.uint8)
    for row, picture in zip(padded, pictures, strict=True):
        row[: len(picture)] = picture.descriptors
    others = _units(torch.from_numpy(padded).to(query.device))  # (B, N, D)
    scores = query @ others.mT  # (B, Q, N)
    count = torch.tensor(counts, device=query.device)
    empty = torch.arange(others.shape[1], device=query.device) >= count[:, None]
    scores.masked_fill_(empty[:, None], -2)
    best, partner = scores.max(2)  # (B, Q) each
    own = torch.arange(len(query), device=query.device)
    good = scores.argmax(1).gather(1, partner) == own
    second = scores.scatter_(2, partner[:, :, None], -2).amax(2)
    certain = best
    if similarity is not None:
        good &= best > similarity
    if ratio is not None:
        certain = -(1 - best).clamp_min(SAME) / (1 - second).clamp_min(SAME)
        good &= (certain > -(ratio**2)) & (count >= 2)[:, None]
    good &= (count > 0)[:, None]
    order = certain.masked_fill(~good, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    taken = good.sum(1).tolist()
    here, there = order.cpu().numpy(), partner.gather(1, order).cpu().numpy()
    return [Matches(here[b, :n], there[b, :n]) for b, n in enumerate(taken)]
