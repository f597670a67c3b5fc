"""A teacher: better and slower recipes, whose similarities a network learns to give by its own vectors.

    teacher = teach(photos.items, ["learned-linear+ms", "resnet-tuned+ms"], device="cuda")      # (N, D)

Labels say of a photo which few are right. A teacher says of each photo how much it is like each other, and so of photos
that have no label; several recipes, each at several scales, see more together than any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cooc.descriptor import Descriptor
from cooc.errors import CoocError
from cooc.pictures.batches import Item


def teach(
    items: Sequence[Item],
    recipes: Sequence[str],
    *,
    device: str | torch.device,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Vectors of the pictures, whose products are the mean of the recipes' cosines; of one that has none, zeros."""
    numbered = [Item(number, item.picture, item.box) for number, item in enumerate(items)]
    parts = []
    for turn, recipe in enumerate(recipes):
        describe = Descriptor.from_pretrained(recipe, device=device)
        rows = np.zeros((len(items), describe.dim), np.float32)
        for done, (item, found) in enumerate(describe.stream(numbered, workers=workers)):
            if not isinstance(found, CoocError):
                rows[item.key] = found
            progress(turn * len(items) + done + 1, len(recipes) * len(items))
        parts.append(torch.from_numpy(rows))
    whole: Tensor = torch.cat(parts, 1).to(device) / len(recipes) ** 0.5
    return whole
