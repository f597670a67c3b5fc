"""docs/extending.md, followed: its blocks run, and its store passes the suite of all engines."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import memory_store

from cooc.activations import BACKBONES
from cooc.index import ENGINES, create_store
from cooc.index.store import Store
from cooc.pooling import POOLINGS
from cooc.weights import WEIGHTS
from tests.index import test_features, test_store
from tests.reference.store import Model
from tests.tiny import write_photos

OTHER_PROCESSES = {  # which cannot see this one's memory
    "test_reading_while_another_process_writes",
    "test_one_writer_at_a_time",
    "test_a_killed_writer_leaves_whole_batches",
}
SUITE = {
    name: test
    for suite in (test_store, test_features)
    for name, test in vars(suite).items()
    if name.startswith("test_")
    and name not in OTHER_PROCESSES
    and {"address", "store", "filled", "shared"} & (asked := set(inspect.signature(test).parameters))
    and "engine" not in asked
}
globals().update(SUITE)  # collected here, they find the fixtures below


def test_the_suite_is_there() -> None:
    assert len(SUITE) > 20
    assert vars(test_store).keys() >= OTHER_PROCESSES


PAGE = (Path(__file__).parent.parent / "docs/extending.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test adds goes with it."""
    kept = [(registry, dict(registry)) for registry in (BACKBONES, POOLINGS, WEIGHTS, ENGINES)]
    monkeypatch.setitem(ENGINES, "memory", "examples.memory_store")
    yield
    for registry, before in kept:
        registry.clear()  # type: ignore[attr-defined]
        registry.update(before)  # type: ignore[attr-defined]
    memory_store.INDEXES.clear()


@pytest.fixture
def address() -> str:
    return "memory://conformance"


@pytest.fixture
def store(request: pytest.FixtureRequest, address: str) -> Store:
    features = request.function.__module__ == test_features.__name__
    return create_store(address, test_features.WITH_FEATURES if features else test_store.META)


@pytest.fixture
def filled(store: Store) -> tuple[Store, Model]:
    return test_store.fill(store)


@pytest.fixture
def shared(store: Store) -> tuple[Store, Model]:
    return test_store.fill(store)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Block after block, as a reader would; random tensors stand in for the file of weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(ENGINES, "memory", "nothing yet")
    for photo, name in zip(write_photos(tmp_path, 2), ("a.jpg", "b.jpg"), strict=True):
        photo.rename(tmp_path / name)
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    stated = []
    for code in blocks:
        if "import_weights" in code:
            weights = {key: torch.randn(t.shape) / 30 for key, t in names["VGG11"]("").state_dict().items()}
            torch.save(weights | {"classifier.0.weight": torch.zeros(3)}, "vgg11-8a719046.pth")
        exec(compile(code, "docs/extending.md", "exec"), names)
        for name, shape in re.findall(r"^(\w+) = .*# \(([\d, ]+)\)", code, re.MULTILINE):
            assert tuple(names[name].shape) == tuple(int(n) for n in shape.split(",")), name
            stated.append(names[name])
    maps = names["soft"].backbone(torch.rand(1, 3, 64, 48)).float()
    pooled = POOLINGS["lse"].build(512, r=5.0)(maps)
    by_hand = np.log(np.exp(5 * maps[0].double().numpy()).mean((1, 2))) / 5
    np.testing.assert_allclose(pooled[0].numpy(), by_hand, rtol=1e-4, atol=1e-5)
    assert not np.allclose(*stated)  # another pooling, other vectors
    np.testing.assert_allclose(np.linalg.norm(stated, axis=2), 1, rtol=1e-5)
    assert capsys.readouterr().out == "a.jpg\n"
    assert [match.path for match in names["results"].matches] == ["a.jpg", "b.jpg"]
