"""Recipes by name, and the changes that a name may carry."""

from __future__ import annotations

import math

import pytest
import torch

from cooc.activations import BACKBONES
from cooc.errors import InputError, UnknownNameError
from cooc.pooler import Pooler
from cooc.pooling import POOLINGS
from cooc.recipes import MULTI_SCALE, RECIPES, DescriptorConfig, find_recipe

PAPER = {
    "ucrow": ("ucrow", "none", 512),
    "crow": ("crow", "none", 512),
    "spoc": ("spoc", "none", 512),
    "mac": ("mac", "none", 512),
    "rmac": ("rmac", "none", 512),
    "gem": ("gem", "none", 512),
    "paper-linear": ("chco-sct", "none", 512),
    "paper-linear-topdown": ("chco-sct", "top-down", 512),
    "paper-linear-centre": ("chco-sct", "centre", 512),
    "paper-bilinear-aa": ("compact-bilinear", "none", 512),
    "paper-bilinear": ("compact-bilinear", "none", 512),
    "paper-bilinear-topdown": ("compact-bilinear", "top-down", 512),
    "paper-bilinear-topdown-4096": ("compact-bilinear", "top-down", 4096),
    "paper-bilinear-ms": ("compact-bilinear", "none", 8192),
}


@pytest.mark.parametrize("name", PAPER)
def test_rows_of_the_papers_tables(name: str) -> None:
    """VGG16 of the paper at pool5, 1024 pixels, radius 4."""
    config = find_recipe(name).config
    assert (config.pooling, config.mask, config.dim) == PAPER[name]
    assert (config.backbone, config.layer, config.size, config.radius) == ("vgg16-caffe", "pool5", 1024, 4)
    assert config.scales == (MULTI_SCALE if name.endswith("-ms") else (1.0,))
    assert config.cooccurrence == (
        "none" if name.endswith("-aa") or not POOLINGS[config.pooling].cooccurrence else "direct"
    )
    assert dict(config.options).get("dim", 8192) == 8192


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_made_and_cites_its_source(name: str) -> None:
    recipe = find_recipe(f"{name}+raw")
    assert RECIPES[name].name == name
    assert len(RECIPES[name].source) > 5
    assert (recipe.config.whitening, recipe.config.dim) == ("", 0)
    channels = BACKBONES[recipe.config.backbone].layers[recipe.config.layer][0]
    out = Pooler(recipe.config, channels)(torch.rand(2, channels, 2, 3))
    assert out.shape[0] == 2
    torch.testing.assert_close(out.norm(dim=1), torch.ones(2))


def test_recipes_differ() -> None:
    assert len({recipe.config.hash for recipe in RECIPES.values()}) == len(RECIPES)


def test_changes() -> None:
    assert find_recipe("crow+ms").config.scales == pytest.approx((1.0, math.sqrt(0.5), 0.5))
    assert find_recipe("crow+dim=128").config == find_recipe("crow").config.replace(dim=128)
    assert find_recipe("gem+p=4").config.options == (("p", 4),)
    assert find_recipe("gem+p=4").config.hash == find_recipe("gem+p=4.0").config.hash
    enlarged, before = find_recipe("resnet-gem").config, find_recipe("resnet-gem+least=0").config
    assert enlarged.hash != before.hash
    assert enlarged.space_hash == before.space_hash
    assert DescriptorConfig.from_dict({k: v for k, v in before.as_dict().items() if k != "least"}) == before
    assert find_recipe("rmac+whole=false+levels=2").config.options == (("levels", 2), ("whole", False))
    assert find_recipe("paper-linear-centre+sigma=0.3").config.sigma == 0.3
    assert find_recipe("crow+scales=1,0.5").config.scales == (1.0, 0.5)
    assert find_recipe("paper-bilinear+sqrt=true+dim=1024").config.options == (
        ("dim", 8192),
        ("seed", 0),
        ("sqrt", True),
    )
    assert find_recipe("crow+backbone=resnet50").config.layer == "layer4"
    assert (
        find_recipe("crow+layer=conv5_3+size=640").config.replace(layer="pool5", size=1024)
        == find_recipe("crow").config
    )


def test_the_name_is_kept_and_the_source_says_what_was_changed() -> None:
    recipe = find_recipe("gem+p=4+ms")
    assert recipe.name == "gem+p=4+ms"
    assert recipe.source.startswith(RECIPES["gem"].source)
    assert recipe.source.endswith("changed: p=4 ms")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("paper-liner", "paper-linear"),
        ("crow+sise=640", "size"),
        ("crow+mask=topdown", "top-down"),
        ("crow+backbone=vgg61", "vgg16"),
        ("crow+pooling=chco-sctt", "chco-sct"),
        ("crow+layer=conv5-3", "conv5_3"),
        ("gem+pp=4", "p"),
        ("crow+rav", "raw"),
    ],
)
def test_unknown_names_offer_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"Did you mean '{nearest}'"):
        find_recipe(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "crow+",
        "crow+dim=",
        "crow+dim=many",
        "crow+dim=1.5",
        "crow+dim=-1",
        "crow+size=0",
        "crow+scales=1,2",
        "crow+scales=",
        "crow+scales=a",
        "gem+p=three",
        "crow+p=4",
        "crow+options=3",
        "crow+cooccurrence=learned",
        "crow+radius=-1",
        "paper-linear-centre+sigma=0",
        "paper-linear-centre+sigma=nan",
    ],
)
def test_changes_that_mean_nothing(name: str) -> None:
    with pytest.raises(InputError):
        find_recipe(name)
