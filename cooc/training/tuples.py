"""Tuples to learn from: a query, photos that match it, and hard negatives."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cooc.datasets.photos import Ints, Photos
from cooc.errors import InputError


def mine(queries: Tensor, own: Tensor, pool: Tensor, clusters: Tensor, count: int) -> Tensor:
    """The nearest `count` of the pool for each query, none of the query's own cluster, at most one of any cluster.

    With too few clusters it is one of each. queries (Q, D), own (Q,): their clusters; pool (M, D), clusters (M,). Gives
    places in the pool. (Q, count)
    """
    names, cluster = torch.unique(clusters, return_inverse=True)  # (K,), (M,)
    count = min(count, len(names) - 1)
    if count < 1:
        raise InputError("All photos to train on have one label, so that none is a wrong answer. Add another label.")
    out = []
    for start in range(0, len(queries), 256):
        scores = queries[start : start + 256] @ pool.T  # (q, M)
        mine_too = own[start : start + 256, None] == names  # (q, K)
        columns = cluster.expand(len(scores), -1)
        best = scores.new_full(mine_too.shape, -torch.inf).scatter_reduce(1, columns, scores, "amax")  # (q, K)
        places = torch.arange(len(pool), device=pool.device).expand(len(scores), -1)
        places = torch.where(scores == best.gather(1, columns), places, len(pool))
        first = places.new_full(mine_too.shape, len(pool)).scatter_reduce(1, columns, places, "amin")  # (q, K)
        out.append(first.gather(1, best.masked_fill(mine_too, -torch.inf).topk(count, dim=1).indices))
    return torch.cat(out)


def tuples(photos: Photos, queries: Ints, negatives: Ints, positives: int, rng: np.random.Generator) -> Ints:
    """Rows (query, positives, negatives), each query with matches drawn by chance, again if it has too few.

    queries (Q,), negatives (Q, N) -> (Q, 1 + positives + N)
    """
    drawn = [rng.choice(m, positives, replace=len(m) < positives) for m in (photos.matches[int(q)] for q in queries)]
    return np.concatenate([queries[:, None], np.array(drawn).reshape(-1, positives), negatives], axis=1)
