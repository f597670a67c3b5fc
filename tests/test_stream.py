"""Pictures through a network: every one arrives, batches are begun ahead, and a failing device loses none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cooc.errors import CoocError, ImageError, MachineError
from cooc.pictures.batches import Item
from cooc.stream import stream

CPU = torch.device("cpu")
Begin = Callable[[Tensor], Callable[[], list[Any]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(9):
        Image.new("RGB", ((32, 48), (48, 32))[i % 2], (20 * i,) * 3).save(tmp_path / f"{i}.png")
    (tmp_path / "text.jpg").write_text("no picture")
    return tmp_path


def brightness(images: Tensor) -> Callable[[], list[int]]:
    return lambda: [int(image.float().mean()) for image in images]


def described(folder: Path, begin: Begin, **options: Any) -> dict[str, int | CoocError]:
    items = [Item(path.name, path) for path in sorted(folder.iterdir())]
    found = stream(items, begin, device=CPU, size=64, workers=0, **options)
    return {item.key: result for item, result in found}


WANTED = {f"{i}.png": 20 * i for i in range(9)}


def test_every_picture_has_its_result_or_its_error(folder: Path) -> None:
    found = described(folder, brightness)
    assert isinstance(found.pop("text.jpg"), ImageError)
    assert found == WANTED


@pytest.mark.parametrize("when", ["begun", "waited for"])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_batch_that_is_too_large_is_halved(folder: Path, room: int, when: str) -> None:
    sizes: list[int] = []

    def begin(images: Tensor) -> Callable[[], list[int]]:
        sizes.append(len(images))

        def wait() -> list[int]:
            if len(images) > room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
            return brightness(images)()

        if when == "begun":
            result = wait()
            return lambda: result
        return wait

    found = described(folder, begin)
    del found["text.jpg"]
    assert found == WANTED
    assert max(sizes) > room


def test_what_fails_alone_is_tried_elsewhere_and_then_is_the_machines_error(folder: Path) -> None:
    def broken(images: Tensor) -> Callable[[], list[int]]:
        if bool((images == 40).any()):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        return brightness(images)

    found = described(folder, broken)
    error = found["2.png"]
    assert isinstance(error, MachineError)
    assert "illegal memory access" in str(error)
    assert "Compile" not in str(error)
    assert [name for name in WANTED if found[name] != WANTED[name]] == ["2.png"]
    assert described(folder, broken, fallback=brightness)["2.png"] == 40


def test_batches_are_begun_ahead_of_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for one: it is no CPU, so two batches are begun before the first is waited for."""
    monkeypatch.setattr("cooc.stream.batch_pixels", lambda device: 1)
    begun = 0
    seen: list[int] = []

    def begin(images: Tensor) -> Callable[[], list[int]]:
        nonlocal begun
        begun += 1
        number = begun

        def wait() -> list[int]:
            seen.append(begun - number)
            return [number]

        return wait

    items = [Item(i, np.zeros((32, 32, 3), np.uint8)) for i in range(5)]
    for device, ahead in ((torch.device("meta"), [2, 2, 2, 1, 0]), (CPU, [0] * 5)):
        begun = 0
        seen.clear()
        assert [found for _, found in stream(items, begin, device=device, size=64, workers=0)] == [1, 2, 3, 4, 5]
        assert seen == ahead
