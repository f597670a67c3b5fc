"""Fixtures that more than one test file needs."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped,unused-ignore]

from benchmarks.__main__ import app as benchmarks_app
from cooc.cli import every
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


# Milvus takes a third of a core even while nobody asks it anything: one process tests it, and ends it then.
SERVED = ("export", "features", "milvus", "on_server", "postgres", "restore", "store")
WITH_SERVERS = frozenset(f"tests/index/test_{name}.py" for name in SERVED)


class Scheduling(LoadFileScheduling):  # type: ignore[misc,unused-ignore]
    """A file is tested by one process, and so are all those with servers."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "with servers" if file in WITH_SERVERS else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "milvus" in item.nodeid)  # last, so that it runs no longer than it must


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Whatever servers the tests have started (see tests/servers.py) end with them."""
    following = "" if nextitem is None else nextitem.nodeid.partition("::")[0]
    if following not in WITH_SERVERS | {item.nodeid.partition("::")[0]}:
        end_servers()


@pytest.fixture(scope="session")
def cooc() -> Shell:
    """`cooc("describe", path, ...)`"""
    return shell(every())


@pytest.fixture(scope="session")
def benchmarks() -> Shell:
    """`benchmarks("tables", ...)`: as python -m benchmarks."""
    return shell(benchmarks_app)
