"""Which photos show the same thing? A label does not say: a castle has a gate and a dungeon.

Geometry does: local features of both agree on one transform (`cooc.verification`). Copies of a photo agree best of all,
and have nothing to teach: they are told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from cooc.datasets.photos import Photos
from cooc.pictures.batches import Item
from cooc.pictures.decode import load_view
from cooc.recipes import DescriptorConfig
from cooc.training.cache import ActivationCache
from cooc.training.network import CoOcNet, describe
from cooc.verification.engines import LONGEST, extract
from cooc.verification.features import pack, unpack
from cooc.verification.probability import PROVEN, same_thing
from cooc.verification.verifier import verify as agreements
from cooc.verified_duplicates import is_copy
from cooc.verified_search import Features

ENGINE = "sift"
Name = TypeVar("Name", str, int)


def proven(
    candidates: Iterable[tuple[Name, Sequence[Name]]],
    features: Callable[[Sequence[Name]], list[Features]],
    device: torch.device,
) -> Iterator[tuple[Name, Name, bool]]:
    """Pairs that show the same thing, each once, and whether they are copies. A GPU matches, where there is one."""
    seen: dict[Name, set[Name]] = {}
    for name, others in candidates:
        new: list[Name] = [other for other in others if name not in seen.get(other, ())]
        seen[name] = set(new)
        own, rest = features([name])[0], features(new)
        if not own or not rest:
            continue
        found = agreements(own, rest, device=None if device.type == "cpu" else str(device))
        yield from (
            (name, other, is_copy(agreement))
            for other, agreement in zip(new, found, strict=True)
            if same_thing(agreement) >= PROVEN
        )


def verify(
    photos: Photos,
    cache: ActivationCache,
    config: DescriptorConfig,
    *,
    nearest: int = 10,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Photos:
    """Photos with the pairs that match: of the `nearest` of the same label, those that geometry proves.

    Pairs that a data set gives are left as they are.
    """
    if photos.positives is not None:
        return photos
    with ThreadPoolExecutor() as pool:
        codes = []
        for code in pool.map(_code, photos.items):
            codes.append(code)
            progress(len(codes), len(photos))
    net = CoOcNet(config, cache.channels, train=()).to(cache.device)
    with torch.no_grad():
        vectors = describe(net, cache, range(len(cache)), positions=1 << 13)
    clusters = torch.from_numpy(photos.clusters).to(vectors.device)

    def candidates() -> Iterator[tuple[int, list[int]]]:
        for q in range(len(photos)):
            scores = (vectors @ vectors[q]).masked_fill(clusters != clusters[q], -torch.inf)
            scores[q] = -torch.inf
            best = scores.topk(min(nearest, int(scores.isfinite().sum())))
            yield q, best.indices.tolist()

    found: dict[int, set[int]] = {}
    for q, p, copy in proven(candidates(), lambda rows: [unpack(codes[row]) for row in rows], cache.device):
        if not copy:
            found.setdefault(q, set()).add(p)
            found.setdefault(p, set()).add(q)
    return replace(photos, positives={q: np.array(sorted(found[q]), np.int64) for q in sorted(found)})


def all_pairs(photos: Photos) -> Photos:
    """The same, but to train on, every photo of a label matches all others of it. What is held out stays verified."""
    found = {q: match for q, match in photos.matches.items() if photos.held_out[q]}
    rows = np.flatnonzero(~photos.held_out)
    for label in np.unique(photos.clusters[rows]):
        same = rows[photos.clusters[rows] == label]
        if len(same) > 1:
            found |= {int(q): same[same != q] for q in same}
    return replace(photos, positives={q: found[q] for q in sorted(found)})


def _code(item: Item) -> bytes:
    """Local features as an index keeps them."""
    pixels, size, _ = load_view(item.picture, LONGEST)
    return pack(extract(ENGINE, pixels, size=size))
