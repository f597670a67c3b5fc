"""A descriptor as one folder: written, carried to a machine without a connection, and found there by name or path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import skimage.data
import torch
from torch import Tensor

import cooc.cli.weights  # noqa: F401 (adds its commands to app)
from cooc.artefacts import export_artefact, import_artefact
from cooc.cooccurrence import Cooccurrence
from cooc.descriptor import Descriptor
from cooc.errors import InputError, UnknownNameError, WeightsError
from cooc.recipes import RECIPES, find_recipe
from tests.shell import Shell
from tests.test_descriptor_module import assert_runs_elsewhere

PICTURE = skimage.data.coffee()[100:196, 150:278]


@pytest.fixture
def light(real_weights: Callable[[str], dict[str, Tensor]]) -> Descriptor:
    real_weights("efficientnet-lite0")
    return Descriptor.from_pretrained("light", device="cpu", dtype="float32")


@pytest.fixture
def mine(light: Descriptor, tmp_path: Path) -> Path:
    """An artefact with a filter and a whitening of its own, as training leaves one."""
    layer = Cooccurrence("factored", channels=1280, rank=2)
    torch.nn.init.normal_(layer.left, std=3000)
    light.pooler.cooccurrence = layer.requires_grad_(False)
    light.save_pretrained(tmp_path / "runs/mine")
    return tmp_path / "runs/mine"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """From then on: another machine, which has no weights and no connection."""

    def move() -> Path:
        monkeypatch.setenv("COOC_HOME", str(tmp_path / "elsewhere"))
        monkeypatch.setenv("COOC_OFFLINE", "1")
        return tmp_path / "elsewhere"

    return move


def vectors(recipe: str | Path) -> Tensor:
    return Descriptor.from_pretrained(recipe, device="cpu", dtype="float32")([PICTURE])


def test_what_is_saved_is_loaded(light: Descriptor, mine: Path) -> None:
    assert {file.name for file in mine.iterdir()} == {"descriptor.json", "filter.safetensors", "whitening.safetensors"}
    again = Descriptor.from_pretrained(mine, device="cpu", dtype="float32")
    assert again.fingerprint == light.fingerprint == json.loads((mine / "descriptor.json").read_text())["fingerprint"]
    assert torch.equal(again([PICTURE]), light([PICTURE]))
    assert again.dim == 512
    assert not torch.allclose(again([PICTURE]), vectors("light"), atol=1e-3)
    again.save_pretrained(mine)  # over itself
    assert torch.equal(vectors(mine), light([PICTURE]))


def test_a_folder_is_a_recipe_with_changes(mine: Path) -> None:
    assert find_recipe(f"{mine}+size=320").config == find_recipe(str(mine)).config.replace(size=320)
    assert find_recipe(f"{mine}+dim=64").config.dim == 64


def test_carried_to_another_machine(
    cooc: Shell, mine: Path, tmp_path: Path, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, bag = vectors(mine), tmp_path / "bag"
    assert cooc("weights", "export", mine, bag).out.strip() == str(bag)
    assert {file.name for file in bag.iterdir()} == {
        "descriptor.json",
        "filter.safetensors",
        "network.safetensors",
        "whitening.safetensors",
    }
    assert (bag / "filter.safetensors").read_bytes() == (mine / "filter.safetensors").read_bytes()
    for file in mine.iterdir():  # nothing of the bag points back
        file.unlink()
    home = elsewhere()
    with pytest.raises(WeightsError, match="COOC_OFFLINE"):
        vectors(bag)
    assert "mine: a recipe now" in cooc("weights", "import", bag).out
    assert torch.equal(vectors(bag), wanted)
    assert torch.equal(vectors("mine"), wanted)
    assert torch.equal(vectors("mine+size=1024"), wanted)
    for file in bag.iterdir():
        file.unlink()
    monkeypatch.chdir(tmp_path)
    assert torch.equal(vectors("mine"), wanted)
    assert sorted(path.name for path in (home / "descriptors").iterdir()) == ["mine"]
    with pytest.raises(UnknownNameError, match="'mine'"):
        find_recipe("mien")


def test_a_named_recipe_needs_only_its_weights_there(
    cooc: Shell, light: Descriptor, tmp_path: Path, elsewhere: Callable[[], Path]
) -> None:
    wanted, bag = light([PICTURE]), tmp_path / "bag"
    cooc("weights", "export", "light", bag)
    home = elsewhere()
    assert "light: a recipe now" in cooc("weights", "import", bag).out
    assert not (home / "descriptors").exists()
    for recipe in ("light", bag):
        torch.testing.assert_close(vectors(recipe), wanted, rtol=0, atol=1e-6)


def test_a_set_of_weights_is_exported_as_before(
    cooc: Shell, light: Descriptor, tmp_path: Path, elsewhere: Callable[[], Path]
) -> None:
    cooc("weights", "export", "efficientnet-lite0", tmp_path / "weights.safetensors")
    elsewhere()
    assert "efficientnet-lite0: imported" in cooc("weights", "import", tmp_path / "weights.safetensors").out


def test_changes_and_names(light: Descriptor, tmp_path: Path, elsewhere: Callable[[], Path]) -> None:
    """A recipe with changes has the name of its folder; none takes the name of one that ships."""
    export_artefact("light+size=320", tmp_path / "quick")
    export_artefact("light+size=320", tmp_path / "gem")
    elsewhere()
    assert import_artefact(tmp_path / "quick") == "quick"
    assert find_recipe("quick").config.size == 320
    assert import_artefact(tmp_path / "quick", "faster") == "faster"
    assert import_artefact(tmp_path / "quick") == "quick"  # again: replaced
    for name in ("gem", "a/b", "..", "a+b", ".hidden"):
        with pytest.raises(InputError, match="--name"):
            import_artefact(tmp_path / "gem", name)
    assert find_recipe("gem") == RECIPES["gem"]


def test_an_authors_filter_travels_as_safetensors(light: Descriptor, tmp_path: Path) -> None:
    Cooccurrence("learned", channels=512, radius=0).save(tmp_path / "authors.npy")
    export_artefact(f"paper-linear+raw+filter={tmp_path / 'authors.npy'}", tmp_path / "bag")
    assert Path(find_recipe(str(tmp_path / "bag")).config.filter) == tmp_path / "bag/filter.safetensors"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"config": {"backbone": "vgg16"}}', '{"config": {"strange": 1}}'])
def test_folders_that_are_no_descriptor(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match=r"descriptor\.json is missing"):
        find_recipe(str(tmp_path))
    (tmp_path / "descriptor.json").write_text(content)
    with pytest.raises(InputError, match=r"descriptor\.json is no descriptor that cooc wrote"):
        find_recipe(str(tmp_path))


def test_files_of_an_artefact_lie_in_its_folder(mine: Path) -> None:
    """A folder from a stranger names nothing else on this machine."""
    content = json.loads((mine / "descriptor.json").read_text())
    content["config"] |= {"filter": "/etc/filter.safetensors", "whitening": "../../whitening.safetensors"}
    (mine / "descriptor.json").write_text(json.dumps(content))
    config = find_recipe(str(mine)).config
    assert Path(config.filter) == mine / "filter.safetensors"
    assert Path(config.whitening) == mine / "whitening.safetensors"


def test_onnx_from_the_command_line(cooc: Shell, real_weights: Callable[[str], object], tmp_path: Path) -> None:
    real_weights("vgg16-caffe")
    recipe = "gem+layer=pool3+raw"  # few layers: tracing them takes the time
    cooc("weights", "export", recipe, tmp_path / "gem.onnx")
    assert_runs_elsewhere(tmp_path / "gem.onnx", Descriptor.from_pretrained(recipe, device="cpu", dtype="float32"))
