"""The process that stays after a search: real processes, each test with a folder of its own for the socket."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cooc import asking
from cooc.cli import warm
from tests.labelled import write_labelled_folder

RECIPE = "light+size=96"
COOC = [sys.executable, "-m", "cooc"]


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_labelled_folder(tmp_path_factory.mktemp("things")) / "jpg"
    command = [*COOC, "index", folder, "-r", RECIPE, "--device", "cpu", "--verify", "none", "-q"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the socket is made. What a test has left running ends with it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("COOC_WARM", raising=False)
    tmp_path.chmod(0o700)
    yield tmp_path / "cooc"
    for pid in staying(tmp_path / "cooc"):
        os.kill(pid, signal.SIGKILL)


def staying(place: Path) -> list[int]:
    said = subprocess.run(["pgrep", "-f", f"cooc.cli.warm.* {place}/"], capture_output=True, text=True).stdout
    return list(map(int, said.split()))


def search(indexed: Path, *words: object, minutes: str = "5", **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COOC_WARM": minutes, "COOC_INDEX": str(indexed / ".cooc")}
    command = [*COOC, "search", *map(str, words), "--device", "cpu", "--no-thumbnails"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def results(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return {key: value for key, value in json.loads(done.stdout).items() if key != "seconds"}


def until(what: Any) -> None:
    while not what():
        time.sleep(0.05)


def test_a_second_search_is_answered_by_the_process_of_the_first(indexed: Path, place: Path) -> None:
    cold = search(indexed, "arch_000001.jpg", "--json", minutes="0", cwd=indexed)
    assert not place.exists()
    first = search(indexed, "arch_000001.jpg", "--json", cwd=indexed)
    assert "stays loaded for 5 minutes" in first.stderr
    process = staying(place)
    assert len(process) == 1
    second = search(indexed, "arch_000001.jpg", "--json", cwd=indexed)
    assert second.stderr == cold.stderr
    assert results(first) == results(second) == results(cold)
    # The caller's folder, standard input, exit codes and words for what is wrong.
    with (indexed / "gate_000000.jpg").open("rb") as stream:
        piped = search(indexed, "-", "--json", stdin=stream, cwd=place)
    assert results(piped)["matches"][0]["path"] == "gate_000000.jpg"
    wrong = [search(indexed, "nothing.jpg", minutes=minutes, cwd=indexed) for minutes in ("5", "0")]
    assert wrong[0].returncode == wrong[1].returncode == 2
    assert wrong[0].stderr == wrong[1].stderr != ""
    assert staying(place) == process
    # Nobody else can reach it.
    assert place.stat().st_mode & 0o077 == 0


def test_the_first_search_waits_for_no_torch_and_the_next_have_it(
    tmp_path_factory: pytest.TempPathFactory, place: Path
) -> None:
    """The default's network: OpenCV describes the first query, torch is loaded once that is answered."""
    folder = write_labelled_folder(tmp_path_factory.mktemp("others")) / "jpg"
    command = [*COOC, "index", folder, "-r", "resnet-tuned+size=96", "--device", "cpu", "--verify", "none", "-q"]
    subprocess.run(command, check=True)

    def has_torch() -> bool:
        (process,) = staying(place)
        return "libtorch" in Path(f"/proc/{process}/maps").read_text()

    first = results(search(folder, folder / "arch_000001.jpg", "--json"))
    until(has_torch)
    second = results(search(folder, folder / "arch_000001.jpg", "--json"))
    assert [match["path"] for match in first["matches"]] == [match["path"] for match in second["matches"]]
    cold = results(search(folder, folder / "arch_000001.jpg", "--json", minutes="0"))
    assert cold == first


def test_it_ends_by_itself(indexed: Path, place: Path) -> None:
    results(search(indexed, indexed / "arch_000001.jpg", "--json", minutes="0.01"))
    until(lambda: not staying(place))
    assert list(place.iterdir()) == []


def test_an_index_that_is_done_starts_it_and_one_that_was_killed_is_replaced(indexed: Path, place: Path) -> None:
    environment = {**os.environ, "COOC_WARM": "5", "COOC_INDEX": str(indexed / ".cooc")}
    command = [*COOC, "index", str(indexed), "--index", ".cooc", "--device", "cpu"]
    done = subprocess.run(command, env=environment, cwd=indexed, capture_output=True, text=True, check=True)
    assert "stays loaded for 5 minutes" in done.stderr
    (process,) = staying(place)
    answered = search(indexed, indexed / "arch_000001.jpg", "--json")  # at once: it waits until all is loaded
    assert results(answered)["matches"][0]["path"] == "arch_000001.jpg"
    assert answered.stderr == ""
    assert staying(place) == [process]
    os.kill(process, signal.SIGKILL)
    until(lambda: not staying(place))
    assert len(list(place.iterdir())) == 1
    results(search(indexed, indexed / "arch_000001.jpg", "--json"))
    (another,) = staying(place)
    assert another != process


def test_interrupts_and_busy_ones(indexed: Path, place: Path) -> None:
    """A search that waits for its standard input: others go on without the process; Ctrl-C ends both."""
    environment = {**os.environ, "COOC_WARM": "5", "COOC_INDEX": str(indexed / ".cooc")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    waiting = subprocess.Popen([*COOC, "search", "-", "--device", "cpu"], env=environment, text=True, **pipes)
    until(lambda: staying(place))
    results(search(indexed, indexed / "arch_000001.jpg", "--json"))
    assert len(staying(place)) == 1
    waiting.send_signal(signal.SIGINT)
    assert "interrupted" in waiting.communicate()[1]
    assert waiting.returncode == 130
    until(lambda: not staying(place))


def test_a_folder_that_others_can_enter_is_not_used(indexed: Path, place: Path) -> None:
    place.mkdir()
    place.chmod(0o755)
    results(search(indexed, indexed / "arch_000001.jpg", "--json"))
    assert list(place.iterdir()) == []
    assert not staying(place)


def test_minutes_are_a_number(indexed: Path, place: Path) -> None:
    done = search(indexed, "a.jpg", minutes="long")
    assert done.returncode == 2
    assert "COOC_WARM='long'" in done.stderr


def test_by_default_only_in_a_terminal(indexed: Path, place: Path) -> None:
    command = [*COOC, "search", str(indexed / "arch_000001.jpg"), "--index", str(indexed / ".cooc"), "-k", "1"]
    subprocess.run(command, capture_output=True, check=True)
    assert not staying(place)
    ours, theirs = pty.openpty()
    subprocess.run([*command, "--device", "cpu"], stdin=theirs, stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "arch_000001.jpg" in said
    assert len(staying(place)) == 1


def test_a_system_without_a_folder_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container nothing names one: platformdirs warns, which is nothing that a user can do about."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = asking._folder()  # warnings are errors here
    assert folder.stat().st_mode & 0o077 == 0


def test_the_network_of_a_search_is_looked_after_once(indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To see whether it is kept for others, all of it is read: searches that use it again need not wait."""
    monkeypatch.setattr(warm, "_stays", True)
    monkeypatch.setattr(warm, "_loaded", [])
    monkeypatch.setattr(warm, "_last", [])
    for after_it in (1, 0, 0):
        with warm.opened(str(indexed / ".cooc"), "cpu") as search:
            search.descriptor  # noqa: B018 (as a search that loads it)
        assert len(warm._last) == after_it
        assert warm._loaded[0][0] is search.descriptor
        warm._last.clear()
