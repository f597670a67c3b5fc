"""Flat things made and measured for real, small; what is counted from pairs, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import skimage.data
from PIL import Image

from benchmarks.flat import make, project
from benchmarks.verification import (
    Row,
    alarms,
    by_cosine,
    by_geometry,
    first_by_words,
    fit,
    flat_recall,
    found_first,
    hardest,
    judge,
    measured,
    shares,
    words_of,
)
from benchmarks.verifying import measure_speed
from cooc.verification.engines import extract
from cooc.verification.probability import Calibration
from cooc.verification.transforms import project as through
from cooc.verification.verifier import verify
from tests.verification.pictures import PHOTOS, photo


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Prints and clutter."""
    prints, clutter = tmp_path_factory.mktemp("prints"), tmp_path_factory.mktemp("clutter")
    for name in PHOTOS:
        Image.fromarray(photo(name)).save(prints / f"{name}.png")
    Image.fromarray(skimage.data.hubble_deep_field()).save(clutter / "sky.png")
    return prints, clutter


@pytest.fixture(scope="module")
def flat(pictures: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sets") / "flat"
    make(pictures[0], out, pictures[1], things=3, absent=1, size=600, seed=3)
    return out


def test_a_set_of_flat_things_is_labelled_and_the_same_again(
    flat: Path, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    truth = json.loads((flat / "ground_truth.json").read_text())
    assert [len(truth[key]) for key in ("database", "queries", "absent")] == [3, 3, 1]
    make(pictures[0], tmp_path / "flat", pictures[1], things=3, absent=1, size=600, seed=3)
    for file in (flat / "jpg").iterdir():
        assert file.read_bytes() == (tmp_path / "flat" / "jpg" / file.name).read_bytes()


def test_the_transform_of_a_view_is_the_one_that_geometry_finds(flat: Path) -> None:
    query = json.loads((flat / "ground_truth.json").read_text())["queries"][0]
    view, thing = (np.array(Image.open(flat / "jpg" / n)) for n in (query["image"], query["positives"][0]))
    (agreement,) = verify(extract("sift", thing), [extract("sift", view)])
    assert agreement.inliers > 20
    middle = np.array([[thing.shape[1] / 2, thing.shape[0] / 2]])
    expected = project(np.array(query["transform"]), middle)
    assert (
        np.abs(through(agreement.transform, middle.astype(np.float32)) - expected).max() < 0.012 * 600
    )  # the tolerance


def test_covers_of_a_series_share_their_look(pictures: tuple[Path, Path], tmp_path: Path) -> None:
    make(pictures[0], tmp_path / "covers", pictures[1], things=2, absent=2, series=2, size=600, seed=1)
    covers = [np.array(Image.open(tmp_path / "covers" / "jpg" / f"0000{n}.jpg")).astype(int) for n in (0, 1)]
    assert np.abs(covers[0][:8] - covers[1][:8]).mean() < 3  # the band above
    assert np.abs(covers[0][300:600] - covers[1][300:600]).mean() > 20


def test_pairs_are_measured_once_and_kept(flat: Path, tmp_path: Path) -> None:
    rows = measured(flat, "sift", tmp_path)
    assert len(rows) == 4 * 3
    assert sum(row.same for row in rows) == 3
    assert min(row.inliers for row in rows if row.same) > max(row.inliers for row in rows if not row.same)
    assert found_first([row for row in rows if not row.query.startswith("view_00003")], lambda r: r.inliers) == 1
    for code in (tmp_path / "flat" / "sift").iterdir():
        code.write_bytes(b"")  # not read again
    assert measured(flat, "sift", tmp_path) == rows


def some(query: str, *pairs: tuple[bool, int, float]) -> list[Row]:
    return [Row(query, f"{n}.jpg", same, count, count, inside) for n, (same, count, inside) in enumerate(pairs)]


def test_a_search_for_pairs_finds_as_an_index_does(flat: Path, tmp_path: Path) -> None:
    truth = json.loads((flat / "ground_truth.json").read_text())
    pictures = [*truth["database"], *(q["image"] for q in [*truth["queries"], *truth["absent"]])]
    vectors = dict(zip(pictures, np.eye(len(pictures), dtype=np.float32) + 0.1, strict=True))
    rows, pairs = measured(flat, "sift", tmp_path / "a", vectors), measured(flat, "sift", tmp_path / "b")

    def key(row: Row) -> tuple[str, str, int, float, float]:
        return row.query, row.picture, row.inliers, row.evidence, row.inside

    assert sorted(map(key, rows)) == sorted(map(key, pairs))  # few pictures: all of them are looked at
    for query in truth["queries"]:
        (first,) = [row for row in rows if row.query == query["image"] and row.place == 0]
        assert first.same


def test_alarms_are_counted_with_and_without_the_positives() -> None:
    rows = [
        *some("a", (True, 40, 1.0), (False, 5, 1.0)),  # found, shown
        *some("b", (True, 4, 1.0), (False, 0, 0.0)),  # found, not shown
        *some("c", (True, 10, 1.0), (False, 50, 1.0)),  # the wrong one first: an alarm
        *some("d", (False, 8, 1.0)),  # not there
    ]
    counted = alarms(rows, lambda r: r.inliers / 60, lambda r: r.inliers)
    assert counted == {"absent": 4, "shown wrongly": 1, "present": 3, "first": 2, "shown rightly": 1}


def test_what_is_proven_comes_first_and_the_rest_stays_in_its_order() -> None:
    said, order = by_geometry(Calibration(-4.0, 2.0, 0.0, 0.0))
    weak, next_one, strong = (
        Row("q", "a", False, 4, 4.0, 1.0, 0),
        Row("q", "b", False, 5, 5.0, 1.0, 1),
        Row("q", "c", True, 60, 60.0, 1.0, 2),
    )
    assert said(weak) < said(next_one) < 0.5 < said(strong)
    assert sorted([next_one, weak, strong], key=order, reverse=True) == [strong, weak, next_one]
    said, order = by_cosine(20.0, -6.0)
    assert said(replace(weak, cosine=0.3)) == pytest.approx(0.5)
    assert order(replace(weak, cosine=0.4)) > order(replace(strong, cosine=0.3))


def test_shares_have_intervals() -> None:
    counts = {"absent": 500, "shown wrongly": 10, "present": 9, "first": 0, "shown rightly": 0}
    found = shares(counts)
    assert (found["shown wrongly, share"], found["shown wrongly, 95 %"]) == (0.02, (0.0109, 0.0364))  # as R's prop.test
    assert "shown rightly, share" not in found
    assert shares(counts | {"shown wrongly": 0})["shown wrongly, 95 %"] == (0, 0.0076)


def test_families_weigh_the_same_whatever_their_kinds_and_queries() -> None:
    rng = np.random.default_rng(0)
    truth = Calibration(-6.0, 1.0, 1.5, 1.0)

    def kind(count: int) -> list[Row]:
        rows = []
        for n in range(count):
            count, inside = int(rng.integers(4, 60)), float(rng.uniform(0.1, 1))
            same = bool(rng.random() < 1 / (1 + np.exp(-truth.log_odds(count, count, inside))))
            rows += some(f"q{n}", (same, count, inside), (False, 0, 0.0))
        return rows

    one, two = kind(3000), kind(400)
    more = [replace(row, query=f"{row.query}/{n}") for n in range(5) for row in two]
    found = fit({"a": one, "b": two}).as_dict()
    assert found == pytest.approx(fit({"a": one, "b": more}).as_dict(), abs=1e-3)
    assert found == pytest.approx(fit({"a": one, "b-1": two, "b-2": more}).as_dict(), abs=1e-3)
    alone = fit({"a": one})
    often = np.log(3000 / sum(row.same for row in one))  # the thing is there less often than not, which is made up for
    judged = judge(one, replace(alone, bias=alone.bias - often))
    assert (judged["pairs"], judged["hardest"]) == (6000, 3000)
    assert judged["ece"] < 0.03


def test_the_hardest_pairs_of_a_query_are_its_strongest() -> None:
    rows = some("q", (True, 5, 1.0), (True, 9, 0.1), (False, 7, 1.0), (False, 3, 1.0)) + some("p", (False, 0, 0.0))
    assert hardest(rows, lambda row: row.inliers) == [rows[1], rows[2]]
    assert hardest(rows, lambda row: row.inside) == [rows[0], rows[2]]


def test_a_shortlist_that_misses_the_thing_finds_nothing() -> None:
    rows = some("q", (True, 40, 1.0), (False, 5, 1.0))
    vectors = {"q": np.array([1, 0], np.float32), "0.jpg": np.array([0.6, 0.8], np.float32)}
    vectors["1.jpg"] = np.array([0.8, 0.6], np.float32)
    near = flat_recall(rows, vectors, np.zeros((0, 2), np.float32), {"q": set()})
    assert (near["vector alone"], near["geometry over everything"], near["geometry over the first 50"]) == (0, 1, 1)
    crowd = np.tile(np.array([[0.7, 0.7]], np.float32), (60, 1))
    far = flat_recall(rows, vectors, crowd, {"q": set()})
    assert (far["in the first 50 by vector"], far["geometry over the first 50"]) == (0, 0)
    assert far["geometry over the first 100"] == 1
    both = "geometry over the first 50 by vector and 50 by words"
    assert (far[both], flat_recall(rows, vectors, crowd, {"q": {"0.jpg"}})[both]) == (0, 1)


def test_words_of_a_kind_are_looked_up_among_others(flat: Path, tmp_path: Path) -> None:
    own, asked = words_of(flat, tmp_path)
    far = list(own.values())[:1]
    found = first_by_words(own, asked, far, 2)
    assert found.keys() == asked.keys()
    assert all(names <= own.keys() for names in found.values())
    assert first_by_words(own, own, [], 1) == {name: {name} for name in own}


def test_speed_is_measured_beside_the_network(pictures: tuple[Path, Path]) -> None:
    found = measure_speed(sorted(pictures[0].iterdir())[:2], ["sift"], turns=1)
    assert set(found["rows"]) == {"network", "sift: features", "sift: verify 100", "sift: screen and verify 100"}
    assert found["rows"]["network"]["best / network"] == 1
    assert 1000 < found["bytes a picture"]["sift"] < 70_000
