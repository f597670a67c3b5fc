"""`cooc plan`: arithmetic by hand, what is not known is said, and the constants are those of results/."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning
from benchmarks.results import load_results
from cooc.bench.plan import (
    LAYOUTS,
    Constants,
    Need,
    Setting,
    amount,
    cells,
    describing_hours,
    hours_text,
    images_text,
    packaged,
    plan,
)
from cooc.errors import InputError, UnknownNameError
from tests.shell import Shell

ROOT = Path(__file__).parents[2]


def constant(value: float, images: int = 10**6, **more: Any) -> dict[str, Any]:
    return {"value": value, "images": images, "source": "results/made-up.json", **more}


KNOWN: Constants = {
    "float32: bytes beside the vectors": constant(600),
    "int4: bytes beside the vectors": constant(300),
    "int4: ms of a scan": constant(200),
    "int4: images added per second": constant(5000),
    "embedded: bytes of the graph": constant(272),
    "embedded: bytes in memory beside the vectors": constant(302),
    "embedded: images added per second": constant(4000),
    "embedded: seconds to build": constant(600),
    "embedded: ms of a search": constant(0.75),
    "embedded: searches per second": constant(500),
    "postgresql: bytes on disk": constant(4600, 10**5, dim=512),
    "postgresql: bytes of the graph": constant(1324, 10**5),
    "sift: bytes of local features": constant(60_000),
    "cpu, vgg16-caffe, sift: pixels per second": {"value": 1e3, "source": "results/made-up.json", "machine": "CPU"},
    "cuda, vgg16-caffe: pixels per second": {"value": 1e6, "source": "results/made-up.json", "machine": "GPU"},
}


def need(images: float, layout: str, **setting: Any) -> Need:
    (found,) = plan(images, Setting(**setting), KNOWN, (layout,))
    return found


def test_a_million_on_one_machine() -> None:
    found = need(1e6, "float32", replicas=1)
    assert found.vectors == 1e6 * 2 * 2048
    assert (found.metadata, found.graph) == (600e6, 272e6)
    assert found.disk == 1e6 * (2 * 2048 + 600 + 272)
    assert found.memory == 1e6 * (2048 + 302)
    assert found.holds == int(0.8 * 128e9 / (2048 + 302 + 2048))  # a second copy while the graph is built
    assert (found.copy, found.machines, found.missing) == (1, 1, 1.0)
    assert found.loading == pytest.approx((1e6 / 4000 + 600) / 3600)
    assert (found.ms, found.rate, found.beyond) == (0.75, 500, 1)


def test_compact_vectors() -> None:
    half, byte, four, pq = (need(1e6, name) for name in ("float16", "int8", "int4", "pq"))
    assert half.vectors == 1e6 * 2 * 1024
    assert half.metadata == 600e6  # as a float32 index
    assert half.ms is half.rate is half.loading is None  # was not measured
    assert half.machines == 2
    assert byte.memory == 1e6 * (512 + 302)
    assert (four.vectors, four.metadata, four.graph, four.disk) == (256e6, 300e6, 0, 556e6)
    assert four.holds == int(0.8 * 128e9 / 256)
    assert four.ms == 200
    assert four.rate == 5 * 2  # of two copies
    assert four.loading == pytest.approx(200 / 3600)
    assert pq.vectors == 128e6
    assert pq.ms is pq.rate is pq.loading is None  # was not measured


def test_a_billion_on_many_machines() -> None:
    found = need(1e9, "milvus-hnsw", replicas=3)
    holds = int(0.8 * 128e9 / (2048 + 272))
    assert found.holds == holds == 44_137_931
    assert found.copy == 23 == math.ceil(1e9 / holds)
    assert found.machines == 69
    assert found.missing == 0
    assert found.ms is None
    assert need(1e9, "milvus-hnsw", replicas=1).missing == 1 / 23
    assert need(1e9, "milvus-hnsw", disk=1e11).copy == math.ceil(1e9 / int(0.8e11 / (2 * 2048 + 600 + 272)))
    coded = need(1e9, "milvus-ivf_pq")
    assert coded.memory == 64e9
    assert coded.disk == 1e9 * (64 + 2048 + 600)
    alone = need(1e9, "float16")
    assert alone.vectors == 1e9 * 2048
    assert alone.machines is alone.ms is alone.missing is None
    assert "not spread" in cells(alone)


def test_postgresql_counts_its_half_vectors_as_vectors() -> None:
    found = need(1e5, "postgresql")
    assert found.vectors == 1e5 * (2048 + 1024)
    assert found.graph == 1e5 * 300
    assert found.metadata == 1e5 * (4600 - 1324 - 2048)
    assert found.disk == 1e5 * 4600
    assert found.memory == 1e5 * 1324
    assert need(1e5, "postgresql", dim=4096).disk is None  # no graph there


def test_graphs_grow_slower_than_scans() -> None:
    graph, scan = need(1e7, "float32", replicas=1), need(1e7, "int4", replicas=1)
    assert graph.ms == pytest.approx(0.75 * 7 / 6)
    assert graph.rate == pytest.approx(500 * 6 / 7)
    assert graph.loading == pytest.approx((1e7 / 4000 + 6000 * 7 / 6) / 3600)
    assert scan.ms == pytest.approx(2000)
    assert graph.beyond == scan.beyond == 10
    assert "~0.875" in cells(graph)
    assert need(10, "float32").ms == 0.75  # never less than what was measured


def test_local_features_are_most_of_what_lies_on_disk() -> None:
    found = need(1e6, "float32", replicas=1, features="sift", disk=1e12)
    assert found.features == 60_000e6
    assert found.disk == 1e6 * (2 * 2048 + 600 + 60_000 + 272)
    assert found.holds == int(0.8 * 1e12 / (2 * 2048 + 600 + 60_000 + 272))  # here the disk is full first
    assert found.memory == need(1e6, "float32").memory
    assert need(1e6, "float32").features == 0
    unknown = need(1e6, "float32", features="xfeat")
    assert unknown.features is unknown.disk is unknown.holds is None


def test_describing() -> None:
    assert describing_hours(3.6e6, "vgg16-caffe", 1e3, 0, KNOWN, "sift") == pytest.approx(1000)
    assert describing_hours(3.6e6, "vgg16-caffe", 1e6, 1, KNOWN, "sift") is None
    assert describing_hours(3.6e6, "vgg16-caffe", 1e6, 1, KNOWN) == pytest.approx(1000)
    assert describing_hours(3.6e6, "vgg16-caffe", 1e6, 8, KNOWN) == pytest.approx(125)
    assert describing_hours(1e6, "vgg16-caffe", 1e6, 0, KNOWN) is None
    assert describing_hours(1e6, "resnet50", 1e6, 1, KNOWN) is None


def test_nothing_measured_is_nothing_made_up() -> None:
    for found in plan(1e6, Setting(), {}):
        assert found.vectors > 0
        assert found.metadata is found.disk is found.memory is found.holds is found.machines is None
        assert found.ms is found.rate is found.loading is None
        assert cells(found).count("not measured") >= 9


@pytest.mark.parametrize("images", [0, -1, 0.5, 1e13, math.nan, math.inf])
def test_wrong_numbers_of_images(images: float) -> None:
    with pytest.raises(InputError, match="a whole number from 1 to"):
        plan(images, Setting(), KNOWN)


def test_wrong_settings() -> None:
    with pytest.raises(UnknownNameError, match="int4"):
        plan(1, Setting(), KNOWN, ("int5",))
    for wrong in ({"memory": 1e6}, {"disk": math.inf}, {"memory": math.nan}):
        with pytest.raises(InputError, match="at least 1 GB"):
            Setting(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least 1"):
        Setting(replicas=0)


def test_amounts_are_short() -> None:
    sizes = (0, 1, 999, 999.9, 12_345, 999_999, 2.048e12, 5e18)
    assert [*map(amount, sizes)] == ["0 B", "1 B", "999 B", "1 kB", "12.3 kB", "1 MB", "2.05 TB", "5000 PB"]
    assert [*map(images_text, (10**6, 10**9, 44_137_931))] == ["1M", "1B", "44.1M"]
    times = (0.001, 0.5, 20, 100, 365 * 24 * 3)
    assert [*map(hours_text, times)] == ["3.6 s", "30 min", "20 h", "4.17 days", "3 years"]


def test_the_constants_are_those_of_the_results() -> None:
    results = load_results(ROOT / "results")
    said = "cooc/data/planning.json is old: run `python -m benchmarks tables --write`"
    assert (ROOT / "cooc/data/planning.json").read_text(encoding="utf-8") == planning.text(results), said
    known = packaged()
    assert known["embedded: searches per second"]["value"] == pytest.approx(
        results.other["serving-1m"]["engine"]["searches/s"], rel=1e-5
    )
    for name, found in known.items():
        assert (ROOT / found["source"]).is_file(), name
        assert 0 < found["value"] < math.inf, name


def test_the_command(cooc: Shell) -> None:
    done = cooc("plan", "--images", "1e9", "--json")
    assert done.code == 0, done.err
    assert {found["layout"] for found in done.json["needs"]} == set(LAYOUTS)
    assert done.json["constants"] == packaged()
    assert done.json["setting"]["dim"] == 512
    shown = cooc("plan", "--images", "1e6,1e8", "-r", "paper-bilinear+dim=4096", "--storage", "float32,pq", "--gpus", 0)
    assert shown.code == 0, shown.err
    assert "32.8 GB" in shown.out  # 1e6 vectors, searched and kept
    assert "not measured with local features, " in shown.out
    known = cooc("plan", "--images", "1e6", "--gpus", 0, "--verify", "none", "--json").json
    assert known["needs"][0]["features"] == 0
    assert "results/search-1m.json" in shown.err
    for words, message in {
        ("--images", "many"): "a number is wanted",
        ("--images", "0"): "a whole number",
        ("--storage", "float61"): "float16",
        ("--memory", "0"): "at least 1 GB",
        ("--verify", "sfit"): "sift",
        ("--recipe", "paper-linear+raw"): "+dim=512",
    }.items():
        wrong = cooc("plan", *words)
        assert wrong.code == 2
        assert message in wrong.err
