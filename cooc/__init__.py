"""cooc: find the pictures that show the same thing.

    image -> activations -> co-occurrence tensor -> pooled vector -> whitening
          -> index -> search -> re-ranking -> evaluation

Each step is one module of that name; `cooccurrence.py` is the paper. The short way through all of them:

    from cooc import Descriptor, ImageSearch

    describe = Descriptor.from_pretrained("paper-linear-topdown")
    vectors = describe(["a.jpg", "b.jpg"])                     # (2, 512) float32, unit length

    search = ImageSearch.create("photos/.cooc", root="photos")
    search.add(["photos/a.jpg", "photos/b.jpg"])
    search.search("query.jpg", box=(40, 60, 300, 400))         # the most similar pictures, with their scores
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cooc.cooccurrence import Cooccurrence, cooccurrence_vector, shih_cooccurrence
    from cooc.descriptor import Descriptor
    from cooc.errors import CoocError
    from cooc.image_search import ImageSearch
    from cooc.recipes import RECIPES, DescriptorConfig, find_recipe

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "CoocError",
    "Cooccurrence",
    "Descriptor",
    "DescriptorConfig",
    "ImageSearch",
    "__version__",
    "cooccurrence_vector",
    "find_recipe",
    "shih_cooccurrence",
]

_HOME = {
    "CoocError": "errors",
    "Cooccurrence": "cooccurrence",
    "cooccurrence_vector": "cooccurrence",
    "shih_cooccurrence": "cooccurrence",
    "Descriptor": "descriptor",
    "DescriptorConfig": "recipes",
    "ImageSearch": "image_search",
    "RECIPES": "recipes",
    "find_recipe": "recipes",
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are used, so that `cooc --help` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'cooc' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cooc.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
