"""Export and import: what goes out comes back, and nothing that is malformed comes in, by no door and not by halves."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cooc.errors import InputError, StoreMismatchError
from cooc.image_search import ImageSearch
from cooc.index import copying, create_store, open_store
from cooc.index.export import export_index
from cooc.index.importing import Exported
from cooc.index.records import StoreMeta
from cooc.index.store import Store
from cooc.recipes import find_recipe
from tests import servers
from tests.index.test_embedded import ROOT
from tests.index.test_store import DIM, flip, random_vectors, record
from tests.servers import ENGINES
from tests.shell import Shell
from tests.tiny import RECIPE

CONFIG = find_recipe(RECIPE).config
META = StoreMeta(RECIPE, CONFIG.as_dict(), CONFIG.hash, "d" * 64, DIM, root="photos", cooc_version="0")
RECORDS = [record(f"{i // 5}/{i}.jpg", taken="2020-01-01" if i % 2 else None, tags=frozenset("ab")) for i in range(12)]
FORMATS = ["out.npy", "out.parquet"]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The folder with the files of an index of twelve pictures, in both formats."""
    with create_store(str(tmp_path / "source"), META) as store:
        store.add(RECORDS, random_vectors(12))
        for name in FORMATS:
            assert export_index(store, tmp_path / name) == 12
    return tmp_path


def read(folder: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]], np.ndarray]:
    """Meta, rows and vectors, as another program would read them."""
    if name.endswith(".npy"):
        meta, *rows = (json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines())
        return meta, rows, np.load(folder / name)
    table = pq.read_table(folder / name)
    vectors = np.array(table.column("vector").to_pylist(), np.float32)
    return json.loads(table.schema.metadata[b"cooc"]), table.drop_columns(["vector"]).to_pylist(), vectors


def write(folder: Path, name: str, meta: Any, rows: list[Any], vectors: np.ndarray) -> None:
    """As another program might write them; for parquet every column has the type that its values suggest."""
    if name.endswith(".npy"):
        np.save(folder / name, vectors)
        (folder / "out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (meta, *rows)))
        return
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    table = pa.table({column: [row.get(column) for row in rows] for column in names})
    table = table.append_column("vector", pa.array(list(vectors)))
    pq.write_table(table.replace_schema_metadata({"cooc": json.dumps(meta)}), folder / name)


def bring_in(folder: Path, name: str, index: Path) -> None:
    ImageSearch.import_from(folder / name, index, root=folder).close()


@pytest.mark.parametrize("name", FORMATS)
def test_what_goes_out_comes_back(exported: Path, name: str) -> None:
    write(exported, name, *read(exported, name))
    bring_in(exported, name, exported / "index")
    with open_store(exported / "index") as store:
        assert list(store.records()) == RECORDS
        np.testing.assert_array_equal(store.vectors([r.id for r in RECORDS]), random_vectors(12))
        assert store.verify() == []


# what is wrong with a record

WRONG: list[tuple[str, Any]] = [
    ("width", "<b>"),
    ("width", 0),
    ("height", -3),
    ("height", 2**31),
    ("height", 4.5),
    ("width", True),
    ("width", None),
    ("size", -1),
    ("size", 2**63),
    ("size", "1"),
    ("mtime_ns", 1e300),
    ("mtime_ns", [1]),
    ("sha256", "AB" * 32),
    ("sha256", "ab"),
    ("sha256", 7),
    ("path", "/etc/passwd"),
    ("path", "../up.jpg"),
    ("path", "a/../../up.jpg"),
    ("path", "a//b.jpg"),
    ("path", "a/./b.jpg"),
    ("path", "a/"),
    ("path", ""),
    ("path", "a\0b"),
    ("path", "\ud800"),
    ("path", None),
    ("path", ["a"]),
    ("tags", "abc"),
    ("tags", [""]),
    ("tags", ["line\nbreak"]),
    ("tags", [1]),
    ("tags", {"a": 1}),
    ("taken", "yesterday"),
    ("taken", "2020-13-45"),
    ("taken", 2020),
    ("id", "0" * 32),
    ("id", 5),
]


NUMBERS = ("size", "mtime_ns", "width", "height")


def spoiled(rows: list[dict[str, Any]], name: str, field: str, value: Any) -> list[dict[str, Any]]:
    """A wrong value in row 7. In parquet a path is bytes, and a column of numbers has one type."""
    if name == "out.parquet":
        rows = [row | {field: value} if field in NUMBERS else row for row in rows]
        field, value = ("path_bytes", value.encode()) if field == "path" else (field, value)
    return [row | {field: value} if number == 7 else row for number, row in enumerate(rows)]


def possible(field: str, value: Any) -> bool:
    """Can a column of parquet hold it, beside values of the right kind?"""
    right = {"tags": ["text"], "path": b"text"}.get(field, "text")
    try:
        rows = spoiled([{field: right, "path_bytes": right}] * 8, "out.parquet", field, value)
        pa.array([row["path_bytes" if field == "path" else field] for row in rows])
    except (pa.ArrowException, AttributeError, OverflowError, UnicodeEncodeError):
        return False
    return True


CASES = [(name, *case) for name in FORMATS for case in WRONG if name == "out.npy" or possible(*case)]


@pytest.mark.parametrize(("name", "field", "value"), CASES, ids=[" ".join(map(repr, case)) for case in CASES])
def test_a_wrong_field_is_named_and_nothing_comes_in(exported: Path, name: str, field: str, value: Any) -> None:
    meta, rows, vectors = read(exported, name)
    write(exported, name, meta, spoiled(rows, name, field, value), vectors)
    with pytest.raises(InputError, match=rf"{field}.*Nothing was imported"):
        bring_in(exported, name, exported / "index")
    assert not (exported / "index").exists()


@pytest.mark.parametrize("field", ["path", "size", "mtime_ns", "sha256", "width", "height", "taken", "tags"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_field_is_named(exported: Path, name: str, field: str) -> None:
    meta, rows, vectors = read(exported, name)
    for row in rows:
        del row["path_bytes" if name == "out.parquet" and field == "path" else field]
    write(exported, name, meta, rows, vectors)
    with pytest.raises(InputError, match=rf"{field}.* is missing"):
        bring_in(exported, name, exported / "index")


@pytest.mark.parametrize("name", FORMATS)
def test_a_path_twice(exported: Path, name: str) -> None:
    meta, rows, vectors = read(exported, name)
    write(exported, name, meta, [*rows[:11], rows[3]], vectors)
    with pytest.raises(InputError, match=r"'0/3.jpg' is there twice"):
        bring_in(exported, name, exported / "index")


# what is wrong with the whole

METAS: list[tuple[str, Any]] = [
    ("dim", DIM + 1),
    ("dim", DIM * 2),
    ("dim", 0),
    ("dim", str(DIM)),
    ("dim", -DIM),
    ("dim", 2**40),
    ("recipe", 5),
    ("recipe", ""),
    ("recipe", "a\nb"),
    ("config", []),
    ("config", {"nosuch": 1}),
    ("config", {"scales": 5}),
    ("config", {"backbone": {}}),
    ("config", {"size": "large"}),
    ("config", {"options": 3}),
    ("config", {"sigma": [1]}),
    ("config_hash", None),
    ("weights_hash", "<script>"),
    ("root", 5),
    ("root", "\ud800"),
    ("created", "yesterday"),
    ("format", 99),
    ("format", "2"),
    ("storage", "zip"),
    ("storage", []),
    ("cooc_version", 1),
]


@pytest.mark.parametrize(("field", "value"), METAS, ids=[f"{field} {value!r}" for field, value in METAS])
@pytest.mark.parametrize("name", FORMATS)
def test_wrong_meta(exported: Path, name: str, field: str, value: Any) -> None:
    meta, rows, vectors = read(exported, name)
    write(exported, name, meta | {field: value}, rows, vectors)
    with pytest.raises(InputError):
        bring_in(exported, name, exported / "index")
    assert not (exported / "index").exists()
    with pytest.raises((InputError, StoreMismatchError)):  # into one that is there
        bring_in(exported, name, exported / "source")
    with open_store(exported / "source") as store:
        assert list(store.records()) == RECORDS
        assert store.verify() == []


VECTORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "too few": lambda vectors: vectors[:-1],
    "none": lambda vectors: vectors[:0],
    "too many": lambda vectors: np.concatenate([vectors, vectors]),
    "too long": lambda vectors: vectors * np.float32(1.1),
    "not a number": lambda vectors: np.where(np.arange(12)[:, None] == 11, np.float32("nan"), vectors),
    "infinite": lambda vectors: np.where(np.arange(12)[:, None] == 0, np.float32("inf"), vectors),
    "float64": lambda vectors: vectors.astype(np.float64),
    "float16": lambda vectors: vectors.astype(np.float16),
    "big-endian": lambda vectors: vectors.astype(">f4"),
    "in columns": np.asfortranarray,
    "one long one": np.ravel,
    "deep": lambda vectors: vectors[:, None],
    "texts": lambda vectors: vectors.astype(str),
    "objects": lambda vectors: vectors.astype(object),
    "fields": lambda vectors: vectors.view([("a", "<f4"), ("b", "<f4")]),
}


# A table has one vector in each row, one way to write it, and no objects.
IN_TABLES = ("too long", "not a number", "infinite", "float64", "float16", "texts")


@pytest.mark.parametrize(
    ("name", "kind"), [("out.npy", kind) for kind in VECTORS] + [("out.parquet", kind) for kind in IN_TABLES]
)
def test_wrong_vectors(exported: Path, name: str, kind: str) -> None:
    meta, rows, vectors = read(exported, name)
    write(exported, name, meta, rows, VECTORS[kind](vectors))
    with pytest.raises(InputError, match="Nothing was imported"):
        bring_in(exported, name, exported / "index")
    assert not (exported / "index").exists()


def test_lists_of_different_lengths(exported: Path) -> None:
    vectors = read(exported, "out.parquet")[2]
    table = pq.read_table(exported / "out.parquet").drop_columns(["vector"])
    lists = [list(map(float, vector)) for vector in vectors]
    lists[0], lists[1] = [*lists[0], 0.0], lists[1][:-1]
    for wrong in (lists, [None, *lists[1:]], [[None] * DIM, *lists[1:]]):
        column = pa.array(wrong, pa.list_(pa.float32()))
        pq.write_table(table.append_column("vector", column), exported / "out.parquet")
        with pytest.raises(InputError, match="Nothing was imported"):
            bring_in(exported, "out.parquet", exported / "index")


def pickled() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([{}], object), allow_pickle=True)
    return stream.getvalue()


FILES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "without its end": lambda path: os.truncate(path, path.stat().st_size - 1),
    "and more": lambda path: path.write_bytes(path.read_bytes() + b"\n[]\n"),
    "text": lambda path: path.write_text("Not Found"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
    "a pickle": lambda path: path.write_bytes(pickled()),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[1]\n" * 13),
    "nothing": lambda path: path.write_text("null\n" * 13),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["out.npy", "out.jsonl", "out.parquet"])
def test_malformed_files(cooc: Shell, exported: Path, name: str, kind: str) -> None:
    """One clear message, exit code 2, and no index."""
    FILES[kind](exported / name)
    file = (exported / name).with_suffix(".parquet" if "parquet" in name else ".npy")
    done = cooc("import", file, "--index", exported / "new")
    if (kind, name) == ("without its end", "out.jsonl"):  # a newline
        return
    assert done.code == 2, done.err
    assert not (exported / "new").exists()
    assert "Nothing was imported" in done.err
    assert "Traceback" not in done.err
    assert len(done.err) < 700


# by chance

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
FUZZ = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """The files of the twelve pictures, to be changed and written again and again."""
    folder = tmp_path_factory.mktemp("fuzz")
    with create_store(str(folder / "source"), META) as store:
        store.add(RECORDS, random_vectors(12))
        for name in FORMATS:
            export_index(store, folder / name)
    return folder, {name: (folder / name).read_bytes() for name in (*FORMATS, "out.jsonl")}


def assert_refused_or_sound(file: Path) -> None:
    """Whatever comes in is what an index may hold; anything else is one kind of error."""
    try:
        found = Exported(file)
        blocks = list(found)
        found.check()
    except InputError:
        return
    for records, vectors, _ in blocks:
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
        for one in records:
            assert type(one.width) is type(one.height) is type(one.size) is type(one.mtime_ns) is int
            assert min(one.width, one.height) > 0
            assert not Path(one.path).is_absolute()
            assert ".." not in Path(one.path).parts
            assert all(isinstance(tag, str) for tag in one.tags)


@FUZZ
@given(row=st.integers(-1, 11), key=st.sampled_from([*META.__slots__, *RECORDS[0].__slots__, "id"]), value=ANYTHING)
def test_any_value_in_any_field(files: tuple[Path, dict[str, bytes]], row: int, key: str, value: Any) -> None:
    folder, contents = files
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    meta, rows, vectors = read(folder, "out.npy")
    (meta if row < 0 else rows[row])[key] = value
    write(folder, "out.npy", meta, rows, vectors)
    assert_refused_or_sound(folder / "out.npy")


@FUZZ
@given(
    name=st.sampled_from(["out.npy", "out.jsonl", "out.parquet"]),
    at=st.integers(0, 10**6),
    data=st.binary(min_size=1, max_size=8),
    cut=st.booleans(),
)
def test_any_bytes_anywhere(files: tuple[Path, dict[str, bytes]], name: str, at: int, data: bytes, cut: bool) -> None:
    folder, contents = files
    for other, content in contents.items():
        (folder / other).write_bytes(content)
    content = contents[name]
    at %= len(content)
    (folder / name).write_bytes(content[:at] + data + (b"" if cut else content[at + len(data) :]))
    assert_refused_or_sound((folder / name).with_suffix(".parquet" if "parquet" in name else ".npy"))


# all or nothing


@pytest.fixture(params=sorted(ENGINES))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine = servers.engine(request.param)
    with create_store(engine.address(tmp_path, DIM), META) as store:
        store.add([record("mine.jpg"), record("0/1.jpg", "another", tags=frozenset("z"))], random_vectors(2, seed=5))
        yield store
    engine.drop(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_the_2500th_row_is_wrong(target: Store, tmp_path: Path, name: str) -> None:
    """Seen: 2,000 of 2,500 stayed."""
    with create_store(str(tmp_path / "large"), META) as store:
        store.add([record(f"{i}.jpg") for i in range(2500)], random_vectors(2500))
        export_index(store, tmp_path / name)
    meta, rows, vectors = read(tmp_path, name)
    write(tmp_path, name, meta, rows, np.concatenate([vectors[:-1], 2 * vectors[-1:]]))
    before = list(target.records())
    with pytest.raises(InputError, match="rows from 2000 on"):
        Exported(tmp_path / name).check()
    with pytest.raises(InputError, match="rows from 2000 on"):  # the file has changed since it was checked
        target.add_all(Exported(tmp_path / name))
    assert list(target.records()) == before
    assert target.verify() == []
    write(tmp_path, name, meta, rows, vectors)
    assert target.add_all(Exported(tmp_path / name)) == 2500
    assert len(target) == 2502


def test_killed_in_the_middle(exported: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom cooc.index import open_store\n"
        "from cooc.index.importing import Exported\n"
        "def blocks():\n    yield from Exported(Path(sys.argv[2]))\n    os.kill(os.getpid(), 9)\n"
        "open_store(sys.argv[1], write=True).add_all(blocks())\n"
    )
    with create_store(str(exported / "index"), META) as store:
        store.add([record("mine.jpg")], random_vectors(1))
    command = [sys.executable, "-c", script, str(exported / "index"), str(exported / "out.npy")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    with open_store(str(exported / "index")) as store:
        assert [r.path for r in store.records()] == ["mine.jpg"]
        assert store.verify() == []


# damage


def test_pictures_that_go_meanwhile_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process removes them; that is no damage, and no reason to stop."""
    monkeypatch.setattr(copying, "BLOCK", 1)
    with create_store(str(tmp_path / "source"), META) as store, caplog.at_level(logging.WARNING, "cooc"):
        store.add(RECORDS, random_vectors(12))
        going = copying.intact_blocks(store)
        next(going)
        store.remove([RECORDS[1].path])
        assert [one.path for block in going for one in block.records] == [one.path for one in RECORDS[2:]]
    assert caplog.text == ""


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_vectors_do_not_go_out(
    cooc: Shell, exported: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (exported / "source").rename(exported / "index")
    servers.Embedded().harm(exported, RECORDS[4], flip(30))
    with caplog.at_level(logging.WARNING, "cooc"):
        done = cooc("export", exported / name, "--index", exported / "index")
    assert done.code == 3
    assert done.out.startswith("11 pictures")
    assert "1 left out" in done.err
    assert RECORDS[4].path in caplog.text
    bring_in(exported, name, exported / "new")
    with open_store(exported / "new") as store:
        assert list(store.records()) == [r for r in RECORDS if r != RECORDS[4]]
        assert store.verify() == []
