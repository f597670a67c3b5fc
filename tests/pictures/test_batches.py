"""Many pictures to batches: all of them arrive, bad ones are reported, a dying worker takes nothing along."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from pillow_heif import register_heif_opener
from torch import Tensor

from cooc.errors import CoocError, ImageError, MachineError
from cooc.pictures import shared_memory
from cooc.pictures.batches import Bad, Item, batches, decode, default_workers
from cooc.pictures.decode import load_image
from tests.starving import Starved


def picture(width: int, height: int, value: int) -> NDArray[np.uint8]:
    return np.full((height, width, 3), value, np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures of three shapes, each of one colour that says which it is; and three files that are none."""
    for i in range(12):
        width, height = ((48, 32), (32, 48), (40, 40))[i % 3]
        Image.fromarray(picture(width, height, 20 * i)).save(tmp_path / f"{i:02}.png")
    (tmp_path / "03-text.jpg").write_text("not a picture")
    (tmp_path / "07-empty.jpg").touch()
    (tmp_path / "09-cut.png").write_bytes((tmp_path / "09.png").read_bytes()[:60])
    return tmp_path


def items(folder: Path) -> list[Item]:
    return [Item(path.name, path) for path in sorted(folder.iterdir())]


def brightness(images: Tensor) -> list[int]:
    """Stands for the network: it sees whole batches, and only values tell which picture is which."""
    assert images.dtype == torch.uint8
    assert images.shape[1] == 3
    return [int(image.float().mean()) for image in images]


class Done(NamedTuple):
    items: list[Item]
    result: Any


def extract(
    items: Iterable[Item], describe: Callable[[Tensor], Any], *, size: int, **options: int
) -> Iterator[Done | Bad]:
    """Batches, and what `describe` makes of each."""
    for batch in batches(items, size=size, **options):
        if isinstance(batch, Bad):
            yield batch
            continue
        pixels = np.empty(batch.shape, np.uint8)
        batch.copy_to(pixels)
        yield Done(batch.items, describe(torch.from_numpy(pixels).permute(0, 3, 1, 2)))


def collect(results: Iterator[Done | Bad]) -> tuple[dict[Any, int], dict[Any, CoocError]]:
    good: dict[Any, int] = {}
    bad: dict[Any, CoocError] = {}
    for done in results:
        if isinstance(done, Bad):
            bad[done.item.key] = done.error
        else:
            for item, value in zip(done.items, done.result, strict=True):
                assert item.key not in good
                good[item.key] = value
    return good, bad


WANTED = {f"{i:02}.png": 20 * i for i in range(12)}


@pytest.mark.parametrize("workers", [0, 1])
def test_everything_arrives_and_bad_files_are_named(folder: Path, workers: int) -> None:
    good, bad = collect(extract(items(folder), brightness, size=64, batch_pixels=4 * 48 * 32, workers=workers))
    assert good == WANTED
    assert set(bad) == {"03-text.jpg", "07-empty.jpg", "09-cut.png"}
    for name, error in bad.items():
        assert isinstance(error, ImageError)
        assert name in str(error)
        assert len(str(error)) < 400


def test_pixels_pass_through_shared_memory_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in one process: a worker's part on one side of the memory, its parent's on the other."""
    shared = shared_memory.Shared(2, 3 * 48 * 32)
    with open(shared.address, "r+b") as file:  # noqa: PTH123
        monkeypatch.setattr(shared_memory, "_memory", mmap.mmap(file.fileno(), 0))
    for place, name in zip(list(shared.free), ("04.png", "00.png"), strict=True):
        loaded = shared_memory.load(folder / name, place, 64, None, 1, 0)
        assert loaded.pixels is None
        assert (shared.view(place, loaded.shape) == load_image(folder / name)).all()
    larger = shared_memory.load(
        folder / "04.png", shared_memory.Place(0, 100), 64, None, 1, 0
    )  # no room: the pixels themselves
    assert isinstance(larger.pixels, np.ndarray)
    assert (larger.pixels == load_image(folder / "04.png")).all()
    shared.close()


def test_pictures_in_shared_memory_stay_until_their_batch_is_made(folder: Path) -> None:
    """Many wait for others of their shape, more than there is room for: none is overwritten by a later one."""
    names = ["04.png", "00.png"] * 30
    wanted = {name: float(load_image(folder / name).astype(float).mean()) for name in set(names)}
    many = [Item(name, folder / name) for name in names]
    for hold_pixels in (1, 10**9):
        seen = []
        for batch in extract(
            many, lambda x: x.double().mean((1, 2, 3)), size=64, workers=1, batch_pixels=10**5, hold_pixels=hold_pixels
        ):
            assert not isinstance(batch, Bad)
            seen += [item.key for item in batch.items]
            assert batch.result.tolist() == pytest.approx([wanted[item.key] for item in batch.items])
        assert sorted(seen) == sorted(names)


@pytest.mark.parametrize("batch_pixels", [1, 48 * 32, 3 * 48 * 32, 10**9])
def test_any_batch_size_and_order_give_the_same(folder: Path, batch_pixels: int) -> None:
    for order in (items(folder), items(folder)[::-1]):
        sizes = []

        def describe(images: Tensor) -> list[int]:
            sizes.append(images.shape[0] * images.shape[2] * images.shape[3])  # noqa: B023
            return brightness(images)

        good, bad = collect(extract(order, describe, size=64, batch_pixels=batch_pixels))
        assert good == WANTED
        assert len(bad) == 3
        assert max(sizes) <= max(batch_pixels, 48 * 32 + 64)
        if batch_pixels == 10**9:
            assert len(sizes) == 3  # one batch for each shape


def test_a_batch_has_one_shape_and_the_pictures_in_it(folder: Path) -> None:
    for done in extract(items(folder), lambda images: images, size=64):
        if isinstance(done, Done):
            assert len(done.items) == len(done.result)
            for item, image in zip(done.items, done.result, strict=True):
                np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), load_image(item.picture, size=64))


def test_rare_shapes_do_not_pile_up() -> None:
    """Every picture has a shape of its own: without a limit all of them would wait for company until the end."""
    taken = described = 0

    def pictures() -> Iterator[Item]:
        nonlocal taken
        for taken in range(60):
            yield Item(taken, picture(20 + taken, 20, taken))

    def describe(images: Tensor) -> list[int]:
        nonlocal described
        assert taken - described < 20 + 4  # 8000 pixels are at most 20 of them; 4 more are being decoded
        described += 1
        return brightness(images)

    good, bad = collect(extract(pictures(), describe, size=500, batch_pixels=4000, hold_pixels=8000))
    assert good == {i: i for i in range(60)}
    assert bad == {}


def test_boxes_sizes_and_smallest_sides() -> None:
    image = picture(200, 100, 0)
    image[:, 100:] = 200
    wanted = [
        Item("whole", image),
        Item("right", image, (100, 0, 200, 100)),
        Item("tiny", image, (0, 0, 4, 4)),
        Item("outside", image, (300, 0, 400, 100)),
    ]
    shapes: dict[Any, tuple[int, ...]] = {}
    reasons = {}
    for done in extract(wanted, lambda images: images, size=100, min_side=32):
        if isinstance(done, Bad):
            reasons[done.item.key] = done.reason
        else:
            shapes |= {item.key: tuple(image.shape) for item, image in zip(done.items, done.result, strict=True)}
            if done.items[0].key == "right":
                assert done.result.eq(200).all()
    assert shapes == {"whole": (3, 50, 100), "right": (3, 50, 50), "tiny": (3, 32, 32)}
    assert "outside" in reasons["outside"]


@pytest.mark.parametrize("workers", [0, 1])
def test_endless_input_is_taken_as_there_is_room(workers: int) -> None:
    """A crawl may never end; what is read ahead is bounded, and closing early leaves nothing behind."""
    taken = 0

    def endless() -> Iterator[Item]:
        nonlocal taken
        for i in itertools.count():
            taken += 1
            yield Item(i, picture(32, 32, i % 256))

    results = decode(endless(), size=32, workers=workers)
    for i in range(20):
        item, pixels = next(results)
        assert item.key == i  # in order
        assert isinstance(pixels, np.ndarray)
        assert pixels[0, 0, 0] == i
        assert taken <= i + 8
    results.close()  # type: ignore[attr-defined]
    assert taken < 30


def test_errors_of_the_caller_are_not_swallowed(folder: Path) -> None:
    def broken(images: Tensor) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        list(extract(items(folder), broken, size=64))

    def interrupted() -> Iterator[Item]:
        yield items(folder)[0]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(extract(interrupted(), brightness, size=64))


class Killer:
    """A picture that ends the process which unpickles it, as a crashing decoder does to a worker."""

    def __init__(self, how: signal.Signals = signal.SIGSEGV) -> None:
        self.how = how

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (self.how,)


class Stuck:
    """A picture that cannot be sent to a worker at all."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("cannot travel")


def test_a_dying_worker_takes_nothing_along(folder: Path) -> None:
    """The killers are found out, one at the very end too; every other picture arrives."""
    wanted = [item for item in items(folder) if item.key in WANTED]
    wanted.insert(2, Item("killer", Killer()))  # type: ignore[arg-type]
    wanted.insert(5, Item("stuck", Stuck()))  # type: ignore[arg-type]
    wanted.insert(8, Item("out of memory", Killer(signal.SIGKILL)))  # type: ignore[arg-type]
    wanted.append(Item("last", Killer()))  # type: ignore[arg-type]
    good, bad = collect(extract(wanted, brightness, size=64, workers=1))
    assert good == WANTED
    assert set(bad) == {"killer", "stuck", "out of memory", "last"}
    for name in ("killer", "last"):
        assert isinstance(bad[name], ImageError)
        assert "crashed the decoder" in str(bad[name])
    assert isinstance(bad["out of memory"], MachineError)  # so the system kills: no picture is to blame
    assert "SIGKILL" in str(bad["out of memory"])
    assert "cannot travel" in str(bad["stuck"])


@pytest.mark.parametrize("ending", ["jpg", "progressive.jpg", "png", "jp2", "heic", "webp", "tif"])
def test_a_worker_without_memory_blames_no_picture(tmp_path: Path, ending: str) -> None:
    """Some decoders take it for damage when they get none."""
    register_heif_opener()
    path, small = tmp_path / f"large.{ending}", tmp_path / f"small.{ending}"
    large = Image.linear_gradient("L").resize((1600, 1200)).convert("RGB")
    large.save(path, **({"progressive": True} if "progressive" in ending else {}))
    large.resize((48, 32)).save(small)
    for spare in (1 << 20, 12 << 20):
        wanted = [Item("before", small), Item("starved", Starved(path, spare))]  # type: ignore[arg-type]
        found = {item.key: result for item, result in decode(wanted, size=1600, workers=1)}
        assert isinstance(found["before"], np.ndarray)
        if isinstance(starved := found["starved"], np.ndarray):
            np.testing.assert_array_equal(starved, load_image(path, size=1600))
        else:
            assert isinstance(starved, MachineError)


def test_what_cannot_be_decoded_for_want_of_memory_is_not_damaged(tmp_path: Path) -> None:
    """The test above must see some fail: this one does for sure."""
    Image.linear_gradient("L").resize((6000, 4000)).save(tmp_path / "a.png")
    ((_, error),) = decode([Item(0, Starved(tmp_path / "a.png", 1 << 20))], size=64, workers=1)  # type: ignore[arg-type]
    assert isinstance(error, MachineError)
    assert "memory" in str(error).lower()


def test_workers_do_not_load_torch() -> None:
    """What a worker runs is `images.load_image`; with torch it would start ten times slower and hold 200 MB more."""
    code = "import sys, cooc.pictures.decoders, cooc.pictures.thumbnails; sys.exit('torch' in sys.modules)"
    assert load_image.__module__ == "cooc.pictures.decode"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_default_workers() -> None:
    assert default_workers("cpu") == 1
    assert default_workers("cuda") >= 1


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """kill -9 gives the parent no chance to tell them."""
    script = (
        "import os, signal, sys\n"
        "from cooc.pictures.decoders import Decoders\n"
        "from tests.hostile import process, sleep\n"
        "from threading import Thread\n"
        "decoders = Decoders()\n"
        "pids = {decoders.run(process, b'')}\n"
        "Thread(target=decoders.run, args=(sleep, b''), daemon=True).start()\n"  # one works, one is at rest
        "while len(pids) < 2:\n"
        "    pids.add(decoders.run(process, b''))\n"
        "print(*pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "parent.py").write_text(script)
    command = [sys.executable, str(tmp_path / "parent.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
