"""cooc bench and compare on vectors and rankings that another program wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cooc.bench.own import rankings_result, vectors_result
from cooc.cli import every
from cooc.datasets.retrieval import Dataset, load_dataset
from cooc.errors import InputError
from cooc.evaluation import evaluate
from tests.labelled import write_labelled_folder
from tests.shell import shell

cooc = shell(every())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled_folder(tmp_path_factory.mktemp("own") / "things")


@pytest.fixture
def dataset(folder: Path) -> Dataset:
    return load_dataset(folder)


@pytest.fixture
def vectors(dataset: Dataset, tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Not unit vectors, in double precision, as a program may well write them."""
    rng = np.random.default_rng(0)
    database = rng.normal(size=(len(dataset.image_paths), 8)) * rng.uniform(0.1, 10, (len(dataset.image_paths), 1))
    queries = rng.normal(size=(len(dataset.queries), 8))
    np.save(tmp_path / "d.npy", database)
    np.save(tmp_path / "q.npy", queries)
    return database, queries


def cosine_rankings(database: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """One pair at a time."""
    scores = [[-(q @ d) / np.linalg.norm(q) / np.linalg.norm(d) for d in database] for q in queries]
    return np.argsort(scores, axis=1, kind="stable")


def test_vectors_are_ranked_by_the_cosine(
    dataset: Dataset, vectors: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    result = vectors_result(dataset, f"mine={tmp_path / 'd.npy'},{tmp_path / 'q.npy'}", ["none", "average-5"])
    rankings = cosine_rankings(*vectors)
    expected = evaluate(rankings, dataset.ground_truth, "plain")
    scores = result["results"]["none"]["plain"]
    assert scores["mAP"] == pytest.approx(100 * expected.map, abs=1e-3)
    assert scores["MRR"] == pytest.approx(100 * expected.mrr, abs=1e-2)
    assert scores["recall@k"] == {str(k): pytest.approx(100 * v, abs=1e-2) for k, v in expected.recall_at_k.items()}
    assert (result["recipe"], result["dim"], result["queries"]) == ("mine", 8, len(dataset.queries))
    assert result["top"][0] == [dataset.image_paths[i].stem for i in rankings[0]]
    assert set(result["results"]) == {"none", "average-5"}


def test_geometry_goes_on_from_vectors_of_ones_own(folder: Path, tmp_path: Path, dataset: Dataset) -> None:
    """Vectors that know nothing: what is found is found by geometry. A ranking has no vectors to go on from."""
    rng = np.random.default_rng(1)
    for name, rows in (("d", len(dataset.image_paths)), ("q", len(dataset.queries))):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(rows, 32)).astype(np.float32))
    own = ("--vectors", f"mine={tmp_path / 'd.npy'},{tmp_path / 'q.npy'}")
    options = ("--expand", "none", "--cache", tmp_path / "cache", "--results", tmp_path, "--device", "cpu", "--json")
    (result,) = cooc("bench", folder, *own, "--verify", "sift", *options).json
    found = {stage: scores["plain"]["mAP"] for stage, scores in result["results"].items()}
    assert list(found) == ["none", "sift inliers first", "sift diffusion", "sift search", "sift thorough"]
    assert min(found[stage] for stage in found if stage != "none") > found["none"] + 10
    np.save(tmp_path / "r.npy", np.zeros((len(dataset.queries), 1), np.int64))
    refused = cooc("bench", folder, "--rankings", tmp_path / "r.npy", "--verify", "sift", *options)
    assert (refused.code, "give --vectors" in refused.err) == (InputError.exit_code, True)


def test_rankings_may_be_short_and_filled_up(
    dataset: Dataset, vectors: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    rankings = cosine_rankings(*vectors)[:, :5]
    filled = np.concatenate([rankings, np.full((len(rankings), 3), -1)], axis=1)
    for name, array in (("short", rankings.astype(np.int32)), ("filled", filled)):
        np.save(tmp_path / f"{name}.npy", array)
        result = rankings_result(dataset, str(tmp_path / f"{name}.npy"))
        expected = evaluate(rankings, dataset.ground_truth, "plain")
        assert result["results"]["none"]["plain"]["mAP"] == pytest.approx(100 * expected.map, abs=1e-3)
        assert (result["recipe"], result["dim"]) == (name, None)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((9, 8), np.int64), "floating-point .* not int64"),
        (np.ones(9, np.float32), r"not float32 \(9,\)"),
        (np.ones((9, 0), np.float32), r"not float32 \(9, 0\)"),
        (np.ones((7, 8), np.float32), "7 rows for 9 pictures in the database"),
        (np.ones((9, 5), np.float32), "5 and 8 dimensions"),
        (np.full((9, 8), np.nan, np.float32), "row 0 is zero, or not finite"),
        (np.eye(9, 8, dtype=np.float32), "row 8 is zero, or not finite"),
    ],
)
@pytest.mark.usefixtures("vectors")
def test_bad_vectors_are_named(dataset: Dataset, tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "bad.npy", array)
    with pytest.raises(InputError, match=message):
        vectors_result(dataset, f"{tmp_path / 'bad.npy'},{tmp_path / 'q.npy'}")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((6, 3)), "holds float64"),
        (np.zeros(6, int), r"shape \(6,\)"),
        (np.zeros((5, 1), int), "5 rows for 6 queries"),
        (np.tile([0, 9], (6, 1)), "Row 0 .* index 9: the database has rows 0 to 8"),
        (np.tile([0, -1, 1], (6, 1)), "Row 0 .* index -1"),
        (np.tile([2, 2], (6, 1)), "Row 0 .* twice"),
    ],
)
def test_bad_rankings_are_named(dataset: Dataset, tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "bad.npy", array)
    with pytest.raises(InputError, match=message):
        rankings_result(dataset, str(tmp_path / "bad.npy"))


@pytest.mark.usefixtures("vectors")
def test_bad_files_are_named(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("1 2 3")
    np.savez(tmp_path / "two.npz", a=np.ones(2), b=np.ones(2))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for given, message in (
        (tmp_path / "missing.npy", "missing.npy cannot be read .*No such file"),
        (tmp_path / "text.npy", "no array of numpy"),
        (tmp_path / "two.npz", "several arrays"),
        (tmp_path / "objects.npy", "no array of numpy"),
        (f"a/b={tmp_path / 'd.npy'}", "cannot be read"),
        (f"a b={tmp_path / 'd.npy'}", "'a b' is no name"),
        ("name=", "names no file"),
        ("a.npy,b.npy", "wants one file"),
    ):
        with pytest.raises(InputError, match=message):
            rankings_result(dataset, str(given))
    with pytest.raises(InputError, match="wants two files"):
        vectors_result(dataset, str(tmp_path / "d.npy"))


@pytest.mark.usefixtures("vectors")
def test_the_commands(folder: Path, dataset: Dataset, tmp_path: Path) -> None:
    pair = f"mine={tmp_path / 'd.npy'},{tmp_path / 'q.npy'}"
    np.save(tmp_path / "order.npy", np.tile(np.arange(9), (6, 1)))
    given = ("--vectors", pair, "--rankings", tmp_path / "order.npy")
    done = cooc("bench", folder, *given, "--expand", "none", "--results", tmp_path / "results")
    assert done.code == 0, done.err
    assert all(word in done.out for word in ("mine", "order", "recall@10", "MRR"))
    written = json.loads((tmp_path / "results" / "things--mine.json").read_text())
    assert written["results"]["none"] == vectors_result(dataset, pair)["results"]["none"]
    assert cooc("tables", tmp_path / "results").code == 0

    options = ("--device", "cpu", "--workers", 0, "--dtype", "float32", "--cache", tmp_path / "cache", "--images", 1)
    mixed = cooc("compare", folder, "-r", "ucrow+raw+size=64", *given, *options, "--json")
    rows = {row["recipe"]: row for row in mixed.json["recipes"]}
    assert set(rows) == {"mine", "order", "ucrow+raw+size=64"}
    assert rows["mine"]["ms"] is None
    assert rows["mine"]["mAP"] == written["results"]["none"]["plain"]["mAP"]
    assert all(row["beaten_by"] is None for row in rows.values())  # what has no time is neither better nor worse
    alone = cooc("compare", folder, *given)
    assert "mine" in alone.out
    assert cooc("compare", folder, *given, "--plot", tmp_path / "a.svg").code == 2
    assert "Name at least one recipe" in cooc("bench", folder).err
