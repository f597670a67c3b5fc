from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cooc.errors import InputError
from cooc.verification.coding import quantise, unit, vectors
from cooc.verification.features import LocalFeatures, pack, unpack


def some(count: int = 50, dim: int = 64, size: tuple[int, int] = (4000, 3000), seed: int = 0, engine: str = "sift"):
    rng = np.random.default_rng(seed)
    return LocalFeatures(
        points=(rng.random((count, 2)) * size).astype(np.float32),
        scales=(2 ** rng.uniform(-1, 8, count)).astype(np.float32),
        angles=rng.uniform(0, 360, count).astype(np.float32),
        descriptors=rng.integers(0, 256, (count, dim), dtype=np.uint8),
        width=size[0],
        height=size[1],
        engine=engine,
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [64, 63])
def test_what_is_read_is_what_was_written(bits: int, dim: int) -> None:
    features = some(dim=dim)
    again = LocalFeatures.from_bytes(features.to_bytes(bits))
    assert (again.width, again.height, again.engine, len(again)) == (4000, 3000, "sift", 50)
    assert np.abs(again.points - features.points).max() <= 4000 / 65535 / 2 + 1e-3
    assert np.abs(np.log2(again.scales / features.scales)).max() <= 1 / 32 + 1e-6
    assert np.abs((again.angles - features.angles + 180) % 360 - 180).max() <= 360 / 512 + 1e-3
    if bits == 8:
        assert (again.descriptors == features.descriptors).all()
    else:
        assert np.abs(again.descriptors.astype(int) - features.descriptors).max() <= 8
        assert (again.to_bytes(4)) == features.to_bytes(4)  # rounding once is enough


def test_a_code_is_as_short_as_promised() -> None:
    assert len(some(1500).to_bytes(4)) < 1500 * 38 + 60


@given(count=st.integers(0, 30), dim=st.integers(1, 20), bits=st.sampled_from([4, 8]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_any_number_and_dimension_comes_back(count: int, dim: int, bits: int, seed: int) -> None:
    features = some(count, dim, (7, 5), seed)
    again = LocalFeatures.from_bytes(features.to_bytes(bits))
    assert again.descriptors.shape == (count, dim)
    assert len(again.points) == count


def test_several_engines_lie_one_behind_the_other() -> None:
    code = pack([some(5), some(7, engine="xfeat")])
    assert [(f.engine, len(f)) for f in unpack(code)] == [("sift", 5), ("xfeat", 7)]
    assert unpack(b"") == ()
    with pytest.raises(InputError, match="2 engines"):
        LocalFeatures.from_bytes(code)


def test_every_changed_bit_is_found() -> None:
    code = some(3, 4).to_bytes(8)
    for place in range(8 * len(code)):
        changed = bytearray(code)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(InputError, match=r"damaged|format"):
            LocalFeatures.from_bytes(bytes(changed))


def test_every_cut_is_found() -> None:
    code = some(3, 4).to_bytes()
    for end in range(1, len(code)):
        with pytest.raises(InputError, match="damaged"):
            LocalFeatures.from_bytes(code[:end])
    with pytest.raises(InputError, match="damaged"):
        LocalFeatures.from_bytes(code + b"x")


def test_a_later_format_is_named() -> None:
    body = bytearray(some(1, 2).to_bytes(8)[:-4])
    body[3] = 9
    with pytest.raises(InputError, match=r"format 9.*update cooc"):
        LocalFeatures.from_bytes(bytes(body) + struct.pack("<I", zlib.crc32(bytes(body))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": np.zeros((3, 3), np.float32)}, "points must be"),
        ({"scales": np.zeros(2, np.float32)}, "scales must be"),
        ({"scales": np.zeros(3, np.float32)}, "over 0"),
        ({"angles": np.full(3, np.nan, np.float32)}, "finite"),
        ({"descriptors": np.zeros((3, 4), np.float32)}, "uint8"),
        ({"width": 0}, "0 x 5"),
    ],
)
def test_features_that_cannot_be_are_refused(change: dict, message: str) -> None:
    good = {
        "points": np.ones((3, 2), np.float32),
        "scales": np.ones(3, np.float32),
        "angles": np.zeros(3, np.float32),
        "descriptors": np.zeros((3, 4), np.uint8),
        "width": 5,
        "height": 5,
        "engine": "sift",
    }
    LocalFeatures(**good)
    with pytest.raises(InputError, match=message):
        LocalFeatures(**{**good, **change})


def test_bytes_keep_the_angle_between_vectors() -> None:
    rng = np.random.default_rng(0)
    a, b = unit(rng.normal(size=(200, 64))), unit(rng.normal(size=(200, 64)))
    b = unit(a + 0.5 * b)
    assert np.abs(np.einsum("nd,nd->n", vectors(quantise(a)), vectors(quantise(b))) - (a * b).sum(1)).max() < 0.01
