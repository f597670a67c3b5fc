"""Tables from result files, and the documents that hold them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper, report
from benchmarks.results import load_results
from cooc.errors import DatasetError, InputError, UnknownNameError
from cooc.recipes import find_recipe
from tests.shell import Shell

ROOT = Path(__file__).parents[2]
PROTOCOLS = {
    "oxford5k": ("oxford",),
    "roxford5k": ("roxford-easy", "roxford-medium", "roxford-hard"),
    "gldv2_dev": ("plain",),
}


def write(folder: Path, dataset: str, recipe: str, scores: dict[str, list[float]], **more: Any) -> None:
    """A result file as `cooc bench` writes it, with the numbers given: expansion -> mAP for each protocol."""
    results = {
        expansion: {
            protocol: {"mAP": value, "interval": [value - 5, value + 5]}
            for protocol, value in zip(PROTOCOLS[dataset], values, strict=True)
        }
        for expansion, values in scores.items()
    }
    content = {
        "dataset": dataset,
        "recipe": recipe,
        "config": {"cooccurrence": "direct", "size": 1024},
        "dim": 512,
        "results": results,
        "command": f"cooc bench {dataset} -r {recipe}",
        "commit": "abc123",
        "machine": {"accelerator": None, "cpu": "test machine"},
    }
    (folder / f"{dataset}--{recipe}.json").write_text(json.dumps(content | more))


def row(table: report.Table, *start: str) -> list[str]:
    """The row that starts so."""
    found = [cells for cells in table.rows if cells[: len(start)] == list(start)]
    assert len(found) == 1, f"{start} is there {len(found)} times"
    return found[0]


def test_the_papers_rows_name_recipes_that_exist() -> None:
    rows = [row for table in (*paper.TABLES.values(), *paper.REFERENCE.values()) for row in table.rows]
    names = {name for row in rows for name in row.recipes if not name.startswith("learned")}
    assert {find_recipe(name).name for name in names} == names
    for row in rows:
        first = [name for name in row.recipes[:1] if not name.startswith("learned")]
        assert all(find_recipe(name).config.dim == row.dim for name in first)


def test_the_papers_numbers_agree_where_it_prints_them_twice() -> None:
    """Tables 2, 3 and 5 share rows, as do 1 and 6, 4 and 6: a slip of the pen would show."""

    def values(name: str, method: str, dim: int) -> dict[str, float | None]:
        table = paper.TABLES[name]
        return next(
            dict(zip(table.columns, r.values, strict=True)) for r in table.rows if (r.method, r.dim) == (method, dim)
        )

    for one, other, method, dim in (
        ("table1", "table6", "ucrow", 512),
        ("table1", "table6", "crow + AQE", 512),
        ("table1", "table6", "ChCO-SC_T + SpTD", 512),
        ("table2", "table3", "BP(AC_T) + SpTD", 512),
        ("table2", "table5", "BP(AC_T) + SpTD + AQE", 512),
        ("table3", "table5", "BP(AC_T) + SpTD", 4096),
        ("table4", "table6", "BP(AC_T) + ms", 8192),
        ("table4", "table6", "BP(AC_T) learned + alphaQE + ms", 8192),
    ):
        first, second = values(one, method, dim), values(other, method, dim)
        shared = set(first) & set(second)
        assert shared
        assert {k: first[k] for k in shared} == {k: second[k] for k in shared}


def test_a_row_shows_ours_and_the_papers_in_the_columns_that_were_measured(tmp_path: Path) -> None:
    write(tmp_path, "oxford5k", "ucrow", {"none": [64.9], "average-10": [71.0]})
    assert report.TABLES["table1"](load_results(tmp_path)).headings == ["method", "dim", "Oxford"]
    write(tmp_path, "roxford5k", "ucrow", {"none": [59.8, 42.5, 14.9]})
    table = report.TABLES["table1"](load_results(tmp_path))
    assert table.headings == ["method", "dim", *paper.OXFORD]  # nobody measured Paris or Holidays
    assert table.rows[0] == ["ucrow", "512", "64.9 (66.0)", "59.8 (60.5)", "42.5 (41.2)", "14.9 (12.0)"]
    assert row(table, "ucrow + AQE") == ["ucrow + AQE", "512", "71.0 (70.5)", "- (55.3)", "- (39.9)", "- (13.1)"]
    assert row(table, "crow")[2] == "- (67.2)"


def test_a_smaller_vector_than_the_papers_is_shown_as_such(tmp_path: Path) -> None:
    write(
        tmp_path, "roxford5k", "paper-bilinear-ms+dim=4096", {"none": [70, 54, 30], "alpha-50": [72, 58, 33]}, dim=4096
    )
    results = load_results(tmp_path)
    assert row(report.TABLES["table4"](results), "BP(AC_T) + ms")[1] == "4096 (8192)"
    assert "58.0 (60.9)" in row(report.TABLES["table4"](results), "BP(AC_T) + alphaQE + ms")


def test_methods_of_other_papers_have_no_number_of_ours(tmp_path: Path) -> None:
    write(tmp_path, "roxford5k", "gem", {"none": [59.8, 43.7, 20.0]})
    table = report.TABLES["table6"](load_results(tmp_path))
    assert [cells[0] for cells in table.rows[:4]] == ["SPoC", "MAC", "R-MAC", "GeM"]  # not what other tables have
    assert row(table, "GeM")[3] == "43.7 (40.5)"
    assert row(table, "Fine-tuned VGG16-GeM + ms (Radenovic)")[3] == "- (61.9)"


def test_reference_marks_what_is_off_by_more_than_a_point(tmp_path: Path) -> None:
    write(tmp_path, "roxford5k", "crow", {"none": [59.8, 43.7, 20.0]})
    write(tmp_path, "oxford5k", "crow+backbone=vgg16", {"none": [62.8]})
    table = report.TABLES["reference"](load_results(tmp_path))
    assert table.headings == ["method", "dim", "Oxford/Caffe", "torchvision"]
    assert table.rows == [["crow", "512", "- / +1.0 / -1.1 ! / +0.0", "+1.1 ! / - / - / -"]]


def scores(*values: float, gain: float | None = None) -> dict[str, Any]:
    """Oxford, then Easy, Medium and Hard of ROxford, as an experiment keeps them."""
    names = ("oxford", "roxford-easy", "roxford-medium", "roxford-hard")
    cells = {
        name: {"mAP": v, "interval": [v - 5, v + 5]} | ({} if gain is None else {"gain": [gain, gain - 1, gain + 1]})
        for name, v in zip(names, values, strict=True)
    }
    return {"oxford5k": {"oxford": cells.pop("oxford")}, "roxford5k": cells}


def experiment(folder: Path, name: str, rows: dict[str, Any]) -> report.Results:
    about = {"command": "python experiments/roxford.py", "commit": "abc", "machine": {"accelerator": "NVIDIA H200"}}
    (folder / f"experiment-{name}.json").write_text(json.dumps(about | {"rows": rows}))
    return load_results(folder)


def by_expansion(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {dataset: dict.fromkeys(names, protocols) for dataset, protocols in found.items()}


def test_learned_filters_stand_beside_the_direct_ones(tmp_path: Path) -> None:
    """The best on landmarks held out, and the one that ships."""
    direct = {"scores": {"one scale": by_expansion(scores(70, 64.6, 49, 23.2), "none")}}
    filters = {
        name: {
            "history": [{"mAP": 50.0}, {"mAP": held_out}],
            "best": 1,
            "seconds": 60.2,
            "scores": {"one scale": by_expansion(scores(71, 66, 50, 25, gain=1.4), "none")},
        }
        for name, held_out in {
            "contrastive-8e-3": 50.5,
            "sap": 52.0,
            "sap, full filter": 53.0,
            **{f"worse {i}": 51.0 for i in range(9)},
        }.items()
    }
    table = report.TABLES["learned"](experiment(tmp_path, "learning", {"direct": direct, **filters}))
    assert table.headings[-1] == "one scale"
    assert table.rows[:2] == [["direct", "-", "-", "50.0", "49.0"], ["sap", "1", "60", "52.0", "+1.4 [+0.4, +2.4]"]]
    assert [cells[0] for cells in table.rows[2:]] == [*(f"worse {i}" for i in range(5)), "contrastive-8e-3 (ships)"]


def test_draws_of_the_sketch_stand_beside_the_reference(tmp_path: Path) -> None:
    values = {"seed 0": (60, 50, 40, 20), "seed 1": (62, 52, 44, 21), "no sketch": (61, 51, 41, 19)}
    rows = {f"BP(AA), 512, {k}": {"scores": by_expansion(scores(*v), "none", "average-10")} for k, v in values.items()}
    table = report.TABLES["seeds"](experiment(tmp_path, "seeds", rows))
    cells = ["60.0 .. 62.0 (64.0)", "50.0 .. 52.0 (58.1)", "40.0 .. 44.0 (45.0)", "20.0 .. 21.0 (21.7)"]
    assert table.rows == [["BP(AA)", "Oxford/Caffe", "512", *cells]]
    table = report.TABLES["seeds"](experiment(tmp_path, "seeds-vgg16", rows))  # beside the others
    assert [row[1] for row in table.rows] == ["Oxford/Caffe", "torchvision"]


def test_multi_scale_rows_come_from_the_experiment_unless_they_were_measured_alone(tmp_path: Path) -> None:
    rows = {
        "BP(AC_T), each scale, shrunk 0.01": {
            "scores": by_expansion(scores(72.4, 68.8, 50.8, 24.3), "none", "alpha-10")
        }
    }
    results = experiment(tmp_path, "whitening", rows)
    assert report.TABLES["whitening"](results).rows[0][1:5] == ["72.4", "68.8", "50.8", "24.3"]
    assert results.score("paper-bilinear-ms", ("roxford5k", "roxford-medium"))["mAP"] == 50.8
    write(tmp_path, "roxford5k", "paper-bilinear-ms", {"none": [70, 55, 30]})
    again = load_results(tmp_path)
    assert again.score("paper-bilinear-ms", ("roxford5k", "roxford-medium"))["mAP"] == 55


def test_re_rankings_stand_beside_one_another(tmp_path: Path) -> None:
    write(tmp_path, "gldv2_dev", "gem", {"none": [44.4], "k-reciprocal": [50.0]})
    write(
        tmp_path, "roxford5k", "crow", {"none": [60, 50, 40], "k-reciprocal": [61, 51, 41], "diffusion": [62, 52, 42]}
    )
    write(tmp_path, "roxford5k", "ucrow", {"none": [60, 50, 40]})  # nothing to compare
    table = report.TABLES["rerankings"](load_results(tmp_path))
    assert table.headings == ["", "Landmarks, `gem`", "ROxford M, `crow`"]
    assert table.rows == [["none", "44.4", "50.0"], ["k-reciprocal", "50.0", "51.0"], ["diffusion", "-", "52.0"]]


def test_times_stand_beside_the_papers(tmp_path: Path) -> None:
    about = {"section": "cooccurrence", "channels": 2048, "batch": 5, "floor": 0.00291, "note": ""}
    rows = [
        about | {"name": "closed form", "ms": 0.0824},
        about | {"name": "convolution float32", "ms": 15.83},
        about | {"name": "Shih", "ms": None},
        about | {"section": "sketch", "name": "scatter", "ms": 1.0},
    ]
    machine = {"accelerator": "NVIDIA H200", "cpu": "x"}
    content = {"rows": rows, "machine": machine, "command": "cooc bench speed", "commit": "abc"}
    (tmp_path / "speed-cuda.json").write_text(json.dumps(content))
    again = content | {"rows": [about | {"name": "closed form", "ms": 0.09}], "command": "cooc bench speed"}
    (tmp_path / "speed-cuda-again.json").write_text(json.dumps(again))  # slower: the quickest run counts
    table = report.TABLES["performance"](load_results(tmp_path))
    assert table.headings == ["channels", "batch", "", "closed form", "convolution float32", "Shih", "memory floor"]
    assert table.rows == [
        ["2048", "5", "paper: GTX 1080 Ti", "-", "5.58", "out of memory", "-"],
        ["2048", "5", "ours: NVIDIA H200", "0.0824", "15.8", "-", "0.00291"],
    ]
    assert table.sources == ["`cooc bench speed` (commit abc, NVIDIA H200)"]


def test_stores_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    asked = {"p50 ms": 3.05, "p99 ms": 11.3, "recall": 0.9952}
    found = {
        "vectors": 20000,
        "dim": 512,
        "adding, vectors per second": 10780.4,
        "building the search structure, seconds": 8.652,
        "on disk, share of the vectors": 2.218,
        "search structure, bytes per image": 1347.2,
        "exact": asked,
        "approximate": asked,
        "approximate, 1 in 60 passes": asked,
        "approximate, queries per second of 4 threads": 325.8,
        "command": "cooc bench store",
    }
    (tmp_path / "scale-postgresql.json").write_text(json.dumps(found))
    table = report.TABLES["stores"](load_results(tmp_path))
    assert table.rows == [["postgresql", "20,000", "10780", "9", "4542", *["3.05 / 11.3, 0.995"] * 3, "326"]]
    found |= {"on disk, share of the vectors": None}
    del found["exact"]
    (tmp_path / "scale-milvus-1m.json").write_text(json.dumps(found))
    row = next(row for row in report.TABLES["stores"](load_results(tmp_path)).rows if row[0] == "milvus-1m")
    assert row[4:6] == ["-", "-"]


def test_rates_of_ray_stand_beside_the_plain_loop(tmp_path: Path) -> None:
    assert not report.TABLES["scale-ray"](load_results(tmp_path)).rows
    found: dict[str, Any] = {
        "pictures": 20000,
        "plain loop, one core": {"pictures per second": 40.04, "seconds": 125.4, "described": 5000, "bad": 0},
        "ray, 1 worker": {"pictures per second": 38.0, "seconds": 140.0, "described": 5000, "bad": 0},
        "efficiency of 2 workers": 0.914,
        "overhead of ray on one core": 0.05,
        "overhead of ray on all cores": -0.02,
        "pictures in the index of ray": 20000,
        "largest difference of a vector": 0.0,
        "command": "cooc bench scale",
    }
    (tmp_path / "scale-ray.json").write_text(json.dumps(found))
    assert report.TABLES["scale-ray"](load_results(tmp_path)).rows == [
        ["plain loop, one core", "5,000", "40.0", "125"],
        ["ray, 1 worker", "5,000", "38.0", "140"],
        ["efficiency of 2 workers", "", "91 %", ""],
        ["overhead of ray on one core", "", "5 %", ""],
        ["overhead of ray on all cores", "", "-2 %", ""],
        ["largest difference of a vector", "20,000", "0", ""],
    ]


def test_commands_are_numbered_and_printed_once(tmp_path: Path) -> None:
    for recipe in ("ucrow", "crow"):
        write(
            tmp_path, "oxford5k", recipe, {"none": [60]}, command="cooc bench oxford5k -r ucrow,crow --data /tmp/w/data"
        )
    write(tmp_path, "roxford5k", "shih-linear-topdown", {"none": [60, 50, 40]})
    results = load_results(tmp_path)
    page = "<!-- table:table5 -->\n<!-- /table -->\n<!-- table:table1 -->\n<!-- /table -->\n"
    text = report.rewrite(page + "<!-- table:commands -->\n<!-- /table -->\n", results, "results.md")
    assert "1. `cooc bench oxford5k -r ucrow,crow --data data` (commit abc123, test machine)\n" in text
    assert "2. `cooc bench roxford5k -r shih-linear-topdown` (commit abc123, test machine)\n" in text
    assert text.count("cooc bench") == 2
    assert re.findall(r"Commands \[(.*)\]\((.*)\)\.", text) == [("2", "#commands"), ("1", "#commands")]
    assert "Commands [1](docs/results.md#commands)." in report.rewrite(page, results, "README.md")
    assert "Commands [1](results.md#commands)." in report.rewrite(page, results, "docs/method.md")


def test_every_table_stands_in_a_document_and_the_commands_in_one() -> None:
    named = [name for path in report.documents(ROOT) for _, name, *_ in report.BLOCK.findall(path.read_text("utf-8"))]
    assert sorted(named) == sorted([*report.TABLES, "commands"])


def test_blocks_are_renewed_and_all_else_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "oxford5k", "paper-bilinear-aa", {"none": [63.6]})
    results = load_results(tmp_path)
    text = "# A\n<!-- table:readme -->\nold\n<!-- /table -->\nb | c\n<!-- table:table2 -->\n<!-- /table -->\n"
    once = report.rewrite(text, results)
    assert "old" not in once
    assert once.startswith(
        "# A\n<!-- table:readme -->\n**Measured (published)**: not measured.\n<!-- /table -->\nb | c\n"
    )
    assert "| BP(AA) | 512 | 63.6 (65.9) |" in once
    assert report.rewrite(once, results) == once


def test_broken_documents_and_results_are_refused(tmp_path: Path) -> None:
    results = load_results(tmp_path)
    with pytest.raises(UnknownNameError, match="Did you mean 'table1'"):
        report.rewrite("<!-- table:tabel1 -->\n<!-- /table -->", results)
    with pytest.raises(InputError, match=r"README.*needs its <!-- /table"):
        report.rewrite("<!-- table:table1 -->\n", results, "README.md")
    (tmp_path / "oxford5k--ucrow.json").write_text("{")
    with pytest.raises(DatasetError, match=r"oxford5k--ucrow\.json is no result file"):
        load_results(tmp_path)


def test_no_document_differs_from_the_results() -> None:
    """`python -m benchmarks tables --write` repairs it."""
    results = load_results(ROOT / "results")
    documents = report.documents(ROOT)
    assert ROOT / "docs" / "results.md" in documents
    for path in documents:
        text = path.read_text(encoding="utf-8")
        assert report.rewrite(text, results, path.name) == text, (
            f"{path.name}: run `python -m benchmarks tables --write`"
        )


def test_the_command_prints_and_writes(benchmarks: Shell, tmp_path: Path) -> None:
    write(tmp_path, "oxford5k", "crow", {"none": [64.9]})
    (tmp_path / "README.md").write_text("<!-- table:readme -->\n<!-- /table -->\n")
    shown = benchmarks("tables", "table1", "performance", "--results", tmp_path)
    assert shown.code == 0
    assert "64.9 (67.2)" in shown.out
    assert "Time of the co-occurrence tensor: not measured" in shown.out
    constants = tmp_path / "cooc/data/planning.json"
    constants.parent.mkdir(parents=True)
    constants.write_text("old")
    assert benchmarks("tables", "--write", "--results", tmp_path, "--root", tmp_path).code == 0
    assert "| crow | 512 | 64.9 (67.2) |" in (tmp_path / "README.md").read_text()
    assert json.loads(constants.read_text()) == {}  # nothing there of what they come from
