"""The official evaluation rules, one ranked image at a time, in plain Python.

`oxford_ap` walks the list as the Oxford program does: ambiguous images are passed over, and each further image adds a
trapezoid. `revisited` follows the evaluation of ROxford and RParis: junk shifts the positives forward, queries without
positives are not averaged, and precision at k stops at the last positive. Positives that a shortened list lacks come
after its end; the official programs know whole lists only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def oxford_ap(ranked: Sequence[int], positives: Collection[int], ambiguous: Collection[int]) -> float:
    old_recall, old_precision, ap = 0.0, 1.0, 0.0
    found = seen = 0
    for image in ranked:
        if image in ambiguous:
            continue
        if image in positives:
            found += 1
        seen += 1
        recall, precision = found / len(positives), found / seen
        ap += (recall - old_recall) * (old_precision + precision) / 2
        old_recall, old_precision = recall, precision
    return ap


def precision_at(k: int, ranked: Sequence[int], positives: Collection[int], ambiguous: Collection[int]) -> float:
    kept = [image for image in ranked if image not in ambiguous]
    missing = [image for image in positives if image not in kept]
    last = math.inf if missing else max(kept.index(image) + 1 for image in positives)
    depth = int(min(k, last))
    return sum(image in positives for image in kept[:depth]) / depth


def revisited(
    rankings: Sequence[Sequence[int]], truth: Sequence[tuple[Collection[int], Collection[int]]], ks: Sequence[int]
) -> tuple[float, list[float], dict[int, float]]:
    """mAP, AP of each query and mP@k from (positives, junk) of each query."""
    aps, at = [], dict.fromkeys(ks, 0.0)
    total, empty = 0.0, 0
    for ranked, (positives, junk) in zip(rankings, truth, strict=True):
        if not positives:
            aps.append(math.nan)
            empty += 1
            continue
        places = [place for place, image in enumerate(ranked) if image in positives]
        shifted = [place - sum(image in junk for image in ranked[:place]) for place in places]
        ap = 0.0
        for j, place in enumerate(shifted):
            before = 1.0 if place == 0 else j / place
            after = (j + 1) / (place + 1)
            ap += (before + after) / 2 / len(positives)
        aps.append(ap)
        total += ap
        for k in ks:
            at[k] += precision_at(k, ranked, positives, junk)
    counted = len(truth) - empty
    if not counted:
        return math.nan, aps, dict.fromkeys(ks, math.nan)
    return total / counted, aps, {k: value / counted for k, value in at.items()}


def first_place(ranked: Sequence[int], positives: Collection[int], ambiguous: Collection[int]) -> float:
    """Place of the first positive, counted from 1; infinite where there is none."""
    place = 0
    for image in ranked:
        if image in ambiguous:
            continue
        place += 1
        if image in positives:
            return place
    return math.inf


def recall_and_mrr(
    rankings: Sequence[Sequence[int]], truth: Sequence[tuple[Collection[int], Collection[int]]], ks: Sequence[int]
) -> tuple[dict[int, float], float]:
    """Share of queries with a positive among the first k, and the mean reciprocal rank."""
    counted = [(ranked, *groups) for ranked, groups in zip(rankings, truth, strict=True) if groups[0]]
    places = [first_place(*one) for one in counted]
    if not places:
        return dict.fromkeys(ks, math.nan), math.nan
    recall = {k: sum(place <= k for place in places) / len(places) for k in ks}
    return recall, sum(1 / place for place in places) / len(places)
