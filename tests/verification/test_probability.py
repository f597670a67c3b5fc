from __future__ import annotations

import dataclasses
import json

import cv2
import numpy as np
import pytest

from cooc.errors import InputError
from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.engines import ENGINES, extract
from cooc.verification.probability import FILE, PROVEN, load_calibration, same_thing
from cooc.verification.verifier import verify
from tests.verification.pictures import photo, turned, warp


def some_agreement(engine: str, points: int, inside: float) -> Agreement:
    (features,) = extract("sift", photo("cat"), limit=5)
    seen = {"inliers": points, "evidence": float(points), "inside": inside}
    return dataclasses.replace(no_agreement(features), engine=engine, **seen)


def test_every_engine_has_a_calibration_and_an_unknown_one_is_named() -> None:
    assert set(json.loads(FILE.read_text())["engines"]) == set(ENGINES)
    with pytest.raises(InputError, match="surf"):
        load_calibration("surf")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_probability_grows_with_points_and_with_what_lies_between(engine: str) -> None:
    by_points = [same_thing(some_agreement(engine, n, 1.0)) for n in (0, 4, 8, 16, 64, 500)]
    assert by_points[0] == 0
    assert (np.diff(by_points) > 0).all()
    assert by_points[-1] > 0.95
    by_inside = [same_thing(some_agreement(engine, 30, s)) for s in (0.0, 0.05, 0.2, 1.0)]
    assert (np.diff(by_inside) >= 0).all()
    assert all(0 <= p <= 1 for p in by_points + by_inside)


def test_covers_that_share_a_band_above_and_below_are_not_the_same() -> None:
    """They agree in more than a hundred points, all over the page but for what lies between the bands."""
    covers = [cv2.resize(photo("astronaut"), (480, 640)) for _ in range(2)]
    for page, art in zip(covers, ("coffee", "cat"), strict=True):
        page[90:550] = cv2.resize(photo(art), (480, 460))
    query = extract("sift", warp(covers[0], turned(8, 0.9, (240, 320)), (480, 640)))
    same, sibling = verify(query, [extract("sift", page) for page in covers])
    assert sibling.inliers > 100
    assert same_thing(sibling) < 0.6 * PROVEN
    assert same_thing(same) > 0.99
