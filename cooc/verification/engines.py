"""The engines in one table, and local features of a picture by one of them or by several at once.

    extract("sift", pixels)                              # (LocalFeatures,)
    extract("sift+xfeat", pixels)                        # (LocalFeatures, LocalFeatures)
    extract("sift", pixels, size=(4000, 3000))           # pixels are the picture, decoded smaller
    extract("sift", crop, size=(4000, 3000), box=box)    # pixels are what the box shows
    extract("xfeat", pixels, turns=4)                    # a query seen in four turns, for an engine that knows none

| engine      | turned by any angle                             | mirrored | weights     | best at                     |
|-------------|-------------------------------------------------|----------|-------------|-----------------------------|
| sift        | yes                                             | no       | none        | prints, covers, buildings   |
| xfeat       | to about 30 degrees; with `turns=4` any quarter | no       | xfeat       | places in other light       |
| activations | to about 30 degrees; with `turns=4` any quarter | no       | vgg16-caffe | proves less than the others |

docs/verification.md says which others were looked at and why they are not here.
"""

from __future__ import annotations

from itertools import product

import cv2
import numpy as np

from cooc.errors import BoxError, InputError, UnknownNameError
from cooc.pictures.decode import scale_of
from cooc.verification.engine import Detected, Engine, Pixels
from cooc.verification.features import LocalFeatures
from cooc.verification.sift import detect_sift

Box = tuple[float, float, float, float]

LONGEST = 1024  # pixels of the longer side, at which features are looked for
KEPT = 1500  # features of a picture that an index keeps
QUERY = 2000  # of a query, which keeps nothing: among clutter the thing has its share of them
ENLARGED = 2.0  # a crop smaller than LONGEST is enlarged so far
SMALL, LARGER = 384, 512  # a query with fewer pixels than the first along its longer side is seen at the second, too


def _detect_xfeat(pixels: Pixels, limit: int, device: str) -> Detected:
    from cooc.activations import resolve_device  # needs torch: a process that decodes and makes SIFT does without
    from cooc.verification.xfeat import detect_xfeat

    return detect_xfeat(pixels, limit, str(resolve_device(device)))


def _detect_activations(pixels: Pixels, limit: int, device: str) -> Detected:
    from cooc.activations import resolve_device
    from cooc.verification.activations import detect_activations

    return detect_activations(pixels, limit, str(resolve_device(device)))


ENGINES: dict[str, Engine] = {
    "sift": Engine(
        detect_sift,
        source="OpenCV (Lowe 2004; RootSIFT: Arandjelovic and Zisserman 2012)",
        licence="Apache-2.0; the patent ended in 2020",
        rotation=True,
        scale=True,
        weights=None,
        dim=64,
        turn=35,
        octaves=0.8,
        ratio=0.9,
        weight=2,
    ),
    "xfeat": Engine(
        _detect_xfeat,
        source="Potje et al., CVPR 2024; network written here, weights of its authors",
        licence="Apache-2.0",
        rotation=False,
        scale=False,
        weights="xfeat",
        dim=64,
        turn=60,
        octaves=2,
        similarity=0.82,
        weight=0.3,  # 27 agree by chance as often as 4 of SIFT, whose sizes and directions must agree as well
    ),
    "activations": Engine(
        _detect_activations,
        source="VGG16's conv5_3 (Simonyan and Zisserman 2015), the network of the paper's recipes",
        licence="CC BY 4.0",
        rotation=False,
        scale=False,
        weights="vgg16-caffe",
        dim=64,
        turn=45,
        octaves=1.1,
        similarity=0.6,
        weight=0.7,  # of wrong pairs 1 in 1000 has 8 at 512 pixels, 12 at 800; of SIFT 4
        tolerance=0.025,  # a position stands for 16 pixels, or more
    ),
}


def parts(name: str) -> tuple[str, ...]:
    """The engines that a name means: "sift+xfeat" -> ("sift", "xfeat")."""
    names = tuple(name.split("+"))
    for part in names:
        if part not in ENGINES:
            raise UnknownNameError("verification engine", part, ENGINES)
    if len(set(names)) < len(names):
        raise InputError(f"{name!r} names an engine twice.")
    return names


def extract(
    name: str,
    pixels: Pixels,
    *,
    size: tuple[int, int] | None = None,
    box: Box | None = None,
    limit: int = KEPT,
    longest: int = LONGEST,
    turns: int = 1,
    enlarge: bool = False,
    device: str = "cpu",
) -> tuple[LocalFeatures, ...]:
    """Local features by each engine of `name`, at most `limit` by each, in pixels of the full-size picture.

    `size` is (width, height) of that picture; without it, `pixels` are the picture at its size. With `box` (x0, y0, x1,
    y1, in full-size pixels) `pixels` show only that part. Pixels beyond `longest` are made smaller first; those of a
    box smaller than that are enlarged, up to twice, for engines that know size; the others see the part as large as it
    is in the picture at `longest`. `turns=4` adds, for engines that know no rotation, the features of the pixels turned
    by 90, 180 and 270 degrees; `enlarge` adds those of a `SMALL` picture that is made larger. Both are for queries,
    never for what is kept.
    """
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or 0 in pixels.shape:
        raise InputError(f"Pixels must be uint8 RGB (H, W, 3), not {pixels.dtype} {pixels.shape}.")
    if limit < 1 or longest < 1 or turns not in (1, 4):
        raise InputError(f"limit {limit}, longest {longest}, turns {turns}: at least 1 the first two, 1 or 4 the last.")
    width, height = size or (pixels.shape[1], pixels.shape[0])
    shown = box or (0.0, 0.0, float(width), float(height))
    if not (0 <= shown[0] < shown[2] <= width and 0 <= shown[1] < shown[3] <= height):
        raise BoxError(f"Box {shown} is empty or outside a picture of {width} x {height} pixels.")
    side = max(width, height)
    wholes = [scale_of(side, longest, least) for least in (0, LARGER)[: 2 if enlarge and side < SMALL else 1]]
    found = []
    for part, whole in product(parts(name), wholes):  # the whole picture would be scaled so
        engine = ENGINES[part]
        if engine.scale:
            factor = min(longest / max(pixels.shape[:2]), max(whole, ENLARGED if box else 1.0))
        else:  # things must be as large as in an indexed picture
            factor = whole * (shown[2] - shown[0]) / pixels.shape[1]
        seen = _resized(pixels, factor, cv2.INTER_CUBIC if whole > 1 else cv2.INTER_LINEAR)
        for turn in range(1 if engine.rotation else turns):
            turned = np.rot90(seen, turn)
            detected = engine.detect(turned, limit, device)
            found.append(_place(part, detected, turn, (seen.shape[1], seen.shape[0]), shown, (width, height)))
    return tuple(found)


def _resized(pixels: Pixels, factor: float, larger: int) -> Pixels:
    height, width = pixels.shape[:2]
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    if size == (width, height):
        return pixels
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if factor < 1 else larger), np.uint8)


def _place(
    name: str, found: Detected, turn: int, seen: tuple[int, int], shown: Box, size: tuple[int, int]
) -> LocalFeatures:
    """From the pixels that the engine saw, turned by quarters against the clock, to those of the full-size picture."""
    points, (width, height) = found.points, seen
    x, y = points[:, 0], points[:, 1]
    if turn == 1:
        x, y = width - 1 - y, x
    elif turn == 2:
        x, y = width - 1 - x, height - 1 - y
    elif turn == 3:
        x, y = y, height - 1 - x
    across, down = (shown[2] - shown[0]) / width, (shown[3] - shown[1]) / height
    full = np.stack([(x + 0.5) * across - 0.5 + shown[0], (y + 0.5) * down - 0.5 + shown[1]], 1)
    return LocalFeatures(
        points=full.astype(np.float32),
        scales=(found.scales * np.sqrt(across * down)).astype(np.float32),
        angles=((found.angles + 90 * turn) % 360).astype(np.float32),
        descriptors=found.descriptors,
        width=size[0],
        height=size[1],
        engine=name,
    )
