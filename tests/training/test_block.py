"""The end of a network in training: the same maps as the whole network's, and a change that travels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cooc.activations import build_backbone
from cooc.artefacts import TUNING
from cooc.datasets.photos import Photos, add_crops, add_unlabelled
from cooc.descriptor import Descriptor
from cooc.errors import InputError
from cooc.pictures.batches import Item
from cooc.recipes import DescriptorConfig, find_recipe
from cooc.training.artefacts import finish
from cooc.training.block import Block, layer_before
from cooc.training.cache import ActivationCache, Columns, build_cache
from cooc.training.network import CoOcNet, describe
from cooc.training.train import TrainConfig, as_it_is, train
from cooc.training.verification import verify
from cooc.tuning import read_tuning, tune, write_tuning
from tests.test_activations import random_weights
from tests.tiny import write_photos

CASES = [
    ("vgg16", "conv5_3", "block5"),
    ("vgg16", "pool5", "block4"),
    ("resnet50-caffe", "conv5", "block5"),
]
SIZES = [(97, 130), (161, 96), (128, 128)]


def changed(block: Block) -> Block:
    """As if it had learned something."""
    torch.manual_seed(1)
    for tensor in block.change().values():
        tensor += 0.02 * torch.randn_like(tensor)
    return block


def cached(pictures: list[Tensor], network: torch.nn.Module) -> ActivationCache:
    columns = Columns(torch.float32)
    for i, picture in enumerate(pictures):
        columns.add([str(i)], network(picture[None]))
    return columns.cache(str(i) for i in range(len(pictures)))


@pytest.mark.parametrize(("name", "layer", "part"), CASES)
@torch.no_grad()
def test_padded_maps_are_those_of_the_whole_network(tmp_path: Path, name: str, layer: str, part: str) -> None:
    """Before training, and with what was learned, written and read again."""
    weights = random_weights(name)
    before = layer_before(DescriptorConfig(backbone=name, layer=layer), part)
    pictures = [torch.rand(3, *size) for size in SIZES]
    cache = cached(pictures, build_backbone(name, before, weights=weights))
    block = Block(build_backbone(name, layer, weights=weights), before, rank=2)
    found = [block(*cache.batch(range(3)))]
    write_tuning(tmp_path / TUNING, changed(block).change(), {})
    tuning = read_tuning(tmp_path / TUNING)
    block.load_change(tuning)
    found.append(block(*cache.batch(range(3))))
    for (maps, sizes), change in zip(found, (None, tuning), strict=True):
        whole = build_backbone(name, layer, weights=weights, tuning=change)
        for i, picture in enumerate(pictures):
            expected = whole(picture[None])[0]
            h, w = expected.shape[1:]
            assert sizes[i].tolist() == [h, w]
            torch.testing.assert_close(maps[i, :, :h, :w], expected, rtol=1e-4, atol=1e-4 * float(expected.max()))
            assert not maps[i, :, h:].any()
            assert not maps[i, :, :, w:].any()
    assert not torch.allclose(found[0][0], found[1][0], rtol=1e-3)


def test_gradients_reach_the_change_and_nothing_else() -> None:
    weights, config = random_weights("vgg16"), DescriptorConfig(backbone="vgg16", layer="conv5_3", pooling="gem")
    block = Block(build_backbone("vgg16", "conv5_3", weights=weights), "pool4", rank=2)
    cache = cached([torch.rand(3, *size) for size in SIZES], build_backbone("vgg16", "pool4", weights=weights))
    net = CoOcNet(config, cache.channels, train=("block5",), block=block)
    vectors = describe(net, cache, range(3))
    torch.autograd.backward((vectors[0] * vectors[1]).sum())
    learning = {name for name, p in net.named_parameters() if p.requires_grad}
    assert {name for name, p in net.named_parameters() if p.grad is not None} == learning
    assert {name.rpartition(".")[2] for name in learning} == {"up", "down", "shift"}
    ups = [p.grad for name, p in net.named_parameters() if name.endswith("up")]
    assert len(ups) == 3
    assert all(grad is not None and grad.any() for grad in ups)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be trained from block5"):
        layer_before(DescriptorConfig(backbone="efficientnet-lite0"), "block5")
    with pytest.raises(InputError, match="name the first block alone"):
        TrainConfig(DescriptorConfig(), train=("block4", "block5"))
    with pytest.raises(InputError, match="layer of vgg16 behind block5"):
        layer_before(DescriptorConfig(backbone="vgg16", layer="pool4"), "block5")
    network = build_backbone("vgg16", "pool4", weights=None).network
    with pytest.raises(InputError, match=r"another network or layer: features\.24"):
        tune(network, {"features.24.up": torch.zeros(1)})
    (tmp_path / "bad.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match="no tuning that cooc wrote"):
        read_tuning(tmp_path / "bad.safetensors")
    with pytest.raises(InputError, match="no such tuning"):
        find_recipe(f"gem+tuning={tmp_path / 'none.safetensors'}").config.hash  # noqa: B018


def test_a_tuned_run_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained, written, and read by any command: the same vectors as the network that was trained."""
    weights = random_weights("vgg16")
    monkeypatch.setattr("cooc.descriptor.load_weights", lambda name, **_: weights)
    paths = write_photos(tmp_path / "photos", 8)
    photos = Photos("p", [Item(i, path) for i, path in enumerate(paths)], np.arange(8) % 4, None, np.zeros(8, bool))
    recipe = find_recipe("gem+backbone=vgg16+layer=conv5_3+size=96+dtype=float32+raw").config
    kept = recipe.replace(layer=layer_before(recipe, "block5"))
    cache, good, bad = build_cache(photos.items, kept, device=torch.device("cpu"), keep="float32", workers=0)
    assert (len(good), bad) == (8, [])
    photos = verify(photos, cache, as_it_is(recipe, cache, "block5"), least=0.0)
    small = {"block_rank": 2, "block_lr": 1e-1, "epochs": 1, "queries": 6, "negatives": 2}
    run = train(cache, photos, TrainConfig(recipe, train=("block5",), **small), folder=tmp_path / "run")  # type: ignore[arg-type]
    summary = finish(run, cache, photos, tmp_path / "run", recipe=recipe, whitening="none")
    assert summary["tuning"]["bytes"] == (tmp_path / "run" / TUNING).stat().st_size
    tuned = Descriptor.from_pretrained(tmp_path / "run", device="cpu", dtype="float32")
    plain = Descriptor(recipe, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(tuned.describe(paths), describe(run.net, cache, range(8)), rtol=0, atol=1e-5)
    assert not torch.allclose(tuned.describe(paths), plain.describe(paths), atol=1e-3)
    assert tuned.fingerprint != plain.fingerprint
    again = tuned.config.replace(layer="conv5_3")  # what was tuned is trained further: the two changes are one
    cache, _, _ = build_cache(
        photos.items, again.replace(layer="pool4"), device=torch.device("cpu"), keep="float32", workers=0
    )
    run = train(cache, photos, TrainConfig(again, train=("block5",), **small), folder=tmp_path / "again")  # type: ignore[arg-type]
    finish(run, cache, photos, tmp_path / "again", recipe=again, whitening="none")
    further = Descriptor.from_pretrained(tmp_path / "again", device="cpu", dtype="float32").describe(paths)
    with torch.no_grad():
        torch.testing.assert_close(further, describe(run.net, cache, range(8)), rtol=0, atol=1e-5)
    assert not torch.allclose(further, tuned.describe(paths), atol=1e-3)
    assert len({tuned.config.hash, recipe.hash, tuned.config.space_hash, recipe.space_hash}) == 4


def test_crops_are_asked_for_and_not_searched_in(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for path in paths:
        Image.new("RGB", (200, 120)).save(path)
    items, matches = [Item(i, path) for i, path in enumerate(paths)], {i: np.array([i ^ 1]) for i in range(6)}
    photos = Photos("p", items, np.arange(6) // 2, matches, np.arange(6) >= 4)
    whole = add_unlabelled(add_crops(photos, 0), [tmp_path / "other.jpg"], held_out=True)
    assert len(whole) == 13
    assert whole.crops.tolist() == [False] * 6 + [True] * 6 + [False]
    queries, database, truth = whole.validation()
    assert queries.tolist() == [4, 5, 10, 11]
    assert database.tolist() == [4, 5, 12]  # nothing that is trained on, and no crop
    assert [list(t.positives) for t in truth] == [[1], [0], [1], [0]]
    assert [list(t.itself) for t in truth] == [[0], [1], [], []]
    assert list(truth[2].junk) == [0]  # the photo that it is a part of
    alone = add_crops(add_unlabelled(photos, [paths[0]], held_out=False), 0)  # found by a part of it
    assert [match.tolist() for q, match in alone.matches.items() if alone.clusters[q] == 3] == [[6]]
    assert alone.crops[[q for q, match in alone.matches.items() if match.tolist() == [6]]].all()
    for row in range(6, 12):
        x0, y0, x1, y1 = whole.items[row].box or (0, 0, 0, 0)
        assert 0 <= x0 < x1 <= 200
        assert 0 <= y0 < y1 <= 120
        assert (x1 - x0) % 32 == (y1 - y0) % 32 == 0  # few shapes, which a GPU can batch
    (tmp_path / "bad.png").write_bytes(b"no picture")
    assert len(add_crops(Photos("p", [Item(0, tmp_path / "bad.png")], np.zeros(1, int), None, np.zeros(1, bool)))) == 1
