"""The demo on a few of its photographs: it finds them, and draws what it found."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).parent.parent / "examples/demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_it_finds_the_photographs(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SIZE", 192)
    demo.main(["--photographs", "4", "--out", str(tmp_path / "new/demo.png")])
    printed = capsys.readouterr().out
    views = 4 * demo.VIEWS_OF_EACH
    assert f"{views} of {views} views found their photograph among 4." in printed
    assert all(name in printed for name in ("astronaut", "cat", "coffee", "rocket"))
    with Image.open(tmp_path / "new/demo.png") as picture:
        assert picture.width > 1000
        assert demo.GREEN in {colour for _, colour in picture.getcolors(1 << 24) or []}
        assert demo.RED not in {colour for _, colour in picture.getcolors(1 << 24) or []}


def test_a_wrong_one_is_shown_too(demo: ModuleType) -> None:
    blank = Image.new("RGB", (32, 32))
    good = demo.Found("cropped", "cat", blank, [("cat", 0.9), ("rocket", 0.1)])
    wrong = demo.Found("cropped", "rocket", blank, [("cat", 0.5), ("rocket", 0.4)])
    assert (good.right, wrong.right) == (True, False)
    assert demo.choose([wrong, good, good]) == [good, wrong]


def test_photographs_have_a_licence_and_come_with_the_package(demo: ModuleType) -> None:
    assert len(demo.PHOTOGRAPHS) >= 8
    assert all(licence.startswith(("public domain", "CC0")) for _, licence in demo.PHOTOGRAPHS.values())
    assert len(demo.load(list(demo.PHOTOGRAPHS))) == len(demo.PHOTOGRAPHS)


def test_views_are_seeded_and_differ(demo: ModuleType) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8))
    for view in demo.VIEWS.values():
        first, again, other = (view(photo, random.Random(seed)) for seed in (0, 0, 1))
        assert first.tobytes() == again.tobytes() != photo.tobytes()
        assert first.tobytes() != other.tobytes()
        assert min(first.size) >= 64
