"""Files that ask too much are refused from their bytes; what cameras and programs write is not."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cooc.errors import ImageError
from cooc.pictures import effort
from cooc.pictures.decode import image_info, load_image
from cooc.pictures.effort import check_effort
from tests.hostile import chunk, many_scans, png, segment, text


def jpeg(side: int = 64, **options: object) -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(noise).save(stream, "JPEG", **options)
    return stream.getvalue()


def refuses(data: bytes, why: str, path: Path) -> None:
    path.write_bytes(data)
    for picture in (data, path):
        for read in (image_info, load_image):
            with pytest.raises(ImageError, match=why) as told:
                read(picture)
            assert len(str(told.value)) < 300


def test_scans_of_a_jpeg(tmp_path: Path) -> None:
    """As many as are allowed are decoded; one more is not. The largest picture may have 16."""
    assert load_image(many_scans(64, 100)).shape == (64, 64, 3)
    refuses(many_scans(64, 101), "more than 100 scans", tmp_path / "a.jpg")
    refuses(many_scans(17_300, 17), "more than 16 scans", tmp_path / "b.jpg")
    check_effort(io.BytesIO(many_scans(17_300, 16)), "largest")
    refuses(many_scans(8900, 1000), "more than 63 scans", tmp_path / "c.jpg")


def test_scans_are_counted_as_the_decoder_sees_them(tmp_path: Path) -> None:
    """Not those in a thumbnail, behind the end, or in another picture; but those behind bytes that are skipped."""
    inside = segment(0xE1, many_scans(64, 300))
    plain = jpeg(progressive=True)
    for data in (plain[:2] + inside + plain[2:], plain + many_scans(64, 300), plain + b"\xff\xda" * 300):
        assert load_image(data).shape == (64, 64, 3)
    many = many_scans(64, 300)
    start = many.index(b"\xff\xda")
    for junk in (b"\xff" * 100, b"junk", b"\xff\xd0\xff\xd7", b"\xff\x01", b"\xff\0\xff\0", segment(0xFE, b"\xff\xd9")):
        refuses(many[:start] + junk + many[start:], "scans", tmp_path / "a.jpg")
        hidden = many.replace(b"\xff\xda", junk + b"\xff\xda")
        refuses(hidden, "scans|segments", tmp_path / "b.jpg")


def naive_scans(data: bytes) -> int:
    """Byte by byte, as the standard describes it."""
    scans, i, in_scan = 0, 2, False
    while i < len(data) - 1:
        if data[i] != 0xFF or data[i + 1] in (0x00, 0xFF) or (in_scan and 0xD0 <= data[i + 1] <= 0xD7):
            i += 1
            continue
        marker = data[i + 1]
        if marker == 0xD9:
            break
        in_scan = marker == 0xDA
        scans += in_scan
        i += 2
        if not (marker == 0x01 or 0xD0 <= marker <= 0xD7):
            i += int.from_bytes(data[i : i + 2], "big")
    return scans


@pytest.mark.parametrize(
    "options",
    [
        {"quality": 95},
        {"progressive": True},
        {"progressive": True, "quality": 30, "subsampling": 0},
        {"progressive": True, "restart_marker_blocks": 1},
        {"restart_marker_rows": 1},
        {"optimize": True, "comment": b"\xff\xda" * 1000},
    ],
)
def test_scans_of_what_programs_write(options: dict[str, object]) -> None:
    data = jpeg(300, **options)
    assert effort._scans(data[2:], 1000) == naive_scans(data) <= 10
    assert load_image(data).shape == (300, 300, 3)


def test_a_header_that_promises_one_scan_is_believed_by_the_decoder_too() -> None:
    """Such a file is not searched for more of them, since the decoder either does not see them or gives up."""
    once, other = jpeg(), jpeg(quality=10)
    scan = other[other.index(b"\xff\xda") : -2]
    for count in (1, 100, 5000):
        with suppress(ImageError):
            assert (load_image(once[:-2] + scan * count + once[-2:]) == load_image(once)).all()


def test_segments_of_a_jpeg(tmp_path: Path) -> None:
    """Pillow joins those of EXIF one by one, which for 4 MB of small ones takes minutes."""
    plain = jpeg()
    one = segment(0xE1, b"Exif\0\0" + b"x" * 8)
    refuses(plain[:2] + one * 200_000 + plain[2:], "1000 segments", tmp_path / "a.jpg")
    refuses(plain[:2] + (b"\xff" * 5 + segment(0xFE, b"")) * 2000 + plain[2:], "1000 segments", tmp_path / "b.jpg")
    assert load_image(plain[:2] + segment(0xE1, bytes(65_000)) * 500 + plain[2:]).shape == (64, 64, 3)


def test_texts_of_a_png(tmp_path: Path) -> None:
    refuses(png(16, text() * 101), "100 compressed texts", tmp_path / "a.png")
    refuses(png(16, *[chunk(b"tEXt", b"a\0b")] * 1001), "1000 chunks", tmp_path / "b.png")
    behind = png(16).replace(chunk(b"IEND", b""), text() * 101 + chunk(b"IEND", b""))
    refuses(behind, "100 compressed texts", tmp_path / "c.png")
    assert load_image(png(16, *[chunk(b"tEXt", b"a\0b")] * 900)).shape == (16, 16, 3)


def test_many_pieces_of_pixels_are_no_texts() -> None:
    """Large PNGs have thousands of them."""
    whole = png(16)
    start = whole.index(b"IDAT") - 4
    data = whole[start + 8 : whole.index(b"IEND") - 8]
    pieces = b"".join(chunk(b"IDAT", data[i : i + 1]) for i in range(len(data)))
    many = whole[:start] + pieces + chunk(b"IDAT", b"") * 5000 + chunk(b"IEND", b"")
    assert (load_image(many) == load_image(whole)).all()


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 20, 100, 150])
def test_files_that_end_early_are_left_to_the_decoder(cut: int) -> None:
    for data in (jpeg(progressive=True), many_scans(64, 3), png(16, text())):
        with pytest.raises(ImageError, match=r"damaged|known format"):
            load_image(data[:cut])
