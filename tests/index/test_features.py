"""Local features in a store: what every engine must do with them. The codes are opaque there, so any bytes will do."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cooc.errors import InputError
from cooc.index import create_store, open_store
from cooc.index.copying import restore
from cooc.index.records import Record
from cooc.index.store import Store
from tests import servers
from tests.index.test_store import DIM, META, random_vectors, record
from tests.servers import ENGINES, IN_ONE_PROCESS

WITH_FEATURES = replace(META, features="sift")


def code(name: str, size: int = 5000) -> bytes:
    return np.random.default_rng(list(name.encode())).bytes(size)


@pytest.fixture(params=sorted(IN_ONE_PROCESS))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[servers.Engine]:
    made = servers.engine(request.param)
    made.address(tmp_path, DIM)
    yield made
    made.drop(tmp_path)


@pytest.fixture
def address(engine: servers.Engine, tmp_path: Path) -> str:
    where = engine.address(tmp_path, DIM)
    return f"{where}&features={tmp_path / 'features'}" if isinstance(engine, servers.Milvus) else where


@pytest.fixture
def store(address: str) -> Iterator[Store]:
    with create_store(address, WITH_FEATURES) as opened:
        yield opened


def kept(store: Store) -> dict[str, bytes | None]:
    records = list(store.records())
    return dict(zip([one.path for one in records], store.features([one.id for one in records]), strict=True))


def add(store: Store, *records: Record, features: bool = True) -> None:
    codes = [code(one.sha256) for one in records] if features else None
    store.add(records, random_vectors(len(records)), codes)


def test_features_come_and_go_with_their_picture(store: Store, address: str) -> None:
    a, b, c = record("a.jpg"), record("b.jpg"), record("c.jpg")
    store.add([a, b, c], random_vectors(3), [code("a"), None, b""])
    assert store.meta.features == "sift"
    assert store.features([c.id, a.id, "0" * 32, b.id, a.id]) == [b"", code("a"), None, None, code("a")]
    assert store.count_features() == (2, 5000)
    assert [one.path for one in store.without_features()] == ["b.jpg"]
    store.remove(["a.jpg"])
    assert store.features([a.id]) == [None]
    assert store.count_features() == (1, 0)
    store.add([a], random_vectors(1))  # it is back, its features are not
    assert [one.path for one in store.without_features()] == ["a.jpg", "b.jpg"]
    assert store.verify() == []


def test_changed_content_has_no_features_of_the_old(store: Store) -> None:
    add(store, record("a.jpg", "old"))
    add(store, record("a.jpg", "new"), features=False)
    assert kept(store) == {"a.jpg": None}
    assert store.count_features() == (0, 0)
    add(store, record("a.jpg", "new"))
    assert kept(store) == {"a.jpg": code(record("a.jpg", "new").sha256)}
    add(store, record("a.jpg", "new"), features=False)  # the same content again: what was made of it stays
    assert kept(store) == {"a.jpg": code(record("a.jpg", "new").sha256)}


def test_copies_share_features_and_the_last_one_takes_them_along(store: Store) -> None:
    one, two = record("one.jpg", "same"), record("two.jpg", "same")
    add(store, one)
    add(store, two, features=False)
    assert kept(store) == {"one.jpg": code(one.sha256), "two.jpg": code(one.sha256)}
    store.remove(["one.jpg"])
    assert kept(store) == {"two.jpg": code(one.sha256)}
    store.remove(["two.jpg"])
    assert store.count_features() == (0, 0)


def test_moved_pictures_keep_their_features(store: Store) -> None:
    a, b, c = record("a.jpg"), record("b.jpg"), record("c.jpg")
    add(store, a, b, c)
    store.rename({"a.jpg": "b.jpg", "b.jpg": "a.jpg"})  # they change places
    assert kept(store) == {"a.jpg": code(b.sha256), "b.jpg": code(a.sha256), "c.jpg": code(c.sha256)}
    store.rename({"a.jpg": "c.jpg"})  # what was there goes
    assert kept(store) == {"b.jpg": code(a.sha256), "c.jpg": code(b.sha256)}
    assert store.count_features() == (2, 10_000)
    store.remove(["b.jpg"])
    store.compact()
    assert kept(store) == {"c.jpg": code(b.sha256)}
    store.tag([one.id for one in store.records()], add=["x"])
    store.touch({"c.jpg": 7})
    assert kept(store) == {"c.jpg": code(b.sha256)}
    assert store.verify() == []


def test_an_index_without_features_gets_them(address: str) -> None:
    records = [record(f"{i:02}.jpg", str(i // 2)) for i in range(8)]
    with create_store(address, META) as store:
        store.add(records, random_vectors(8))
        assert store.meta.features == ""
        assert store.features([records[0].id]) == [None]
        assert [one.path for one in store.without_features()] == [one.path for one in records]
        assert store.count_features() == (0, 0)
        with pytest.raises(InputError, match="no local features"):
            store.add(records[:1], random_vectors(1), [b"code"])
        with pytest.raises(InputError, match="no local features"):
            store.set_features({records[0].id: b"code"})
        store.set_feature_engines("sift+xfeat")
        store.set_feature_engines("sift+xfeat")
        assert store.meta.features == "sift+xfeat"
        with pytest.raises(InputError, match=r"sift\+xfeat, not by sift.*cooc rebuild"):
            store.set_feature_engines("sift")
        assert store.set_features({records[0].id: code("0"), records[3].id: code("1"), "f" * 32: code("2")}) == 2
        store.set_features({})
    with open_store(address) as store:
        assert store.meta == replace(META, features="sift+xfeat")
        assert [one.path for one in store.without_features()] == [one.path for one in records[4:]]
        assert list(kept(store).values()) == [code("0")] * 2 + [code("1")] * 2 + [None] * 4
        assert store.count_features() == (4, 10_000)
        assert store.verify() == []


def test_damaged_features_are_left_out_and_found(
    engine: servers.Engine, address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [record(f"{i}.jpg") for i in range(3)]
    with create_store(address, WITH_FEATURES) as store:
        add(store, *records)
    engine.harm_features(tmp_path, records[1])
    with open_store(address, write=True) as store:
        with caplog.at_level(logging.WARNING, "cooc"):
            assert list(kept(store).values()) == [code(records[0].sha256), None, code(records[2].sha256)]
        assert "1.jpg" in caplog.text
        assert "cooc index" in caplog.text
        (problem,) = store.verify()
        assert problem.startswith("1.jpg: its local features are damaged")
        assert list(store.without_features()) == []
        assert [one.path for one in store.without_features(check=True)] == ["1.jpg"]
        store.snapshot(str(tmp_path / "copy"))
        store.set_features({records[1].id: code("again")})
        assert kept(store)["1.jpg"] == code("again")
        assert store.verify() == []


def test_snapshot_and_restore_keep_features(store: Store, tmp_path: Path) -> None:
    records = [record(f"{i}.jpg") for i in range(3)]
    store.add(records, random_vectors(3), [code("0"), None, code("2")])
    store.snapshot(str(tmp_path / "copy"))
    restore(str(tmp_path / "copy"), str(tmp_path / "restored"))
    for folder in ("copy", "restored"):
        with open_store(tmp_path / folder) as copy:
            assert copy.meta.features == "sift"
            assert list(kept(copy).values()) == [code("0"), None, code("2")]
            assert copy.verify() == []


@pytest.mark.parametrize("engine", sorted(IN_ONE_PROCESS.keys() - {"embedded"}), indirect=True)
def test_a_snapshot_goes_to_a_server_with_its_features(engine: servers.Engine, address: str, tmp_path: Path) -> None:
    with create_store(str(tmp_path / "here"), WITH_FEATURES) as store:
        add(store, record("a.jpg"))
    restore(str(tmp_path / "here"), address, root="photos")
    with open_store(address) as store:
        assert (store.meta.features, kept(store)) == ("sift", {"a.jpg": code(record("a.jpg").sha256)})


WRITER = """
import sys
from cooc.index import open_store
from tests.index.test_features import code
from tests.index.test_store import random_vectors, record
with open_store(sys.argv[1], write=True) as store:
    print("ready", flush=True)
    for batch in range(100_000):
        records = [record(f"{batch}/{i}.jpg") for i in range(10)]
        store.add(records, random_vectors(10, seed=batch), [code(r.sha256, 57_000) for r in records])
"""


@pytest.mark.parametrize("engine", sorted(ENGINES), indirect=True)  # those that two processes may open
def test_kill_9_leaves_pictures_with_their_features(engine: servers.Engine, address: str) -> None:
    create_store(address, WITH_FEATURES).close()
    command = [sys.executable, "-c", WRITER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with open_store(address) as store:
            while len(store) < 50:
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
    with open_store(address, write=True) as store:
        records = list(store.records())
        assert len(records) >= 50
        assert len(records) % 10 == 0
        assert list(store.without_features()) == []
        for start in range(0, len(records), 100):
            some = records[start : start + 100]
            assert store.features([r.id for r in some]) == [code(r.sha256, 57_000) for r in some]
        assert store.verify() == []


def test_on_milvus_features_need_a_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = servers.engine("milvus")
    where = engine.address(tmp_path, DIM)
    with caplog.at_level(logging.WARNING, "cooc"), create_store(where, WITH_FEATURES) as store:
        assert "features=s3://" in caplog.text
        assert store.meta.features == ""
        add(store, record("a.jpg"), features=False)
        with pytest.raises(InputError, match="features=s3://BUCKET/PREFIX"):
            store.set_feature_engines("sift")
    with open_store(f"{where}&features={tmp_path / 'files'}", write=True) as store:
        store.set_feature_engines("sift")
        store.set_features({record("a.jpg").id: code("a")})
    with open_store(where, write=True) as store:  # the index knows it from now on
        assert kept(store) == {"a.jpg": code("a")}
        file = next((tmp_path / "files").rglob(record("a.jpg").sha256))
        stray = file.with_name(file.parent.name + "ab" * 31)
        stray.write_bytes(b"of a run that was killed")
        store.compact()
        assert not stray.exists()
        assert kept(store) == {"a.jpg": code("a")}
    engine.drop(tmp_path)
