"""Copies that geometry proves: re-saved, smaller, cropped, framed or turned, and mirrored ones.

    for group in find_copies(store, mirrored=lambda id: ...):
        print([record.path for record in group])

Vectors name the candidates, local features decide. Two pictures are copies if a similarity (one turn, one size) takes
the one to the other to within a pixel or so, over all of what both could show, and if nearly all matches agree with it.
The last is what tells a copy from a photo that somebody else has taken from the same place. Measured on 270 copies of
30 photos of gldv2_dev (cropped, smaller, framed, turned, darker, re-saved; one crop agrees in nothing)
and 1126 pairs of views of one landmark, features not yet coded:

|                                             | copies       | other views                                    |
|---------------------------------------------|--------------|------------------------------------------------|
| matches that agree                          | 70 % or more | median 41 % of the 28 that pass the next two   |
| stretch of one place against another        | to 1.01      | 1.00 (from one place) to any                   |
| median error, pixels at 1024                | to 0.97      | 0.4 (from one place) to 5                      |
| inliers (the fewest: a quarter of the size) | from 21      | up to 700                                      |

With features as an index keeps them, 176 of 180 copies of 20 photos of that set pass; three of the four that fail
are copies of a quarter of the size. Some photos of one series, taken from one place, count as copies, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import cv2
import numpy as np

from cooc.index.inverted import Inverted
from cooc.index.records import Filter, Record
from cooc.index.shortlist import NEAR_DUPLICATE, Groups, neighbours
from cooc.index.store import Store
from cooc.verification.agreement import Agreement
from cooc.verification.features import LocalFeatures, unpack
from cooc.verification.transforms import local_maps, project
from cooc.verification.verifier import verify
from cooc.verification.words import signatures

NEAREST, LEAST = 20, 0.15  # candidates by their vectors; cosines of copies: half-size 0.38 or more, turned 0 to 0.55
SHARING = 5  # candidates by their visual words, which do not change when a picture is turned
INLIERS = 15
AGREE = 0.68  # of the matches
STRETCH = 1.02
ERROR = 1.2 / 1024  # of the longer side
OVERLAP = 0.9  # of the smaller picture that the larger one shows
REGION = 0.15  # of that, where the inliers lie; the sky of a photo has none
FEW = 30  # features, below which geometry cannot tell: then similarity decides,
FLAT = 0.95  # and must be this high, for pictures with nothing in them are all similar


def find_copies(
    store: Store,
    threshold: float | None = None,
    where: Filter | None = None,
    *,
    words: Inverted | None = None,
    mirrored: Callable[[str], Sequence[LocalFeatures]] | None = None,
    device: str | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Iterator[list[Record]]:
    """Groups of copies, each in the order of its paths. `threshold`: the least similarity of two; by default 0.15.

    Each picture is compared with its 20 nearest at most, and, unless a similarity is demanded, with the 5 that share
    most visual words with it, however they are turned.

    `mirrored(id)` gives the local features of a picture's mirror image, empty where its file cannot be read: for
    those that are very similar and yet agree in nothing. `progress(count)` is told how many pictures were compared.
    """
    groups = Groups()
    least = LEAST if threshold is None else threshold
    alike, same = max(least, NEAR_DUPLICATE), max(least, FLAT)
    sharing = words if threshold is None else None
    chosen = None if where is None else {record.id for record in store.records(where)}
    for count, (name, found) in enumerate(neighbours(store, math.inf, where, nearest=NEAREST, least=least)):
        progress(count)
        (code,) = store.features([name])
        own = unpack(code) if code else ()
        scores = dict(found)
        for other in sharing.search(signatures([own])[0], SHARING + 1) if sharing is not None and own else ():
            if other != name and (chosen is None or other in chosen):
                scores.setdefault(other, 0.0)
        others = [(other, score) for other, score in scores.items() if not groups.joined(name, other)]
        if not others:
            continue
        pictures = [unpack(code) if code else () for code in store.features([other for other, _ in others])]
        clear = [min(_most(own), _most(picture)) >= FEW for picture in pictures]
        agreements = verify(own, pictures, device=device) if any(clear) else [None] * len(others)
        left = []
        for (other, score), told, agreement, picture in zip(others, clear, agreements, pictures, strict=True):
            if (agreement is not None and is_copy(agreement)) or (score >= same and not told):
                groups.join(name, other)
            elif score >= alike and told:
                left.append((other, picture))
        turned = mirrored(name) if left and mirrored is not None else ()
        if turned:
            for (other, _), agreement in zip(left, verify(turned, [p for _, p in left], device=device), strict=True):
                if is_copy(agreement):
                    groups.join(name, other)
    return groups.records(store)


def is_copy(agreement: Agreement) -> bool:
    """Do two pictures agree nearly everywhere, as a picture and its smaller, cropped or turned copy do?"""
    if agreement.inliers < max(INLIERS, AGREE * agreement.tentative):
        return False
    (width, height), (wide, high) = agreement.query_size, agreement.picture_size
    corners = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    stretch = np.linalg.svd(local_maps(agreement.transform, corners), compute_uv=False)
    if not stretch.max() <= STRETCH * stretch.min():
        return False
    place = project(agreement.transform, agreement.query_points)
    error = np.median(np.linalg.norm(place - agreement.picture_points, axis=1))
    if error > ERROR * max(wide, high):
        return False
    frame = project(agreement.transform, corners)
    shared, _ = cv2.intersectConvexConvex(frame, np.array([(0, 0), (wide, 0), (wide, high), (0, high)], np.float32))
    smaller = min(float(cv2.contourArea(frame)), float(wide * high))
    region = float(cv2.contourArea(agreement.picture_region))
    return bool(shared >= OVERLAP * smaller and region >= REGION * shared)


def _most(features: Sequence[LocalFeatures]) -> int:
    return max(map(len, features), default=0)
