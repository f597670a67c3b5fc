from __future__ import annotations

import importlib.util
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

import cooc.cli.training  # noqa: F401 (adds its commands to app)
from cooc.cli import app
from cooc.cooccurrence import Cooccurrence, direct_filter
from cooc.datasets.photos import Photos, hold_out, load_photos
from cooc.descriptor import Descriptor
from cooc.errors import PARTIAL, DatasetError, InputError, UnknownNameError
from cooc.evaluation import average_precision, evaluate
from cooc.filter_files import about_filter
from cooc.pictures.batches import Item
from cooc.pooler import Pooler
from cooc.pooling import POOLINGS as table
from cooc.recipes import MULTI_SCALE, DescriptorConfig, find_recipe, find_whitening
from cooc.training import filters
from cooc.training.artefacts import finish, fit_whitening
from cooc.training.cache import ActivationCache, Columns, ColumnsOnDisk, build_cache, joined_on_cpu
from cooc.training.checkpoint import Average
from cooc.training.losses import contrastive
from cooc.training.network import CoOcNet, describe
from cooc.training.train import TrainConfig, as_it_is, gradients, mined, train, validate
from cooc.training.tuples import mine, tuples
from cooc.training.verification import all_pairs, shared_layout, verify
from cooc.whitening import adapt, fit_pca
from tests.shell import shell
from tests.tiny import descriptor, write_photos

C = 6
CPU = torch.device("cpu")
RAW = DescriptorConfig(pooling="bilinear", radius=1)
SKETCH = DescriptorConfig(pooling="compact-bilinear", radius=2, mask="top-down", options=(("dim", 64), ("seed", 1)))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are too small to share: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def maps(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Activations of pictures of different sizes, sparse as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (5, 3), (4, 4), (2, 6), (1, 1), (5, 3)]
    made = [torch.randn(C, *shapes[i % len(shapes)], generator=generator).clamp_min(0) for i in range(count)]
    return [A.to(dtype) for A in made]


def cache_of(pictures: list[Tensor]) -> ActivationCache:
    columns = Columns(dtype=torch.float32)
    for i, A in enumerate(pictures):
        columns.add([str(i)], A[None])
    return columns.cache(str(i) for i in range(len(pictures)))


def toy(count: int = 24, clusters: int = 6, noise: float = 0.15, seed: int = 0) -> tuple[ActivationCache, Photos]:
    """Photos of a few things: each cluster has its own maps, and every photo of it shows them with some noise."""
    generator = torch.Generator().manual_seed(seed)
    things = [torch.randn(C, 4, 5, generator=generator).clamp_min(0) for _ in range(clusters)]
    noisy = [things[i % clusters] + noise * torch.rand(C, 4, 5, generator=generator) for i in range(count)]
    labels = np.arange(count) % clusters
    positives = {i: np.setdiff1d(np.flatnonzero(labels == labels[i]), [i]) for i in range(count)}
    items = [Item(i, f"{i}.jpg") for i in range(count)]
    photos = Photos("toy", items, labels, positives, np.zeros(count, bool))
    return cache_of(noisy), hold_out(photos, 0.34, seed=1)


def delta_of(net: CoOcNet) -> Tensor:
    return net.get_parameter("pooler.cooccurrence.delta")


def config(**changes: object) -> TrainConfig:
    base = TrainConfig(RAW, lr=1e-2, epochs=3, batch=4, queries=12, negatives=2, dtype="float32", loss="triplet")
    return replace(base, **changes)  # type: ignore[arg-type]


# Activations, padded


@pytest.mark.parametrize("pooling", table)
@pytest.mark.parametrize("mask", ["none", "top-down", "centre"])
@pytest.mark.parametrize("form", ["learned", "factored"])
def test_padded_batch_equals_one_by_one(pooling: str, mask: str, form: str) -> None:
    pictures = maps(6)
    chosen = DescriptorConfig(pooling=pooling, radius=1, mask=mask)
    parts = ("filter",) if table[pooling].cooccurrence else ()
    net = CoOcNet(chosen, C, form=form, rank=3, train=parts)
    torch.manual_seed(0)
    for parameter in net.parameters():
        parameter.data = torch.randn_like(parameter)
    cache = cache_of(pictures)
    together = net(*cache.batch(range(6)))
    high, wide = cache.largest
    wider = net(*cache.batch(range(6), shape=(high + 3, wide + 3)))
    assert torch.allclose(wider, together, atol=1e-6)
    alone = torch.cat([net(A[None]) for A in pictures])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mask", ["none", "top-down", "centre"])
@pytest.mark.parametrize("pooling", ["compact-bilinear", "chco-sct"])
def test_equals_the_descriptor_with_the_same_filter(tmp_path: Path, pooling: str, mask: str) -> None:
    """What was trained on padded batches is what a recipe computes from one picture."""
    net = CoOcNet(DescriptorConfig(pooling=pooling, radius=1, mask=mask), C)
    torch.nn.init.normal_(delta_of(net), std=0.3)
    net.filter().save(tmp_path / "f.safetensors")
    learned = net.config.replace(cooccurrence="learned", filter=str(tmp_path / "f.safetensors"))
    pooler = Pooler(learned, C)
    pictures = maps(6)
    expected = torch.cat([pooler(A[None]) for A in pictures])
    with torch.no_grad():
        found = describe(net, cache_of(pictures), range(6), positions=30)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_batches_are_the_pictures_themselves() -> None:
    pictures = maps(6)
    A, sizes = cache_of(pictures).batch([3, 0, 4])
    for row, i in enumerate((3, 0, 4)):
        h, w = pictures[i].shape[1:]
        assert torch.equal(A[row, :, :h, :w], pictures[i])
        assert float(A[row].sum()) == pytest.approx(float(pictures[i].sum()), rel=1e-6)
        assert sizes[row].tolist() == [h, w]


def test_groups_keep_wide_and_high_apart_and_take_every_picture_once() -> None:
    cache = cache_of(maps(30))
    for positions in (1, 40, 10_000):
        groups = list(cache.groups(range(30), positions))
        assert sorted(torch.cat(groups).tolist()) == list(range(30))
        for group in groups:
            h, w = cache.places[group, 1], cache.places[group, 2]
            assert len(set((h > w).tolist())) == 1
            assert int(h.max() * w.max()) * len(group) <= positions or len(group) == 1


def test_activations_on_disk_can_be_resumed(tmp_path: Path) -> None:
    pictures = maps(6)
    about = {"backbone": "toy"}

    def sink(**changes: object) -> ColumnsOnDisk:
        return ColumnsOnDisk(tmp_path / "kept", about | changes, C, torch.float16)

    first = sink()
    for i in range(3):
        first.add([str(i)], pictures[i][None])
    with (tmp_path / "kept/index.jsonl").open("a") as index:
        index.write('{"3": [99')  # killed while writing
    with (tmp_path / "kept/activations.bin").open("ab") as file:
        file.write(b"half a batch")
    second = sink()
    assert [str(i) in second.places for i in range(6)] == [True] * 3 + [False] * 3
    second.add(["3", "5"], torch.stack([pictures[1], pictures[5]]))
    second.add(["4"], pictures[4][None])
    cache = sink().cache(["5", "0", "4"]).to("cpu")
    for row, i in enumerate((5, 0, 4)):
        assert torch.equal(cache.batch([row])[0][0], pictures[i].half().float())
    with pytest.raises(InputError, match="backbone = 'toy', not 'other'"):
        sink(backbone="other")


def test_a_run_that_is_stopped_keeps_photos_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were all held back until one of another shape came."""
    items = [Item(i, path) for i, path in enumerate(write_photos(tmp_path, 5)[::2])]
    monkeypatch.setattr("cooc.training.cache.TOGETHER", 1)
    seen = list[int]()

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if done == total:
            raise KeyboardInterrupt

    tiny = descriptor()
    made: dict[str, Any] = {"device": CPU, "folder": tmp_path / "kept", "workers": 0, "backbone": tiny.backbone}
    with pytest.raises(KeyboardInterrupt):
        build_cache(items, tiny.config, **made, progress=stop)
    assert seen == [1, 2, 3]
    seen.clear()
    cache, good, bad = build_cache(items, tiny.config, **made, progress=lambda done, _: seen.append(done))
    assert (len(cache), good, bad, seen) == (3, [0, 1, 2], [], [3])  # two were there


def test_activations_that_do_not_fit_the_dtype_are_refused() -> None:
    with pytest.raises(InputError, match="too large"):
        Columns(dtype=torch.float16).add(["a"], torch.full((1, C, 2, 2), 1e6))


# Gradients


def test_columns_are_joined_without_holding_them_twice() -> None:
    """As torch.cat does it, where a GPU has no room for both: seen with 29,000 photos, 42 GB."""
    parts = [torch.rand(n, 5).half() for n in (1, 7, 30, 2)]
    expected = torch.cat(parts)
    assert joined_on_cpu(parts).equal(expected)
    assert parts == []


@pytest.mark.parametrize(("form", "layer"), [("learned", False), ("learned", True), ("factored", False)])
def test_gradients_of_the_filter_against_finite_differences(form: str, layer: bool) -> None:
    """Through co-occurrences, pooling, normalisation, whitening and the paper's loss, in float64."""
    channels = 3
    torch.manual_seed(0)
    A = torch.nn.functional.pad(torch.rand(3, channels, 2, 3, dtype=torch.float64), (0, 1, 0, 1))
    sizes = torch.tensor([[2, 3]] * 3)
    whitening = fit_pca(torch.rand(40, channels**2), 4) if layer else None
    net = CoOcNet(RAW, channels, form=form, rank=2, whitening=whitening).double()
    names = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    values = tuple(0.1 * torch.randn_like(net.get_parameter(name)) for name in names)

    def loss(*parameters: Tensor) -> Tensor:
        vectors = torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (A, sizes))
        return contrastive(vectors[:1], vectors[None, 1:2], vectors[None, 2:], margin=1.9)

    assert float(loss(*values)) > 0
    assert torch.autograd.gradcheck(loss, tuple(value.requires_grad_() for value in values))


def test_gradients_do_not_depend_on_how_many_tuples_are_in_memory() -> None:
    cache, photos = toy()
    settings = config()
    net = CoOcNet(RAW, C)
    rows = mined(net, cache, photos, settings, np.random.default_rng(0))
    found = []
    for at_once in (1, 5, 100):
        net.zero_grad()
        loss = gradients(net, cache, rows, replace(settings, at_once=at_once))
        found.append((loss, delta_of(net).grad))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-7)


def _one_of_two(rank: int, file: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    cache, photos = toy()
    net = CoOcNet(RAW, C)
    rows = mined(net, cache, photos, config(), np.random.default_rng(0))
    loss = gradients(net, cache, rows[:7], config())  # 7: the parts are not of one size
    record = validate(net, cache, photos, config())
    torch.save((rows, loss, delta_of(net).grad, record["mAP"]), f"{out}{rank}")
    dist.destroy_process_group()


def test_two_processes_give_the_gradient_of_one(tmp_path: Path) -> None:
    start = torch.multiprocessing.get_context("spawn")
    two = [start.Process(target=_one_of_two, args=(r, str(tmp_path / "meet"), str(tmp_path / "out"))) for r in range(2)]
    for process in two:
        process.start()
    for process in two:
        process.join()
    cache, photos = toy()
    net = CoOcNet(RAW, C)
    rows = mined(net, cache, photos, config(), np.random.default_rng(0))
    loss = gradients(net, cache, rows[:7], config())
    for rank in range(2):
        theirs, their_loss, gradient, score = torch.load(tmp_path / f"out{rank}", weights_only=False)
        assert np.array_equal(theirs, rows)
        assert their_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(gradient, delta_of(net).grad, rtol=1e-4, atol=1e-7)
        assert score == validate(net, cache, photos, config())["mAP"]


# Tuples


def test_mining_takes_one_of_a_cluster_and_none_of_the_querys() -> None:
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(60, 5), dim=1)
    clusters = torch.arange(60) % 7
    queries = torch.arange(20)
    found = mine(vectors[queries], clusters[queries], vectors, clusters, 4)
    for q, places in zip(queries, found, strict=True):
        theirs = clusters[places].tolist()
        assert len(set(theirs)) == 4
        assert int(clusters[q]) not in theirs
        naive: list[int] = []  # down the ranking, skipping what may not be taken
        for i in (vectors @ vectors[q]).argsort(descending=True).tolist():
            if clusters[i] != clusters[q] and clusters[i] not in clusters[naive] and len(naive) < 4:
                naive.append(i)
        assert places.tolist() == naive
    every = mine(vectors[queries], clusters[queries], vectors, clusters, 10)  # of 6 other clusters
    assert [sorted(row) for row in clusters[every].tolist()] == [sorted({*range(7)} - {q % 7}) for q in range(20)]
    with pytest.raises(InputError, match="Add another label"):
        mine(vectors[queries], clusters[:20] * 0, vectors, clusters * 0, 4)


def test_an_epochs_tuples_hold_positives_and_hard_negatives_of_the_training_part() -> None:
    cache, photos = toy()
    settings = config(positives=2, queries=10)
    rows = mined(CoOcNet(RAW, C), cache, photos, settings, np.random.default_rng(3))
    assert rows.shape == (10, 1 + 2 + 2)
    assert not photos.held_out[rows].any()
    for q, p1, p2, *negatives in rows:
        assert {p1, p2} <= set(photos.matches[q])
        assert p1 != p2
        labels = photos.clusters[negatives]
        assert len(set(labels)) == 2
        assert photos.clusters[q] not in labels
    again = mined(CoOcNet(RAW, C), cache, photos, settings, np.random.default_rng(3))
    assert np.array_equal(rows, again)


def test_positives_repeat_where_there_are_too_few() -> None:
    photos = toy()[1]
    few = replace(photos, positives={0: np.array([6])})
    rows = tuples(few, np.array([0]), np.array([[1, 2]]), 3, np.random.default_rng(0))
    assert rows.tolist() == [[0, 6, 6, 6, 1, 2]]


def test_whole_clusters_are_held_out() -> None:
    photos = toy(clusters=6)[1]
    inside = set(photos.clusters[~photos.held_out])
    outside = set(photos.clusters[photos.held_out])
    assert len(outside) == 2
    assert not inside & outside
    queries, database, truth = photos.validation()
    assert len(queries) == 8
    assert database.tolist() == np.flatnonzero(photos.held_out).tolist()  # what is fitted to a photo sets it apart
    assert all(len(np.asarray(t.positives)) == 3 for t in truth)
    assert not hold_out(photos, 0).held_out.any()


def test_photos_that_were_not_verified_are_junk_in_validation() -> None:
    photos = toy(clusters=6)[1]
    q = int(photos.queries(held_out=True)[0])
    assert photos.positives is not None
    photos = replace(photos, positives={q: photos.positives[q][:1]})
    _, _, (truth,) = photos.validation()
    assert len(np.asarray(truth.positives)) == 1
    assert len(np.asarray(truth.junk)) == 2


def test_subset_renumbers() -> None:
    photos = toy()[1].subset([6, 0, 13, 1, 18])
    assert {q: p.tolist() for q, p in photos.matches.items()} == {0: [1, 4], 1: [0, 4], 4: [0, 1][::-1], 2: [3], 3: [2]}
    assert photos.clusters.tolist() == [0, 0, 1, 1, 0]


def test_all_pairs_are_those_of_a_label_but_what_is_held_out_stays_verified() -> None:
    clusters = np.array([0, 0, 0, 1, 2, 2, 2])
    held_out = clusters == 2
    matches = {0: np.array([1]), 1: np.array([0]), 4: np.array([5]), 5: np.array([4])}
    photos = Photos("set", [Item(i, f"{i}.jpg") for i in range(7)], clusters, matches, held_out)
    found = all_pairs(photos).matches
    assert {q: list(match) for q, match in found.items()} == {0: [1, 2], 1: [0, 2], 2: [0, 1], 4: [5], 5: [4]}


def test_labels_alone_do_not_say_what_matches(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/2.jpg", "b/3.jpg", "c/deep/4.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    photos = load_photos(tmp_path, held_out=0)
    assert photos.clusters.tolist() == [0, 0, 1, 2]
    with pytest.raises(InputError, match="not verified"):
        photos.queries()
    with pytest.raises(DatasetError, match="1 folders"):
        load_photos(tmp_path, exclude=["b", "c"])


def test_ground_truth_set(tmp_path: Path) -> None:
    (tmp_path / "jpg").mkdir()
    names = ["q0.jpg", "q1.jpg", "a.jpg", "b.jpg", "c.jpg", "d.jpg"]
    for name in names:
        (tmp_path / "jpg" / name).touch()
    truth = {
        "name": "own",
        "database": ["a.jpg", "b.jpg", "c.jpg", "d.jpg"],
        "queries": [
            {"image": "q0.jpg", "bbox": [0, 0, 9, 9], "positives": ["a.jpg"], "junk": ["b.jpg"]},
            {"image": "q1.jpg", "bbox": None, "positives": ["c.jpg"], "junk": []},
        ],
    }
    (tmp_path / "ground_truth.json").write_text(json.dumps(truth))
    photos = load_photos(tmp_path, held_out=0)
    assert [Path(str(item.picture)).name for item in photos.items] == [
        "a.jpg",
        "b.jpg",
        "c.jpg",
        "d.jpg",
        "q0.jpg",
        "q1.jpg",
    ]
    assert photos.items[4].box == (0, 0, 9, 9)
    a, b, c, d, q0, q1 = photos.clusters.tolist()
    assert a == b == q0  # junk is no negative
    assert c == q1
    assert len({a, c, d}) == 3
    assert {q: p.tolist() for q, p in photos.matches.items()} == {4: [0], 0: [4], 5: [2], 2: [5]}


def test_retrieval_sfm_as_published(tmp_path: Path) -> None:
    def part(names: list[str], clusters: list[int]) -> dict[str, object]:
        for name in names:
            file = tmp_path / "ims" / name[-2:] / name[-4:-2] / name[-6:-4] / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        return {"cids": names, "cluster": np.array(clusters), "qidxs": [0, 2], "pidxs": [1, 3]}

    content = {"train": part(["00aabbcc", "11aabbcd", "22aabbce", "33aabbcf"], [1, 1, 2, 2])}
    content["val"] = part(["44ddeeff", "55ddeef0", "66ddeef1", "77ddeef2"], [3, 3, 4, 4])
    file = tmp_path / "retrieval-SfM-120k.pkl"
    file.write_bytes(pickle.dumps(content, protocol=2))
    photos = load_photos(tmp_path)
    assert photos.clusters.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert photos.held_out.tolist() == [False] * 4 + [True] * 4
    assert {q: p.tolist() for q, p in photos.matches.items()} == {0: [1], 2: [3], 4: [5], 6: [7]}
    assert str(photos.items[1].picture).endswith("ims/cd/bb/aa/11aabbcd")
    Path(str(photos.items[1].picture)).unlink()
    with pytest.raises(DatasetError, match="1 of the 8 photos"):
        load_photos(tmp_path)
    content["val"]["pidxs"] = [1, 9]
    file.write_bytes(pickle.dumps(content))
    with pytest.raises(DatasetError, match="beyond its 4 photos"):
        load_photos(tmp_path)
    file.write_bytes(pickle.dumps({"train": Path("x")}))
    with pytest.raises(DatasetError, match="asks for"):
        load_photos(tmp_path)


# The loop


@pytest.mark.parametrize("form", ["learned", "factored"])
def test_overfits_a_tiny_set_to_loss_zero(form: str) -> None:
    cache, photos = toy(noise=0.3)
    photos = hold_out(photos, 0)
    rate = {"learned": 0.02, "factored": 0.05}[form]
    settings = config(form=form, rank=4, lr=rate, epochs=60, patience=60, queries=24, options={"margin": 0.2})
    run = train(cache, photos, settings)
    losses = [epoch["loss"] for epoch in run.history[1:]]
    assert losses[0] > 0.01
    assert losses[-1] == 0


def test_the_papers_loss_goes_to_zero_for_equal_positives() -> None:
    cache, photos = toy(noise=0)
    run = train(cache, hold_out(photos, 0), config(loss="contrastive", lr=0.03, epochs=40, patience=40, queries=24))
    losses = [epoch["loss"] for epoch in run.history[1:]]
    assert losses[0] > 1e-3
    assert losses[-1] < 1e-7 * losses[0]


@pytest.mark.parametrize(("form", "average"), [("learned", 0.0), ("factored", 0.9)])
def test_resumed_equals_uninterrupted(tmp_path: Path, form: str, average: float) -> None:
    cache, photos = toy()
    settings = config(form=form, rank=3, epochs=5, patience=5, average=average)
    whole = train(cache, photos, settings, folder=tmp_path / "whole")
    train(cache, photos, replace(settings, epochs=2), folder=tmp_path / "stopped")
    resumed = train(cache, photos, settings, folder=tmp_path / "stopped", resume=True)
    for name, value in whole.net.state_dict().items():
        assert torch.equal(value, resumed.net.state_dict()[name]), name
    assert whole.best == resumed.best
    plain = [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in whole.history]
    assert plain == [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in resumed.history]
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "stopped")]
    for a, b in zip(*(state["optimiser"]["state"].values() for state in states), strict=True):
        assert torch.equal(a["exp_avg"], b["exp_avg"])
    lines = (tmp_path / "stopped/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == list(range(6))
    assert not list((tmp_path / "stopped").glob(".*"))


def test_what_is_kept_is_the_mean_over_steps() -> None:
    """After each of three steps, as a loop has it; and the network goes on from where it was, not from the mean."""
    cache, photos = toy()
    net = CoOcNet(RAW, cache.channels)
    mean, delta, expected = Average(net, 0.75), delta_of(net), 0.0
    for step in (1.0, 2.0, 4.0):
        delta.data += step
        mean.update()
        expected = 0.75 * expected + 0.25 * float(delta.detach().mean())
    with mean.used():
        assert float(delta.detach().mean()) == pytest.approx(expected)
    assert float(delta.detach().mean()) == 7
    photos = hold_out(photos, 0)  # without a judge the last epoch is kept
    settings = config(form="learned", epochs=1, options={"margin": 0.5})
    runs = [train(cache, photos, replace(settings, average=average)) for average in (0.0, 0.5)]
    assert runs[0].history[1]["loss"] == runs[1].history[1]["loss"]  # the steps are the same,
    assert not torch.equal(*(delta_of(run.net) for run in runs))  # what is kept is not
    with pytest.raises(InputError, match="less than 1 of itself"):
        config(average=1.0)


@pytest.mark.parametrize(("form", "names"), [("learned", ["delta"]), ("factored", ["left", "right"])])
def test_a_checkpoint_from_before_is_resumed(tmp_path: Path, form: str, names: list[str]) -> None:
    """CoOcNet's own parts were its Pooler's later on, under longer names."""
    cache, photos = toy()
    settings = config(descriptor=SKETCH, epochs=1, form=form)
    train(cache, photos, settings, folder=tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for part in ("net", "best_net"):
        before = {k.removeprefix("pooler.").removeprefix("cooccurrence."): v for k, v in state[part].items()}
        assert sorted(before) == sorted([*names, "pool.bins", "pool.signs"])
        state[part] = before
    torch.save(state, tmp_path / "checkpoint.pt")
    assert len(train(cache, photos, replace(settings, epochs=2), folder=tmp_path, resume=True).history) == 3


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    cache, photos = toy()
    with pytest.raises(InputError, match="no checkpoint"):
        train(cache, photos, config(), folder=tmp_path, resume=True)
    train(cache, photos, config(epochs=1), folder=tmp_path)
    with pytest.raises(InputError, match=r"lr = 0.01, not 0.5"):
        train(cache, photos, config(lr=0.5), folder=tmp_path, resume=True)
    (tmp_path / "checkpoint.pt").write_bytes(b"PK no")
    with pytest.raises(InputError, match="no checkpoint of cooc"):
        train(cache, photos, config(), folder=tmp_path, resume=True)


def test_the_best_epoch_is_kept_and_it_stops_early() -> None:
    cache, photos = toy(noise=1.5)
    run = train(cache, photos, config(lr=0.5, epochs=30, patience=2, queries=8))  # far too fast: it gets worse
    scores = [epoch["mAP"] for epoch in run.history]
    assert len(scores) < 31
    assert run.best == int(np.argmax(scores))
    assert len(scores) - 1 - run.best == 2
    assert validate(run.net, cache, photos, run.config)["mAP"] == scores[run.best]


def test_it_learns_what_is_to_be_learned(tmp_path: Path) -> None:
    """Half of the channels are noise. A filter can leave them out, and unseen things are found better then."""
    generator = torch.Generator().manual_seed(0)
    things = [torch.randn(3, 4, 5, generator=generator).clamp_min(0) for _ in range(20)]
    noise = [1.5 * torch.randn(3, 4, 5, generator=generator).clamp_min(0) for _ in range(120)]
    cache = cache_of([torch.cat([things[i % 20], noise[i]]) for i in range(120)])
    labels = np.arange(120) % 20
    positives = {i: np.setdiff1d(np.flatnonzero(labels == labels[i]), [i]) for i in range(120)}
    items = [Item(i, f"{i}.jpg") for i in range(120)]
    photos = hold_out(Photos("half noise", items, labels, positives, np.zeros(120, bool)), 0.4)
    run = train(cache, photos, config(lr=0.02, epochs=6, patience=6, queries=72, batch=12, options={"margin": 0.3}))
    assert run.history[run.best]["mAP"] > run.history[0]["mAP"] + 5
    judged = finish(run, cache, photos, tmp_path, recipe=RAW, whitening="none")["judged"]
    with torch.no_grad():
        vectors = torch.cat([Pooler(RAW, C)(cache.batch([i])[0]) for i in range(120)])
    queries = np.flatnonzero(photos.held_out)
    near = [queries[np.argsort(-(vectors[queries] @ vectors[q]).numpy(), kind="stable")] for q in queries]
    ranks = [row[row != q] for q, row in zip(queries, near, strict=True)]
    scores = [average_precision(np.flatnonzero(labels[r] == labels[q]), 5) for q, r in zip(queries, ranks, strict=True)]
    assert judged["before"] == pytest.approx(100 * np.mean(scores), abs=1e-3)
    assert judged["after"] > judged["before"] + 5
    assert judged["better"]
    kept = (tmp_path / "descriptor.json").read_bytes(), (tmp_path / "filter.safetensors").read_bytes()

    # the same again from there on: nothing is gained, and what was written stays
    learned = find_recipe(str(tmp_path)).config
    again = finish(run, cache, photos, tmp_path, recipe=learned, whitening="none")["judged"]
    assert (again["gain"], again["better"]) == ([0, 0], False)
    assert kept == ((tmp_path / "descriptor.json").read_bytes(), (tmp_path / "filter.safetensors").read_bytes())
    assert json.loads((tmp_path / "run.json").read_text())["judged"] == again


def test_curves_for_tensorboard_or_a_word_how_to_get_it(tmp_path: Path) -> None:
    cache, photos = toy()
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(InputError, match="pip install tensorboard"):
            train(cache, photos, config(epochs=1), folder=tmp_path, tensorboard=True)
    else:
        train(cache, photos, config(epochs=1), folder=tmp_path, tensorboard=True)
        assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize(("pooling", "name"), [("gem", "p"), ("chco-sct", "b")])
def test_exponents_can_be_trained(pooling: str, name: str) -> None:
    cache, photos = toy()
    descriptor = DescriptorConfig(pooling=pooling, radius=1, options=((name, 2.5),))
    run = train(cache, photos, config(descriptor=descriptor, train=("exponent",), lr=1e-5, epochs=1))
    assert run.history[0]["mAP"] >= 0
    assert float(run.net.exponent.detach()) > 0
    usual = config(descriptor=descriptor, train=("exponent",), lr=None, epochs=1, options={"margin": 1.0})
    after = float(train(cache, hold_out(photos, 0), usual).net.exponent.detach())
    assert 0 < abs(after - 2.5) < 0.25  # three steps; with the rate of a filter it was thrown about by 10
    parts = ("filter", "exponent") if pooling != "gem" else ("exponent",)
    net = CoOcNet(descriptor, C, train=parts)
    rows = mined(net, cache, photos, config(), np.random.default_rng(0))
    gradients(net, cache, rows, config(options={"margin": 1.0}))
    assert net.exponent.grad is not None
    assert float(net.exponent.grad.abs()) > 0


def test_a_whitening_layer_can_be_trained_and_is_the_whitening_then() -> None:
    cache, photos = toy()
    run = train(cache, photos, config(layer=5, train=("filter", "whitening"), epochs=2, patience=2, lr=1e-3))
    assert run.net.layer is not None
    whitening = fit_whitening(run, cache, photos, "pca", 0, {"space": "toy"})
    assert (whitening.dim, whitening.meta["kind"]) == (5, "trained")
    with torch.no_grad():
        raw = describe(run.net, cache, range(4), positions=99, raw=True)
        torch.testing.assert_close(whitening(raw), describe(run.net, cache, range(4), positions=99))


def test_learning_starts_from_the_whitening_of_the_recipe() -> None:
    """Epoch 0 is the recipe as it is; what goes with the filter at the end is its whitening, adapted to the pairs."""
    cache, photos = toy(48, 12)
    with torch.no_grad():
        vectors = torch.cat([Pooler(RAW, C)(cache.batch([i])[0]) for i in range(48)])
    own = fit_pca(vectors[:30], 5)
    run = train(cache, photos, config(epochs=1), whitening=own)
    queries, database, truth = photos.validation()
    whitened = own(vectors)
    ranks = [(-whitened[database] @ whitened[q]).argsort(stable=True).numpy() for q in queries]
    assert run.history[0] == {"epoch": 0, "mAP": pytest.approx(100 * evaluate(ranks, truth, "holidays").map, abs=1e-3)}
    assert run.net.layer is not None
    assert torch.equal(run.net.layer.projection, own.projection)
    adapted = fit_whitening(run, cache, photos, "adapted", 0, {"space": "toy"})
    rows = np.flatnonzero(~photos.held_out)
    pairs = [(i, k) for i, k in itertools.combinations(range(len(rows)), 2) if (rows[i] - rows[k]) % 12 == 0]
    with torch.no_grad():
        learned = describe(run.net, cache, range(48), raw=True)
    expected = adapt(own, learned[rows], [i for i, _ in pairs], [k for _, k in pairs])
    torch.testing.assert_close(adapted(learned), expected(learned))
    assert adapted.meta["space"] == "toy"


def test_whitening_of_what_was_learned() -> None:
    cache, photos = toy(48, 12)
    run = train(cache, photos, config(epochs=1, descriptor=SKETCH))
    vectors = describe(run.net, cache, range(48), positions=999).detach()
    pca = fit_whitening(run, cache, photos, "pca", 10, {"space": "s"})
    seen = vectors[~photos.held_out]  # what is held out is to judge it
    torch.testing.assert_close(pca(vectors).detach(), fit_pca(seen, 10)(vectors))
    learned = fit_whitening(run, cache, photos, "learned", 10, {"space": "s"})
    assert learned.meta["kind"] == "learned"
    assert learned.meta["pairs"] == str(len(seen) * 3)
    with pytest.raises(UnknownNameError):
        fit_whitening(run, cache, photos, "pcaa", 10, {})


@pytest.mark.parametrize(("pooling", "parts"), [("chco-sct", ("filter", "exponent")), ("gem", ("exponent",))])
def test_an_artefact_is_what_was_learned(tmp_path: Path, pooling: str, parts: tuple[str, ...]) -> None:
    """Filter, exponent and whitening: from the folder alone come the vectors that the network gives."""
    cache, photos = toy(48, 12)
    photos = hold_out(photos, 0)  # nothing that could say that it does not help
    descriptor = DescriptorConfig(pooling=pooling, radius=1, mask="top-down")
    run = train(cache, photos, config(descriptor=descriptor, train=parts, epochs=1, rank=3, form="factored"))
    finish(run, cache, photos, tmp_path, recipe=descriptor.replace(size=800, scales=MULTI_SCALE), dim=4)
    found = find_recipe(str(tmp_path))
    assert (found.config.size, found.config.scales, found.source) == (800, MULTI_SCALE, "trained on toy")
    pooler, whitening = Pooler(found.config, C), find_whitening(found.config)
    with torch.no_grad():
        expected = describe(run.net, cache, range(48))
        vectors = torch.cat([pooler(cache.batch([i])[0]) for i in range(48)])
    torch.testing.assert_close(vectors, expected, rtol=0, atol=2e-6)
    assert (whitening.dim, found.config.dim) == (4, 4)
    torch.testing.assert_close(whitening(vectors), fit_pca(expected, 4)(vectors), rtol=0, atol=1e-5)


def test_bad_settings() -> None:
    cache, photos = toy()
    with pytest.raises(UnknownNameError, match="triplet"):
        config(loss="tripled")
    with pytest.raises(InputError, match="batch must be at least 1"):
        config(batch=0)
    with pytest.raises(InputError, match="learning rate"):
        config(lr=-1.0)
    with pytest.raises(InputError, match="does not look at co-occurrences"):
        CoOcNet(DescriptorConfig(pooling="gem"), C)
    with pytest.raises(InputError, match="no exponent"):
        CoOcNet(RAW, C, train=("exponent",))
    with pytest.raises(InputError, match="no whitening layer"):
        CoOcNet(RAW, C, train=("whitening",))
    with pytest.raises(UnknownNameError):
        CoOcNet(RAW, C, form="factorised")
    with pytest.raises(InputError, match="activations of 24"):
        train(cache, photos.subset([0, 1]), config())
    with pytest.raises(InputError, match="has a match"):
        train(cache, replace(photos, positives={}), config())


# Filters


def learned_layer(channels: int = 8, rank: int = 3) -> Cooccurrence:
    torch.manual_seed(0)
    change = 0.1 * torch.einsum("kr,rwyx->kwyx", torch.randn(channels, rank), torch.randn(rank, channels, 3, 3))
    return Cooccurrence("learned", filter=direct_filter(channels, 1) + change)


def test_compression(tmp_path: Path) -> None:
    layer = learned_layer()
    errors = [filters.error(filters.compress(layer, rank), layer) for rank in (1, 2, 3, 8)]
    assert errors[0] > errors[1] > 0.01
    assert errors[2] < 1e-5
    assert errors[3] < 1e-5
    singular = torch.linalg.svdvals(filters.delta(layer).flatten(1))
    assert errors[0] == pytest.approx(float(singular[1:].norm() / singular.norm()), rel=1e-4)  # nothing is nearer
    small = filters.compress(layer, 3)
    for storage, most in (("float32", 1e-5), ("float16", 2e-3)):
        small.save(tmp_path / "f.safetensors", storage=storage, about={"data": "toy"})
        again = Cooccurrence.load(tmp_path / "f.safetensors")
        assert (again.form, again.radius) == ("factored", 1)
        assert filters.error(again, layer) < most
        assert about_filter(tmp_path / "f.safetensors") == {"data": "toy"}
    assert [file.name for file in tmp_path.iterdir()] == ["f.safetensors"]
    with pytest.raises(UnknownNameError):
        small.save(tmp_path / "g.safetensors", storage="float8")


@pytest.mark.parametrize("scale", [1.0, 1 / 9, 1e-3])
def test_filters_of_others_are_brought_to_our_scale(tmp_path: Path, scale: float) -> None:
    layer = learned_layer()
    np.save(tmp_path / "authors.npy", (layer.full_filter() * scale).numpy())
    found, factor = filters.import_filter(tmp_path / "authors.npy")
    assert factor == pytest.approx(1 / scale, rel=0.2)
    full = found.full_filter()
    assert float(full.median()) == pytest.approx(float(layer.full_filter().median()), rel=0.2)
    pooled = [Pooler(RAW, 8) for _ in range(2)]
    for pooler, one in zip(pooled, (layer, found), strict=True):
        pooler.cooccurrence = one
    A = torch.randn(2, 8, 4, 5).clamp_min(0)
    torch.testing.assert_close(pooled[0](A), pooled[1](A), rtol=0, atol=1e-6)


def test_what_is_no_filter_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", -np.ones((4, 4, 3, 3), np.float32))
    with pytest.raises(InputError, match="median"):
        filters.import_filter(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.ones((4, 5, 3, 3), np.float32))
    with pytest.raises(InputError):
        filters.import_filter(tmp_path / "b.npy")


def test_strongest_pairs() -> None:
    full = direct_filter(5, 1)
    full[2, 4, 0, 0] += 3
    full[1, 1, 2, 2] -= 4
    assert filters.strongest(Cooccurrence("learned", filter=full), 2) == [(1, 1, 4.0), (2, 4, 3.0)]


# Verified pairs


def view(scene: Tensor, y: int, x: int, h: int = 9, w: int = 11) -> Tensor:
    return scene[:, y : y + h, x : x + w]


def test_shifted_and_scaled_views_share_their_layout() -> None:
    torch.manual_seed(0)
    scene, other = (torch.randn(2, 64, 20, 24) - 1).clamp_min(0)
    photo = view(scene, 4, 5)
    twice = torch.nn.functional.interpolate(photo[None], scale_factor=2, mode="nearest")[0]
    mixed = photo.flatten(1)[:, torch.randperm(9 * 11)].view_as(photo)  # the same things, in no order
    shifted, unrelated, zeros = view(scene, 7, 9), view(other, 4, 5), torch.zeros_like(photo)
    scores = shared_layout(photo, torch.stack([photo, shifted, unrelated, mixed, zeros]))
    assert float(scores[0]) == pytest.approx(9 * 11, rel=1e-5)
    assert float(scores[1]) == pytest.approx(6 * 7, rel=0.15)  # what both show
    assert float(scores[2:4].max()) < 0.5 * float(scores[1])
    assert float(scores[4]) == 0
    assert float(shared_layout(photo, twice[None])[0]) > 0.5 * 9 * 11
    padded = torch.nn.functional.pad(torch.stack([photo, shifted]), (0, 6, 0, 3))
    torch.testing.assert_close(shared_layout(photo, padded), scores[:2])


def test_pairs_of_one_label_are_verified() -> None:
    """Two labels; under each two different scenes, two views of each: only views of one scene match."""
    torch.manual_seed(1)
    scenes = (torch.randn(4, 256, 20, 24) - 1.5).clamp_min(0)
    cache = cache_of([view(scene, *at) for scene in scenes for at in ((4, 5), (5, 7))])
    clusters = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    items = [Item(i, f"{i}.jpg") for i in range(8)]
    photos = Photos("scenes", items, clusters, None, np.zeros(8, bool))
    verified = verify(photos, cache, as_it_is(RAW, cache))
    assert {q: p.tolist() for q, p in verified.matches.items()} == {q: [q ^ 1] for q in range(8)}
    assert verify(verified, cache, as_it_is(RAW, cache)) is verified


# Commands, on real pictures with the real network


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three labels of four photos each, 96 pixels wide, and a file that is none; a ground truth over the photos."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for label in ("castle", "tower", "bridge"):
        (root / "labels" / label).mkdir(parents=True)
        scene = Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8)).resize((160, 160), Image.Resampling.BICUBIC)
        for i, (x, y) in enumerate(((0, 0), (10, 20), (30, 8), (40, 40))):
            scene.crop((x, y, x + 96, y + (96, 64)[i % 2])).save(root / "labels" / label / f"{label}{i}.png")
    (root / "labels/tower/broken.jpg").write_bytes(b"no picture")
    names = sorted(path.name for path in (root / "labels").glob("*/*.png"))
    queries = [{"image": f"{n}0.png", "positives": [f"{n}{i}.png" for i in (1, 2, 3)]} for n in ("castle", "tower")]
    (root / "truth").mkdir()
    truth = {"name": "tiny", "database": [n for n in names if not n.endswith("0.png")], "queries": queries}
    (root / "truth/ground_truth.json").write_text(json.dumps(truth))
    (root / "truth/jpg").symlink_to(root / "labels")
    return root


def command(*arguments: object, code: int = 0) -> str:
    result = shell(app)(*arguments)
    assert result.code == code, result
    return result.out


TINY = ("--form", "factored", "--rank", 4, "--size", 96, "--epochs", 1, "--queries", 4, "--batch", 2, "--negatives", 1)
HERE = ("--held-out", 0, "--dim", 4, "--device", "cpu", "--dtype", "float32", "--workers", 0)


@pytest.fixture(scope="module")
def trained(pictures: Path, real_weights: Callable[[str], dict[str, Tensor]]) -> Path:
    real_weights("vgg16-caffe")
    run = pictures / "run"
    data = ("--data", pictures / "labels", "-o", run, "--cache", pictures / "kept", "--storage", "float16")
    found = json.loads(command("train", *data, *TINY, *HERE, "--json", code=PARTIAL))
    assert found["data"]["photos"] == 12  # the broken one is reported and left out
    assert found["filter"]["form"] == "factored"
    assert 0 < found["filter"]["error"] < 1e-2  # something was learned, and rounded to float16
    assert found["pairs"] >= 6
    assert found["peak_bytes"] > 0
    assert {"command", "commit", "versions", "machine"} <= set(found)
    return run


def test_what_a_run_leaves_is_a_recipe(pictures: Path, trained: Path) -> None:
    files = {file.name for file in trained.iterdir()}
    own = {"descriptor.json", "filter.safetensors", "whitening.safetensors"}
    assert files == own | {"run.json", "log.jsonl", "checkpoint.pt"}
    assert (trained / "filter.safetensors").stat().st_size < 4 * 512 * 82 * 2 + 20_000
    assert [json.loads(line)["epoch"] for line in (trained / "log.jsonl").read_text().splitlines()] == [0, 1]
    describe = Descriptor.from_pretrained(trained, device="cpu", dtype="float32")
    assert (describe.config.size, describe.config.scales) == (1024, (1.0,))  # of searching, not of training
    paths = [pictures / "labels/castle/castle0.png", pictures / "labels/tower/tower0.png"]
    vectors = describe(paths)
    assert vectors.shape == (2, 4)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    (trained / "descriptor.json").rename(pictures / "descriptor.json")
    try:  # as runs were left before there were artefacts
        old = Descriptor.from_pretrained(trained, device="cpu", dtype="float32")
        assert old.config == describe.config
        torch.testing.assert_close(old(paths), vectors)
    finally:
        (pictures / "descriptor.json").rename(trained / "descriptor.json")
    assert about_filter(trained / "filter.safetensors")["config"]["form"] == "factored"


def test_resume_goes_on_where_it_was(pictures: Path, trained: Path) -> None:
    """Again with one epoch more; activations are read from the folder, where the first run put them."""
    more = ("--epochs", 2, "--resume", "--storage", "float16")
    data = ("--data", pictures / "labels", "-o", trained, "--cache", pictures / "kept")
    text = command("train", *data, *TINY, *HERE, *more, code=PARTIAL)
    assert f"Use it: cooc index FOLDER -r {trained}" in text
    assert [json.loads(line)["epoch"] for line in (trained / "log.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_learned_whitening_from_pairs_in_the_same_command(pictures: Path, tmp_path: Path) -> None:
    data = ("--data", pictures / "labels", "-o", tmp_path, "-r", "paper-linear", "--cache", pictures / "kept")
    found = json.loads(
        command("train", *data, *TINY, *HERE, "--whitening", "learned", "--held-out", 0.4, "--json", code=PARTIAL)
    )
    assert 0 <= found["history"][found["best"]]["mAP"] <= 100
    assert found["whitening"]["kind"] == "learned"
    assert int(found["whitening"]["pairs"]) == found["pairs"]


def test_photos_held_out_without_a_match_judge_nothing(pictures: Path, trained: Path, tmp_path: Path) -> None:
    """Before anything is learned, which would be kept unjudged otherwise."""
    for label in ("castle", "tower"):
        (tmp_path / "labels" / label).mkdir(parents=True)
        (tmp_path / "labels" / label / "0.png").symlink_to(pictures / "labels" / label / f"{label}0.png")
        (tmp_path / "labels" / label / "1.png").write_bytes(b"no picture")
    result = shell(app)("train", "--data", tmp_path / "labels", "-o", tmp_path / "run", *TINY, *HERE, "--held-out", 0.5)
    assert result.code == 2
    assert "nothing could judge" in result.err
    assert not list((tmp_path / "run").iterdir())


def test_filter_show_draws(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    filters.compress(learned_layer(), 2).save(file, about={"data": "toy"})
    found = json.loads(command("filter", "show", file, "--json", "-o", tmp_path / "f.png"))
    assert (found["channels"], found["side"], found["rank"], found["about"]) == (8, 3, 2, {"data": "toy"})
    assert len(found["strongest"]) == 8
    with Image.open(tmp_path / "f.png") as drawing:
        assert min(drawing.size) > 200
    assert "change" in command("filter", "show", file)


def test_filter_compress_tells_error_size_and_map(pictures: Path, tmp_path: Path) -> None:
    layer = Cooccurrence("factored", channels=512, rank=4)
    torch.nn.init.normal_(layer.left)
    layer.save(tmp_path / "f.safetensors")
    on = ("--on", pictures / "truth", "-r", "paper-linear+size=96", "--device", "cpu")
    files = (tmp_path / "f.safetensors", "-o", tmp_path / "small.safetensors")
    rows = json.loads(command("filter", "compress", *files, "--rank", 2, *on, "--json"))
    assert rows[0]["error"] == 0
    assert rows[1]["rank"] == 2
    assert 0 < rows[1]["error"] < 1
    assert rows[1]["MB"] < 0.3 * rows[0]["MB"]  # half of the rank, half of the bytes
    assert all(0 < row["plain"] <= 100 for row in rows)


def test_filter_import_of_the_authors_layout(tmp_path: Path) -> None:
    layer = learned_layer()
    np.save(tmp_path / "authors.npy", layer.full_filter().numpy() / 9)
    files = (tmp_path / "authors.npy", "-o", tmp_path / "ours.safetensors")
    rows = json.loads(command("filter", "import", *files, "--json"))
    assert rows[0]["factor"] == 9
    again = Cooccurrence.load(tmp_path / "ours.safetensors")
    torch.testing.assert_close(again.full_filter(), layer.full_filter(), rtol=0, atol=1e-6)
    text = command("filter", "import", tmp_path / "authors.npy", "-o", tmp_path / "s.safetensors", "--rank", 3)
    assert "factored" in text
    assert filters.error(Cooccurrence.load(tmp_path / "s.safetensors"), layer) < 1e-3
