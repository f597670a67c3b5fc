from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cooc.errors import BoxError, InputError, UnknownNameError
from cooc.verification import activations, xfeat
from cooc.verification.coding import vectors
from cooc.verification.engine import best_of_all_parts
from cooc.verification.engines import ENGINES, extract, parts
from cooc.verification.features import LocalFeatures, pack
from cooc.verification.geometry import agree
from cooc.verification.matching import match
from cooc.verification.sift import detect_sift, root_sift
from cooc.verification.transforms import project
from cooc.weights import WEIGHTS
from tests.verification.pictures import PHOTOS, features_of, photo, seen_at, turned, warp

DETECTORS = list(ENGINES)


def off_by(transform: np.ndarray, expected: np.ndarray, size: tuple[int, int]) -> float:
    """How many pixels two transforms are apart, at most, over the middle of a picture."""
    grid = np.stack(np.meshgrid(*(np.linspace(0.25 * s, 0.75 * s, 5) for s in size)), -1).reshape(-1, 2)
    grid = grid.astype(np.float32)
    return float(np.abs(project(transform, grid) - project(expected, grid)).max())


# ---- the table -----------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert parts("sift+xfeat") == ("sift", "xfeat")
    assert parts("xfeat+activations") == ("xfeat", "activations")
    with pytest.raises(UnknownNameError, match="Did you mean 'sift'"):
        parts("sfit")
    with pytest.raises(InputError, match="twice"):
        parts("sift+sift")


def test_every_engine_says_where_it_comes_from_and_how_it_matches() -> None:
    for engine in ENGINES.values():
        assert engine.source
        assert engine.licence
        assert (engine.ratio is None) != (engine.similarity is None)
        assert engine.weights is None or engine.weights in WEIGHTS


@pytest.mark.parametrize("name", DETECTORS)
def test_features_have_the_declared_shape_and_lie_in_the_picture(name: str) -> None:
    (features,) = extract(name, photo("astronaut"), limit=300, longest=seen_at(name))
    assert features.descriptors.shape == (300, ENGINES[name].dim)
    assert features.size == (512, 512)
    assert (features.points >= -1).all()
    assert (features.points <= 512).all()
    (again,) = extract(name, photo("astronaut"), limit=300, longest=seen_at(name))
    assert features.to_bytes(8) == again.to_bytes(8)


def test_several_at_once() -> None:
    names = ["sift", "xfeat", "activations"]
    assert [f.engine for f in extract("+".join(names), photo("cat"), limit=50, longest=256)] == names


# ---- where features lie --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DETECTORS)
def test_positions_are_those_of_the_full_size_picture(name: str) -> None:
    """The same photo, decoded smaller: features lie at the same places of the full one."""
    full = features_of(name, "coffee")
    across = min(600, seen_at(name)) * 3 // 4
    less = cv2.resize(photo("coffee"), (across, across * 2 // 3), interpolation=cv2.INTER_AREA)
    (small,) = extract(name, less, size=(600, 400), longest=seen_at(name))
    agreement = agree(full, small, match(full, small))
    assert agreement.inliers > 20
    assert off_by(agreement.transform, np.eye(3), (600, 400)) < 2
    assert small.size == (600, 400)


@pytest.mark.parametrize("name", DETECTORS)
def test_a_crop_lies_where_its_box_is(name: str) -> None:
    pixels = photo("astronaut")
    box = (100.0, 60.0, 420.0, 330.0)
    (crop,) = extract(name, pixels[60:330, 100:420], size=(512, 512), box=box, longest=seen_at(name))
    whole = features_of(name, "astronaut")
    agreement = agree(crop, whole, match(crop, whole))
    assert agreement.inliers > 30
    centre = np.array([[260, 195]], np.float32)
    assert np.abs(project(agreement.transform, centre) - centre).max() < (
        6.4 if name == "activations" else 1
    )  # a quarter position


def test_a_small_crop_is_enlarged_and_a_small_picture_if_asked_for() -> None:
    pixels = photo("coffee")[100:220, 200:360]
    box = (200.0, 100.0, 360.0, 220.0)
    plain = extract("sift", pixels)[0]
    assert len(extract("sift", pixels, size=(600, 400), box=box)[0]) > len(plain)
    for engine in ("sift", "xfeat"):
        (same, larger) = extract(engine, pixels, enlarge=True)
        assert pack((same,)) == pack(extract(engine, pixels))
        assert len(larger) > len(same)
        assert larger.size == (160, 120)  # and all in pixels of the picture as it is
        assert ((larger.points > -1) & (larger.points < larger.size)).all()
    larger = extract("sift", pixels, enlarge=True)[1]
    assert off_by(agree(larger, plain, match(larger, plain)).transform, np.eye(3), (160, 120)) < 0.5
    large = photo("coffee")
    thumbnail, (kept,) = cv2.resize(large, (150, 100), interpolation=cv2.INTER_AREA), extract("sift", large)
    found = [agree(seen, kept, match(seen, kept)).inliers for seen in extract("sift", thumbnail, enlarge=True)]
    assert found[1] > 1.2 * found[0]
    assert pack(extract("sift", large, enlarge=True)) == pack(extract("sift", large))
    inside = extract("sift", pixels[:60], size=(160, 120), box=(0.0, 0.0, 160.0, 60.0), enlarge=True)[1]
    assert off_by(agree(inside, plain, match(inside, plain)).transform, np.eye(3), (160, 60)) < 0.5


def test_pixels_beyond_the_limit_are_made_smaller() -> None:
    large = cv2.resize(photo("cat"), None, fx=4, fy=4, interpolation=cv2.INTER_CUBIC)
    (features,) = extract("sift", large, longest=512)
    (plain,) = extract("sift", cv2.resize(photo("cat"), (512, 341), interpolation=cv2.INTER_AREA), size=(1804, 1200))
    agreement = agree(features, plain, match(features, plain))
    assert off_by(agreement.transform, np.eye(3), (1804, 1200)) < 4  # a pixel at 512


def test_features_come_from_all_parts() -> None:
    """A thousand strong points in one corner do not crowd out the few elsewhere."""
    rng = np.random.default_rng(0)
    corner, rest = rng.uniform(0, 20, (1000, 2)), rng.uniform(0, 160, (100, 2))
    points = np.concatenate([corner, rest]).astype(np.float32)
    chosen = best_of_all_parts(points, (160, 160), 200)
    assert len(set(chosen.tolist())) == 200
    assert (chosen >= 1000).sum() > 80
    assert chosen[0] == 0  # the strongest of all is still the first
    assert len(best_of_all_parts(points[:3], (160, 160), 200)) == 3


@pytest.mark.parametrize(
    ("pixels", "options", "error"),
    [
        (np.zeros((5, 5), np.uint8), {}, InputError),
        (np.zeros((5, 5, 3), np.float32), {}, InputError),
        (np.zeros((0, 5, 3), np.uint8), {}, InputError),
        (np.zeros((5, 5, 3), np.uint8), {"box": (0, 0, 9, 9)}, BoxError),
        (np.zeros((5, 5, 3), np.uint8), {"box": (3, 0, 3, 4)}, BoxError),
        (np.zeros((5, 5, 3), np.uint8), {"limit": 0}, InputError),
        (np.zeros((5, 5, 3), np.uint8), {"turns": 3}, InputError),
    ],
)
def test_wrong_input_is_refused(pixels: np.ndarray, options: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        extract("sift", pixels, **options)


# ---- pictures with nothing in them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (7, 5), (64, 64), (300, 200)])
def test_one_colour_and_tiny_pictures_have_few_features_or_none(name: str, shape: tuple[int, int]) -> None:
    plain = np.full((*shape, 3), 200, np.uint8)
    (features,) = extract(name, plain)
    other = features_of(name, "cat")
    agreement = agree(features, other, match(features, other))
    assert agreement.inliers == 0
    assert LocalFeatures.from_bytes(features.to_bytes()).size == features.size


@pytest.mark.parametrize("name", DETECTORS)
def test_noise_agrees_with_nothing(name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    (features,), other = extract(name, noise, longest=seen_at(name)), features_of(name, "astronaut")
    assert agree(features, other, match(features, other)).inliers == 0


@pytest.mark.parametrize("name", DETECTORS)
def test_a_huge_picture_is_looked_at_in_a_smaller_copy(name: str) -> None:
    pixels = photo("astronaut")
    huge = cv2.resize(pixels, (6000, 6000), interpolation=cv2.INTER_CUBIC)
    huge.setflags(write=False)  # as Pillow gives them
    (a,), b = extract(name, huge, longest=seen_at(name)), features_of(name, "astronaut")
    agreement = agree(a, b, match(a, b))
    assert a.size == (6000, 6000)
    assert agreement.inliers > 100
    assert off_by(agreement.transform, np.diag([512 / 6000, 512 / 6000, 1.0]), (6000, 6000)) < 1


# ---- SIFT ----------------------------------------------------------------------------------------------------------


def test_root_sift_is_the_root_of_sift() -> None:
    """Described by itself, after the others were left out, a feature is what it is among all of them."""
    grey = cv2.cvtColor(photo("cat"), cv2.COLOR_RGB2GRAY)
    points, plain = cv2.SIFT.create(nfeatures=200, contrastThreshold=0.02).detectAndCompute(grey, None)
    expected = {(*k.pt, k.size, k.angle): np.sqrt(row / row.sum()) for k, row in zip(points, plain, strict=True)}
    keypoints, rows = root_sift(photo("cat"), 50)
    assert len(rows) == 50
    for keypoint, row in zip(keypoints.tolist(), rows, strict=True):
        np.testing.assert_allclose(row, expected[tuple(keypoint[:4])], atol=1e-6)


def test_the_short_code_ranks_as_root_sift_does() -> None:
    """Half-whitened: no copy of RootSIFT's cosines, but the nearest of 400 is among the ten nearest there."""
    _, rows = root_sift(photo("coffee"), 400)
    short = vectors(detect_sift(photo("coffee"), 400).descriptors)
    order = [np.argsort(-(x @ x.T), axis=1)[:, 1:] for x in (rows, short)]
    assert np.mean([first in ten for first, ten in zip(order[1][:, 0], order[0][:, :10], strict=True)]) > 0.9


@pytest.mark.parametrize("degrees", [37, 90, 180, 250])
def test_sift_knows_rotation(degrees: float) -> None:
    pixels = photo("astronaut")
    transform = turned(degrees, 0.7, (256, 256))
    a, (b,) = features_of("sift", "astronaut"), extract("sift", warp(pixels, transform, (512, 512)))
    agreement = agree(a, b, match(a, b))
    assert agreement.inliers > 60
    assert off_by(agreement.transform, transform, (512, 512)) < 1


@pytest.mark.parametrize("name", DETECTORS)
def test_no_engine_takes_a_mirrored_picture_for_the_same(name: str) -> None:
    """SIFT finds nothing. XFeat matches what is its own mirror image (a face, a rocket): little beside the picture."""
    for picture in PHOTOS:
        a = features_of(name, picture)
        (b,) = extract(name, photo(picture)[:, ::-1], longest=seen_at(name))
        agreement = agree(a, b, match(a, b))
        assert agreement.inliers <= (0 if name == "sift" else 0.1 * agree(a, a, match(a, a)).inliers)


# ---- XFeat ---------------------------------------------------------------------------------------------------------


class Layer(nn.Sequential):
    def __init__(self, inside: int, outside: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outside, affine=False),
            nn.ReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class ByModules(nn.Module):
    """The network of the paper as modules with batch normalisation, where ours folds it into the kernels."""

    def __init__(self) -> None:
        super().__init__()

        def block(*layers: tuple[int, ...]) -> nn.Sequential:
            return nn.Sequential(*(Layer(*sizes) for sizes in layers))

        self.skip1 = nn.Sequential(nn.AvgPool2d(4, 4), nn.Conv2d(1, 24, 1))
        self.block1 = block((1, 4), (4, 8, 3, 2), (8, 8), (8, 24, 3, 2))
        self.block2 = block((24, 24), (24, 24))
        self.block3 = block((24, 64, 3, 2), (64, 64), (64, 64, 1))
        self.block4 = block((64, 64, 3, 2), (64, 64), (64, 64))
        self.block5 = block((64, 128, 3, 2), (128, 128), (128, 128), (128, 64, 1))
        self.block_fusion = nn.Sequential(Layer(64, 64), Layer(64, 64), nn.Conv2d(64, 64, 1))
        self.heatmap_head = nn.Sequential(Layer(64, 64, 1), Layer(64, 64, 1), nn.Conv2d(64, 1, 1), nn.Sigmoid())
        self.keypoint_head = nn.Sequential(*(Layer(64, 64, 1) for _ in range(3)), nn.Conv2d(64, 65, 1))

    def forward(self, grey: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = (grey - grey.mean()) / (grey.var(unbiased=False) + 1e-5).sqrt()
        x3 = self.block3(self.block2(self.block1(x) + self.skip1(x)))
        x4 = self.block4(x3)
        x5 = self.block5(x4)
        for coarse in (x4, x5):
            x3 = x3 + F.interpolate(coarse, x4.shape[-2] * 2, mode="bilinear")
        maps = self.block_fusion(x3)
        height, width = x.shape[-2:]
        blocks = x.reshape(height // 8, 8, width // 8, 8).permute(1, 3, 0, 2).reshape(1, 64, height // 8, width // 8)
        return maps, self.heatmap_head(maps), self.keypoint_head(blocks)


def test_xfeat_is_the_network_of_the_paper(real_weights) -> None:
    state = real_weights("xfeat")
    network = ByModules().eval()
    missing, extra = network.load_state_dict(state, strict=False)
    assert all(name.endswith("num_batches_tracked") for name in missing)
    assert all(name.startswith("fine_matcher") for name in extra)
    grey = torch.from_numpy(photo("astronaut")).float().mean(2)[None, None, :256, :256]
    with torch.inference_mode():
        for ours, theirs in zip(xfeat.xfeat_maps(grey, xfeat.prepare_weights(state)), network(grey), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_keypoints_are_the_local_maxima() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, reliability = torch.randn(1, 65, 4, 5, generator=generator) * 3, torch.rand(1, 1, 4, 5, generator=generator)
    points, strength = xfeat.find_keypoints(logits, reliability, 1000)
    heat = logits.softmax(1)[0, :64].reshape(8, 8, 4, 5).permute(2, 0, 3, 1).reshape(32, 40)
    expected = {
        (x, y)
        for y in range(32)
        for x in range(40)
        if heat[y, x] > 0.05 and heat[y, x] == heat[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3].max()
    }
    assert {tuple(map(int, p)) for p in points.tolist()} == expected
    assert (strength.diff() <= 0).all()
    assert len(xfeat.find_keypoints(logits, reliability, 3)[0]) == 3


def test_xfeat_finds_a_turned_query_in_four_steps() -> None:
    pixels = photo("coffee")
    picture = features_of("xfeat", "coffee")
    query = extract("xfeat", np.ascontiguousarray(np.rot90(pixels)), turns=4)
    assert [len(extract(name, pixels, turns=4)) for name in ("xfeat", "sift")] == [4, 1]
    agreements = [agree(part, picture, match(part, picture)) for part in query]
    assert agreements[0].inliers < 20
    best = max(agreements, key=lambda a: a.inliers)
    assert best.inliers > 200
    (height, width) = pixels.shape[:2]
    expected = np.array([[0, -1, width - 1], [1, 0, 0], [0, 0, 1.0]])  # undoes np.rot90
    assert off_by(best.transform, expected, (height, width)) < 1


# ---- activations ---------------------------------------------------------------------------------------------------


def test_peaks_are_found_between_positions() -> None:
    """Two channels with a parabola around a known place each: the mean of the places, by their heights."""
    row, column = torch.meshgrid(torch.arange(7.0), torch.arange(9.0), indexing="ij")
    maps = torch.stack(
        [(h - (row - y) ** 2 - (column - x) ** 2).relu() for h, x, y in ((10, 4.2, 3.4), (9, 3.8, 2.9), (0, 1, 1))]
    )
    strength, places = activations.find_peaks(maps)
    (peak,) = strength.nonzero().tolist()
    assert peak == [3, 4]
    heights = maps[:2, 3, 4]
    torch.testing.assert_close(strength[3, 4], heights.norm())
    expected = (heights * torch.tensor([[0.2, -0.2], [0.4, -0.1]])).sum(1) / heights.sum()
    torch.testing.assert_close(places[:, 3, 4], expected)


def test_a_position_lies_in_the_middle_of_its_pixels() -> None:
    """What the network sees at a spot of light is strongest there, at each of the sizes."""
    dark = np.full((320, 320, 3), 90, np.uint8)
    cv2.circle(dark, (200, 120), 20, (250, 240, 230), -1)
    points, scales, strength, rows = activations.find_features(dark)
    assert len(set(scales.tolist())) == 3
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-4)
    for scale in set(scales.tolist()):
        own = scales == scale
        middle = np.average(points[own], axis=0, weights=strength[own])
        assert np.abs(middle - (200, 120)).max() < scale


@pytest.mark.parametrize(("factor", "shift"), [(1.0, (37, -21)), (0.8, (10, 5)), (1.3, (-60, -40))])
def test_activations_recover_a_known_shift_and_scale(factor: float, shift: tuple[float, float]) -> None:
    pixels = photo("astronaut")
    transform = turned(0, factor, (256, 256), shift)
    a = features_of("activations", "astronaut")
    (b,) = extract("activations", warp(pixels, transform, (512, 512)), longest=seen_at("activations"))
    agreement = agree(a, b, match(a, b))
    assert agreement.inliers > 50
    assert off_by(agreement.transform, transform, (512, 512)) < 12.8  # half of a position: 16 pixels at 320


def test_activations_know_a_slight_turn_and_any_quarter_in_four_steps() -> None:
    pixels = photo("coffee")
    picture, longest = features_of("activations", "coffee"), seen_at("activations")
    (slight,) = extract("activations", warp(pixels, turned(15, 1, (300, 200)), (600, 400)), longest=longest)
    assert agree(slight, picture, match(slight, picture)).inliers > 40
    query = extract("activations", np.ascontiguousarray(np.rot90(pixels)), turns=4, longest=longest)
    inliers = [agree(part, picture, match(part, picture)).inliers for part in query]
    assert inliers[0] < 12
    assert max(inliers) > 200
