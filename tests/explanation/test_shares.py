"""Shares of a score: equal to a sum formed position by position, adding up to the score, and where the thing is."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import skimage.data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from cooc.activations import Activations, Backbone
from cooc.descriptor import Descriptor
from cooc.errors import InputError
from cooc.explanation import draw, explain
from cooc.explanation.shares import SUMS, densest_box
from cooc.pooling import POOLINGS
from cooc.recipes import MULTI_SCALE, DescriptorConfig
from cooc.whitening import Whitening
from tests.reference import explanation as reference
from tests.shell import Shell

CHANNELS, STRIDE = 10, 8


@functools.cache
def tiny() -> Activations:
    """Ten channels, one for every 8 x 8 pixels: small enough for loops."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(3, CHANNELS, STRIDE, STRIDE, bias=False)
    layer.weight.data = torch.randn(layer.weight.shape, generator=generator)
    backbone = Backbone(lambda layer: nn.Identity(), "", {"last": (CHANNELS, STRIDE)}, (0.0,) * 3, (1.0,) * 3)
    return Activations(nn.Sequential(layer, nn.ReLU()), backbone, "last")


def descriptor(pooling: str, whitened: bool = True, **changes: object) -> Descriptor:
    if pooling == "compact-bilinear":
        changes["options"] = {"dim": 32, **dict(changes.get("options", {}))}  # type: ignore[call-overload]
    config = DescriptorConfig(**{"pooling": pooling, "radius": 1, "size": 96, **changes})  # type: ignore[arg-type]
    plain = Descriptor(config, device="cpu", backbone=tiny())
    if not whitened:
        return plain
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(plain.raw_dim, generator=generator) / plain.raw_dim**0.5 / 2
    projection = torch.randn(6, plain.raw_dim, generator=generator)
    return Descriptor(config, device="cpu", backbone=tiny(), whitening=Whitening(mean, projection))


def picture(x: int = 200, y: int = 60, width: int = 96, height: int = 72) -> NDArray[np.uint8]:
    photo: NDArray[np.uint8] = np.ascontiguousarray(skimage.data.astronaut()[y : y + height, x : x + width])
    return photo


CASES = [(name, scales) for name in POOLINGS for scales in ((1.0,), MULTI_SCALE)]


@pytest.mark.parametrize(("pooling", "scales"), CASES)
@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("mask", ["none", "top-down"])
def test_shares_add_up_to_the_score(pooling: str, scales: tuple[float, ...], whitened: bool, mask: str) -> None:
    describe = descriptor(pooling, whitened, scales=scales, mask=mask)
    query, match = picture(), picture(190, 80, 80, 96)
    vectors = describe([query, match])
    score = float(vectors[0] @ vectors[1])
    why = explain(describe, query, match)
    assert why.score == pytest.approx(score, abs=1e-5)
    assert why.query.map.sum() == pytest.approx(score, abs=1e-4)
    assert why.match.map.sum() == pytest.approx(score, abs=1e-4)
    assert why.query.map.shape == (9, 12)
    assert why.match.map.shape == (12, 10)
    assert why.exact == (pooling in SUMS)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_square_roots_are_said_to_be_no_sums(pooling: str) -> None:
    describe = descriptor(pooling, options={"sqrt": True})
    why = explain(describe, picture(), picture(190, 80))
    assert not why.exact
    assert why.match.map.sum() == pytest.approx(why.score, abs=1e-4)


@pytest.mark.parametrize("pooling", sorted(SUMS))
@pytest.mark.parametrize("cooccurrence", ["direct", "none", "shih"])
def test_shares_are_those_of_each_positions_own_vector(pooling: str, cooccurrence: str) -> None:
    if cooccurrence == "none" and POOLINGS[pooling].cooccurrence and not pooling.endswith("bilinear"):
        cooccurrence = "direct"
    describe = descriptor(pooling, cooccurrence=cooccurrence)
    assert describe.whitening is not None
    query, match = picture(), picture(190, 80, 80, 96)
    q = describe([query])[0].double().numpy()
    with torch.no_grad():
        A = tiny()(torch.from_numpy(match).permute(2, 0, 1)[None])
        layer = describe.pooler.cooccurrence
        C = A if layer is None else layer(A)
    sketch: list[NDArray[np.float64]] = []
    if pooling == "compact-bilinear":
        sketch = [t.double().numpy() for t in (describe.pooler.pool.bins, describe.pooler.pool.signs)]  # type: ignore[attr-defined]
    vectors = reference.position_vectors(pooling, A[0].double().numpy(), C[0].double().numpy(), *sketch)
    mean, projection = (t.double().numpy() for t in (describe.whitening.mean, describe.whitening.projection))
    wanted = reference.shares(np.pad(vectors, ((0, 0), (0, len(mean) - vectors.shape[1]))), q, mean, projection)
    got = explain(describe, query, match).match.map
    np.testing.assert_allclose(got.ravel(), wanted, atol=1e-5)


def test_positions_without_activations_have_no_share() -> None:
    match = picture().copy()
    match[:, :40] = 0  # black gives nothing in a network without biases
    why = explain(descriptor("ucrow"), picture(), match)
    assert (why.match.map[:, :5] == 0).all()
    assert (why.match.map[:, 5:] != 0).all()
    assert why.match.box is not None
    assert why.match.box[0] >= 40


def test_a_picture_of_nothing() -> None:
    why = explain(descriptor("chco-sct"), picture(), np.zeros((64, 64, 3), np.uint8))
    assert why.score == 0
    assert (why.match.map == 0).all()
    assert why.match.box is None
    assert draw(descriptor("chco-sct"), picture(), np.zeros((64, 64, 3), np.uint8), why).width > 100


def test_boxes_are_in_pixels_of_the_full_picture(tmp_path: Path) -> None:
    """A file four times as large as what is described; the query is a part of it."""
    large = Image.fromarray(picture()).resize((384, 288))
    path = tmp_path / "large.png"
    large.save(path)
    box = (100.0, 40.0, 300.0, 250.0)
    why = explain(descriptor("chco-sct"), path, path, query_box=box)
    assert why.match.region == (0, 0, 384, 288)
    assert why.query.region[:2] == (100, 40)
    assert why.query.region[2] == pytest.approx(100 + why.query.map.shape[1] * 32)
    for shares, outer in ((why.match, (0, 0, 384, 288)), (why.query, box)):
        assert shares.box is not None
        x0, y0, x1, y1 = shares.box
        assert outer[0] <= x0 < x1 <= outer[2]
        assert outer[1] <= y0 < y1 <= outer[3]


def test_boxes_of_a_picture_that_is_enlarged() -> None:
    small = np.asarray(Image.fromarray(picture()).resize((48, 40)))
    why = explain(descriptor("chco-sct", least=96), small, small, query_box=(12, 4, 48, 36))
    assert why.match.map.shape == (10, 12)  # each position covers 4 x 4 of its pixels
    assert why.match.region == (0, 0, 48, 40)
    assert why.query.map.shape == (8, 9)
    assert why.query.region == (12, 4, 48, 36)


def test_tensors_are_explained_as_they_are() -> None:
    tensors = [torch.from_numpy(p).permute(2, 0, 1) for p in (picture(), picture(190, 80))]
    describe = descriptor("crow")
    why, same = explain(describe, *tensors), explain(describe, picture(), picture(190, 80))
    np.testing.assert_allclose(why.match.map, same.match.map, atol=1e-6)
    assert why.match.box == same.match.box


small_maps = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.integers(-3, 9))


@settings(deadline=None, max_examples=60)
@given(small_maps, st.sampled_from([0.3, 0.8, 1.0]))
def test_densest_box_is_the_smallest(shares: NDArray[np.float32], most: float) -> None:
    got = densest_box(shares, most)
    if not (shares > 0).any():
        assert got is None
        return
    assert got == reference.densest_box(shares.astype(np.float64), most)


@pytest.mark.parametrize("most", [0.0, -1.0, 1.5])
def test_a_box_of_no_part_is_refused(most: float) -> None:
    with pytest.raises(InputError, match="at most 1"):
        densest_box(np.ones((2, 2), np.float32), most)


def scene(size: tuple[int, int], where: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
    """A cup, and a picture with grass-like noise in which it stands somewhere."""
    cup = Image.fromarray(skimage.data.coffee()).crop((120, 40, 440, 360)).resize((128, 128))
    noise = np.random.default_rng(0).integers(60, 110, (size[1] // 16, size[0] // 16, 3), dtype=np.uint8)
    ground = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    ground.paste(cup, where)
    return cup, ground


@pytest.mark.parametrize("recipe", ["paper-linear", "paper-bilinear-topdown"])
def test_it_is_there(recipe: str) -> None:
    """With the real network: most of the score comes from where the cup is, and the box is around it."""
    cup, ground = scene((320, 256), (160, 32))
    describe = Descriptor.from_recipe(recipe, device="cpu", dtype="float32")
    why = explain(describe, cup, ground)
    assert why.exact
    assert why.match.map.sum() == pytest.approx(why.score, abs=1e-4)
    assert why.match.box is not None
    x0, y0, x1, y1 = why.match.box
    assert 160 <= (x0 + x1) / 2 <= 288
    assert 32 <= (y0 + y1) / 2 <= 160
    on = why.match.map[1:5, 5:9].sum()
    assert on > 0.6 * np.maximum(why.match.map, 0).sum()


def test_explain_command(cooc: Shell, tmp_path: Path) -> None:
    cup, ground = scene((320, 256), (160, 32))
    cup.save(tmp_path / "cup.png")
    ground.save(tmp_path / "ground.png")
    files = [str(tmp_path / name) for name in ("cup.png", "ground.png")]
    target = tmp_path / "why.png"
    result = cooc("explain", *files, "-o", target, "-r", "paper-linear", "--json")
    assert result.code == 0, result
    told = result.json
    assert told["exact"] is True
    assert np.sum(told["match"]["map"]) == pytest.approx(told["score"], abs=1e-4)
    with Image.open(target) as page:
        assert page.width > 500
    assert cooc("explain", *files, "-o", tmp_path / "why.txt").code == 2


def test_spread_keeps_the_sum() -> None:
    """At scales whose positions begin anywhere, nothing is lost or counted twice."""
    one, many = descriptor("ucrow", scales=(1.0,)), descriptor("ucrow", scales=(1.0, 0.9, 0.71, 0.33, 0.09))
    for size in ((96, 72), (50, 97), (8, 200), (17, 31)):
        image: Tensor = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
        maps = [explain(d, image, image).match.map for d in (one, many)]
        assert maps[0].shape == maps[1].shape
        assert maps[1].sum() == pytest.approx(1, abs=1e-4)
