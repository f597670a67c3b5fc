"""An index of a folder, and a descriptor that says how often it was asked: for whoever has `photos`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cooc.image_search import ImageSearch
from tests.tiny import RECIPE, Watched


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def search(photos: Path, watched: Watched) -> Iterator[ImageSearch]:
    with ImageSearch.create(photos / ".cooc", recipe=RECIPE, descriptor=watched) as made:
        yield made
