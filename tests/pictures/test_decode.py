"""Every picture here is encoded for real; only what a root user cannot have (an unreadable folder) is simulated."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pillow_heif
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageFile

from cooc.errors import BoxError, ImageError, InputError
from cooc.pictures import decode, opening
from cooc.pictures.boxes import parse_box
from cooc.pictures.decode import EXTENSIONS, ImageInfo, image_info, load_image, open_image
from cooc.pictures.folder import list_images

pillow_heif.register_heif_opener()


def smooth(width: int, height: int) -> Image.Image:
    """Colours that change slowly, differently along x and y, so that lossy formats keep them and every turn shows."""
    y, x = np.mgrid[:height, :width]
    red, green = 255 * x / max(1, width - 1), 255 * y / max(1, height - 1)
    return Image.fromarray(np.stack([red, green, 255 - (red + green) / 2], axis=-1).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def difference(a: Any, b: Any) -> float:
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    assert a.shape == b.shape
    return float(np.abs(a - b).mean())


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_header(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


# -- formats and modes -------------------------------------------------------------------------------------------------

FORMATS: dict[
    str, tuple[str, dict[str, Any], float]
] = {  # extension: Pillow's name, how to save, largest mean difference
    ".jpg": ("JPEG", {"quality": 95}, 2),
    ".mpo": ("MPO", {"quality": 95}, 2),
    ".png": ("PNG", {}, 0),
    ".webp": ("WEBP", {"lossless": True}, 0),
    ".avif": ("AVIF", {"quality": 95}, 2),
    ".heic": ("HEIF", {"quality": 95}, 3),
    ".jp2": ("JPEG2000", {}, 1),
    ".tif": ("TIFF", {"compression": "tiff_lzw"}, 0),
    ".bmp": ("BMP", {}, 0),
    ".gif": ("GIF", {}, 12),
    ".ppm": ("PPM", {}, 0),
    ".tga": ("TGA", {}, 0),
    ".pcx": ("PCX", {}, 0),
    ".sgi": ("SGI", {}, 0),
    ".dds": ("DDS", {}, 0),
    ".ico": ("ICO", {"sizes": [(60, 40)]}, 0),
}


@pytest.mark.parametrize("extension", FORMATS)
def test_formats(tmp_path: Path, extension: str) -> None:
    format, options, tolerance = FORMATS[extension]
    original, path = smooth(60, 40), tmp_path / f"picture{extension}"
    if format == "MPO":  # what phones write: a JPEG with a second picture behind it
        options = options | {"save_all": True, "append_images": [Image.new("RGB", (60, 40), "red")]}
    path.write_bytes(encoded(original, format, **options))
    opened = open_image(path)
    assert (opened.mode, opened.size) == ("RGB", (60, 40))
    assert difference(opened, original) <= tolerance
    loaded = load_image(str(path))
    assert loaded.dtype == np.uint8
    assert loaded.flags.writeable
    assert difference(loaded, opened) == 0
    assert image_info(path) == ImageInfo(60, 40, format, None)
    assert load_image(path, size=30).shape == (20, 30, 3)


def test_every_kind_of_source_gives_the_same_picture(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    original = smooth(20, 10)
    path.write_bytes(encoded(original, "PNG"))
    with path.open("rb") as stream, Image.open(path) as lazy:
        stream.read(7)  # somewhere in the middle: it is rewound
        for source in (path, str(path), path.read_bytes(), stream, original, lazy, np.asarray(original)):
            assert difference(load_image(source), original) == 0
            assert image_info(source).width == 20
        assert not stream.closed


def test_a_stream_that_cannot_seek() -> None:
    content = encoded(smooth(20, 10), "PNG")
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        assert load_image(stream).shape == (10, 20, 3)
        assert not stream.closed


def test_sources_are_not_changed() -> None:
    turned = smooth(20, 10)
    turned.getexif()[ExifTags.Base.Orientation] = 6
    assert open_image(turned).size == (10, 20)
    assert turned.size == (20, 10)
    plain = smooth(20, 10)
    open_image(plain).paste("red", (0, 0, 20, 10))
    assert difference(plain, smooth(20, 10)) == 0
    array = np.zeros((4, 4, 3), np.uint8)
    load_image(array)[:] = 9
    assert not array.any()


MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "La", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"]


@pytest.mark.parametrize("mode", MODES)
def test_pillow_modes(mode: str) -> None:
    result = open_image(Image.new(mode, (5, 4)))
    assert (result.mode, result.size) == ("RGB", (5, 4))


def test_alpha_lies_on_white(tmp_path: Path) -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = 0, 128, 255
    for source in (rgba, encoded(Image.fromarray(rgba), "PNG"), encoded(Image.fromarray(rgba), "TIFF")):
        assert load_image(source)[0, :, 0].tolist() == pytest.approx([255, 127, 0], abs=1)
    grey = encoded(Image.fromarray(rgba).convert("LA"), "PNG")
    assert load_image(grey)[0, :, 1].tolist() == pytest.approx([255, 127, 0], abs=1)


def test_palettes() -> None:
    four = Image.new("P", (4, 1))
    four.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 7, 8, 9])
    four.putdata([0, 1, 2, 3])
    expected = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [7, 8, 9]]
    assert load_image(encoded(four, "PNG"))[0].tolist() == expected
    assert load_image(encoded(four, "GIF"))[0].tolist() == expected
    expected[1] = [255, 255, 255]
    assert load_image(encoded(four, "PNG", transparency=1))[0].tolist() == expected
    assert load_image(encoded(four, "GIF", transparency=1))[0].tolist() == expected
    partly = bytes([255, 0, 255, 255])  # alpha for each colour: Pillow warns about these unless they go through RGBA
    assert load_image(encoded(four, "PNG", transparency=partly))[0].tolist() == expected


def test_one_transparent_grey_or_colour() -> None:
    grey = Image.fromarray(np.array([[10, 20]], np.uint8))
    assert load_image(encoded(grey, "PNG", transparency=10))[0, :, 0].tolist() == [255, 20]
    rgb = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert load_image(encoded(rgb, "PNG", transparency=(1, 2, 3)))[0].tolist() == [[255, 255, 255], [4, 5, 6]]
    deep = Image.fromarray(np.array([[257, 514]], np.uint16))
    assert load_image(encoded(deep, "PNG", transparency=257))[0, :, 0].tolist() == [255, 2]


def test_cmyk() -> None:
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # red
    for content in (encoded(cmyk, "JPEG", quality=95), encoded(cmyk, "TIFF")):
        assert load_image(content)[8, 8].tolist() == pytest.approx([255, 0, 0], abs=4)
    assert b"Adobe" in encoded(cmyk, "JPEG")  # that is, stored inverted


def test_lab() -> None:
    lightness, a, b = 54.29, 80.81, 69.89  # sRGB red, for the D50 white of colour profiles
    red = Image.new("LAB", (4, 4), (round(lightness * 2.55), round(128 + a), round(128 + b)))
    assert load_image(encoded(red, "TIFF"))[0, 0].tolist() == pytest.approx([255, 0, 0], abs=5)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bit_gradient(format: str) -> None:
    values = np.linspace(0, 65535, 512).astype(np.uint16).reshape(1, 512)
    loaded = load_image(encoded(Image.fromarray(values), format))
    assert (loaded == loaded[:, :, :1]).all()
    np.testing.assert_array_equal(loaded[0, :, 0], np.rint(values[0] / 257.0))


def test_integers_and_floats_keep_their_range() -> None:
    def grey(values: list[float], dtype: Any) -> list[int]:
        return cast("list[int]", load_image(Image.fromarray(np.array([values], dtype)))[0, :, 0].tolist())

    assert grey([0, 257, 65535], np.int32) == [0, 1, 255]
    assert grey([0, 100_000, 200_000], np.int32) == [0, 128, 255]
    assert grey([-10, 0, 10], np.int32) == [0, 128, 255]
    assert grey([0, 0.2, 1], np.float32) == [0, 51, 255]
    assert grey([0, 51, 255], np.float32) == [0, 51, 255]
    assert grey([0, 257, 65535], np.float32) == [0, 1, 255]
    assert grey([-1e38, 0, 1e38], np.float32) == [0, 128, 255]
    assert grey([np.nan, 0.2, np.inf, -np.inf], np.float32) == [0, 51, 255, 0]
    assert grey([np.nan, np.nan], np.float32) == [0, 0]
    assert grey([7], np.float32) == [7]


def test_animations_give_their_first_frame() -> None:
    first, second = Image.new("RGB", (8, 8), (0, 0, 255)), Image.new("RGB", (8, 8), (255, 0, 0))
    for format, options in {"GIF": {}, "PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}, "AVIF": {}}.items():
        content = encoded(first, format, save_all=True, append_images=[second], **options)
        assert difference(open_image(content), first) < 3, format


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_arrays() -> None:
    eight = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    np.testing.assert_array_equal(load_image(eight), eight)
    np.testing.assert_array_equal(load_image(eight[::-1, ::2]), eight[::-1, ::2])
    np.testing.assert_array_equal(load_image(eight[:, :, 0]), np.repeat(eight[:, :, :1], 3, axis=2))
    np.testing.assert_array_equal(load_image(eight[:, :, :1]), np.repeat(eight[:, :, :1], 3, axis=2))
    np.testing.assert_array_equal(load_image(eight.astype(np.uint16) * 257), eight)
    np.testing.assert_array_equal(load_image((eight.astype(np.uint16) * 257).astype(">u2")), eight)
    np.testing.assert_array_equal(load_image(eight.astype(np.float32) / 255), eight)
    np.testing.assert_array_equal(load_image(eight / 255), eight)
    np.testing.assert_array_equal(load_image(eight > 5), (eight > 5) * 255)


@pytest.mark.parametrize(
    ("array", "hint"),
    [
        (np.zeros((3, 8, 8), np.uint8), "transpose"),
        (np.zeros((8, 8, 2), np.uint8), r"\(8, 8, 2\)"),
        (np.zeros(8, np.uint8), "shape"),
        (np.zeros((1, 8, 8, 3), np.uint8), "shape"),
        (np.zeros((0, 8, 3), np.uint8), "shape"),
        (np.zeros((8, 8), np.int64), "int64"),
        (np.zeros((8, 8), np.complex64), "complex64"),
        (np.array([["a"]]), "<U1"),
        (np.array([[object()]]), "object"),
        (np.full((8, 8), np.nan), "NaN"),
        (np.full((8, 8), 200.0), "255"),
        (np.full((8, 8), -0.1), "0..1"),
    ],
)
def test_arrays_that_are_no_pictures(array: Any, hint: str) -> None:
    with pytest.raises(ImageError, match=hint):
        load_image(array)


# -- EXIF --------------------------------------------------------------------------------------------------------------

UPRIGHT: dict[int, Callable[[Any], Any]] = {  # how the stored rows and columns become the upright ones
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF"])
def test_orientations(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored = smooth(48, 32)
    if format == "TIFF":
        content = encoded(stored, format, tiffinfo={int(ExifTags.Base.Orientation): orientation})
    else:
        content = encoded(stored, format, quality=95, exif=exif.tobytes())  # bytes: else HEIF stores no rotation
    expected = UPRIGHT[orientation](np.asarray(stored))
    loaded = load_image(content)
    assert difference(loaded, expected) < 3
    info = image_info(content)
    assert (info.height, info.width) == loaded.shape[:2]
    left_half = load_image(content, size=24, box=(0, 0, info.width / 2, info.height))
    assert difference(left_half, load_image(content, size=24)[:, : left_half.shape[1]]) < 6


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_orientation_of_a_jpeg_that_is_decoded_smaller(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    jpeg = encoded(smooth(801, 603), "JPEG", quality=95, exif=exif)
    assert 100 <= max(open_image(jpeg, size=100).size) < 801
    upright = Image.fromarray(np.ascontiguousarray(UPRIGHT[orientation](np.asarray(smooth(801, 603)))))
    for box in (None, (31.0, 400.0, 555.5, 600.0)):
        assert difference(load_image(jpeg, size=100, box=box), load_image(upright, size=100, box=box)) < 2


def test_png_with_exif_behind_the_pixels() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    content = encoded(smooth(6, 4), "PNG")
    end = png_chunk(b"IEND", b"")
    assert content.endswith(end)
    late = content.removesuffix(end) + png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + end
    assert load_image(late).shape == (6, 4, 3)
    assert image_info(late).width == 4


def jpeg_with_dates(original: object, changed: object) -> bytes:
    exif = Image.Exif()
    if original is not None:
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = original
    if changed is not None:
        exif[ExifTags.Base.DateTime] = changed
    return encoded(smooth(8, 8), "JPEG", exif=exif)


@pytest.mark.parametrize(
    ("original", "changed", "taken"),
    [
        ("2021:02:03 04:05:06", "2022:01:01 00:00:00", "2021-02-03T04:05:06"),
        (None, "2022:01:01 00:00:00", "2022-01-01T00:00:00"),
        ("0000:00:00 00:00:00", "2022:01:01 00:00:00", "2022-01-01T00:00:00"),
        ("2021-02-03 04:05:06", None, "2021-02-03T04:05:06"),
        ("    :  :     :  :  ", None, None),
        ("yesterday", "2022:13:01 00:00:00", None),
        (None, None, None),
    ],
)
def test_date(original: object, changed: object, taken: str | None) -> None:
    assert image_info(jpeg_with_dates(original, changed)).taken == taken


def test_broken_exif_never_fails() -> None:
    good = jpeg_with_dates("2021:02:03 04:05:06", "2022:01:01 00:00:00")
    start = good.index(b"Exif\0\0") + 6
    length = struct.unpack(">H", good[start - 8 : start - 6])[0] - 8
    for position in range(start, start + length):
        for value in (0, 255):
            broken = good[:position] + bytes([value]) + good[position + 1 :]
            assert load_image(broken).shape == (8, 8, 3)
            assert image_info(broken).width == 8


def test_info_does_not_decode() -> None:
    assert image_info(png_header(5000, 4000) + png_chunk(b"IDAT", b"not zlib")).width == 5000
    jpeg = encoded(smooth(400, 300), "JPEG")
    assert image_info(jpeg[: len(jpeg) // 2]) == ImageInfo(400, 300, "JPEG", None)


# -- sizes and boxes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(641, 479), (479, 641), (1000, 30), (3, 700)])
@pytest.mark.parametrize("size", [1, 50, 90, 160, 333, 5000])
def test_longest_side(width: int, height: int, size: int) -> None:
    original = smooth(width, height)
    jpeg = encoded(original, "JPEG", quality=95, subsampling=0)
    factor = min(1, size / max(width, height))
    expected = (max(1, round(height * factor)), max(1, round(width * factor)), 3)
    full = load_image(open_image(jpeg), size=size)  # a Pillow image is never decoded smaller
    draft = load_image(jpeg, size=size)
    assert full.shape == draft.shape == expected
    assert difference(full, draft) < 3
    decoded = open_image(jpeg, size=size)
    assert decoded.width >= expected[1]
    assert decoded.height >= expected[0]


def test_draft_mode_is_used_and_close_on_detail() -> None:
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8))
    jpeg = encoded(coarse.resize((1024, 768), Image.Resampling.BICUBIC), "JPEG", quality=92)
    assert open_image(jpeg, size=128).size == (128, 96)
    assert open_image(jpeg, size=129).size == (256, 192)
    assert open_image(jpeg).size == (1024, 768)
    full = load_image(open_image(jpeg), size=129)
    assert difference(load_image(jpeg, size=129), full) < 2
    box = (100.0, 50.0, 700.0, 333.0)
    draft_crop, full_crop = load_image(jpeg, size=129, box=box), load_image(open_image(jpeg), size=129, box=box)
    assert draft_crop.shape == full_crop.shape == (36, 76, 3)
    assert difference(draft_crop, full_crop) < 2


def test_boxes_are_whole_pixels_of_the_full_picture() -> None:
    original = smooth(100, 80)
    pixels = np.asarray(original)
    np.testing.assert_array_equal(load_image(original, box=(10, 20, 30, 50)), pixels[20:50, 10:30])
    np.testing.assert_array_equal(load_image(original, box=(10.4, 19.6, 30.4, 49.6)), pixels[20:50, 10:30])
    np.testing.assert_array_equal(load_image(original, box=(-5, -1e9, 1e9, 7)), pixels[:7])
    np.testing.assert_array_equal(load_image(original, box=(99.9, 79.9, 100, 80)), pixels[79:, 99:])
    np.testing.assert_array_equal(load_image(original, box=(4.6, 0, 4.9, 80)), pixels[:, 4:5])
    np.testing.assert_array_equal(load_image(original, box=(-3, -3, 0.1, 0.1)), pixels[:1, :1])
    assert load_image(original, size=50, box=(10, 20, 30, 50)).shape == (15, 10, 3)
    assert load_image(original, size=5000, box=(10, 20, 30, 50)).shape == (30, 20, 3)  # not enlarged


def test_small_pictures_are_enlarged_where_that_is_asked_for(tmp_path: Path) -> None:
    small, large = smooth(100, 80), smooth(500, 400)
    small.save(file := tmp_path / "small.png")
    assert load_image(small, size=640, least=384).shape == (307, 384, 3)
    assert load_image(small, size=200, least=384).shape == (160, 200, 3)  # to the size at most
    assert load_image(small, size=640, least=100).shape == (80, 100, 3)
    assert load_image(small, least=384).shape == (80, 100, 3)  # without a size it is as it is
    assert load_image(large, size=640, least=384).shape == (400, 500, 3)
    expected = np.asarray(small.resize((384, 307), Image.Resampling.LANCZOS))
    np.testing.assert_array_equal(load_image(file, size=640, least=384), expected)
    crop = load_image(file, size=640, least=384, box=(10, 20, 60, 60))  # things in it are as large as in the whole
    assert crop.shape == (154, 192, 3)
    assert difference(crop, expected[77:231, 38:230]) < 2
    assert load_image(np.zeros((1, 1, 3), np.uint8), size=640, least=384).shape == (384, 384, 3)
    assert load_image(np.zeros((1, 383, 3), np.uint8), size=640, least=384, min_side=32).shape == (32, 384, 3)
    pixels, larger, full = decode.load_twice(file, size=640, larger=1024, min_side=32, least=384)
    np.testing.assert_array_equal(pixels, expected)
    assert (larger.shape, full) == ((80, 100, 3), (100, 80))
    ahead = decode.decode_ahead(file, size=640, box=None, min_side=32, least=384)
    np.testing.assert_array_equal(load_image(ahead, size=640, min_side=32, least=384), expected)
    with pytest.raises(InputError, match="another size"):
        load_image(ahead, size=640, min_side=32)


def test_nothing_outside_the_box_is_seen() -> None:
    black = np.zeros((64, 64, 3), np.uint8)
    black[16:48, 16:48] = 200
    assert (load_image(black, size=20, box=(16, 16, 48, 48)) == 200).all()


@given(st.data())
def test_any_box_gives_its_share_of_the_picture(data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    x0, y0 = (data.draw(st.floats(-10, side, exclude_max=True)) for side in (width, height))
    x1 = data.draw(st.floats(max(x0, 0), 60, exclude_min=True))
    y1 = data.draw(st.floats(max(y0, 0), 60, exclude_min=True))
    size = data.draw(st.integers(1, 60))
    jpeg = encoded(smooth(width, height), "JPEG")
    crop = load_image(jpeg, size=size, box=(x0, y0, x1, y1))
    factor = min(1, size / max(width, height))
    assert abs(crop.shape[1] - max(1, (min(x1, width) - max(x0, 0)) * factor)) <= 1.5
    assert abs(crop.shape[0] - max(1, (min(y1, height) - max(y0, 0)) * factor)) <= 1.5


@pytest.mark.parametrize("box", [(100, 0, 120, 10), (0, 80, 10, 90), (-20, 0, 0, 10), (0, -20, 10, -5)])
def test_a_box_outside_names_box_and_size(tmp_path: Path, box: decode.Box) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(smooth(100, 80), "PNG"))
    with pytest.raises(BoxError, match="100x80") as caught:
        load_image(path, box=box)
    assert ",".join(map(str, box)) in str(caught.value)
    assert repr(str(path)) in str(caught.value)


def test_empty_and_infinite_boxes() -> None:
    for box in [(5, 5, 5, 9), (5, 5, 9, 4), (0, 0, float("nan"), 5), (0, 0, float("inf"), 5)]:
        with pytest.raises(BoxError):
            load_image(smooth(10, 10), box=box)


def test_tiny_results_are_padded_and_said(caplog: pytest.LogCaptureFixture) -> None:
    original = smooth(100, 80)
    with caplog.at_level(logging.WARNING, "cooc"):
        assert load_image(original, box=(10, 20, 50, 60), min_side=32).shape == (40, 40, 3)
        assert not caplog.records
        padded = load_image(original, box=(10, 20, 13, 60), min_side=32)
    assert padded.shape == (40, 32, 3)
    np.testing.assert_array_equal(padded[:, :3], np.asarray(original)[20:60, 10:13])
    assert (padded[:, 3:] == padded[:, 2:3]).all()
    assert "3x40" in caplog.text
    assert "32x40" in caplog.text
    assert load_image(original, size=4, min_side=7).shape == (7, 7, 3)


def test_parse_box() -> None:
    assert parse_box("1,2,3.5,1e2") == (1, 2, 3.5, 100)
    assert parse_box(" -1, 2 ,3,4") == (-1, 2, 3, 4)
    for text in ("", "1,2,3", "1,2,3,4,5", "a,b,c,d", "1;2;3;4", "3,2,3,4", "1,4,3,4", "1,2,nan,4", "1,2,inf,4"):
        with pytest.raises(BoxError, match="x0"):
            parse_box(text)


def test_sizes_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="size"):
        load_image(smooth(4, 4), size=0)
    with pytest.raises(InputError, match="min_side"):
        load_image(smooth(4, 4), min_side=0)


# -- bad files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True}])
@pytest.mark.parametrize("size", [None, 100])
def test_truncated_jpeg(tmp_path: Path, options: dict[str, Any], size: int | None) -> None:
    content = encoded(smooth(320, 240), "JPEG", **options)
    whole = load_image(content, size=size)
    path = tmp_path / "cut.jpg"
    for part in range(20):
        path.write_bytes(content[: len(content) * part // 20])
        with pytest.raises(ImageError) as caught:
            load_image(path, size=size)
        assert repr(str(path)) in str(caught.value)
    for missing in range(1, 40):  # the last bytes may be no part of the picture
        try:
            result = load_image(content[:-missing], size=size)
        except ImageError:
            continue
        assert difference(result, whole) == 0


@pytest.mark.parametrize("extension", FORMATS)
def test_truncated_files_of_every_format(extension: str) -> None:
    format, options, _ = FORMATS[extension]
    content = encoded(smooth(60, 40), format, **options)
    whole = load_image(content)
    for part in range(20):
        try:
            result = load_image(content[: len(content) * part // 20])
        except ImageError:
            continue
        assert difference(result, whole) == 0, f"{part}/20"


@pytest.mark.parametrize("extension", FORMATS)
def test_damaged_files_of_every_format(extension: str) -> None:
    """A picture or an ImageError: no other exception, no warning."""
    format, options, _ = FORMATS[extension]
    content = encoded(smooth(60, 40), format, **options)
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        for position in rng.integers(0, min(len(content), 400), 3):
            damaged[position] = rng.integers(0, 256)
        try:
            assert load_image(bytes(damaged), max_pixels=10**6).ndim == 3
            image_info(bytes(damaged))
        except ImageError:
            pass


@given(st.binary(max_size=200))
def test_random_bytes(content: bytes) -> None:
    with pytest.raises(ImageError, match="<bytes>"):
        load_image(content)
    with pytest.raises(ImageError, match="<bytes>"):
        image_info(content)


@given(st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"II*\0", b"BM", b"RIFF"]), st.binary())
def test_random_bytes_behind_a_magic_number(magic: bytes, content: bytes) -> None:
    with contextlib.suppress(ImageError):
        assert load_image(magic + content, max_pixels=10**6).ndim == 3


def test_what_is_no_picture(tmp_path: Path) -> None:
    text, empty = tmp_path / "text.jpg", tmp_path / "empty.jpg"
    text.write_text("<html>404: Not Found</html>" * 100)
    empty.touch()
    os.mkfifo(tmp_path / "pipe.jpg")
    cases = [
        (text, "not a picture"),
        (empty, "0 bytes"),
        (tmp_path / "missing.jpg", "does not exist"),
        (tmp_path, "folder"),
        (tmp_path / "pipe.jpg", "regular file"),
        (text / "below.jpg", "cannot be read"),
        (tmp_path / ("x" * 300), "cannot be read"),
        (tmp_path / "a\0b.jpg", "null"),
    ]
    for path, reason in cases:
        for read in (load_image, image_info, open_image):
            with pytest.raises(ImageError, match=reason) as caught:
                read(path)
            assert repr(str(path)) in str(caught.value)


def test_sources_of_other_types() -> None:
    for source, reason in [(None, "NoneType"), (3, "int"), (io.StringIO("x"), "binary"), (b"", "<bytes> is empty")]:
        with pytest.raises(ImageError, match=reason):
            load_image(cast("BinaryIO", source))
    with pytest.raises(ImageError, match="<stream> is empty"):
        load_image(io.BytesIO())
    with pytest.raises(ImageError, match="no pixels"):
        load_image(Image.new("RGB", (0, 5)))


def test_formats_that_would_run_a_program_are_refused() -> None:
    with pytest.raises(ImageError, match="known format"):
        load_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


@pytest.mark.parametrize("side", [20_000, 100_000, 2**31 - 1])
def test_png_bombs(side: int) -> None:
    bomb = png_header(side, side) + png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b"")
    for read in (load_image, image_info, open_image):
        with pytest.raises(ImageError, match="300 megapixels"):
            read(bomb)


def test_a_bomb_inside_an_icon() -> None:
    inner = encoded(Image.new("1", (4000, 4000)), "PNG")
    icon = struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 22) + inner
    with pytest.raises(ImageError, match="1 megapixels"):
        load_image(icon, max_pixels=10**6)
    assert load_image(icon).shape == (4000, 4000, 3)


def test_own_limit_replaces_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would warn here and, from twice its limit, fail."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    content = encoded(smooth(60, 40), "JPEG")
    assert load_image(content, box=(0, 0, 50, 40)).shape == (40, 50, 3)
    with pytest.raises(ImageError, match=r"60x40 pixels.*0.002 megapixels"):
        load_image(content, max_pixels=2000)
    with pytest.raises(ImageError, match="truncated"):
        load_image(content[:-200])
    assert Image.MAX_IMAGE_PIXELS == 100
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_threads_leave_pillow_and_warnings_as_they_were() -> None:
    content = encoded(smooth(200, 200), "JPEG")
    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    results: list[tuple[int, ...]] = []

    def work(limit: int) -> None:
        results.extend(load_image(content, max_pixels=limit).shape for _ in range(20))

    threads = [threading.Thread(target=work, args=(10**6 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(200, 200, 3)] * 160
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "changing.png"
    path.write_bytes(encoded(smooth(600, 400), "PNG"))
    with Image.open(path) as lazy:
        path.write_bytes(b"gone")
        with pytest.raises(ImageError, match=r"changing\.png"):
            load_image(lazy)


# -- folders -----------------------------------------------------------------------------------------------------------


def plant(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def listed(root: Path, **options: Any) -> list[str]:
    return [path.relative_to(root).as_posix() for path in list_images(root, **options)]


def test_listing(tmp_path: Path) -> None:
    plant(tmp_path, "b.JPG", "a.png", "c/z.webp", "c/d/e.heic", "notes.txt", "movie.mpg", "jpg", ".hidden.jpg")
    plant(tmp_path, ".cooc/thumbnail.jpg", ".git/x.png", "c/.trash/y.png", "folder.jpg/f.tif", "._b.JPG")
    assert listed(tmp_path) == ["a.png", "b.JPG", "c/d/e.heic", "c/z.webp", "folder.jpg/f.tif"]
    assert listed(tmp_path / ".git") == ["x.png"]  # asked for by name
    assert list(list_images(tmp_path / "notes.txt")) == [tmp_path / "notes.txt"]
    assert list(list_images(str(tmp_path / "c"))) == [tmp_path / "c/d/e.heic", tmp_path / "c/z.webp"]


def test_listing_is_lazy(tmp_path: Path) -> None:
    plant(tmp_path, "a/1.jpg", "b/2.jpg")
    walk = list_images(tmp_path)
    assert next(walk).name == "1.jpg"
    plant(tmp_path, "b/3.jpg")  # not looked at yet
    assert [path.name for path in walk] == ["2.jpg", "3.jpg"]


def test_missing_roots_fail_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", "a\0b"):
        with pytest.raises(InputError) as caught:
            list_images(tmp_path / name)
        assert repr(str(tmp_path / name)) in str(caught.value)


def test_deep_trees(tmp_path: Path) -> None:
    """Deeper than Python's recursion limit."""
    folders = [tmp_path]
    try:
        while len(folders) < sys.getrecursionlimit() + 50:
            folders.append(folders[-1] / "d")
            folders[-1].mkdir()
        plant(folders[-1], "x.jpg")
        assert list(list_images(tmp_path)) == [folders[-1] / "x.jpg"]
    finally:  # pytest's own cleaning is recursive
        (folders[-1] / "x.jpg").unlink(missing_ok=True)
        for folder in reversed(folders[1:]):
            folder.rmdir()


def test_links_and_loops(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    plant(tmp_path, "elsewhere/far.jpg", "tree/a/1.jpg", "tree/b/2.jpg")
    (tree / "a/up").symlink_to(tree)
    (tree / "a/b").symlink_to(tree / "b")
    (tree / "b/a").symlink_to(tree / "a")
    (tree / "far").symlink_to(tmp_path / "elsewhere")
    (tree / "one.jpg").symlink_to(tmp_path / "elsewhere/far.jpg")
    (tree / "self.jpg").symlink_to(tree / "self.jpg")
    (tree / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert listed(tree) == ["a/1.jpg", "b/2.jpg"]
    errors: list[tuple[str, OSError]] = []
    found = listed(tree, follow_symlinks=True, on_error=lambda path, error: errors.append((path.name, error)))
    assert found == ["a/1.jpg", "a/b/2.jpg", "far/far.jpg", "one.jpg"]
    assert sorted(name for name, _ in errors) == ["dangling.jpg", "self.jpg"]


def test_strange_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [b"new\nline.png", b"latin-\xe9.png", b"\xff\xfe.png", "日本.png".encode(), b"'quoted\".png"]
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(encoded(smooth(6, 4), "PNG"))  # noqa: PTH118
    found = list(list_images(tmp_path))
    assert {os.fsencode(path.name) for path in found} == set(names)
    for path in found:
        assert load_image(path).shape == (4, 6, 3)
        load_image(path, min_side=5)
        path.write_bytes(b"x")
        with pytest.raises(ImageError) as caught:
            load_image(path)
        str(caught.value).encode()  # can be printed
        assert "\n" not in str(caught.value)
    caplog.text.encode()
    assert len(caplog.records) == len(names)


def test_folders_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Permissions do not stop a root user, so that the refusal is simulated; a folder that vanishes is real."""
    plant(tmp_path, "a/1.jpg", "closed/2.jpg", "d/3.jpg", "gone/4.jpg")
    scandir = os.scandir

    def refuse(path: Path) -> Any:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    errors: list[tuple[Path, str | None]] = []
    walk = list_images(tmp_path, on_error=lambda path, error: errors.append((path, error.strerror)))
    found = [next(walk)]
    (tmp_path / "gone/4.jpg").unlink()
    (tmp_path / "gone").rmdir()
    found += walk
    assert [path.name for path in found] == ["1.jpg", "3.jpg"]
    assert errors == [
        (tmp_path / "closed", "Permission denied"),
        (tmp_path / "gone", "No such file or directory"),
    ]
    assert listed(tmp_path) == ["a/1.jpg", "d/3.jpg"]
    assert "Permission denied" in caplog.text


def test_extensions_are_what_the_installed_libraries_decode() -> None:
    formats = {*opening.formats(), "MPO"}  # opened as JPEG
    assert {ext for ext, format in Image.registered_extensions().items() if format in formats} == EXTENSIONS


def test_import_is_light() -> None:
    code = (
        "import sys, cooc.pictures.decode; print(sys.modules.keys() & {'torch', 'pillow_heif', 'PIL.PngImagePlugin'})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("shape", [(40, 30), (200, 100), (1100, 900), (2000, 1500), (2500, 1700), (4100, 300)])
@pytest.mark.parametrize("kind", ["jpg", "png"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_two_sizes_of_one_picture_are_those_of_two_calls(
    shape: tuple[int, int], kind: str, orientation: int, tmp_path: Path
) -> None:
    rough = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    rough.resize(shape).save(tmp_path / f"picture.{kind}", exif=exif)
    for size in (64, 500, 640, 1024, 1500):
        pixels, larger, full = decode.load_twice(tmp_path / f"picture.{kind}", size=size, larger=1024, min_side=32)
        np.testing.assert_array_equal(pixels, load_image(tmp_path / f"picture.{kind}", size=size, min_side=32))
        half = kind == "jpg" and shape == (2000, 1500) and size < 1000  # is enough
        most = 1000 if half else max(size, 1024)
        np.testing.assert_array_equal(larger, load_image(tmp_path / f"picture.{kind}", size=most))
        assert full == (shape if orientation == 1 else shape[::-1])
