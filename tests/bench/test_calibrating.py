"""An index's own calibration: fitted on labelled pictures or on marks, kept in the index, found when it is opened."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cooc.bench.calibrating import from_dataset, from_marks
from cooc.bench.marks import Mark, read_marks
from cooc.datasets.retrieval import load_dataset
from cooc.descriptor import Descriptor
from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.index import calibration, create_store, open_store
from cooc.index.calibration import NOTE, Calibration, Scored
from cooc.index.records import StoreMeta
from cooc.pictures.boxes import Box
from cooc.recipes import find_recipe
from tests.labelled import write_labelled_folder
from tests.serving import descriptor, make_index, write_collection
from tests.shell import Shell

RECIPE = "paper-linear+raw+size=96"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three things, three views of each, labelled; the views are indexed."""
    folder = write_labelled_folder(tmp_path_factory.mktemp("made") / "things")
    with ImageSearch.create(folder / "jpg/.cooc", recipe=RECIPE, device="cpu") as search:
        search.index([folder / "jpg"], workers=0)
    return folder


@pytest.fixture
def things(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change, seen from a folder that is elsewhere and empty."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return Path(shutil.copytree(made, tmp_path / "things"))


def index_of(things: Path) -> tuple[str, Path]:
    return "--index", things / "jpg/.cooc"


def curve_of(things: Path) -> Calibration | None:
    with ImageSearch.open(things / "jpg/.cooc") as search:
        return search.calibration


# Labelled pictures


def test_a_labelled_folder(cooc: Shell, things: Path, tmp_path: Path) -> None:
    """The curve is that of the plain vectors, it stays in the index, and the next search shows it."""
    query = ("search", things / "jpg/arch_000000.jpg", *index_of(things), "--json", "--no-verify")
    assert cooc(*query).json["calibrated"] is False
    done = cooc("calibrate", things, *index_of(things), "--report", tmp_path / "report.json", "--device", "cpu")
    assert done.code == 0, done
    assert list(Path.cwd().iterdir()) == []  # nothing is written where one happens to be
    dataset = load_dataset(str(things))
    describe = Descriptor.from_recipe(RECIPE, device="cpu")
    curve, _ = calibration.calibrate(
        describe([one.path for one in dataset.queries], [one.box for one in dataset.queries]).numpy(),
        describe(dataset.image_paths).numpy(),
        [truth.select(["positives"]) for truth in dataset.ground_truth],
        [truth.select(["junk", "itself"]) for truth in dataset.ground_truth],
    )
    found = curve_of(things)
    assert found is not None
    assert (found.slope, found.offset) == pytest.approx((curve.slope, curve.offset), rel=1e-3)
    assert found.fitted_on == "things, 6 queries"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["slope"] == found.slope
    assert report["test"]["results"] > 0
    answer = cooc(*query).json
    assert answer["calibrated"] is True
    assert [m["probability"] for m in answer["matches"]] == pytest.approx(
        found([m["score"] for m in answer["matches"]])
    )
    checked = cooc(*query[:-1]).json  # where geometry decides, it alone gives a probability
    assert (checked["calibrated"], checked["checked"]) == (True, True)
    assert [m["probability"] is None for m in checked["matches"]] == [not m["verified"] for m in checked["matches"]]
    assert checked["matches"][0]["path"] == "arch_000000.jpg"
    assert checked["matches"][0]["verified"]
    assert "things, 6 queries" in cooc("status", *index_of(things)).out
    assert "Calibrated on nothing" in cooc("calibrate", "--forget", *index_of(things)).out
    assert curve_of(things) is None


def test_pictures_of_the_index_are_not_described_again(things: Path) -> None:
    described = []
    with ImageSearch.open(things / "jpg/.cooc", device="cpu") as search:
        from_dataset(search, load_dataset(str(things)), workers=0, progress=lambda *seen: described.append(seen))
    assert described[-1] == (6, 6)  # the queries, which are parts of pictures, and none of the nine pictures


def test_a_whitening_of_one_s_own(cooc: Shell, things: Path, tmp_path: Path) -> None:
    """It has no name that others know; the curve belongs to its numbers, wherever its file lies."""
    for seed in ("first", "second"):
        words = ("-r", RECIPE, "--size", 96, "--dim", 4, "--device", "cpu", "-o", tmp_path / f"{seed}.safetensors")
        views = sorted((things / "jpg").glob("*.jpg"))[int(seed == "second") :]
        assert cooc("whiten", *views, *words).code == 0
        recipe = f"{RECIPE}+whitening={tmp_path / seed}.safetensors+dim=4"
        words = ("--index", tmp_path / seed, "-r", recipe, "--device", "cpu", "-q")
        assert cooc("index", things / "jpg", *words).code == 0
        assert cooc("calibrate", things, "--index", tmp_path / seed, "--device", "cpu").code == 0
    spaces = []
    for seed in ("first", "second"):
        with ImageSearch.open(tmp_path / seed) as search:
            assert search.calibration is not None
            assert "own" in str(search.space)
            spaces.append(search.space)
    assert spaces[0] != spaces[1]


@pytest.mark.parametrize("words", [("--report", "no/report.json"), ("--report", "report.txt"), ()], ids=str)
def test_what_cannot_be_written_is_said_before_the_work(
    cooc: Shell, things: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a network was loaded")

    monkeypatch.setattr(Descriptor, "__init__", never)
    with ImageSearch.open(things / "jpg/.cooc", write=not words):  # without words: another process is writing
        refused = cooc("calibrate", things, *index_of(things), *words)
    assert refused.code == (2 if words else 5), refused


def test_wrong_words(cooc: Shell, things: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("right")
    for words in ((), (things, "--forget"), (tmp_path / "notes.txt",), (tmp_path / "none.csv",)):
        assert cooc("calibrate", *words, *index_of(things)).code == 2
    assert cooc("calibrate", things / "jpg", *index_of(things)).code == 6  # no ground truth there


# The index's own, and the one that ships


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """An index, empty, of a recipe whose calibration ships with cooc."""
    config = find_recipe("paper-linear").config
    meta = StoreMeta("paper-linear", config.as_dict(), config.hash, "ab" * 16, 512, root=str(tmp_path))
    create_store(tmp_path / "index", meta).close()
    return tmp_path / "index"


def test_its_own_comes_first(shipped: Path) -> None:
    with ImageSearch.open(shipped, write=True) as search:
        first = search.calibration
        assert first is not None
        assert "ships with cooc" in first.fitted_on
        search.calibrate(Calibration(3.0, -1.0, "my marks"))
        assert search.calibration == Calibration(3.0, -1.0)
    with ImageSearch.open(shipped, write=True) as search:
        assert search.status().calibration == "my marks"
        assert search.calibration == Calibration(3.0, -1.0)
        search.calibrate(None)
        assert search.calibration == first
        assert NOTE not in search.store.notes()


@pytest.mark.parametrize(
    "value",
    [{"slope": "steep"}, {"slope": float(-1), "offset": 0.0, "fitted_on": ""}, [], None, {"slope": 1e999, "offset": 0}],
    ids=str,
)
def test_a_curve_that_is_none_is_not_believed(shipped: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with ImageSearch.open(shipped, write=True) as search:
        first, space = search.calibration, search.space
    with open_store(shipped, write=True) as store:
        store.note(NOTE, {space: value})
    with caplog.at_level(logging.WARNING, "cooc"), ImageSearch.open(shipped) as search:
        assert search.calibration == first
    assert "cooc calibrate" in caplog.text


@pytest.mark.parametrize("curve", [Calibration(-1, 0), Calibration(float("nan"), 0), Calibration(1, float("inf"))])
def test_no_curve_is_kept_that_is_none(shipped: Path, curve: Calibration) -> None:
    with ImageSearch.open(shipped, write=True) as search, pytest.raises(InputError, match="no curve"):
        search.calibrate(curve)


# Marks


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six photographs, three views of each, and their index."""
    root = write_collection(tmp_path_factory.mktemp("photographs"))
    make_index(root).close()
    return root


@pytest.fixture
def photos(photographs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(photographs, tmp_path / "photos"))


Judged = list[tuple[str, str, bool]]  # query, picture, right?


def judged(photos: Path) -> Judged:
    """Every picture asked for, every other one marked: views of the same photograph are right."""
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg"))
    return [(a, b, a.rpartition("-")[0] == b.rpartition("-")[0]) for a, b in itertools.permutations(names, 2)]


def plain_curve(photos: Path, rows: Judged, box: Box | None = None) -> Calibration:
    """From the vectors of the descriptor alone."""
    names = sorted({query for query, _, _ in rows})
    paths = [photos / name for name in names]
    asked = dict(zip(names, descriptor()(paths, [box] * len(names)).numpy(), strict=True))
    found = dict(zip(names, descriptor()(paths).numpy(), strict=True))
    return calibration.fit([asked[a] @ found[b] for a, b, _ in rows], [right for _, _, right in rows])


def as_csv(rows: Judged, file: Path) -> Path:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["query", "path", "mark"])
        writer.writerows((query, path, "right" if right else "Wrong") for query, path, right in rows)
    return file


def as_json(rows: Judged, file: Path) -> Path:
    marks = [{"query": query, "path": path, "mark": "right" if right else "wrong"} for query, path, right in rows]
    file.write_text(json.dumps(marks))
    return file


@pytest.mark.parametrize(("write", "name"), [(as_csv, "marks.csv"), (as_json, "marks.json")])
@pytest.mark.parametrize("outside", [False, True], ids=["in the index", "beside the marks"])
def test_marks(cooc: Shell, photos: Path, tmp_path: Path, write: Callable[..., Path], name: str, outside: bool) -> None:
    """The curve of the marks is that of the plain scores, wherever the queries lie."""
    rows = judged(photos)
    wanted = plain_curve(photos, rows)
    if outside:
        rows = [(f"my {query.replace('/', ' ')}", path, right) for query, path, right in rows]
        for path in photos.rglob("*.jpg"):
            shutil.copy(path, tmp_path / f"my {path.parent.name} {path.name}")
    done = cooc("calibrate", write(rows, tmp_path / name), "--index", photos / ".cooc", "--device", "cpu")
    assert done.code == 0, done
    assert "36 right and 270 wrong marks" in done.out
    assert "Tested on 306 results" in done.out
    with ImageSearch.open(photos / ".cooc") as search:
        found = search.calibration
    assert found is not None
    assert (found.slope, found.offset) == pytest.approx((wanted.slope, wanted.offset), rel=1e-3)


def test_marks_that_cannot_be_used_are_left_out_and_named(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    rows, cat = judged(photos), "animals/cat-0.jpg"
    odd = [(cat, "gone.jpg", True), ("none.jpg", cat, True), (cat, cat, True)]
    done = cooc("calibrate", as_csv([*rows, *odd], tmp_path / "marks.csv"), "--index", photos / ".cooc")
    assert done.code == 3
    for said in ("gone.jpg is not in the index", "none.jpg is neither a file", "is the query itself"):
        assert said in done.err
    assert "36 right and 270 wrong" in done.out
    few = cooc("calibrate", as_csv(rows[:9], tmp_path / "marks.csv"), "--index", photos / ".cooc")
    assert few.code == 2
    assert "at least 10" in few.err


def test_marks_with_boxes(photos: Path) -> None:
    rows, box = judged(photos), (10.0, 10.0, 110.0, 90.0)
    marks = [Mark(query, path, right, box) for query, path, right in rows]
    with ImageSearch.open(photos / ".cooc", descriptor=descriptor()) as search:
        curve, _, left_out = from_marks(search, marks, workers=0)
    wanted = plain_curve(photos, rows, box)
    assert left_out == []
    assert (curve.slope, curve.offset) == pytest.approx((wanted.slope, wanted.offset), rel=1e-3)


def test_marks_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffa.jpg,b.jpg,RIGHT\n\n"x, y.jpg",b.jpg,wrong,"1,2,3,4"\na.jpg,b.jpg,wrong\n')
    assert read_marks(tmp_path / "a.csv") == [
        Mark("a.jpg", "b.jpg", False),  # as it was marked last
        Mark("x, y.jpg", "b.jpg", False, (1, 2, 3, 4)),
    ]
    (tmp_path / "a.json").write_text('[{"query": "a", "path": "b", "mark": "right", "box": [1, 2, 3, 4]}]')
    assert read_marks(tmp_path / "a.json") == [Mark("a", "b", True, (1, 2, 3, 4))]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "a.jpg,b.jpg,right\na.jpg,b.jpg,maybe\n", "line 2: 'maybe' is neither"),
        ("a.csv", "a.jpg,b.jpg\n", "2 values"),
        ("a.csv", ",b.jpg,right\n", "names of two pictures"),
        ("a.csv", 'a.jpg,b.jpg,right,"1,2,3"\n', "not a box"),
        ("a.csv", 'a.jpg,"b.jpg\n', "no CSV"),
        ("a.csv", "query,path,mark\n", "no marks"),
        ("a.json", "{", "no JSON"),
        ("a.json", "{}", "a list"),
        ("a.json", "[5]", "mark 1: There are 0 values"),
        ("a.json", '[{"query": "a", "path": 5, "mark": "right"}]', "names of two pictures"),
        ("a.json", '[{"query": "a", "path": "b", "mark": 1}]', "neither right nor wrong"),
        ("a.json", '[{"query": "a", "path": "b", "mark": "right", "box": [1]}]', "not a box"),
    ],
)
def test_marks_that_are_none(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        read_marks(tmp_path / name)
    (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError):
        read_marks(tmp_path / name)


def test_judging_by_halves() -> None:
    """Marks that a true curve made: the fit finds it, and its error is told from queries that it has not seen."""
    rng = np.random.default_rng(0)
    true = Calibration(12.0, -5.0)
    score = rng.uniform(0, 1, 6000)
    scored = Scored(rng.integers(0, 60, 6000), score, rng.random(6000) < true(score))
    curve, report = calibration.judge(scored)
    assert (curve.slope, curve.offset) == pytest.approx((12, -5), rel=0.1)
    assert report["test"]["results"] == 6000
    assert report["test"]["ece"] < 0.03
    assert report["queries"] == 60
    one = Scored(np.zeros(30, np.int64), score[:30], np.arange(30) % 2 == 0)
    scored = Scored(one.query, np.where(one.match, 0.8, 0.2), one.match)
    assert calibration.judge(scored)[1]["test"] is None  # one query cannot test itself
