"""The GPU kernels, run by Triton's interpreter on the CPU, against the torch forms in float64."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from cooc import kernels
from cooc.cooccurrence import cooccurrence
from cooc.kernels import memory
from cooc.kernels.memory import derived

pytest.importorskip("triton", reason="Triton is for Linux only")

CHECKS = ("direct", "thresholds", "linear", "factored", "sketch", "repeat", "forms")


def test_kernels_equal_torch_forms() -> None:
    """In a process of its own: Triton chooses between compiler and interpreter when it is imported."""
    root = Path(__file__).parent.parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gpu_check", "--device", "cpu"]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    for check in CHECKS:
        assert f"\n{check}: " in f"\n{run.stdout}"


def test_nothing_but_a_gpu_uses_kernels() -> None:
    A = torch.rand(1, 4, 5, 6)
    assert not kernels.usable(A)
    assert kernels.cooccurrence(A, 1, None, 0.0, 3.0) is None
    assert kernels.linear_pooling(A, 1, 0.0, 3.0, rarity_eps=1e-5, spatial=True, rarity=True) is None


def test_torch_forms_do_not_import_triton() -> None:
    code = "import sys, torch; from cooc import cooccurrence, descriptor; sys.exit('triton.language' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kernel_that_fails_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here it fails because there is no GPU at all: the torch form takes over."""
    monkeypatch.setattr(kernels, "usable", lambda *tensors: True)
    monkeypatch.setattr(kernels, "_failed", set())
    A = torch.rand(1, 4, 5, 6)
    expected = cooccurrence(A.double(), 1).float()
    for _ in range(2):
        torch.testing.assert_close(cooccurrence(A, 1), expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'direct' failed" in caplog.text


def test_a_source_may_outlive_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """When Python ends, modules lose their names before all tensors are gone. pytest reports what fails then."""
    source = torch.ones(3)
    derived(source, "one", lambda: 1)
    monkeypatch.setattr(memory, "_made", None)
    del source
    gc.collect()


def test_what_is_derived_may_be_its_source() -> None:
    source = torch.ones(3)
    gone = weakref.ref(source)
    assert derived(source, "itself", gone) is source
    del source
    assert gone() is None


def test_what_is_derived_follows_its_source() -> None:
    made: list[float] = []

    def make() -> float:
        made.append(float(source.sum()))
        return made[-1]

    source = torch.ones(3)
    assert derived(source, "sum", make) == derived(source, "sum", make) == 3
    source.add_(1)
    assert derived(source, "sum", make) == 6
    assert made == [3, 6]
