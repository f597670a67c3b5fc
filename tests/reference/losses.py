"""The losses by explicit loops, from their equations. Vectors are lists of numbers; one query at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]


def distance(a: Vector, b: Vector) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def contrastive(query: Vector, positives: Sequence[Vector], negatives: Sequence[Vector], margin: float) -> float:
    total = 0.0
    for positive in positives:
        total += distance(query, positive) ** 2
    for negative in negatives:
        total += max(margin - distance(query, negative), 0) ** 2
    return total / (len(positives) + len(negatives))


def triplet(query: Vector, positives: Sequence[Vector], negatives: Sequence[Vector], margin: float) -> float:
    total = 0.0
    for positive in positives:
        for negative in negatives:
            total += max(distance(query, positive) ** 2 - distance(query, negative) ** 2 + margin, 0)
    return total / (len(positives) * len(negatives))


def smooth_ap(query: Vector, positives: Sequence[Vector], negatives: Sequence[Vector], temperature: float) -> float:
    scores = [sum(x * y for x, y in zip(query, other, strict=True)) for other in [*positives, *negatives]]

    def above(j: int, i: int) -> float:
        return 1 / (1 + math.exp(-(scores[j] - scores[i]) / temperature))

    total = 0.0
    for i in range(len(positives)):
        place_among_positives = 1 + sum(above(j, i) for j in range(len(positives)) if j != i)
        place = 1 + sum(above(j, i) for j in range(len(scores)) if j != i)
        total += place_among_positives / place
    return 1 - total / len(positives)


def average_precision(query: Vector, positives: Sequence[Vector], negatives: Sequence[Vector]) -> float:
    """The usual AP of the tuple's ranking, without any smoothing."""
    scores = [sum(x * y for x, y in zip(query, other, strict=True)) for other in [*positives, *negatives]]
    total = 0.0
    for i in range(len(positives)):
        place_among_positives = 1 + sum(scores[j] > scores[i] for j in range(len(positives)))
        place = 1 + sum(score > scores[i] for score in scores)
        total += place_among_positives / place
    return total / len(positives)
