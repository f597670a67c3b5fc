"""Fixtures that more than one test file needs."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.__main__ import app as benchmarks_app
from cooc.cli import app
from cooc.weights import load_weights
from tests.servers import end_servers
from tests.shell import Shell, shell

torch.set_num_threads(1)  # tests use small tensors: threads that wait for one another cost more than they bring


@pytest.fixture(scope="session", autouse=True)
def _surroundings() -> Iterator[None]:
    """What tests rely on, wherever they are started: a background job of a plain shell ignores Ctrl-C, for one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "COOC_INDEX", "COOC_DEBUG", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        mask = os.umask(0o022)
        yield
        os.umask(mask)
        for number, handler in before.items():
            signal.signal(number, handler)


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
