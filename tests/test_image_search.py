"""The object behind command line and page: what it finds is what plain arrays say, whatever it is asked for."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from cooc.errors import InputError, StoreError, StoreMismatchError, StoreMissingError, UnknownNameError
from cooc.image_search import ImageSearch
from cooc.index import calibration, create_store
from cooc.index.calibration import Calibration
from cooc.index.export import export_index
from cooc.index.records import Filter, Record, StoreMeta
from cooc.index.shortlist import find_duplicates
from cooc.reranking import alpha_expansion, average_expansion, database_augmentation, rank, rerank
from tests.tiny import RECIPE, descriptor, make_descriptor, write_photos

COUNT = 30


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures with its index."""
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, 20)
    write_photos(folder / "below", 10, seed=1)
    with ImageSearch.create(folder / ".cooc", recipe=RECIPE, features="", descriptor=descriptor()) as search:
        search.index([folder])
    return folder


@pytest.fixture
def search(photos: Path) -> Iterator[ImageSearch]:
    with ImageSearch.open(photos / ".cooc", descriptor=descriptor()) as opened:
        yield opened


@pytest.fixture
def database(search: ImageSearch) -> tuple[list[str], NDArray[np.float32]]:
    records = list(search.store.records())
    return [record.path for record in records], search.vectors([record.id for record in records])


Database = tuple[list[str], NDArray[np.float32]]


def ranked(search: ImageSearch, query: object, **options: object) -> list[str]:
    return [match.path for match in search.search(query, k=COUNT, **options).matches]  # type: ignore[arg-type]


# Rankings


def test_ranking_is_the_matrix_product(search: ImageSearch, photos: Path, database: Database) -> None:
    paths, vectors = database
    for name in ("00.jpg", "below/03.jpg"):
        query = descriptor()([photos / name]).numpy()
        order, scores = rank(query, vectors)
        found = search.search(photos / name, k=COUNT)
        assert [match.path for match in found.matches] == [paths[i] for i in order[0]]
        np.testing.assert_allclose([match.score for match in found.matches], scores[0], atol=1e-5)
        np.testing.assert_allclose(found.query_vector, query[0], atol=1e-6)
        assert found.matches[0].record == search.store.find([name])[0]
        assert found.matches[0].id == found.matches[0].record.id


def test_expansion_and_reranking_are_those_of_the_arrays(search: ImageSearch, photos: Path, database: Database) -> None:
    paths, vectors = database
    query = descriptor()([photos / "05.jpg"]).numpy()

    def names(order: NDArray[np.int64]) -> list[str]:
        return [paths[i] for i in order]

    expanded = {"alpha": alpha_expansion(query, vectors), "average": average_expansion(query, vectors)}
    for name, asked in expanded.items():
        assert ranked(search, photos / "05.jpg", expand=name) == names(rank(asked, vectors)[0][0])
    for name in ("k-reciprocal", "superglobal", "diffusion"):
        assert ranked(search, photos / "05.jpg", rerank=name) == names(rerank(name, query, vectors)[0])
    augmented = names(rank(query, database_augmentation(vectors))[0][0])
    assert ranked(search, photos / "05.jpg", augment=True) == augmented
    plain = search.search(photos / "05.jpg", k=COUNT)
    other = search.search(photos / "05.jpg", k=COUNT, expand="alpha", rerank="superglobal")
    scores = {match.path: match.score for match in plain.matches}
    assert scores == pytest.approx({match.path: match.score for match in other.matches}, abs=1e-6)


def test_pages_follow_one_another(search: ImageSearch, photos: Path) -> None:
    for options in ({}, {"expand": "alpha"}, {"rerank": "superglobal"}, {"min_score": -1.0}):
        whole = search.search(photos / "00.jpg", k=12, **options).matches
        parts = [search.search(photos / "00.jpg", k=5, offset=offset, **options).matches for offset in (0, 5, 10)]
        assert [m.id for part in parts for m in part][:12] == [m.id for m in whole]


def test_box_and_several_pictures(search: ImageSearch, photos: Path, database: Database) -> None:
    paths, vectors = database
    describe = descriptor()
    box = (4, 4, 40, 40)
    part = describe([photos / "01.jpg"], [box]).numpy()
    assert ranked(search, photos / "01.jpg", box=box) == [paths[i] for i in rank(part, vectors)[0][0]]
    joined = describe([photos / "01.jpg", photos / "02.jpg"]).numpy().sum(axis=0, keepdims=True)
    expected = [paths[i] for i in rank(joined, vectors)[0][0]]
    assert ranked(search, [photos / "01.jpg", photos / "02.jpg"]) == expected
    both = search.search([photos / "01.jpg", Image.open(photos / "02.jpg")], [box, None]).query_vector
    wanted = part[0] + describe([photos / "02.jpg"]).numpy()[0]
    np.testing.assert_allclose(both, wanted / np.linalg.norm(wanted), atol=1e-5)


def test_search_by_id(search: ImageSearch, photos: Path) -> None:
    with ImageSearch.open(photos / ".cooc") as fresh:
        (record,) = fresh.store.find(["03.jpg"])
        assert record is not None
        found = fresh.search_id(record.id, k=COUNT)
        assert fresh._descriptor is None  # nothing was described
        assert [m.path for m in found.matches] == ranked(search, photos / "03.jpg")[1:]
        assert len(fresh.search_id(record.id, k=COUNT, expand="alpha", rerank="k-reciprocal").matches) == COUNT - 1
    part = search.search_id(record.id, k=5, box=(0, 0, 30, 30))
    expected = search.search(photos / "03.jpg", (0, 0, 30, 30), k=6).matches
    assert [m.path for m in part.matches] == [m.path for m in expected if m.path != "03.jpg"][:5]
    with pytest.raises(InputError, match="search again"):
        search.search_id("0" * 32)
    with pytest.raises(InputError, match="search again"):
        search.file("0" * 32)


def test_filters_and_scores(search: ImageSearch, photos: Path) -> None:
    below = ranked(search, photos / "00.jpg", where=Filter(prefix="below"), expand="average")
    assert len(below) == 10
    assert all(path.startswith("below/") for path in below)
    whole = search.search(photos / "00.jpg", k=COUNT).matches
    cut = whole[4].score
    assert len(search.search(photos / "00.jpg", k=COUNT, min_score=cut).matches) == 5
    assert search.search(photos / "00.jpg", where=Filter(tags=frozenset({"none"}))).matches == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"k": 0}, InputError),
        ({"offset": -1}, InputError),
        ({"expand": "alfa"}, UnknownNameError),
        ({"rerank": "difusion"}, UnknownNameError),
        ({"rerank": ["diffusion"]}, UnknownNameError),
        ({"k": 2.5}, InputError),
        ({"k": "3"}, InputError),
        ({"k": None}, InputError),
        ({"offset": 0.5}, InputError),
        ({"min_score": "high"}, InputError),
        ({"min_score": float("nan")}, InputError),
        ({"where": {"prefix": "below"}}, InputError),
    ],
)
def test_wrong_options(search: ImageSearch, photos: Path, options: dict[str, object], error: type[Exception]) -> None:
    id = next(search.store.records()).id
    for ask in (
        functools.partial(search.search, photos / "00.jpg"),
        functools.partial(search.search_id, id),
        functools.partial(search.search_vector, search.vectors([id])[0]),
    ):
        with pytest.raises(error):
            ask(**options)  # type: ignore[arg-type]


def test_whole_numbers_of_any_kind(search: ImageSearch, photos: Path) -> None:
    assert len(search.search(photos / "00.jpg", k=np.int64(3)).matches) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "box",
    [
        (1, 2, 3),
        ("0", "0", "9", "9"),
        "0,0,9,9",
        5,
        {0, 9},
        (None, 0, 9, 9),
        (0, 0, float("nan"), 9),
        (0, 0, 10**400, 9),
        (9, 9, 0, 0),
        (0, 0, 9, [9]),
        ([0, [0]], 0, 9, 9),
    ],
    ids=str,
)
def test_wrong_boxes(search: ImageSearch, photos: Path, box: Any) -> None:
    id = next(search.store.records()).id
    for ask in (
        lambda: search.search(photos / "00.jpg", box),
        lambda: search.search([photos / "00.jpg"], [box]),
        lambda: search.search_id(id, box=box),
        lambda: search.descriptor.describe([photos / "00.jpg"], [box]),
    ):
        with pytest.raises(InputError, match=r"(?i)box"):
            ask()


def test_boxes_of_any_kind(search: ImageSearch, photos: Path) -> None:
    wanted = search.search(photos / "00.jpg", (0, 0, 30, 30)).query_vector
    for box in ([0, 0, 30, 30], np.array([0, 0, 30, 30]), torch.tensor([0.0, 0, 30, 30]), [(0, 0, 30, 30)]):
        np.testing.assert_array_equal(search.search(photos / "00.jpg", box).query_vector, wanted)  # type: ignore[arg-type]
    both = search.search([photos / "00.jpg"] * 2, [np.array([0, 0, 30, 30]), None]).query_vector  # type: ignore[list-item]
    np.testing.assert_array_equal(both, search.search([photos / "00.jpg"] * 2, [(0, 0, 30, 30), None]).query_vector)


def test_vectors_of_any_kind(search: ImageSearch) -> None:
    vector = search.vectors([next(search.store.records()).id])[0]
    wanted = [match.id for match in search.search_vector(vector).matches]
    for same in (vector.tolist(), 3 * vector, vector.astype(np.float64), torch.from_numpy(vector)):
        assert [match.id for match in search.search_vector(same).matches] == wanted
    zeros = np.zeros(1280, np.float32)
    for wrong in (vector[:5], vector[None], [], "vector", None, ["a"] * 1280, zeros, zeros * np.nan, zeros + np.inf):
        with pytest.raises(InputError):
            search.search_vector(wrong)


def test_devices(photos: Path) -> None:
    for wrong in (None, 2.5, "gpu"):
        with (
            ImageSearch.open(photos / ".cooc", device=wrong) as search,  # type: ignore[arg-type]
            pytest.raises(InputError, match="Usable: cpu"),
        ):
            search.search(photos / "00.jpg")


def test_one_name_is_not_its_letters(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "copy")
    root = tmp_path / "copy"
    with ImageSearch.open(root / ".cooc", write=True, descriptor=descriptor()) as search:
        assert search.tag("00.jpg", add="car") == 1
        assert next(search.records("00.jpg")).tags == {"car"}
        assert [m.path for m in search.search(root / "01.jpg", where=Filter(tags="car")).matches] == ["00.jpg"]  # type: ignore[arg-type]
        assert search.index(root).unchanged == COUNT
        assert search.index(str(root / "below")).unchanged == 10
        assert search.add(str(root / "00.jpg")).unchanged == 1
        assert search.remove("below") == 10
        for wrong in (5, None):
            with pytest.raises(InputError, match="list of names"):
                search.add(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"tags": [5]}, {"tags": 5}, {"tags": ""}, {"prefix": 5}, {"taken_from": 2023}, {"taken_to": "May"}],
    ids=str,
)
def test_wrong_filters(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Filter(**wrong)


def test_an_id_has_one_spelling(search: ImageSearch) -> None:
    """An upper-case one found its picture, but did not take it out of the results."""
    id = next(search.store.records()).id
    for wrong in (id.upper() if not id.isdigit() else f"{id} ", f" {id}", id[:-2], "", None, 7):
        for ask in (search.search_id, search.file, lambda one: search.search_id(one, box=(0, 0, 9, 9))):
            with pytest.raises(InputError, match="no id of an image"):
                ask(wrong)  # type: ignore[arg-type]


def test_wrong_pictures(search: ImageSearch, photos: Path) -> None:
    with pytest.raises(InputError, match="at least one"):
        search.search([])
    with pytest.raises(InputError, match="boxes"):
        search.search([photos / "00.jpg", photos / "01.jpg"], [(0, 0, 9, 9)])
    with pytest.raises(InputError):
        search.search(photos / "missing.jpg")


# The index


def test_foreign_vectors_are_refused(photos: Path) -> None:
    with pytest.raises(StoreMismatchError, match="cooc index"):
        ImageSearch.open(photos / ".cooc", descriptor=make_descriptor(seed=1))
    with pytest.raises(StoreMismatchError, match="recipe"):
        ImageSearch.open(photos / ".cooc", descriptor=make_descriptor(RECIPE + "+radius=2"))
    with pytest.raises(StoreMismatchError, match=r"--recipe ucrow\+raw"):
        ImageSearch.open(photos / ".cooc", recipe="ucrow+raw")
    with ImageSearch.open(photos / ".cooc", write=True, recipe=RECIPE) as search:  # its own; and the lock was let go
        assert len(search.store) == COUNT
    with pytest.raises(StoreMissingError):
        ImageSearch.open(photos / "no")
    with pytest.raises(StoreError, match="already"):
        ImageSearch.create(photos / ".cooc", descriptor=descriptor())


def test_settings_that_came_later_do_not_matter(photos: Path, tmp_path: Path) -> None:
    """An index of an older cooc lacks a setting, and its hash was made without it."""
    with ImageSearch.open(photos / ".cooc") as search:
        config = {key: value for key, value in search.meta.config.items() if key != "sigma"}
        old = replace(search.meta, config=config, config_hash="0123456789abcdef")
    create_store(str(tmp_path / "old"), old).close()
    with ImageSearch.open(tmp_path / "old", recipe=RECIPE, descriptor=descriptor()) as search:
        assert search.search(photos / "00.jpg").matches == []


def test_folder_and_index_may_be_moved_together(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "moved")
    with ImageSearch.open(tmp_path / "moved/.cooc", write=True, descriptor=descriptor()) as search:
        assert search.root == tmp_path / "moved"
        report = search.index([tmp_path / "moved"])
        assert (report.unchanged, report.described) == (COUNT, 0)


def test_index_elsewhere_keeps_its_root(photos: Path, tmp_path: Path) -> None:
    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=descriptor()) as search:
        assert search.root == photos
        assert search.add([photos / "00.jpg", photos / "00.jpg", photos / "no.jpg"]).described == 1
        assert [record.path for record in search.store.records()] == ["00.jpg"]
        assert [file.path for file in search.store.bad_files()] == ["no.jpg"]


def test_remove_and_tag(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(photos, tmp_path / "copy")
    root = tmp_path / "copy"
    with ImageSearch.open(root / ".cooc", write=True, descriptor=descriptor()) as search:
        assert search.tag(["below"], add=["b"]) == 10
        assert search.tag([root / "00.jpg", "01.jpg"], add=["c", "d"]) == 2
        assert search.tag(["01.jpg"], remove=["d"]) == 1
        assert [r.tags for r in search.records(["00.jpg", "01.jpg"])] == [{"c", "d"}, {"c"}]
        assert len(search.search(root / "00.jpg", where=Filter(tags=frozenset({"b"}))).matches) == 10
        with pytest.raises(InputError, match="not in the index"):
            search.tag([root / "99.jpg"], add=["x"])
        monkeypatch.chdir(root / "below")
        assert search.remove(["00.jpg"]) == 1  # as results name it
        assert search.remove(["00.jpg"]) == 1  # no longer known so: the file in this folder
        assert search.remove([root / "below"]) == 9
        assert search.remove([root / "nothing"]) == 0
        assert len(search.store) == 19
        assert search.remove([root]) == 19


def test_status(search: ImageSearch, photos: Path) -> None:
    status = search.status()
    assert (status.images, status.bad, status.dim, status.recipe) == (COUNT, 0, 1280, RECIPE)
    assert status.root == str(photos)
    assert status.bytes is not None
    assert status.bytes > COUNT * 1280 * 4
    assert not status.calibrated


def test_removed_while_searching(photos: Path, tmp_path: Path) -> None:
    """Another process removes images between the search and what follows it."""
    shutil.copytree(photos, tmp_path / "copy")
    with (
        ImageSearch.open(tmp_path / "copy/.cooc", write=True) as writer,
        ImageSearch.open(tmp_path / "copy/.cooc", descriptor=descriptor()) as reader,
    ):
        over = threading.Event()

        def remove() -> None:
            for record in list(writer.store.records()):
                writer.store.remove([record.path])
            over.set()

        thread = threading.Thread(target=remove)
        query = reader.vectors([next(reader.store.records()).id])[0]
        thread.start()
        while not over.is_set():
            for options in ({}, {"augment": True}, {"expand": "alpha", "rerank": "superglobal"}):
                reader.search_vector(query, k=COUNT, **options)
        thread.join()
        assert reader.search_vector(query).matches == []


# Duplicates


def test_duplicates_are_those_of_the_whole_matrix(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(60, 32))
    rows = np.concatenate(
        [centre + 0.12 * rng.normal(size=(count % 40 + 1, 32)) for count, centre in enumerate(centres)]
    )
    vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    records = [Record(f"{i:05}.jpg", 1, 1, f"{i:064x}", 1, 1) for i in range(len(vectors))]
    meta = StoreMeta("r", {}, "c", "w", 32)
    with create_store(str(tmp_path / "index"), meta) as store:
        store.add(records, vectors)
        found = [[record.path for record in group] for group in find_duplicates(store, 0.8)]
    left = set(range(len(vectors)))
    near = vectors @ vectors.T >= 0.8
    expected = []
    while left:
        group, front = set(), {min(left)}
        while front:
            group |= front
            front = set(np.flatnonzero(near[list(front)].any(axis=0)).tolist()) - group
        left -= group
        expected += [[f"{i:05}.jpg" for i in sorted(group)]] if len(group) > 1 else []
    assert found == sorted(expected)
    assert max(map(len, found)) > 16  # more than are asked for at first


def test_duplicates_of_pictures(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "copy", ignore=shutil.ignore_patterns(".cooc"))
    root = tmp_path / "copy"
    shutil.copy(root / "00.jpg", root / "same.jpg")
    Image.open(root / "01.jpg").save(root / "smaller.jpg", quality=60)
    with ImageSearch.create(root / ".cooc", recipe=RECIPE, descriptor=descriptor()) as search:
        search.index([root])
        groups = [{r.path for r in group} for group in search.duplicates(0.9999)]
    assert {"00.jpg", "same.jpg"} in groups


# Probabilities


def test_curve_is_found_again() -> None:
    rng = np.random.default_rng(0)
    curve = Calibration(8.0, -3.0)
    score = rng.uniform(-0.2, 1, 40_000)
    match = rng.random(len(score)) < curve(score)
    fitted = calibration.fit(score, match)
    assert (fitted.slope, fitted.offset) == pytest.approx((8, -3), rel=0.05)
    report = calibration.assess(fitted(score), match)
    assert report["ece"] < 0.01
    assert report["brier"] < report["brier of the base rate"]
    assert sum(row["count"] for row in report["bins"]) == len(score)


def test_curve_stays_finite_without_overlap() -> None:
    fitted = calibration.fit([0.1, 0.2, 0.8, 0.9], [False, False, True, True])
    assert 0 < fitted.slope < 100
    with pytest.raises(InputError, match="more queries"):
        calibration.fit([0.1, 0.2], [True, True])
    with pytest.raises(InputError, match="belong together"):
        calibration.fit([0.1, 0.2, 0.8, 0.9], [True, True, False, False])


def test_calibrate_ignores_junk_and_tells_no_match() -> None:
    rng = np.random.default_rng(1)
    things = rng.normal(size=(40, 64))
    views = np.repeat(things, 6, axis=0) + 0.5 * rng.normal(size=(240, 64))
    views /= np.linalg.norm(views, axis=1, keepdims=True)
    queries, database = views[::6], views
    own = np.arange(0, 240, 6)
    positives = [np.arange(i + 1, i + 6) for i in own]
    curve, report = calibration.calibrate(queries, database, positives, [[i] for i in own], top=10)
    results = calibration.top_results(queries, database, positives, [[i] for i in own], top=10)
    assert results.score.max() < 0.999  # a query does not find itself
    assert results.match.sum() > 150
    assert report["slope"] == curve.slope
    assert report["fitted on queries"] + report["tested on queries"] == 40
    assert report["test"]["brier"] < report["test"]["brier of the base rate"] / 2
    assert report["no match"]["said rightly"] > 0.9
    assert report["no match"]["said wrongly"] < 0.1


def test_probabilities_and_no_match(search: ImageSearch, photos: Path) -> None:
    plain = search.search(photos / "00.jpg", k=5)
    assert [match.probability for match in plain.matches] == [None] * 5
    assert not plain.no_match
    best = plain.matches[0].score
    search.calibration = Calibration(50.0, -50.0 * (best - 0.01))
    found = search.search(photos / "00.jpg", k=5)
    assert [m.probability for m in found.matches] == pytest.approx(search.calibration([m.score for m in found.matches]))
    assert not found.no_match
    assert not search.search(photos / "00.jpg", k=5, offset=10).no_match  # the best one is on an earlier page
    search.calibration = Calibration(50.0, -60.0)
    assert search.search(photos / "00.jpg", k=5).no_match


def test_shipped_curves_belong_to_shipped_recipes() -> None:
    from cooc.recipes import find_recipe

    for name, curve in calibration._shipped().items():
        config = find_recipe(curve["recipe"]).config
        assert config.score_space(config.dim) == name
        assert calibration.find(name) == Calibration(curve["slope"], curve["offset"])
        assert curve["slope"] > 0
    config = find_recipe("paper-linear").config
    assert config.replace(whitening="mine.safetensors").score_space(512) is None
    assert calibration.find(None) is None
    assert config.replace(whitening="", dim=0).score_space(512) != config.score_space(512)


# Export and import


@pytest.mark.parametrize("name", ["out.npy", "out.parquet"])
def test_export_and_import(search: ImageSearch, tmp_path: Path, name: str) -> None:
    odd = Record("odd\udcff\n.jpg", 5, 7, "ab" * 32, 3, 4, "2020-01-01", frozenset({"x", "y"}))
    vector = search.vectors([next(search.store.records()).id])
    with create_store(str(tmp_path / "source"), search.meta) as source:
        source.add([odd], vector)
        source.add(list(search.store.records()), search.vectors([r.id for r in search.store.records()]))
        assert export_index(source, tmp_path / name) == COUNT + 1
        expected = {r: source.vectors([r.id]).tobytes() for r in source.records()}
    with ImageSearch.import_from(tmp_path / name, tmp_path / "index", root=tmp_path) as made:
        assert {r: made.vectors([r.id]).tobytes() for r in made.store.records()} == expected
        assert made.root == tmp_path
        assert made.meta.config_hash == search.meta.config_hash
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    with ImageSearch.import_from(tmp_path / name, tmp_path / "index") as again:  # into one that is there
        assert len(again.store) == COUNT + 1
    if name == "out.npy":
        assert np.load(tmp_path / name).shape == (COUNT + 1, 1280)


def test_import_refuses_what_does_not_fit(search: ImageSearch, tmp_path: Path) -> None:
    export_index(search.store, tmp_path / "out.npy")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    (tmp_path / "out.jsonl").write_text("\n".join(lines[:-1]))
    with pytest.raises(InputError, match="not a complete export"):
        ImageSearch.import_from(tmp_path / "out.npy", tmp_path / "index")
    assert not (tmp_path / "index").exists()
    (tmp_path / "out.jsonl").write_text("\n".join(lines))
    ImageSearch.import_from(tmp_path / "out.npy", tmp_path / "index").close()
    meta = json.loads(lines[0])
    (tmp_path / "out.jsonl").write_text("\n".join([json.dumps(meta | {"weights_hash": "e" * 64}), *lines[1:]]))
    with pytest.raises(StoreMismatchError, match="weights"):
        ImageSearch.import_from(tmp_path / "out.npy", tmp_path / "index")
    for name in ("none.npy", "none.parquet", "none.csv"):
        with pytest.raises(InputError):
            ImageSearch.import_from(tmp_path / name, tmp_path / "index")
    with pytest.raises(InputError, match="cannot be written"):
        export_index(search.store, tmp_path / "nowhere/out.npy")
