"""Heat maps: the numbers are Eq. 8, and the drawing puts them where they belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from cooc.cooccurrence import Cooccurrence, cooccurrence
from cooc.descriptor import Descriptor
from cooc.explanation.heatmaps import RAMP, colour, overlay, sheet, spatial_cooccurrences, upsample
from cooc.pooling import mask


@pytest.fixture(scope="module")
def descriptor() -> Descriptor:
    return Descriptor.from_recipe("paper-linear-topdown+raw", device="cpu")


def picture() -> torch.Tensor:
    rough = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return torch.from_numpy(np.array(rough.resize((130, 100), Image.Resampling.BICUBIC))).permute(2, 0, 1)


def test_alpha_is_equation_8(descriptor: Descriptor) -> None:
    alpha = spatial_cooccurrences(descriptor, picture())
    A = mask(descriptor.backbone(picture()[None]).float(), "top-down")
    S = cooccurrence(A).double().sum(1)[0].numpy()
    np.testing.assert_allclose(alpha, np.sqrt(S / np.sqrt((S**2).sum())), atol=1e-5)
    assert alpha.shape == (3, 4)
    assert (alpha[-1] == 0).all()  # the mask is 0 in the bottom row


def test_learned_filter_takes_the_place_of_the_direct_one(descriptor: Descriptor) -> None:
    direct = spatial_cooccurrences(descriptor, picture())
    start = Cooccurrence("factored", channels=512, rank=1)  # starts as the direct filter
    np.testing.assert_allclose(spatial_cooccurrences(descriptor, picture(), start), direct, atol=1e-6)
    with torch.no_grad():
        start.left[:16] = 50  # some channels count far more than others
        start.right.fill_(1)
    assert not np.allclose(spatial_cooccurrences(descriptor, picture(), start), direct, atol=1e-3)


@pytest.mark.parametrize(("width", "height"), [(96, 64), (100, 90), (70, 40)])
def test_a_position_lands_in_the_middle_of_its_stride(width: int, height: int) -> None:
    alpha = np.zeros((2, 3))
    alpha[1, 1] = 0.25
    heat = upsample(alpha, width, height, 32)
    assert heat.shape == (height, width)
    assert heat.min() >= 0
    assert heat.max() <= 1
    y, x = np.unravel_index(heat.argmax(), heat.shape)
    assert abs(x - 48) <= 16  # position (1, 1) has pixels 32..63 in both directions
    assert 32 <= y <= max(height, 64)


def test_nothing_there_is_drawn_as_nothing() -> None:
    assert (upsample(np.zeros((2, 2)), 64, 64, 32) == 0).all()


def test_ramp_grows_lighter_evenly() -> None:
    linear = np.where(RAMP / 255 <= 0.04045, RAMP / 255 / 12.92, ((RAMP / 255 + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(luminance) >= -2e-3).all()
    assert luminance[0] < 0.02
    assert luminance[-1] > 0.7
    assert (colour(np.array([[0.0, 1.0, 2.0]])) == RAMP[[0, 255, 255]]).all()


def test_overlay_and_sheet() -> None:
    grey = np.full((64, 96, 3), 128, dtype=np.uint8)
    hot = overlay(grey, np.array([[1.0, 0, 0], [0, 0, 0]]), 32)
    assert hot.shape == grey.shape
    assert hot[5, 5].astype(int).sum() > hot[60, 90].astype(int).sum() + 100
    two, three = sheet({"a": grey, "b": hot}), sheet({"a": grey, "b": hot, "c": hot})
    assert two.height == three.height > 64
    assert three.width > two.width
