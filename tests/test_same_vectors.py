"""Every recipe still gives the vectors that it gave when tests/fixtures/vectors.npz was written.

    python -m tests.test_same_vectors        writes it again: only when a recipe is meant to change

Twenty photographs and parts of photographs that come with scikit-image, as every named recipe describes them. The
network runs in float64, so that what is compared does not depend on the machine; of each vector 32 random projections
are kept.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cooc.activations import Activations
from cooc.descriptor import Descriptor, load_backbone
from cooc.recipes import RECIPES, find_recipe

FIXTURE = Path(__file__).parent / "fixtures" / "vectors.npz"
SIZE = 160
PHOTOGRAPHS = [
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "camera.png",
    "hubble_deep_field.jpg",
    "retina.jpg",
    "clock_motion.png",
    "brick.png",
    "cell.png",
    "grass.png",
    "gravel.png",
]
BOX = (40.0, 20.0, 250.0, 220.0)  # a part of the first eight
PICTURES = [(name, None) for name in PHOTOGRAPHS] + [(name, BOX) for name in PHOTOGRAPHS[:8]]
UNWHITENED = ("paper-bilinear-topdown-1024", "paper-bilinear-topdown-2048", "paper-bilinear-topdown-4096",
              "shih-bilinear-topdown", "shih-bilinear-topdown-4096",
              "paper-bilinear-aa-ms", "paper-bilinear-ms",  # no whitening ships for these
              "learned-ms", "learned-deep-ms")  # fmt: skip


@functools.cache
def backbone(name: str, layer: str, tuning: str) -> Activations:
    config = find_recipe("paper-linear").config.replace(backbone=name, layer=layer, tuning=tuning, dtype="float64")
    network = load_backbone(config, torch.device("cpu"))
    known: dict[bytes, torch.Tensor] = {}
    forward = network.forward

    def remembered(images: torch.Tensor) -> torch.Tensor:
        """Recipes that share a network share its maps: else this test would take minutes."""
        key = images.numpy().tobytes()
        if key not in known:
            known[key] = forward(images)
        return known[key]

    network.forward = remembered  # type: ignore[method-assign]
    return network


def projections(recipe: str) -> tuple[NDArray[np.float32], int]:
    """(20, 32), and the dimensions that they are of."""
    config = find_recipe(recipe).config
    config = config.replace(size=SIZE, dtype="float64", **({"whitening": "", "dim": 0} if recipe in UNWHITENED else {}))
    describe = Descriptor(config, device="cpu", backbone=backbone(config.backbone, config.layer, config.tuning))
    folder = Path(str(resources.files("skimage"))) / "data"
    vectors = describe([folder / name for name, _ in PICTURES], [box for _, box in PICTURES]).numpy()
    rng = np.random.default_rng(0)
    return (vectors @ rng.choice([-1.0, 1.0], (vectors.shape[1], 32))).astype(np.float32), vectors.shape[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_same_as_before(recipe: str) -> None:
    with np.load(FIXTURE) as fixture:
        found, dim = projections(recipe)
        np.testing.assert_allclose(found, fixture[recipe], rtol=0, atol=1e-6 * dim**0.5)  # 1e-6 in each dimension


if __name__ == "__main__":
    np.savez_compressed(FIXTURE, **{recipe: projections(recipe)[0] for recipe in RECIPES})
