"""A query matched with many pictures at once, by torch on a GPU. It imports torch: a search on a CPU needs none.

    matches = match_on_device(query, pictures, "cuda", screened=True)     # for each picture; None: not worth a look

All features are compared, and the vote of `screening.is_promising` is the first look, both before anything comes back.
What a code has of a picture goes to the GPU as it is and is decoded there. `geometry_on_device.py` goes on from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cooc.verification.engines import ENGINES
from cooc.verification.features import OCTAVE, SMALLEST, STEPS, Coded, LocalFeatures
from cooc.verification.matching import NONE, SAME, Matches, rule_of
from cooc.verification.screening import ENOUGH, LOOSE, MOST
from cooc.verification.words import ENGINE

BATCH = 1 << 29  # similarities at a time: two gigabytes, which a hundred pictures need


class Placed(NamedTuple):
    """Features on a device. Of B pictures, padded to the length of the longest, each tensor begins with (B, N)."""

    rows: Tensor  # (..., D) unit vectors
    places: Tensor  # (...) complex: x + iy
    growths: Tensor  # (...) log2 of the scales
    angles: Tensor  # (...) degrees


class Compared(NamedTuple):
    """A query and some of the pictures, with their matches: the first `taken` of (B, M), the most certain first."""

    numbers: list[int]  # which of the pictures: B
    query: Placed
    pictures: Placed
    counts: Tensor  # (B,): features of each
    mine: Tensor  # (B, M): of the query,
    other: Tensor  # (B, M): and of the picture
    taken: Tensor  # (B,)

    def take(self, which: list[int]) -> Compared:
        """Some of the pictures."""
        pictures = Placed(*(part[which] for part in self.pictures))
        rest = (part[which] for part in (self.counts, self.mine, self.other, self.taken))
        return Compared([self.numbers[n] for n in which], self.query, pictures, *rest)


def match_on_device(
    query: LocalFeatures,
    pictures: Sequence[LocalFeatures],
    device: str | torch.device,
    *,
    ratio: float | None = None,
    similarity: float | None = None,
    screened: bool = False,
) -> list[Matches | None]:
    """`match` with each of many pictures. `screened`: None instead of matches where `is_promising` says no."""
    rule = rule_of(query, ratio, similarity)
    found: list[Matches | None] = [None if screened else NONE for _ in pictures]
    for block in compare(query, pictures, device, rule, [screened] * len(pictures)):
        here, there, counts = (part.cpu().numpy() for part in (block.mine, block.other, block.taken))
        for number, mine, other, count in zip(block.numbers, here, there, counts, strict=True):
            found[number] = Matches(mine[:count], other[:count])
    return found


def compare(
    query: LocalFeatures,
    pictures: Sequence[LocalFeatures],
    device: str | torch.device,
    rule: tuple[float | None, float | None],
    screened: Sequence[bool],
) -> Iterator[Compared]:
    """Pictures that have features, without those that are `screened` and not promising; as many as memory allows."""
    full = [n for n, picture in enumerate(pictures) if len(picture)]
    if not len(query) or not full:
        return
    own = _placed([query], torch.device(device))
    longest = max(len(pictures[n]) for n in full)
    step = max(1, BATCH // (len(query) * longest))
    for numbers in (full[start : start + step] for start in range(0, len(full), step)):
        some = [pictures[n] for n in numbers]
        counts = torch.tensor([len(p) for p in some]).to(device)
        starts = torch.cumsum(counts, 0) - counts
        inside = torch.arange(longest, device=device)
        flat = _placed(some, torch.device(device))
        others = Placed(*(part[(starts[:, None] + inside).clamp_max(len(part) - 1)] for part in flat))
        mine, other, taken = _matched(own.rows, others.rows, counts, *rule)
        if any(screened[n] for n in numbers):
            size = torch.tensor([max(p.size) for p in some]).to(device)
            promising = _promising(own, others, mine[:, :MOST], other[:, :MOST], taken, size).tolist()
        else:
            promising = [True] * len(some)
        good = [n for n, number in enumerate(numbers) if promising[n] or not screened[number]]
        if good:
            block = Compared(numbers, own, others, counts, mine, other, taken).take(good)
            most = int(block.taken.amax())
            yield block._replace(mine=block.mine[:, :most], other=block.other[:, :most])


def _placed(pictures: Sequence[LocalFeatures], device: torch.device) -> Placed:
    """All features of the pictures, one behind the other."""
    if all(isinstance(p, Coded) and p.bits == 4 for p in pictures):
        return _decoded([p for p in pictures if isinstance(p, Coded)], device)
    descriptors, points, scales, angles = (
        torch.from_numpy(np.concatenate([getattr(p, name) for p in pictures])).to(device)
        for name in ("descriptors", "points", "scales", "angles")
    )
    return Placed(_units(descriptors), torch.complex(*points.unbind(1)), scales.log2(), angles)


def _decoded(pictures: Sequence[Coded], device: torch.device) -> Placed:
    """All that the codes have goes to the device at once: copies one by one would each be waited for."""
    counts = [len(p) for p in pictures]
    total, dim = sum(counts), pictures[0].dim
    parts = [[p.places[: 4 * n] for p, n in zip(pictures, counts, strict=True)]]  # x and y, two bytes each
    parts += [[p.places[k * n : (k + 1) * n] for p, n in zip(pictures, counts, strict=True)] for k in (4, 5)]
    parts += [[p.codes.reshape(-1) for p in pictures]]
    whole = torch.from_numpy(np.concatenate([array for part in parts for array in part])).to(device)
    places, growth, angle, codes = torch.split(whole, [4 * total, total, total, len(whole) - 6 * total])
    codes = codes.view(total, -1)
    rows = torch.stack([codes >> 4, codes & 15], 2).flatten(1)[:, :dim] * 17
    low, high = places.view(-1, 2, 2).float().unbind(2)
    size = torch.tensor([p.size for p in pictures], dtype=torch.float32).to(device)
    x, y = ((low + 256 * high) * (size / STEPS).repeat_interleave(torch.tensor(counts).to(device), 0)).unbind(1)
    return Placed(_units(rows), torch.complex(x, y), growth / OCTAVE + SMALLEST, angle * (360 / 256))


def _units(codes: Tensor) -> Tensor:
    return F.normalize(codes.float() - 127.5, dim=-1)


def _matched(
    query: Tensor, others: Tensor, counts: Tensor, ratio: float | None, similarity: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, Q) of the query's features, (B, Q) of each one's partner, the most certain first; how many (B,) count."""
    scores = query @ others.mT  # (B, Q, N)
    empty = torch.arange(others.shape[1], device=query.device) >= counts[:, None]
    scores.masked_fill_(empty[:, None], -2)
    best, partner = scores.max(2)  # (B, Q) each
    good = scores.argmax(1).gather(1, partner) == torch.arange(len(query), device=query.device)
    certain = best
    if similarity is not None:
        good &= best > similarity
    if ratio is not None:
        second = scores.scatter_(2, partner[:, :, None], -2).amax(2)
        certain = -(1 - best).clamp_min(SAME) / (1 - second).clamp_min(SAME)
        good &= (certain > -(ratio**2)) & (counts >= 2)[:, None]
    good &= (counts > 0)[:, None]
    order = certain.masked_fill(~good, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    return order, partner.gather(1, order), good.sum(1)


def _promising(query: Placed, others: Placed, mine: Tensor, other: Tensor, taken: Tensor, size: Tensor) -> Tensor:
    """(B,): `screening.is_promising` of the first matches."""
    growth = others.growths.gather(1, other) - query.growths[mine]
    turn = others.angles.gather(1, other) - query.angles[mine]
    here, there = query.places[mine], others.places.gather(1, other)
    counts = torch.arange(mine.shape[1], device=mine.device) < taken[:, None]
    alike = (growth[:, :, None] - growth[:, None]).abs() <= ENGINES[ENGINE].octaves
    alike &= ((turn[:, :, None] - turn[:, None] + 180) % 360 - 180).abs() <= ENGINES[ENGINE].turn
    way = torch.polar(2**growth, turn.deg2rad())[:, :, None] * (here[:, None] - here[:, :, None])
    off = (there[:, :, None] + way - there[:, None]).abs()
    alike &= off <= 2 * ENGINES[ENGINE].tolerance * size[:, None, None] + LOOSE * way.abs()
    alike &= counts[:, :, None] & counts[:, None]
    return alike.sum(2).amax(1) >= ENOUGH
