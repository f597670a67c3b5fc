"""How wrong are a query's distances? Each loss takes unit vectors and gives one number for each tuple. (T,)

    query (T, D), positive (T, P, D), negative (T, N, D)

`LOSSES` is the table. All of them are sums over tuples, so a batch can be cut into parts, or over several machines, and
the gradients add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def contrastive(query: Tensor, positive: Tensor, negative: Tensor, *, margin: float = 0.75) -> Tensor:
    """The paper's loss: y d^2 + (1-y) max(tau - d, 0)^2, averaged over a tuple's pairs. tau is the margin. (T,)"""
    near, far = _distance(query, positive), _distance(query, negative)
    return torch.cat([near**2, (margin - far).clamp_min(0) ** 2], dim=1).mean(1)


def triplet(query: Tensor, positive: Tensor, negative: Tensor, *, margin: float = 0.1) -> Tensor:
    """max(d(q,p)^2 - d(q,n)^2 + margin, 0), averaged over all pairs of a positive and a negative. (T,)"""
    near, far = _distance(query, positive) ** 2, _distance(query, negative) ** 2
    return (near[:, :, None] - far[:, None, :] + margin).clamp_min(0).mean((1, 2))


def smooth_ap(query: Tensor, positive: Tensor, negative: Tensor, *, temperature: float = 0.01) -> Tensor:
    """1 - AP of the tuple's own ranking, with sigmoids for the steps (Brown et al. 2020). (T,)

    A positive's place is 1 + how many others score higher; its precision is its place among the positives over its
    place among all. A sigmoid of the difference of two scores counts "higher".
    """
    scores = torch.einsum("td,tmd->tm", query, torch.cat([positive, negative], dim=1))  # (T, P + N)
    count = positive.shape[1]
    higher = torch.sigmoid((scores[:, None, :] - scores[:, :count, None]) / temperature)  # (T, P, P + N)
    itself = torch.eye(count, scores.shape[1], dtype=torch.bool, device=scores.device)
    higher = higher.masked_fill(itself, 0)
    precision = (1 + higher[:, :, :count].sum(2)) / (1 + higher.sum(2))  # (T, P)
    return 1 - precision.mean(1)


def _distance(query: Tensor, others: Tensor) -> Tensor:
    """Euclidean; at 0 the gradient is 0, not NaN. (T, D), (T, M, D) -> (T, M)"""
    distance: Tensor = torch.linalg.vector_norm(query[:, None, :] - others, dim=2)
    return distance


LOSSES: dict[str, Callable[..., Tensor]] = {"contrastive": contrastive, "triplet": triplet, "smooth-ap": smooth_ap}
