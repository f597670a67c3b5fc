"""Snapshots, and putting them back: over an index that is read, damaged, half written or not there at all."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cooc.errors import InputError, StoreDamagedError, StoreError, StoreLockedError
from cooc.index import copying
from cooc.index.copying import restore
from cooc.index.embedded import swapping
from cooc.index.embedded.store import create_store, open_store
from cooc.index.records import BadFile
from tests import servers
from tests.index.test_embedded import ROOT
from tests.index.test_reading import WHO, serving
from tests.index.test_store import META, assert_same_search, flip, random_vectors, record
from tests.reference.store import Model
from tests.shell import Shell


@pytest.fixture
def place() -> Iterator[Path]:
    """An index of 71 pictures, and the snapshot of the 120 that it had; others may read both."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        with create_store(str(place / "index"), META) as store:
            store.add([record(f"{i}.jpg", tags=frozenset({"x"})) for i in range(120)], random_vectors(120))
            store.note("curve", [1, 2])
            store.report_bad([BadFile("bad.jpg", 1, 2, "truncated", "2020-01-01T00:00:00+00:00")])
            store.snapshot(str(place / "snapshot"))
        with open_store(str(place / "index"), write=True) as store:
            store.remove([f"{i}.jpg" for i in range(49)])
        yield place


def count(folder: Path) -> int:
    with open_store(str(folder)) as store:
        assert store.verify() == []
        return len(store)


KILLED = """
import os, sys
from cooc.index.embedded.store import open_store
store = open_store(sys.argv[1], write=True)
store.touch({f"{i}.jpg": i for i in range(120)})
store.remove([f"{i}.jpg" for i in range(60)])
os.kill(os.getpid(), 9)
"""


def kill_a_writer(index: Path) -> None:
    """What it committed is in the WAL alone."""
    subprocess.run([sys.executable, "-c", KILLED, str(index)], cwd=ROOT, check=False)
    assert (index / "index.sqlite-wal").stat().st_size


def test_an_old_wal_does_not_meet_a_restored_database(place: Path) -> None:
    """By hand it does, and nothing is noticed; that is why there is a command."""
    index = place / "index"
    kill_a_writer(index)
    shutil.copytree(index, place / "by hand")
    shutil.copy(place / "snapshot" / "index.sqlite", place / "by hand" / "index.sqlite")
    with open_store(str(place / "by hand")) as store:
        assert len(store) != 120
    assert restore(str(place / "snapshot"), str(index)) == 120
    left = {path.name for path in index.iterdir() if path.stat().st_size}
    assert left <= {"index.sqlite", "index.sqlite-shm", "writer"}  # no WAL, or an empty one
    model = Model()
    model.add([record(f"{i}.jpg", tags=frozenset({"x"})) for i in range(120)], random_vectors(120))
    with open_store(str(index), write=True) as store:
        assert list(store.records()) == model.records()
        assert_same_search(store, model, random_vectors(3, seed=4), 10)
        assert store.notes() == {"curve": [1, 2]}
        assert [bad.since for bad in store.bad_files()] == ["2020-01-01T00:00:00+00:00"]
        assert store.verify() == []
        store.remove(["0.jpg"])
    assert count(index) == 119
    assert count(place / "snapshot") == 120  # is still one


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("killed", [False, True])
def test_who_reads_goes_on_with_what_was_restored(place: Path, who: str, killed: bool) -> None:
    index = place / "index"
    if killed:
        kill_a_writer(index)
    with serving(index, who) as server, serving(index, "root") as other:
        before = "60 []" if killed else "71 []"
        assert server.ask() == other.ask() == before
        restore(str(place / "snapshot"), str(index))
        assert server.ask() == other.ask() == "120 []"
        with open_store(str(index), write=True) as store:
            store.remove(["7.jpg"])
            assert server.ask() == other.ask() == "119 []"
        assert server.ask() == other.ask() == "119 []"
        restore(str(place / "snapshot"), str(index))
        assert server.ask() == other.ask() == "120 []"
    assert count(index) == 120


def test_nothing_is_restored_while_another_process_writes(place: Path) -> None:
    with open_store(str(place / "index"), write=True), pytest.raises(StoreLockedError, match=str(os.getpid())):
        restore(str(place / "snapshot"), str(place / "index"))
    assert count(place / "index") == 71


def harm_pages(folder: Path) -> None:
    path = folder / "index.sqlite"
    data = path.read_bytes()
    path.write_bytes(data[: 2 * 16384] + b"\xee" * 16384 * 3 + data[5 * 16384 :])


SPOILT: dict[str, Callable[[Path], object]] = {
    "pages": harm_pages,
    "emptied": lambda folder: (folder / "index.sqlite").write_bytes(b""),
    "no database": lambda folder: (folder / "index.sqlite").write_bytes(b"x" * 100_000),
    "cut short": lambda folder: os.truncate(folder / "index.sqlite", 40_000),
    "missing": lambda folder: (folder / "index.sqlite").unlink(),
    "no folder": shutil.rmtree,
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_index_is_restored(place: Path, kind: str) -> None:
    SPOILT[kind](place / "index")
    assert restore(str(place / "snapshot"), str(place / "index")) == 120
    assert count(place / "index") == 120


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_snapshot_changes_nothing(place: Path, kind: str) -> None:
    SPOILT[kind](place / "snapshot")
    with pytest.raises(StoreError):
        restore(str(place / "snapshot"), str(place / "index"))
    assert count(place / "index") == 71
    assert not [path.name for path in (place / "index").iterdir() if path.name in ("restored", "replaced")]


def test_another_programs_database_is_not_replaced(place: Path) -> None:
    (place / "other").mkdir()
    connection = sqlite3.connect(place / "other" / "index.sqlite")
    connection.execute("CREATE TABLE other (x)")
    connection.close()
    before = (place / "other" / "index.sqlite").read_bytes()
    with pytest.raises(StoreError, match="another program's"):
        restore(str(place / "snapshot"), str(place / "other"))
    assert (place / "other" / "index.sqlite").read_bytes() == before


def test_the_old_one_comes_back_if_the_new_one_does_not_open(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_a_writer(place / "index")

    def fail(folder: Path, count: int) -> None:
        raise StoreDamagedError("as if the disk had failed")

    monkeypatch.setattr(swapping, "_opened", fail)
    with pytest.raises(StoreDamagedError, match="as if"):
        restore(str(place / "snapshot"), str(place / "index"))
    assert count(place / "index") == 60


STEPS = """
import os, signal, sys
from pathlib import Path
from cooc.index.copying import restore
left = int(sys.argv[3])
def dying(real):
    def call(*args, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return call
for name in ("rename", "replace", "link", "unlink", "rmdir", "mkdir", "remove"):
    setattr(os, name, dying(getattr(os, name)))
restore(sys.argv[1], sys.argv[2])
"""


def test_killed_at_any_step_there_is_one_index_or_the_other(place: Path) -> None:
    seen = []
    for step in range(100):
        index = Path(shutil.copytree(place / "index", place / f"index {step}"))
        kill_a_writer(index)
        command = [sys.executable, "-c", STEPS, str(place / "snapshot"), str(index), str(step)]
        ended = subprocess.run(command, cwd=ROOT, check=False).returncode
        seen.append(count(index))
        assert seen[-1] in (60, 120)
        restore(str(place / "snapshot"), str(index))
        assert count(index) == 120
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert sorted(seen) == seen  # first the old one, from some step on the new
    assert set(seen) == {60, 120}
    assert len(seen) > 8


def test_a_damaged_vector_gets_no_fresh_checksum(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither by a snapshot, nor by putting it back."""
    servers.Embedded().harm(place, record("50.jpg"), flip(30))
    with open_store(str(place / "index")) as store:
        store.snapshot(str(place / "copy"))
    with caplog.at_level(logging.WARNING, "cooc"):
        assert restore(str(place / "copy"), str(place / "index")) == 71
    assert "50.jpg" in caplog.text
    with open_store(str(place / "index")) as store:
        assert list(store.damaged()) == ["50.jpg"]


def test_what_cannot_be_meant(place: Path) -> None:
    with pytest.raises(InputError, match="that index itself"):
        restore(str(place / "index"), str(place / "index" / ".." / "index"))
    with pytest.raises(InputError, match="is no snapshot"):
        restore("postgresql://me:secret@host/db", str(place / "index"))
    with pytest.raises(InputError, match="--root"):
        restore(str(place / "snapshot"), str(place / "index"), root="photos")


def test_the_commands(cooc: Shell, place: Path) -> None:
    assert cooc("snapshot", place / "index", place / "another").out.startswith("71 pictures")
    again = cooc("snapshot", place / "index", place / "another")
    assert again.code == 5
    assert "exists already" in again.err
    SPOILT["emptied"](place / "index")
    for words in (("status", "--index"), ("verify", "--index"), ("search", "x.jpg", "--index"), ("snapshot",)):
        broken = cooc(*words, place / "index", *(["nowhere"] if words == ("snapshot",) else []))
        assert broken.code == 5
        assert f"cooc restore SNAPSHOT {place / 'index'}" in broken.err
    assert cooc("restore", place / "snapshot", place / "index").out.startswith("120 pictures")
    assert count(place / "index") == 120


@pytest.mark.parametrize("name", ["postgresql"])
def test_from_a_server_and_back(name: str, place: Path, tmp_path: Path) -> None:
    engine = servers.engine(name)
    address = engine.address(tmp_path, META.dim)
    with pytest.raises(InputError, match="--root FOLDER"):
        restore(str(place / "snapshot"), address)
    assert restore(str(place / "snapshot"), address, root="/photos") == 120
    with copying.open_store(address) as store, open_store(str(place / "snapshot")) as copy:
        assert store.meta.root == "/photos"
        assert list(store.records()) == list(copy.records())
        assert store.notes() == copy.notes()
        assert list(store.bad_files()) == list(copy.bad_files())
        assert store.verify() == []
        store.snapshot(str(tmp_path / "back"))
    assert count(tmp_path / "back") == 120
    with pytest.raises(StoreError, match="already"):
        restore(str(place / "snapshot"), address, root="/photos")
