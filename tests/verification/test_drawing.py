from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from cooc.verification.agreement import Agreement, no_agreement
from cooc.verification.drawing import GAP, REGION, draw
from cooc.verification.engines import extract
from cooc.verification.verifier import verify
from tests.verification.pictures import photo, turned, warp


@pytest.fixture(scope="module")
def agreement() -> Agreement:
    view = warp(photo("astronaut"), turned(10, 0.7, (256, 256)), (512, 512))
    (found,) = verify(extract("sift", view), [extract("sift", photo("astronaut"))])
    return found


def test_both_pictures_stand_side_by_side(agreement: Agreement) -> None:
    grey = np.full((512, 512, 3), 200, np.uint8)
    drawn = np.asarray(draw(grey, Image.fromarray(grey), agreement, height=256))
    assert drawn.shape == (256, 2 * 256 + GAP, 3)
    assert (drawn[0, 256 : 256 + GAP] == 255).all()
    assert (drawn[0, 0] == 200).all()


def test_points_and_region_lie_where_they_are_in_each_picture(agreement: Agreement) -> None:
    grey = np.full((512, 512, 3), 200, np.uint8)
    drawn = np.asarray(draw(grey, grey, agreement, height=512)).astype(int)
    for points, region, start in (
        (agreement.query_points, agreement.query_region, 0),
        (agreement.picture_points, agreement.picture_region, 512 + GAP),
    ):
        x, y = points[0].round().astype(int)
        assert np.abs(drawn[y, start + x] - 200).max() > 50
        middle = (region[0] + region[1]) / 2  # on its outline
        x, y = middle.round().astype(int)
        around = drawn[max(0, y - 2) : y + 3, max(start, start + x - 2) : start + x + 3].reshape(-1, 3)
        assert (np.abs(around - REGION).max(1) < 60).any()


def test_a_smaller_picture_is_drawn_alike(agreement: Agreement) -> None:
    """Points are those of the full-size picture; what is shown may be a thumbnail of it."""
    full, small = np.full((512, 512, 3), 200, np.uint8), np.full((64, 64, 3), 200, np.uint8)
    expected = draw(full, full, agreement, height=300)
    drawn = draw(small, small, agreement, query_size=(512, 512), picture_size=(512, 512), height=300)
    assert np.asarray(drawn).tolist() == np.asarray(expected).tolist()


def test_nothing_to_draw_is_the_two_pictures() -> None:
    (features,) = extract("sift", photo("cat"), limit=10)
    drawn = np.asarray(draw(photo("cat"), photo("rocket"), no_agreement(features), height=100))
    assert drawn.shape[0] == 100
    assert drawn.shape[1] == 150 + GAP + 150
