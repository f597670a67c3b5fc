"""Processes that decode: whatever a picture does, it ends in time, and no other one suffers for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cooc.errors import BoxError, ImageError, MachineError
from cooc.pictures.batches import Item, decode
from cooc.pictures.decode import decode_ahead, image_info, load_image
from cooc.pictures.decoders import Decoders, Limits
from tests.hostile import end_by, keep, leave_holes, png, process, resident, sleep, slow_icon
from tests.starving import BROKEN

MB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    with Decoders(Limits(keep=0)) as decoders:
        yield decoders


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert until()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("started", [False, True])
def test_a_parent_that_goes_is_no_reason_to_complain(started: bool) -> None:
    """Ctrl-C closes the pipe at any moment: before a process has read, or with its answer unread (a reset)."""
    here, there = socket.socketpair()
    code = f"from cooc.pictures.child_process import serve; serve({there.fileno()})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, pass_fds=[there.fileno()], cwd=ROOT, text=True
    ) as child:
        there.close()
        pipe = Connection(here.detach())
        if started:
            pipe.send((Limits(), ""))
            assert pipe.poll(60)
        pipe.close()
        _, complaints = child.communicate(timeout=60)
    assert not complaints


def test_the_same_pixels_and_errors_as_here(decoders: Decoders, photo: Path) -> None:
    options = {"size": 64, "box": (10, 10, 50, 40), "min_side": 48}
    there = decoders.run(decode_ahead, photo, **options)
    assert (there.pixels == load_image(photo, **options)).all()
    assert there.info == image_info(photo)
    assert (load_image(there, **options) == there.pixels).all()
    assert image_info(there) == there.info
    with pytest.raises(ValueError, match="another size"):
        load_image(there, size=64)
    with pytest.raises(BoxError, match="outside"):
        decoders.run(load_image, photo, box=(100, 100, 200, 200))
    with pytest.raises(ImageError, match=r"photo.*does not exist"):
        decoders.run(load_image, photo.with_name("photo2.png"))
    assert decoders.run(process, b"") == decoders.run(process, b"")  # an error is an answer: it goes on


def test_a_picture_that_takes_too_long(photo: Path) -> None:
    """Minutes of work: it is stopped, and the next one is decoded by another process."""
    with Decoders(Limits(seconds=0.3)) as decoders:
        before = decoders.run(process, b"")
        for read in (image_info, load_image):
            with pytest.raises(ImageError, match=r"takes longer than 0.3 s to decode"):
                decoders.run(read, slow_icon())
        assert decoders.run(load_image, photo).shape == (60, 90, 3)
        assert decoders.run(process, b"") != before
        assert gone(before)


def test_time_that_a_process_sleeps_is_not_the_pictures_fault() -> None:
    with Decoders(Limits(wait=0.2)) as decoders, pytest.raises(MachineError, match="in time"):
        decoders.run(sleep, b"")


def test_a_picture_that_takes_long_makes_room(photo: Path) -> None:
    with Decoders(Limits(turn=5.0)) as decoders:
        waiting = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            slow = threads.submit(decoders.run, sleep, b"", others_wait=waiting.is_set)
            assert decoders.run(load_image, photo, others_wait=lambda: True).shape == (60, 90, 3)
            assert not slow.done()
            waiting.set()
            with pytest.raises(MachineError, match="others wait"):
                slow.result(60)


def test_a_picture_that_needs_too_much_memory(photo: Path) -> None:
    """It is refused by our own limit, so nothing is wrong with the machine."""
    with Decoders(Limits(memory=100 * MB)) as decoders:
        before = decoders.run(process, b"")
        with pytest.raises(ImageError, match=r"needs more than 105 MB of memory|damaged"):
            decoders.run(load_image, png(8000))
        assert decoders.run(load_image, photo).shape == (60, 90, 3)
        assert decoders.run(process, b"") == before


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGSEGV, ImageError),
        (signal.SIGFPE, ImageError),
        (signal.SIGABRT, MachineError),  # as libraries do that get no memory
        (signal.SIGBUS, MachineError),  # shared memory that cannot be had
        (signal.SIGKILL, MachineError),  # as the system does when memory runs out
        (signal.SIGTERM, MachineError),
    ],
)
def test_what_ends_a_process_is_told_apart(decoders: Decoders, number: int, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        decoders.run(end_by, b"", number)


def test_one_that_died_at_rest_is_nobodys_fault(decoders: Decoders, photo: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV):
        pid = decoders.run(process, b"")
        os.kill(pid, number)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # all its threads have ended
        assert decoders.run(load_image, photo).shape == (60, 90, 3)


def test_what_cannot_travel_is_not_the_pictures_fault(decoders: Decoders) -> None:
    with pytest.raises(Exception, match="pickle"):
        decoders.run(lambda picture: None, b"")  # not sent at all
    odd = type("Odd", (), {})
    odd.__module__, odd.__qualname__ = "tests.hostile", "png"  # another thing by that name there
    with pytest.raises(Exception, match=r"pickle|not the same"):
        decoders.run(process, odd())


def test_a_process_in_which_the_machine_failed_is_not_asked_again(decoders: Decoders, photo: Path) -> None:
    """What it lacked, memory or a module that was imported by half, the next picture would lack as well."""
    first = decoders.run(process, None)
    with pytest.raises(ImageError):
        decoders.run(load_image, b"no picture")
    assert decoders.run(process, None) == first  # a bad picture is no reason
    with pytest.raises(MachineError, match="Input/output error"):
        decoders.run(load_image, BROKEN)
    assert decoders.run(process, None) != first
    assert decoders.run(load_image, photo).shape == (60, 90, 3)


def test_memory_is_given_back(decoders: Decoders) -> None:
    """What is only free is returned to the system; a process that holds more is replaced."""
    before, pid = decoders.run(resident, b""), decoders.run(process, b"")
    decoders.run(leave_holes, b"", 300 * MB)
    assert decoders.run(resident, b"") < before + 100 * MB
    assert decoders.run(process, b"") == pid
    decoders.run(keep, b"", 300 * MB)
    assert decoders.run(resident, b"") < before + 100 * MB
    assert decoders.run(process, b"") != pid
    assert gone(pid)


def test_closing_kills_what_is_under_way(decoders: Decoders) -> None:
    with ThreadPoolExecutor(3) as threads:
        pids = set()
        decoders.start(3)
        with decoders._lock:
            pids = {one._process.pid for one in decoders._idle}
        asked = [threads.submit(decoders.run, sleep, b"") for _ in range(2)]
        wait(lambda: len(decoders._busy) == 2)
        decoders.close()
        for one in asked:
            with pytest.raises(MachineError, match="stopped"):
                one.result(60)
        assert len(pids) == 3
        assert all(gone(pid) for pid in pids)
        with pytest.raises(MachineError, match="stopped"):
            decoders.run(process, b"")


def test_many_threads(decoders: Decoders, photo: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(decoders.run, load_image, photo, size=10 + n) for n in range(40)]
        assert [max(one.result(60).shape) for one in asked] == [10 + n for n in range(40)]
    assert 1 <= len(decoders._idle) <= 4


def test_a_script_needs_no_special_form(photo: Path, tmp_path: Path) -> None:
    """multiprocessing would run it again in each process; and nothing is imported from the folder it is run in."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported from here')")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import sys\n"
        "from cooc.pictures.decode import load_image\n"
        "from cooc.pictures.decoders import Decoders\n"
        "print(Decoders().run(load_image, sys.argv[1]).shape)\n"
    )
    command, environment = [sys.executable, script, photo], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert (done.stdout, done.stderr) == ("(60, 90, 3)\n", "")


def test_indexing_goes_on_after_a_picture_that_takes_too_long(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in a run over many files: reported as bad, and the others arrive."""
    (photo.parent / "slow.ico").write_bytes(slow_icon())
    names = ["photo.png", "slow.ico", "photo.png", "photo.png"]
    monkeypatch.setattr("cooc.pictures.batches.LIMITS", Limits(seconds=0.3))
    results = list(decode((Item(name, photo.parent / name) for name in names), size=64, workers=2))
    assert [item.key for item, _ in results] == names
    assert [isinstance(found, np.ndarray) for _, found in results] == [True, False, True, True]
    assert "takes longer than 0.3 s" in str(results[1][1])
    assert isinstance(results[1][1], ImageError)
