"""Readers of an index that others change, replace or put back meanwhile, with and without the right to write."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cooc.errors import StoreDamagedError, StoreError, StoreMismatchError
from cooc.index.embedded.store import create_store, open_store
from tests.index.test_embedded import ROOT
from tests.index.test_store import META, assert_same_search, random_vectors, record
from tests.reference.store import Model

# A server, which asks when it is told to. As root, it first becomes nobody: what it may not write it cannot.
SERVER = """
import os, sys
from cooc.index.embedded.store import open_store
from tests.index.test_store import random_vectors
if os.getuid() == 0 and sys.argv[2] == "nobody":
    os.setgid(65534)
    os.setuid(65534)
with open_store(sys.argv[1]) as store:
    print(len(store), flush=True)
    for line in sys.stdin:
        try:
            found = store.search(random_vectors(1), 1000).ids[0]
            assert None not in store.get(found)
            paths = [r.path for r in store.records()]
            assert len(paths) == len(set(paths)) == len(found) == len(store)
            store.vectors(found)
            print(len(found), store.verify(), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
"""


class Server:
    def __init__(self, folder: Path, who: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SERVER, str(folder), who],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.said = self.process.stdout.readline().strip()

    def ask(self) -> str:
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        print("ask", file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()


@contextmanager
def serving(folder: Path, who: str) -> Iterator[Server]:
    server = Server(folder, who)
    try:
        yield server
    finally:
        server.process.communicate()
    assert server.process.returncode == 0


@pytest.fixture
def index() -> Iterator[Path]:
    """10 pictures in a folder that others may read and only its owner change. (They may not enter pytest's own.)"""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        make(Path(place) / "index", 10)
        yield Path(place) / "index"


def make(folder: Path, count: int, seed: int = 0, **fields: object) -> None:
    with create_store(str(folder), replace(META, **fields)) as store:
        store.add([record(f"{seed}/{i}.jpg") for i in range(count)], random_vectors(count, seed=seed))


def grow(folder: Path, batch: int, compact: bool) -> None:
    with open_store(str(folder), write=True) as store:
        store.add([record(f"new {batch}/{i}.jpg") for i in range(40)], random_vectors(40, seed=batch))
        store.remove([f"new {batch}/{i}.jpg" for i in range(30)])
        if compact:
            store.compact()


WHO = ["root", pytest.param("nobody", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can become nobody"))]


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("compact", [False, True])
def test_a_server_follows_updates(index: Path, who: str, compact: bool) -> None:
    """Of each kind: by a process that opens, writes and closes; while one has it open; after one was killed."""
    with serving(index, who) as server:
        assert server.said == "10"
        assert server.ask() == "10 []"
        for batch in range(3):
            grow(index, batch, compact)
            assert server.ask() == f"{20 + 10 * batch} []"
        with open_store(str(index), write=True) as store:
            assert server.ask() == "40 []"
            store.remove(["0/0.jpg"])
            assert server.ask() == "39 []"
            store.compact()
            assert server.ask() == "39 []"
        script = (
            "import os, sys\nfrom cooc.index.embedded.store import open_store\n"
            "store = open_store(sys.argv[1], write=True)\nstore.remove(['0/1.jpg', '0/2.jpg'])\nos.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", script, str(index)], cwd=ROOT, check=False)
        assert server.ask() == "37 []"
        grow(index, 9, compact)
        assert server.ask() == "47 []"


@pytest.mark.parametrize("who", WHO)
def test_a_server_notices_another_index_in_its_place(index: Path, who: str, tmp_path: Path) -> None:
    with serving(index, who) as server:
        assert server.ask() == "10 []"
        make(tmp_path / "other", 25, seed=5, storage="float16")
        index.rename(tmp_path / "old")
        assert server.ask() == "10 []"  # in between, nothing is there: the old one is still read
        (tmp_path / "other").rename(index)
        assert server.ask() == "25 []"
        make(tmp_path / "third", 7, seed=6)
        (tmp_path / "third" / "index.sqlite").replace(index / "index.sqlite")
        assert server.ask() == "7 []"
        make(tmp_path / "foreign", 3, recipe="another", weights_hash="e" * 64)
        (tmp_path / "foreign" / "index.sqlite").replace(index / "index.sqlite")
        assert server.ask().startswith("StoreMismatchError")
        (tmp_path / "old" / "index.sqlite").replace(index / "index.sqlite")
        assert server.ask() == "10 []"


@pytest.mark.parametrize("who", WHO)
def test_damage_is_told_as_such(index: Path, who: str) -> None:
    with serving(index, who) as server:
        assert server.ask() == "10 []"
        whole = (index / "index.sqlite").read_bytes()
        (index / "new").write_bytes(whole[:16384] + b"\xee" * (len(whole) - 16384))
        (index / "new").replace(index / "index.sqlite")
        answer = server.ask()
        assert answer.startswith("StoreDamagedError")
        assert "cooc restore" in answer
        (index / "new").write_bytes(whole)
        (index / "new").replace(index / "index.sqlite")
        assert server.ask() == "10 []"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become nobody")
def test_reading_without_the_right_to_write_while_another_process_writes(index: Path) -> None:
    """Whatever the writer is just doing, an answer is of one committed state: whole batches of ten."""
    over, problems = threading.Event(), list[object]()

    def write() -> None:
        try:
            for batch in range(40):
                grow(index, batch, batch % 4 == 0)
        except Exception as error:
            problems.append(error)
        over.set()

    with serving(index, "nobody") as server:
        writer = threading.Thread(target=write)
        writer.start()
        answers = list[str]()
        while not over.is_set():
            answers.append(server.ask())
        writer.join()
        last = server.ask()
    assert problems == []
    assert last == "410 []"
    # A search, a list and a check are one state each; between two of them the writer may have gone on: then the lists
    # differ, or the vector of a picture is asked for that is no more.
    place = re.escape(f"in the index in {index}: search again.")
    gone = re.compile(f"InputError There is no image [0-9a-f]{{32}} {place}")
    odd = {answer for answer in answers if not answer.endswith("[]") and not gone.fullmatch(answer)}
    assert odd <= {"AssertionError"}
    assert len({answer for answer in answers if answer.endswith("[]")}) > 3
    assert all(int(answer.split()[0]) % 10 == 0 for answer in answers if answer.endswith("[]"))


def test_threads_go_on_while_the_index_is_replaced(index: Path, tmp_path: Path) -> None:
    model, other = Model(), Model()
    model.add([record(f"0/{i}.jpg") for i in range(10)], random_vectors(10))
    other.add([record(f"5/{i}.jpg") for i in range(25)], random_vectors(25, seed=5))
    make(tmp_path / "other", 25, seed=5)
    expected = [tuple(name for _, name in one.search(random_vectors(1)[0], 7)) for one in (model, other)]
    found, over = set[tuple[str, ...]](), threading.Event()
    with open_store(str(index)) as store:

        def work() -> None:
            while not over.is_set():
                found.add(tuple(store.search(random_vectors(1), 7).ids[0]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        shutil.copytree(index, tmp_path / "copy")
        for _ in range(10):
            (tmp_path / "other" / "index.sqlite").rename(tmp_path / "next.sqlite")
            (index / "index.sqlite").rename(tmp_path / "other" / "index.sqlite")
            (tmp_path / "next.sqlite").rename(index / "index.sqlite")
        over.set()
        for thread in threads:
            thread.join()
        assert found <= set(expected)
        assert_same_search(store, model, random_vectors(2), 5)


def test_a_writer_does_not_write_to_what_was_put_in_its_place(index: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", 25, seed=5)
    with open_store(str(index), write=True) as store:
        (tmp_path / "other" / "index.sqlite").replace(index / "index.sqlite")
        with pytest.raises(StoreError, match="open it again"):
            store.add([record("a.jpg")], random_vectors(1))


def test_another_recipe_in_its_place_is_refused(index: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", 3, config_hash="e" * 64)
    with open_store(str(index)) as store:
        (tmp_path / "other" / "index.sqlite").replace(index / "index.sqlite")
        with pytest.raises(StoreMismatchError, match="put in place"):
            len(store)


def test_nothing_is_called_damaged_before_it_was_opened_again(index: Path, tmp_path: Path) -> None:
    """The page cache of a connection that is open may be wrong where the file is not."""
    with open_store(str(index)) as store:
        assert len(store) == 10
        whole = (index / "index.sqlite").read_bytes()
        connection = store._read._idle[0]
        connection.execute("PRAGMA cache_size = 0")
        with (index / "index.sqlite").open("r+b") as file:  # in place: the inode stays
            file.write(bytes(len(whole)))
            file.flush()
            with pytest.raises(StoreDamagedError):
                list(store.records())
            file.seek(0)
            file.write(whole)
        assert len(list(store.records())) == 10
