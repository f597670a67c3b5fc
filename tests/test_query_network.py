"""Queries described without torch: the vectors that torch gives, by real networks, files and processes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from cooc.activations import build_backbone, resolve_device
from cooc.cli.warm import begin
from cooc.descriptor import Descriptor
from cooc.errors import ImageError, InputError, MachineError
from cooc.image_search import ImageSearch
from cooc.query_network.graph import WEIGHTS, graph_of
from cooc.query_network.running import ABOUT, NETWORK, WHITENING, QueryNetwork, checksum, place_of, surely_cpu
from cooc.query_network.writing import keep
from cooc.recipes import find_recipe
from cooc.weights import weights_home
from cooc.whitening import Whitening
from tests import tiny
from tests.labelled import write_labelled_folder
from tests.test_activations import random_weights

SMALL = {"vgg16-caffe": "pool3", "resnet50-caffe": "conv3"}  # a few million weights of the real layouts
REAL = "resnet-tuned+size=160"


@functools.cache
def descriptor(backbone: str = "resnet50-caffe", whitened: bool = True) -> Descriptor:
    layer = SMALL[backbone]
    config = find_recipe(f"gem+raw+backbone={backbone}+layer={layer}+size=160+least=90").config
    network = build_backbone(backbone, layer, weights=random_weights(backbone))
    random = torch.Generator().manual_seed(3)
    projection = torch.randn(24, network.channels, generator=random)
    whitening = Whitening(torch.rand(network.channels, generator=random) / 20, projection) if whitened else None
    return Descriptor(config, device="cpu", backbone=network, whitening=whitening)


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return tiny.write_photos(tmp_path / "photos", 3)


def kept(made: Descriptor, folder: Path) -> QueryNetwork:
    assert keep(made, folder, "its scores")
    network = QueryNetwork.find(folder, 160)
    assert network is not None
    return network


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("backbone", SMALL)
def test_vectors_are_those_of_torch(backbone: str, whitened: bool, tmp_path: Path, photos: list[Path]) -> None:
    made = descriptor(backbone, whitened)
    network = kept(made, tmp_path / "kept")
    assert network.settings.space == "its scores"
    large = np.random.default_rng(1).integers(0, 256, (301, 401, 3), np.uint8)  # is scaled down
    sliver = large[:3]  # is padded
    small = large[:60, :80]  # is enlarged, and so is a part of it
    pictures = [*photos, photos[0].read_bytes(), large, sliver, Image.fromarray(large), small, small]
    boxes = [None, (3.0, 4.0, 40.0, 47.0), None, (0.0, 0.0, 30.0, 30.0), (50.0, 60.5, 300.0, 200.0), None, None, None]
    boxes.append((10.0, 10.0, 50.0, 50.0))
    expected = made.describe(pictures, boxes).numpy()
    found = network.describe(pictures, boxes)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_the_real_network(real_weights: Callable[[str], dict[str, Tensor]], tmp_path: Path, photos: list[Path]) -> None:
    real_weights("resnet50-caffe")
    made = Descriptor.from_pretrained(REAL, device="cpu")
    found = kept(made, tmp_path / "kept").describe(photos, [None] * 3)
    assert ((found * made.describe(photos).numpy()).sum(axis=1) > 0.9999).all()


def test_pictures_of_one_colour_and_no_pictures(tmp_path: Path, photos: list[Path]) -> None:
    """A channel that never fires; files that are none."""
    made = descriptor()
    network = kept(made, tmp_path / "kept")
    black = np.zeros((50, 60, 3), np.uint8)
    np.testing.assert_allclose(network.describe([black], [None]), made.describe(black).numpy(), atol=1e-5)
    (tmp_path / "text.jpg").write_text("no picture")
    for bad in (tmp_path / "text.jpg", tmp_path / "nothing.jpg"):
        with pytest.raises(ImageError) as ours:
            network.describe([bad], [None])
        with pytest.raises(ImageError) as theirs:
            made.describe(bad)
        assert str(ours.value) == str(theirs.value)


def test_the_graph_is_onnx(tmp_path: Path) -> None:
    """As ONNX's own package and another runtime understand it, for two sizes."""
    backbone = descriptor().backbone
    graph = graph_of(backbone.network)
    (tmp_path / NETWORK).write_bytes(graph.onnx)
    (tmp_path / WEIGHTS).write_bytes(graph.weights)
    onnx.checker.check_model(str(tmp_path / NETWORK), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / NETWORK, providers=["CPUExecutionProvider"])
    for shape in ((1, 3, 64, 97), (1, 3, 130, 48)):
        images = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        (maps,) = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(maps, backbone.network(images).numpy(), rtol=1e-3, atol=1e-3)


class Odd(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.add(y, alpha=2) if len(self.layers) == 1 else y


@pytest.mark.parametrize(
    "network",
    [
        Odd(nn.Conv2d(3, 4, 3)),  # a sum with a factor
        nn.Sequential(nn.Conv2d(3, 4, 3, padding="same")),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
        nn.Sequential(nn.MaxPool2d(3, ceil_mode=True)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    ],
)
def test_a_network_with_anything_else_is_refused(network: nn.Module) -> None:
    with pytest.raises(InputError):
        graph_of(network)


class Other(Descriptor):
    """Gives vectors that its parts do not give."""

    def __init__(self) -> None:
        self.__dict__.update(descriptor().__dict__)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).flip(1)


def test_what_cannot_be_kept_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "queries" / "one"
    lite = build_backbone(tiny.BACKBONE, weights=random_weights(tiny.BACKBONE))
    gem = find_recipe(f"gem+raw+backbone={tiny.BACKBONE}").config
    for made in (tiny.descriptor(), Descriptor(gem, device="cpu", backbone=lite), Other()):
        assert not keep(made, folder, None)
        assert not list(tmp_path.rglob("*.*"))
    (tmp_path / "file").touch()
    assert not keep(descriptor(), tmp_path / "file" / "one", None)  # nowhere to write


def damage(folder: Path, how: str) -> None:
    """What may happen to files; the last two are not found by their checksums."""
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    weights = folder / WEIGHTS
    if how == "missing":
        weights.unlink()
    elif how == "cut off":
        os.truncate(weights, weights.stat().st_size // 2)
    elif how == "empty":
        os.truncate(weights, 0)
    elif how == "one byte":
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    elif how == "half-written":
        (folder / ABOUT).write_bytes((folder / ABOUT).read_bytes()[:50])
    elif how == "of another OpenCV":
        (folder / ABOUT).write_text(json.dumps(about | {"maker": [1, "4.10.0"]}))
    elif how == "no network":
        (folder / NETWORK).write_bytes(b"no network")
        about["files"][NETWORK] = checksum(folder / NETWORK)
        (folder / ABOUT).write_text(json.dumps(about))
    else:
        assert how == "NaN"
        np.save(folder / WHITENING, np.load(folder / WHITENING) * np.float32(np.nan))
        about["files"][WHITENING] = checksum(folder / WHITENING)
        (folder / ABOUT).write_text(json.dumps(about))


BROKEN = ["missing", "cut off", "empty", "one byte", "half-written", "of another OpenCV", "no network"]


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_damaged_is_not_used_and_written_again(how: str, tmp_path: Path, photos: list[Path]) -> None:
    made, folder = descriptor(), tmp_path / "kept"
    expected = kept(made, folder).describe(photos, [None] * 3)
    damage(folder, how)
    assert QueryNetwork.find(folder, 160) is None
    np.testing.assert_array_equal(kept(made, folder).describe(photos, [None] * 3), expected)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_vectors_that_are_none_are_refused(tmp_path: Path, photos: list[Path]) -> None:
    kept(descriptor(), tmp_path / "kept")
    damage(tmp_path / "kept", "NaN")
    network = QueryNetwork.find(tmp_path / "kept", 160)
    assert network is not None
    with pytest.raises(MachineError):
        network.describe(photos[:1], [None])


def test_read_before_it_is_asked_for(tmp_path: Path, photos: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = kept(descriptor(), tmp_path / "kept").describe(photos[:1], [None])
    QueryNetwork.begin(tmp_path / "kept", 160)
    with monkeypatch.context() as patch:
        patch.setattr(QueryNetwork, "_read", None)
        network = QueryNetwork.find(tmp_path / "kept", 160)
    assert network is not None
    np.testing.assert_array_equal(network.describe(photos[:1], [None])[0], expected)
    assert QueryNetwork.find(tmp_path / "kept", 160) not in (None, network)
    QueryNetwork.begin(tmp_path / "nothing", 160)
    assert QueryNetwork.find(tmp_path / "nothing", 160) is None


def test_a_place_for_each_descriptor() -> None:
    config = find_recipe("resnet-tuned").config.as_dict()
    place = place_of(config, "a")
    assert place_of(config | {"dtype": "bfloat16", "size": 384}, "a") == place
    others = {"options": {"p": 4}}, {"least": 100}, {"least": 0}
    assert len({place, place_of(config, "b"), *(place_of(config | other, "a") for other in others)}) == 5
    without = {name: value for name, value in config.items() if name != "least"}  # an index made before there was one
    assert place_of(without, "a") == place_of(config | {"least": 0}, "a")


def test_what_surely_is_the_cpu() -> None:
    assert surely_cpu("cpu")
    assert not surely_cpu("cuda")
    assert not surely_cpu("mps")
    assert resolve_device("auto").type == "cpu" or not surely_cpu("auto")


# Commands, each in a process of its own


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, real_weights: Callable[[str], dict[str, Tensor]]) -> Path:
    """A cache of our own, with the weights of the user's."""
    real_weights("resnet50-caffe")
    home = tmp_path_factory.mktemp("home")
    (home / "weights").symlink_to(weights_home())
    return home


def run(home: Path, *words: object) -> tuple[list[str], Any]:
    """The modules that a command imports, and what it answers."""
    settings = os.environ | {"COOC_HOME": str(home), "COOC_WARM": "0", "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-m", "cooc", *map(str, words), "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    return modules, json.loads(done.stdout.splitlines()[-1])


def paths(answer: Any) -> list[str]:
    return [match["path"] for match in answer["matches"]]


def scores(answer: Any) -> list[float]:
    return [match["score"] for match in answer["matches"]]


@pytest.fixture(scope="module")
def indexed(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_labelled_folder(tmp_path_factory.mktemp("things"), side=240) / "jpg"
    run(home, "index", folder, "-r", REAL, "--verify", "sift")
    return folder


@pytest.mark.parametrize("more", [(), ("--no-verify",), ("--box", "10,20,200,180")])
def test_a_search_imports_no_torch(home: Path, indexed: Path, more: tuple[str, ...]) -> None:
    words = ("search", indexed / "gate_000001.jpg", "--index", indexed / ".cooc", *more)
    modules, answer = run(home, *words)
    assert "cv2" in modules
    assert not {"torch", "faiss", "filelock", "cooc.index.sync", "cooc.cli.indexing"}.intersection(modules)
    shutil.move(home / "queries", home / "away")
    try:
        modules, expected = run(home, *words)
        assert "torch" in modules
        assert len(list((home / "queries").iterdir())) == 1  # for the next search
    finally:
        shutil.rmtree(home / "queries")
        shutil.move(home / "away", home / "queries")
    assert paths(answer) == paths(expected)
    assert scores(answer) == pytest.approx(scores(expected), abs=1e-3)
    assert answer["calibrated"] == expected["calibrated"]


def test_words_of_a_search_are_looked_through(home: Path, indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the network is read meanwhile. What is wrong with them is no matter yet."""
    monkeypatch.setenv("COOC_HOME", str(home))
    begun: list[Path] = []
    monkeypatch.setattr(QueryNetwork, "begin", lambda folder, size: begun.append(folder))
    index = str(indexed / ".cooc")
    begin(["search", "a.jpg", "--index", index, "--device", "cpu"])
    begin(["search", "--device=cpu", f"--index={index}", "a.jpg"])
    monkeypatch.setenv("COOC_INDEX", index)
    begin(["search", "a.jpg", "--device", "cpu"])
    assert begun == [*(home / "queries").iterdir()] * 3
    for words in (["--device", "cuda"], ["--index", str(home)], ["--index", "milvus://nowhere/a"], ["--index"]):
        begin(["search", "a.jpg", "--device", "cpu", *words])
    assert begun == [*(home / "queries").iterdir()] * 4  # the last one has no word that follows


@pytest.mark.parametrize("how", ["cut off", "no network", "NaN"])
def test_a_search_with_damaged_files_has_the_right_answer(home: Path, indexed: Path, how: str) -> None:
    words = ("search", indexed / "gate_000001.jpg", "--index", indexed / ".cooc")
    _, expected = run(home, *words)
    (folder,) = (home / "queries").iterdir()
    shutil.copytree(folder, home / "whole")
    try:
        damage(folder, how)
        modules, answer = run(home, *words)
        assert "torch" in modules
        assert paths(answer) == paths(expected)
    finally:
        shutil.rmtree(folder)
        shutil.move(home / "whole", folder)


def test_a_descriptor_that_is_loaded_describes(home: Path, indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the library: several pictures, tensors, and whether torch is loaded or not."""
    monkeypatch.setenv("COOC_HOME", str(home))
    query = [indexed / "gate_000001.jpg", indexed / "arch_000000.jpg"]
    with ImageSearch.open(indexed / ".cooc", device="cpu") as search:
        assert search.query_network is not None
        without = search.search(query)
        space = search.space
        search.search(torch.from_numpy(np.array(Image.open(query[0]))).permute(2, 0, 1))  # only torch knows tensors
        assert search.query_network is None
        found = search.search(query)
        assert [match.path for match in found.matches] == [match.path for match in without.matches]
        np.testing.assert_allclose(found.query_vector, without.query_vector, atol=2e-3)
    with ImageSearch.open(indexed / ".cooc", device="cpu", descriptor=search.descriptor) as search:
        assert search.space == space
