"""Fixtures that more than one test file needs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from cooc.weights import load_weights

torch.set_num_threads(1)  # tests use small tensors: threads that wait for one another cost more than they bring


@pytest.fixture(scope="session")
def real_weights() -> Callable[[str], dict[str, torch.Tensor]]:
    """`real_weights("vgg16-caffe")`: the true tensors, from the normal cache, fetched on a machine's first run."""
    return functools.cache(load_weights)
