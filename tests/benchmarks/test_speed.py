"""The speed harness: well-formed tables, right results, clear refusals. How long anything takes is not tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import speed as module
from benchmarks.speed import FORMS, SpeedConfig, compact_bilinear_fft, run_speed, targets, write_speed
from benchmarks.timing import LEAST, MOST, measure, sampler
from cooc.errors import InputError, UnknownNameError
from cooc.pooling import compact_bilinear, sketch_hashes
from tests.shell import Shell

ROW = {"section", "name", "channels", "batch", "ms", "low", "high", "ratio", "floor", "error", "note"}
QUICK = tuple(form for form in FORMS if form != "compiled")  # compiling takes longer than all the rest together
TINY: dict[str, Any] = {
    "device": "cpu",
    "channels": (6, 16),
    "batches": (1, 3),
    "map_size": (5, 7),
    "picture": (64, 96),
    "forms": QUICK,
    "seconds": 0.001,
    "pool_bytes": 1 << 16,
}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run_speed(SpeedConfig(**TINY))


def test_rows_are_complete(result: dict[str, Any]) -> None:
    assert all(set(row) == ROW for row in result["rows"])
    assert [(r["name"], r["channels"], r["batch"]) for r in result["rows"] if r["section"] == "cooccurrence"] == [
        (form, channels, batch) for channels in (6, 16) for batch in (1, 3) for form in QUICK
    ]
    assert [(r["name"], r["channels"], r["batch"]) for r in result["rows"] if r["section"] == "sketch"] == [
        (form, 16, batch) for batch in (1, 3) for form in ("scatter", "FFT")
    ]
    assert [row["name"] for row in result["rows"] if row["section"] == "descriptor"] == [
        "network",
        "paper-linear+raw",
        "paper-linear+raw, pooling alone",
        "paper-bilinear+raw",
        "paper-bilinear+raw, pooling alone",
    ]


def test_what_was_measured_has_times_and_what_was_not_has_a_reason(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["ms"] is None:
            assert row["note"] == "not run: no native bfloat16 here", row
            assert row["name"] == "convolution bfloat16"
        else:
            assert 0 < row["low"] <= row["ms"] <= row["high"]
            assert row["ratio"] > 0
            assert row["note"] == ""
        assert (row["floor"] is not None) == (row["section"] == "cooccurrence")


def test_ratio_is_to_the_first_of_the_group(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["name"] in ("closed form", "scatter", "network"):
            assert row["ratio"] == 1
            base = row["ms"]
        elif row["ms"] is not None:
            assert row["ratio"] == pytest.approx(row["ms"] / base, rel=1e-3)


def test_every_form_is_right(result: dict[str, Any]) -> None:
    checked = [row for row in result["rows"] if row["section"] != "descriptor" and row["ms"] is not None]
    assert {row["name"] for row in checked} >= {*QUICK, "scatter", "FFT"} - {"convolution bfloat16"}
    for row in checked:
        assert row["error"] < (1e-2 if "bfloat16" in row["name"] else 1e-5), row


def test_result_says_how_to_run_it_again(result: dict[str, Any], tmp_path: Path) -> None:
    assert {"benchmark", "device", "threads", "load", "copy_gb_per_s", "targets", "command", "commit"} <= set(result)
    assert {"machine", "versions", "date", "map_size", "picture", "radius"} <= set(result)
    path = write_speed(result, tmp_path / "results")
    assert path == tmp_path / "results" / "speed-cpu.json"
    assert json.loads(path.read_text()) == result
    assert list(path.parent.iterdir()) == [path]


def test_too_slow_for_a_cpu_stays_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_OPERATIONS", 1e6)
    options = TINY | {"channels": (16,), "batches": (3,), "sections": ("cooccurrence",)}
    notes = {row["name"]: row["note"] for row in run_speed(SpeedConfig(**options))["rows"]}
    assert notes["convolution float32"] == notes["Shih"] == "not run: takes many seconds for one call on a CPU"
    assert notes["closed form"] == ""


def test_what_fails_is_a_row_with_its_reason() -> None:
    rows = run_speed(SpeedConfig(**TINY | {"sections": ("descriptor", "sketch"), "picture": (8, 8)}))["rows"]
    assert rows[0]["section"] == "descriptor"
    assert rows[0]["note"].startswith("failed: InputError: ")
    assert [row["name"] for row in rows[1:]] == ["scatter", "FFT", "scatter", "FFT"]


def test_targets_compare_the_faster_closed_form() -> None:
    def row(name: str, ms: float | None, section: str = "cooccurrence", ratio: float | None = None) -> dict[str, Any]:
        return {"section": section, "name": name, "channels": 512, "batch": 1, "ms": ms, "ratio": ratio}

    rows = [row("closed form", 2.0), row("compiled", 1.0), row("convolution float32", 150.0)]
    pooling = row("paper-linear+raw, pooling alone", 30.0, "descriptor", 0.2)
    faster, share = targets([*rows, pooling], "cpu")
    assert (faster["value"], faster["wanted"], faster["met"]) == (150, ">= 100", True)
    assert (share["value"], share["wanted"], share["met"]) == (0.2, "< 0.1", False)
    (faster,) = targets([rows[0], rows[2]], "cuda")
    assert (faster["value"], faster["met"]) == (75, False)
    (faster,) = targets([rows[0], row("convolution float32", None)], "cpu")
    assert faster["met"] is None


def test_fft_form_equals_scatter_form() -> None:
    bins, signs = sketch_hashes(7, dim=32, seed=3)
    generator = torch.Generator().manual_seed(0)
    A, C = torch.randn(2, 2, 7, 4, 3, dtype=torch.float64, generator=generator)
    expected = compact_bilinear(A, C, bins=bins, signs=signs, dim=32)
    torch.testing.assert_close(compact_bilinear_fft(A, C, bins=bins, signs=signs, dim=32), expected)


def test_forms_take_turns() -> None:
    order: list[str] = []

    def takes(name: str, ms: float) -> float:
        order.append(name)
        return ms

    times = measure({"slow": lambda: takes("slow", 900.0), "fast": lambda: takes("fast", 1.0)}, seconds=1)
    assert times == {"slow": [900.0] * LEAST, "fast": [1.0] * MOST}
    assert order[: 2 * LEAST] == ["slow", "fast"] * LEAST


def test_inputs_rotate() -> None:
    seen: list[int] = []

    def call(A: torch.Tensor) -> torch.Tensor:
        seen.append(int(A))
        return A

    sample = sampler(call, [torch.tensor(i) for i in range(3)], torch.device("cpu"))
    assert all(sample() >= 0 for _ in range(5))
    assert seen == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"device": "gpu"}, InputError, "'gpu' cannot be used here"),
        ({"device": "meta"}, InputError, "'meta' cannot be used here"),
        ({"forms": ("closed",)}, UnknownNameError, "Did you mean 'closed form'"),
        ({"sections": ("sketches",)}, UnknownNameError, "Did you mean 'sketch'"),
        ({"channels": ()}, InputError, "there must be some"),
        ({"batches": (0,)}, InputError, "above 0"),
    ],
)
def test_wrong_options(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run_speed(SpeedConfig(**TINY | change))


class TestCommand:
    ARGUMENTS = ("--device", "cpu", "--channels", "8", "--batches", "2", "--picture", "96x64", "--seconds", "0.001")
    FORMS = ("--forms", "closed form,convolution float32,convolution bfloat16")

    def test_tables(self, benchmarks: Shell, tmp_path: Path) -> None:
        run = benchmarks("speed", *self.ARGUMENTS, *self.FORMS, "--results", tmp_path)
        assert run.code == 0, run
        for words in ("closed form", "convolution float32", "C_T at 24 x 32", "FFT", "network", "pictures of 96 x 64"):
            assert words in run.out
        assert "share of the network's time" in run.out
        assert json.loads((tmp_path / "speed-cpu.json").read_text())["device"] == "cpu"

    def test_json(self, benchmarks: Shell, tmp_path: Path) -> None:
        run = benchmarks("speed", *self.ARGUMENTS, "--sections", "sketch", "--results", tmp_path, "--json")
        assert run.code == 0, run
        assert run.json == json.loads((tmp_path / "speed-cpu.json").read_text())

    def test_wrong_numbers(self, benchmarks: Shell, tmp_path: Path) -> None:
        for arguments in (["--picture", "1024"], ["--channels", "a,b"]):
            run = benchmarks("speed", *arguments, "--results", tmp_path)
            assert run.code == 2
            assert arguments[0] in run.err
