"""Fixtures that more than one test file needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.__main__ import app as benchmarks_app
from cooc.cli import app
from cooc.weights import load_weights
from tests.servers import end_servers
from tests.shell import Shell, shell

torch.set_num_threads(1)  # tests use small tensors: threads that wait for one another cost more than they bring


@pytest.fixture(scope="session")
def real_weights() -> Callable[[str], dict[str, torch.Tensor]]:
    """`real_weights("vgg16-caffe")`: the true tensors, from the normal cache, fetched on a machine's first run."""
    return functools.cache(load_weights)


@pytest.fixture(scope="session", autouse=True)
def _servers() -> Iterator[None]:
    """Whatever servers the tests have started (see tests/servers.py) end with them."""
    yield
    end_servers()


@pytest.fixture(scope="session")
def cooc() -> Shell:
    """`cooc("describe", path, ...)`"""
    return shell(app)


@pytest.fixture(scope="session")
def benchmarks() -> Shell:
    """`benchmarks("tables", ...)`: as python -m benchmarks."""
    return shell(benchmarks_app)
