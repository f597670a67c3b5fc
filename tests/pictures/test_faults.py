"""Errors of content, of the path and of the machine: none is taken for another, wherever in a decoder it happens."""

from __future__ import annotations

import errno
import io
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from cooc.errors import ImageError, MachineError, UnknownNameError, UnreadableError
from cooc.pictures import opening
from cooc.pictures.decode import image_info, load_image
from cooc.pictures.faults import Attentive, blame
from tests.pictures.test_decode import encoded, smooth
from tests.starving import BROKEN, few_files


def test_read_errors_are_the_machines() -> None:
    for read in (load_image, image_info):
        with pytest.raises(MachineError, match="Input/output error"):
            read(BROKEN)


def test_no_file_handles_are_the_machines(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(smooth(6, 4), "PNG"))
    with few_files(0), pytest.raises(MachineError, match="Too many open files"):
        load_image(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png").shape == (4, 6, 3)


def test_decoders_that_could_not_be_loaded_are_loaded_later(tmp_path: Path) -> None:
    """Pillow does without a plugin that it cannot load, for good: WebP would be no picture in this process."""
    (tmp_path / "a.webp").write_bytes(encoded(smooth(6, 4), "WEBP"))
    script = (
        "import sys\n"
        "from cooc.errors import MachineError\n"
        "from cooc.pictures.decode import load_image\n"
        "from tests.starving import few_files\n"
        "for spare in range(12):\n"
        "    with few_files(spare):\n"
        "        try:\n"
        "            load_image(sys.argv[1])\n"
        "            break\n"
        "        except MachineError as error:\n"
        "            print(error)\n"
        "load_image(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.webp")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Too many open files" in done.stdout


def test_a_library_that_is_missing_blames_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    opening.formats.cache_clear()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pillow_heif", None)
        with pytest.raises(MachineError, match="pillow_heif"):
            load_image(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png").shape == (8, 8, 3)


def test_paths_are_neither_the_files_nor_the_machines_fault(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "itself.jpg").symlink_to(tmp_path / "itself.jpg")
    (tmp_path / "file").touch()
    for name in ("pipe.jpg", "itself.jpg", "missing.jpg", "file/a.jpg", "x" * 300, "."):
        with pytest.raises(UnreadableError):
            load_image(tmp_path / name)


class Flaky(io.FileIO):
    """A file on a disk that gives a read error at some place."""

    broken = 0

    def readinto(self, buffer: Any) -> int | None:
        if self.tell() + len(buffer) > self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readinto(buffer)

    def readall(self) -> bytes:
        if os.fstat(self.fileno()).st_size > self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readall()


class Watched(Attentive, Flaky):
    pass


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "HEIF", "JPEG2000"])
def test_read_errors_anywhere_in_a_file(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of Pillow's plugins may take them for damage, or for a picture without EXIF, which then lies on its side."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    (tmp_path / "a").write_bytes(encoded(smooth(60, 40), format, exif=exif.tobytes()))
    wanted = load_image(tmp_path / "a")

    def opened(path: Path) -> io.BufferedReader:
        return io.BufferedReader(Watched(path), 16)

    monkeypatch.setattr(opening, "open_regular", opened)
    failed = 0
    for Flaky.broken in range(0, (tmp_path / "a").stat().st_size + 64, 48):
        try:
            pixels = load_image(tmp_path / "a")
        except MachineError:
            failed += 1
        else:
            np.testing.assert_array_equal(pixels, wanted)
    assert failed > 3


def test_errors_that_decoders_make_of_others_are_the_machines_still() -> None:
    error = SyntaxError("broken PNG file")
    error.__cause__ = OSError(errno.EIO, "Input/output error")
    others = (MemoryError(), OSError("out of memory when reading image file"), TimeoutError(), OSError(28, "No space"))
    for machine in (error, *others):
        assert isinstance(blame(machine, "a.png"), MachineError)
    for content in (struct.error("unpack requires 4 bytes"), OSError("image file is truncated"), OSError(22, "seek")):
        assert type(blame(content, "a.png")) is ImageError
    for path in (PermissionError("Access Denied"), FileNotFoundError("bucket/key")):
        assert isinstance(blame(path, "a.png"), UnreadableError)


def test_every_error_survives_the_way_from_another_process() -> None:
    for error in (ImageError("a"), MachineError("b"), UnreadableError("c"), UnknownNameError("recipe", "x", ["y"])):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
