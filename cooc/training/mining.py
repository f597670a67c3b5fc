"""Pairs to learn from, without labels: pictures of an index that geometry proves to show the same thing.

    photos = mine_pairs(search)             # then as with any other photos: cooc/training/train.py

Vectors and visual words name the candidates, the local features that the index keeps decide (`cooc.verification`).
What is proven is a match. Pictures that hang together by proofs are a group: none is a negative of another, and a group
is held out as a whole. A copy of a picture belongs to its group, but is no match: it has nothing to teach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cooc.activations import resolve_device
from cooc.datasets.photos import Photos, hold_out
from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.index.shortlist import BLOCK, Groups, still_there
from cooc.index.store import Store, blocks
from cooc.pictures.batches import Item
from cooc.verification.features import unpack
from cooc.verification.probability import PROVEN, same_thing
from cooc.verification.verifier import verify
from cooc.verification.words import signatures
from cooc.verified_duplicates import is_copy
from cooc.verified_search import Features

__all__ = ["mine_pairs"]

NEAREST = SHARING = 20  # candidates of a picture: by their vectors, and by the visual words that both have


def mine_pairs(
    search: ImageSearch,
    *,
    most: int = 20_000,
    held_out: float = 0.2,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Photos:
    """Pictures of an index with the pairs that are proven; of a large one, of `most` pictures and what they match."""
    if not search.meta.features:
        raise InputError(
            f"The index {search.index_name} keeps no local features to prove pairs by. Add them: "
            "cooc index FOLDER --verify sift"
        )
    ids = sorted(record.id for record in search.store.records())
    chosen = [ids[i] for i in sorted(np.random.default_rng(seed).permutation(len(ids))[:most].tolist())]
    gpu = None if resolve_device(device).type == "cpu" else device
    groups, matches, seen = Groups(), dict[str, set[str]](), dict[str, set[str]]()
    for done, (name, own, others) in enumerate(_candidates(search, chosen), 1):
        new = [other for other in others if name not in seen.get(other, ())]
        seen[name] = set(new)
        agreements = verify(own, _features(search.store, new), device=gpu) if own and new else []
        for other, agreement in zip(new, agreements, strict=False):
            if same_thing(agreement) < PROVEN:
                continue
            groups.join(name, other)
            if not is_copy(agreement):
                matches.setdefault(name, set()).add(other)
                matches.setdefault(other, set()).add(name)
        progress(done, len(chosen))
    found = [record for record in search.store.get(sorted({*chosen, *groups.parent})) if record is not None]
    place = {record.id: i for i, record in enumerate(found)}
    items = [Item(i, search.collection.picture(record.entry)) for i, record in enumerate(found)]
    clusters = np.unique([groups.top(record.id) for record in found], return_inverse=True)[1].astype(np.int64)
    kept = {place[q]: sorted(place[p] for p in m if p in place) for q, m in matches.items() if q in place}
    positives = {q: np.array(kept[q], np.int64) for q in sorted(kept) if kept[q]}
    if not positives:
        raise InputError(f"No two pictures of {search.index_name} are proven to show the same thing: none can teach.")
    photos = Photos(search.index_name, items, clusters, positives, np.zeros(len(items), bool))
    return hold_out(photos, held_out, seed)


def _candidates(search: ImageSearch, ids: Sequence[str]) -> Iterator[tuple[str, Features, list[str]]]:
    """Each picture with its local features, and those that may show the same."""
    words = search.words
    for block in blocks(ids, BLOCK):
        there, vectors = still_there(search.store, list(block))
        near = search.store.search(vectors, NEAREST + 1).ids if there else []
        for name, own, found in zip(there, _features(search.store, there), near, strict=True):
            sharing = words.search(signatures([own])[0], SHARING + 1) if words is not None else []
            yield name, own, [other for other in dict.fromkeys([*found, *sharing]) if other != name]


def _features(store: Store, ids: Sequence[str]) -> list[Features]:
    """Nothing of a picture that has none yet."""
    return [unpack(code) if code is not None else () for code in store.features(ids)]
