"""`geometry.agree` of a query with many pictures at once, by torch on a GPU: each step for all of them together.

    agreements = agree_on_device(query, pictures, "cuda", pool, screened)      # one for each picture

OpenCV estimates the transforms, in threads. What follows (inliers, plausibility, support, counts in cells) are many
small steps: a picture at a time they cost a few milliseconds of Python each, and all of them no more than that here.
G pictures with N features each, Q features of the query, M matches. Transforms are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import product

import numpy as np
import torch
from torch import Tensor

from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.engine import Engine
from cooc.verification.engines import ENGINES
from cooc.verification.features import LocalFeatures
from cooc.verification.geometry import ESTIMATES, FEWEST, LARGEST, NARROWEST, SPOTS, hull
from cooc.verification.matching import rule_of
from cooc.verification.on_device import Compared, compare
from cooc.verification.support import GRID, INSIDE, density, filling
from cooc.verification.transforms import TINY, Matrix


def agree_on_device(
    query: LocalFeatures,
    pictures: Sequence[LocalFeatures],
    device: str | torch.device,
    pool: Executor,
    screened: Sequence[bool],
) -> list[Agreement]:
    """`agree` with each of many pictures; in nothing with those that are to be `screened` and are not promising."""
    found = [no_agreement(query, picture) for picture in pictures]
    for block in compare(query, pictures, device, rule_of(query, None, None), screened):
        for number, agreement in _agreements(query, pictures, block, pool):
            found[number] = agreement
    return found


def _agreements(
    query: LocalFeatures, pictures: Sequence[LocalFeatures], block: Compared, pool: Executor
) -> list[tuple[int, Agreement]]:
    """Of the pictures that agree with the query in anything."""
    engine = ENGINES[query.engine]
    sizes = torch.tensor([pictures[n].size for n in block.numbers], dtype=torch.float64).to(block.taken.device)
    here = _coordinates(block.query.places)[block.mine]  # (G, M, 2)
    there = _coordinates(block.pictures.places.gather(1, block.other))  # (G, M, 2)
    transforms = _estimated(here, there, block.taken, engine.tolerance * sizes.amax(1), pool)  # (2, G, 3, 3)
    inliers = _inliers(block, here, there, transforms, sizes, query.size, engine)  # (2, G, M)
    inliers &= _plausible(here, there, transforms, inliers, sizes, query.size, engine)[..., None]
    number = inliers.sum(2)
    number *= number >= FEWEST
    good = torch.nonzero(number.amax(0)).flatten().tolist()
    if not good:
        return []
    model = (number[1] > number[0]).long()[good]  # the homography only where it has more
    row = torch.tensor(good).to(model.device)
    block, sizes, transform, kept = block.take(good), sizes[good], transforms[model, row], inliers[model, row]
    supported, filled, cells = (part.cpu().numpy() for part in _support(block, transform, sizes, query.size, engine))
    evidence = filling(supported.sum(1), *filled)
    fields = (transform, kept, here[good].float(), there[good].float(), block.pictures.places, block.taken)
    arrays = [part.cpu().numpy() for part in fields]
    agreements = []
    for n, at, proof, matrix, among, mine, other, places, tentative, *of_cells in zip(
        block.numbers, supported, evidence.tolist(), *arrays, *cells, strict=True
    ):
        mine, other, alike = mine[among], other[among], places[at].view(np.float32).reshape(-1, 2)
        agreement = Agreement(
            engine=query.engine,
            inliers=len(mine),
            strength=engine.weight * len(mine),
            tentative=int(tentative),
            support=len(alike),
            evidence=proof,
            inside=density(alike, *of_cells) if len(alike) else 0.0,
            transform=matrix,
            query_points=mine,
            picture_points=other,
            query_region=hull(mine),
            picture_region=hull(other),
            query_size=query.size,
            picture_size=pictures[n].size,
        )
        agreements.append((n, agreement))
    return agreements


def _coordinates(places: Tensor) -> Tensor:
    return torch.view_as_real(places).double()


def _estimated(here: Tensor, there: Tensor, taken: Tensor, near: Tensor, pool: Executor) -> Tensor:
    """(2, G, 3, 3): an affine map and a homography for each; NaN where there is none."""
    mine, other = here.float().cpu().numpy(), there.float().cpu().numpy()
    counts, tolerances = taken.tolist(), near.tolist()

    def estimated(work: tuple[Callable[..., Matrix | None], int]) -> Matrix:
        estimate, n = work
        found = estimate(mine[n, : counts[n]], other[n, : counts[n]], tolerances[n])
        return np.full((3, 3), np.nan) if found is None else found

    found = list(pool.map(estimated, product(ESTIMATES, range(len(mine)))))
    return torch.from_numpy(np.array(found)).view(len(ESTIMATES), -1, 3, 3).to(here.device)


def _mapped(transforms: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Where (..., 3, 3) take points (..., N, 2), and their Jacobians there (..., N, 2, 2)."""
    whole = points @ transforms[..., :2].mT + transforms[..., None, :, 2]
    depth = torch.where(whole[..., 2:].abs() < TINY, TINY, whole[..., 2:])
    to = whole[..., :2] / depth
    maps = transforms[..., None, :2, :2] - to[..., None] * transforms[..., None, 2:, :2]
    return to, maps / depth[..., None]


def _areas(maps: Tensor) -> Tensor:
    return maps[..., 0, 0] * maps[..., 1, 1] - maps[..., 0, 1] * maps[..., 1, 0]


def _moved(transforms: Tensor, points: Tensor, growths: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places, log2 of sizes and angles of features as transforms show them. One that is mirrored has no size (NaN)."""
    to, maps = _mapped(transforms, points)
    radians = angles.double().deg2rad()
    right, down = (maps @ torch.stack([radians.cos(), radians.sin()], -1)[..., None])[..., 0].unbind(-1)
    return to, growths + 0.5 * _areas(maps).log2(), torch.atan2(down, right).rad2deg()


def _alike(growth: Tensor, turn: Tensor, engine: Engine) -> Tensor:
    """Whether features whose log2 of sizes and whose angles differ by so much may be the same."""
    return (growth.abs() <= engine.octaves) & (((turn + 180) % 360 - 180).abs() <= engine.turn)


def _inliers(
    block: Compared,
    here: Tensor,
    there: Tensor,
    transforms: Tensor,
    sizes: Tensor,
    size: tuple[int, int],
    engine: Engine,
) -> Tensor:
    """(2, G, M): matches that agree in place, size and direction; of several that share a spot, the first."""
    query, pictures = block.query, block.pictures
    to, growth, angle = _moved(transforms, here, query.growths[block.mine], query.angles[block.mine])
    good: Tensor = torch.linalg.vector_norm(to - there, dim=-1) <= engine.tolerance * sizes.amax(1)[:, None]
    growth, angle = growth - pictures.growths.gather(1, block.other), angle - pictures.angles.gather(1, block.other)
    good &= _alike(growth, angle, engine)
    order = torch.arange(here.shape[1], device=here.device)
    good &= order < block.taken[:, None]
    for points, longest in ((here, max(size)), (there, sizes.amax(1)[:, None, None])):
        across, down = (points / longest * SPOTS).round().long().unbind(-1)
        spot = across << 32 | down  # (G, M)
        again = (spot[:, :, None] == spot[:, None]) & (order < order[:, None])  # of an earlier one
        good = good & ~(again & good[:, :, None]).any(-1)
    return good


def _plausible(
    here: Tensor,
    there: Tensor,
    transforms: Tensor,
    inliers: Tensor,
    sizes: Tensor,
    size: tuple[int, int],
    engine: Engine,
) -> Tensor:
    """(2, G): `geometry.plausible` of the transforms and their inliers."""
    maps = _mapped(transforms, here)[1]
    area, half = _areas(maps), maps.square().sum((-1, -2)) / 2
    most = (half + (half.square() - area.square()).clamp_min(0).sqrt()).sqrt()  # as `transforms.stretches`
    least = area.abs() / most.clamp_min(torch.finfo(most.dtype).tiny)
    growth = (most * least).sqrt() * max(size) / sizes.amax(1)[:, None]
    good = (area > 0) & (most <= NARROWEST * least) & (growth <= LARGEST) & (growth >= 1 / LARGEST)
    sound: Tensor = (good | ~inliers).all(-1)
    count = inliers.sum(-1).clamp_min(1)[..., None]
    for points, longest in ((here, max(size)), (there, sizes.amax(1))):
        inner = torch.where(inliers[..., None], points, 0)
        inner = torch.where(inliers[..., None], inner - inner.sum(-2, keepdim=True) / count[..., None], 0)
        spread = inner.mT @ inner / count[..., None]  # (2, G, 2, 2)
        middle, lean = (spread[..., 0, 0] + spread[..., 1, 1]) / 2, (spread[..., 0, 0] - spread[..., 1, 1]) / 2
        narrow = middle - (lean.square() + spread[..., 0, 1].square()).sqrt()  # along the shorter axis
        sound &= narrow.clamp_min(0).sqrt() >= engine.tolerance * longest
    return sound


def _support(
    block: Compared, transform: Tensor, sizes: Tensor, size: tuple[int, int], engine: Engine
) -> tuple[Tensor, Tensor, Tensor]:
    """(G, N): the pictures' features at whose place the query looks alike; and for `filling` and for `density` how
    many of these, of the query's features and of the picture's lie in each cell: (3, G, cells) each.
    """
    query, pictures = block.query, block.pictures
    to, growth, angle = _moved(transform, _coordinates(query.places), query.growths, query.angles)
    to, other = to.float(), torch.view_as_real(pictures.places)  # (G, Q, 2), (G, N, 2)
    apart = sum((to[:, :, None, n] - other[:, None, :, n]).square() for n in (0, 1))  # (G, Q, N); cdist is far slower
    pair, mine, its = (apart <= (engine.tolerance * sizes.amax(1)[:, None, None]).square()).nonzero(as_tuple=True)
    growth, angle = growth[pair, mine] - pictures.growths[pair, its], angle[pair, mine] - pictures.angles[pair, its]
    good = _alike(growth, angle, engine)
    pair, mine, its = pair[good], mine[good], its[good]
    good = (query.rows[mine] * pictures.rows[pair, its]).sum(1) > engine.alike
    real = torch.arange(other.shape[1], device=other.device) < block.counts[:, None]  # (G, N)
    supported = torch.zeros_like(real)
    supported[pair[good], its[good]] = True
    supported &= real
    corner = torch.zeros_like(sizes)
    shown = _between(to, corner, sizes)
    back = _mapped(torch.linalg.inv(transform), other.double())[0].float()
    seen = real & _between(back, corner, corner + torch.tensor(size).to(sizes))
    low = torch.maximum(_extreme(to, shown, -1), _extreme(other, seen, -1))
    high = torch.minimum(_extreme(to, shown, 1), _extreme(other, seen, 1))
    filled = _counts([(other, supported), (to, shown), (other, seen)], low, high, GRID)
    low, high = _extreme(other, supported, -1), _extreme(other, supported, 1)
    every = torch.ones_like(shown)
    dense = _counts([(other, supported), (to, every), (other, real)], low, high, INSIDE)
    return supported, filled, dense


def _between(points: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return ((points >= low[:, None]) & (points <= high[:, None])).all(-1)


def _extreme(points: Tensor, among: Tensor, sign: int) -> Tensor:
    """(G, 2): the least (-1) or the largest (1) coordinates; where there are none, infinite ones of the other sign."""
    return sign * torch.where(among[..., None], sign * points, -torch.inf).amax(1)


def _counts(parts: Sequence[tuple[Tensor, Tensor]], low: Tensor, high: Tensor, cells: int) -> Tensor:
    """(parts, G, cells x cells): of points (G, N, 2) and which of them (G, N), each part as `support._count`."""
    points = torch.cat([part for part, _ in parts], 1)
    inner = torch.cat([among for _, among in parts], 1) & _between(points, low, high)
    cell = (points - low[:, None]) * cells / (high - low).clamp_min(1e-6)[:, None]
    column, row = cell.nan_to_num(0).clamp(0, cells - 1).long().unbind(-1)
    which = [torch.full(part.shape[1:2], n, device=points.device) for n, (part, _) in enumerate(parts)]
    place = (torch.cat(which) * cells + column) * cells + row
    found = torch.zeros(len(points), len(parts) * cells * cells, dtype=torch.float64, device=points.device)
    return found.scatter_add_(1, place, inner.double()).view(len(points), len(parts), -1).transpose(0, 1)
