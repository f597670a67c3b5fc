"""Pairs to learn from, without labels: pictures of an index that geometry proves to show the same thing.

    photos = mine_pairs(search)             # then as with any other photos: cooc/training/train.py

Vectors and visual words name the candidates, the local features that the index keeps decide. What is proven is a match.
Pictures that hang together by proofs are a group: none is a negative of another, and a group is held out as a whole. A
copy of a picture belongs to its group, but is no match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from cooc.activations import resolve_device
from cooc.datasets.photos import Photos, hold_out
from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.index.shortlist import BLOCK, Groups
from cooc.index.store import blocks, intact
from cooc.pictures.batches import Item
from cooc.verification.features import unpack
from cooc.verification.probability import PROVEN, same_thing
from cooc.verification.verifier import gpu_of, verify
from cooc.verification.words import signatures
from cooc.verified_duplicates import is_copy
from cooc.verified_search import Features

__all__ = ["mine_pairs"]

NEAREST = SHARING = 10  # candidates of a picture: by their vectors, and by the visual words that both have


def mine_pairs(
    search: ImageSearch,
    *,
    most: int = 20_000,
    held_out: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Photos:
    """Pictures of an index with the pairs that are proven; of a large one, of `most` pictures and what they match."""
    store = search.store
    if not search.meta.features:
        raise InputError(
            f"The index {search.index_name} keeps no local features to prove pairs by. Add them: "
            "cooc index FOLDER --verify sift"
        )
    ids = sorted(record.id for record in store.records())
    chosen = [ids[i] for i in sorted(np.random.default_rng(seed).permutation(len(ids))[:most].tolist())]

    def features(names: Sequence[str]) -> list[Features]:
        return [unpack(code) if code is not None else () for code in store.features(names)]

    def candidates() -> Iterator[tuple[str, list[str]]]:
        words, done = search.words, 0
        for block in blocks(chosen, BLOCK):
            there, vectors = intact(store, list(block))
            for name, near in zip(there, store.search(vectors, NEAREST + 1).ids if there else [], strict=True):
                sharing = words.search(signatures(features([name]))[0], SHARING + 1) if words is not None else []
                yield name, [other for other in dict.fromkeys([*near, *sharing]) if other != name]
                progress(done := done + 1, len(chosen))

    groups, matches = Groups(), dict[str, set[str]]()
    for one, two, copy in proven(candidates(), features, resolve_device(device)):
        groups.join(one, two)
        if not copy:
            matches.setdefault(one, set()).add(two)
            matches.setdefault(two, set()).add(one)
    records = [record for record in store.get(sorted({*chosen, *groups.parent})) if record is not None]
    place = {record.id: i for i, record in enumerate(records)}
    items = [Item(i, search.collection.picture(record.entry)) for i, record in enumerate(records)]
    clusters = np.unique([groups.top(record.id) for record in records], return_inverse=True)[1].astype(np.int64)
    rows = {place[q]: sorted(place[p] for p in m if p in place) for q, m in matches.items() if q in place}
    positives = {q: np.array(rows[q], np.int64) for q in sorted(rows) if rows[q]}
    if not positives:
        raise InputError(f"No two pictures of {search.index_name} are proven to show the same thing: none can teach.")
    return hold_out(Photos(search.index_name, items, clusters, positives, np.zeros(len(items), bool)), held_out, seed)


def proven(
    candidates: Iterable[tuple[str, Sequence[str]]],
    features: Callable[[Sequence[str]], list[Features]],
    device: torch.device,
) -> Iterator[tuple[str, str, bool]]:
    """Pairs that show the same thing, each once, and whether they are copies. A GPU matches, where there is one."""
    seen: dict[str, set[str]] = {}
    for name, others in candidates:
        new: list[str] = [other for other in others if name not in seen.get(other, ())]
        seen[name] = set(new)
        own, rest = features([name])[0], features(new)
        if not own or not rest:
            continue
        found = verify(own, rest, device=gpu_of(device))
        yield from (
            (name, other, is_copy(agreement))
            for other, agreement in zip(new, found, strict=True)
            if same_thing(agreement) >= PROVEN
        )
