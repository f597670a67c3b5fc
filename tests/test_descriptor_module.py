"""Descriptor as a PyTorch Module: named recipes with their true weights and whitening, as they ship."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import skimage.data
import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim

from cooc.activations import build_backbone
from cooc.descriptor import Descriptor
from cooc.errors import InputError
from cooc.recipes import find_recipe
from tests.test_descriptor import config, descriptor, photo
from tests.test_docs import run_page

SHIPPED = ("paper-linear-topdown", "paper-bilinear", "gem", "learned", "light")
close = functools.partial(torch.testing.assert_close, rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def shipped(real_weights: Callable[[str], dict[str, Tensor]]) -> Callable[[str], Descriptor]:
    @functools.cache
    def load(recipe: str) -> Descriptor:
        real_weights(find_recipe(recipe).config.weights)
        found = Descriptor.from_pretrained(recipe, device="cpu", dtype="float32")
        assert found.whitening is not None
        return found

    return load


@functools.cache
def images(height: int = 64, width: int = 96) -> Tensor:
    """(2, 3, H, W): parts of two photographs, as bytes."""
    both = [photograph[100 : 100 + height, 150 : 150 + width] for photograph in (skimage.data.astronaut(), PEOPLE)]
    return torch.from_numpy(np.stack(both)).permute(0, 3, 1, 2)


PEOPLE = skimage.data.coffee()


# Gradients


@pytest.mark.parametrize("recipe", SHIPPED)
def test_vectors_take_part_in_training(shipped: Callable[[str], Descriptor], recipe: str) -> None:
    """As the input of a layer that learns, and changed in place: inference tensors refuse both."""
    describe = shipped(recipe)
    for vectors in (describe(images()), describe([*images().permute(0, 2, 3, 1).numpy()]), describe(images()[0])):
        assert not vectors.is_inference()
        assert not vectors.requires_grad
        head = nn.Linear(512, 2)
        head(vectors).sum().backward()
        assert head.weight.grad is not None
        vectors += 1


@pytest.mark.parametrize("recipe", SHIPPED)
def test_forward_is_differentiable(shipped: Callable[[str], Descriptor], recipe: str) -> None:
    """From the whitened vector to the pixels: the slope along a direction, against finite differences in float64."""
    describe = copy.deepcopy(shipped(recipe)).double()
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(images().shape, generator=generator, dtype=torch.float64)  # equal pixels tie in a maximum
    pixels = ((images() + noise) / 256).requires_grad_()
    along = torch.randn(pixels.shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, 512, generator=generator, dtype=torch.float64)
    vectors = describe(pixels)
    assert vectors.dtype == torch.float64
    (gradient,) = torch.autograd.grad((vectors * weights).sum(), pixels)
    step = 2e-9  # larger ones cross the kinks of ReLUs and maxima
    with torch.no_grad():
        ends = [float((describe(pixels + sign * step * along) * weights).sum()) for sign in (1, -1)]
    assert float((gradient * along).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)
    assert (gradient.flatten(1).abs().sum(1) > 0).all()


def test_whitening_can_be_trained(shipped: Callable[[str], Descriptor]) -> None:
    describe = copy.deepcopy(shipped("light"))
    assert describe.whitening is not None
    describe.whitening.requires_grad_()
    describe.train()
    describe(images())[:, 0].sum().backward()
    assert float(describe.whitening.projection.grad.abs().sum()) > 0  # type: ignore[union-attr]
    assert [name for name, p in describe.named_parameters() if p.requires_grad] == ["whitening.projection"]


# Copies


@pytest.mark.parametrize("recipe", SHIPPED)
def test_copies_give_the_same_vectors(shipped: Callable[[str], Descriptor], recipe: str) -> None:
    describe = shipped(recipe)
    wanted = describe(images())
    stream = io.BytesIO()
    torch.save(describe.state_dict(), stream)
    stream.seek(0)
    fresh = copy.deepcopy(describe)
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    assert not torch.equal(fresh(images()), wanted)
    fresh.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    for same in (fresh, copy.deepcopy(describe), pickle.loads(pickle.dumps(describe)), describe._copy_on_cpu()):
        assert torch.equal(same(images()), wanted)
        assert same.config == describe.config
        assert same.fingerprint == describe.fingerprint


@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.bfloat16, 0.99), (torch.float16, 0.9999), (torch.float64, 1 - 1e-6)]
)
def test_other_dtypes(shipped: Callable[[str], Descriptor], recipe: str, dtype: torch.dtype, least: float) -> None:
    """The network computes in it; pooling and whitening, in float32 or better."""
    describe = copy.deepcopy(shipped(recipe))
    wanted = describe(images())
    describe = describe.to(dtype)
    assert {p.dtype for p in describe.parameters()} == {dtype}
    vectors = describe(images())
    assert vectors.dtype == torch.promote_types(dtype, torch.float32)
    assert float((vectors * wanted).sum(1).min()) > least
    assert describe([images()[0]]).dtype == torch.float32


@pytest.mark.parametrize("name", ["vgg16", "resnet50-caffe", "efficientnet-lite0", "efficientnet-lite2"])
def test_which_networks_are_depthwise_is_known_before_they_are_built(name: str) -> None:
    assert build_backbone(name, weights=None).grouped == config(backbone=name).depthwise


def test_layout_follows_the_device() -> None:
    """Meta tensors stand for a device: a Module that is moved there arranges its weights as one that is built there."""
    network = copy.deepcopy(descriptor().backbone)
    assert network.grouped
    kernels = [p for p in network.parameters() if p.dim() == 4 and p.shape[1] > 1]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)
    for moved in (network.half(), network.to("meta")):
        assert moved.layout == torch.channels_last
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in moved.parameters() if p.dim() == 4)


# Compilers


@pytest.mark.parametrize("recipe", SHIPPED)
def test_compiles_to_one_graph(shipped: Callable[[str], Descriptor], recipe: str) -> None:
    torch.compiler.reset()
    describe = shipped(recipe)
    compiled = torch.compile(describe, fullgraph=True, backend="aot_eager")
    close(compiled(images()), describe(images()))


def test_exports_for_any_batch_and_size(shipped: Callable[[str], Descriptor]) -> None:
    """EfficientNet's padding depends on whether a side is odd: both kinds at every level."""
    describe = shipped("light")
    free = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    program = torch.export.export(describe, (images(),), dynamic_shapes=(free,)).module()
    for height, width in ((64, 96), (65, 97), (127, 150), (33, 210)):
        close(program(images(height, width)), describe(images(height, width)))
    close(program(images()[:1]), describe(images()[:1]))


def assert_runs_elsewhere(path: Path, describe: Descriptor) -> None:
    """Bytes of pictures to vectors, in a runtime that knows nothing of torch, which rounds in another order.

    That moves a vector by 1e-7, and by 1e-4 where an activation now is on the other side of its map's mean.
    """
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (images(), images()[:1], images(65, 97), images(127, 150)):
        first, *again = [session.run(["vectors"], {"images": batch.numpy()})[0] for _ in range(3)]
        assert all(np.array_equal(first, other) for other in again)  # no two threads add to the same place
        assert float((torch.from_numpy(first) * describe(batch)).sum(1).min()) > 0.99999
    properties = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert properties["fingerprint"] == describe.fingerprint
    assert json.loads(properties["cooc"])["pooling"] == describe.config.pooling


@pytest.mark.parametrize("recipe", ["paper-linear-topdown", "paper-bilinear", "gem"])  # light: the page, below
def test_onnx_runs_elsewhere(shipped: Callable[[str], Descriptor], tmp_path: Path, recipe: str) -> None:
    describe = shipped(recipe)
    describe.export_onnx(tmp_path / "descriptor.onnx")
    assert list(tmp_path.iterdir()) == [tmp_path / "descriptor.onnx"]
    assert_runs_elsewhere(tmp_path / "descriptor.onnx", describe)


def test_the_page_runs_and_the_onnx_that_it_writes(
    real_weights: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it ships, with its whitening. Also here EfficientNet's padding must be right at sides of every kind."""
    real_weights("efficientnet-lite0")
    describe = run_page("docs/pytorch.md", tmp_path, monkeypatch)["describe"]
    assert describe.whitening is not None
    assert_runs_elsewhere(tmp_path / "light.onnx", describe._copy_on_cpu())


def test_onnx_of_regions_and_scales_is_for_one_size(
    real_weights: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    backbone = build_backbone("vgg16-caffe", "pool3", weights=real_weights("vgg16-caffe"))
    chain = config(backbone="vgg16-caffe", layer="pool3", cooccurrence="none", pooling="rmac", options={"levels": 2})
    with pytest.raises(InputError, match=r"size=\(height, width\)"):
        Descriptor(chain, device="cpu", backbone=backbone).export_onnx(tmp_path / "any.onnx")
    for scales in ((1.0,), (1.0, 0.5)):
        describe = Descriptor(chain.replace(scales=scales), device="cpu", backbone=backbone)
        describe.export_onnx(tmp_path / "one.onnx", size=(64, 96))
        session = onnxruntime.InferenceSession(tmp_path / "one.onnx", providers=["CPUExecutionProvider"])
        (vectors,) = session.run(["vectors"], {"images": images().numpy()})
        close(torch.from_numpy(vectors), describe(images()), atol=1e-5)


# Many pictures


def test_little_is_decoded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 paths: what is decoded and not yet described is bounded by the batch, not by their number."""
    Image.fromarray(photo(64, 48)).save(tmp_path / "a.png")
    monkeypatch.setattr("cooc.stream.batch_pixels", lambda device: 4 * 64 * 48)
    describe = descriptor()
    taken = done = most = 0

    def paths() -> Iterator[Path]:
        nonlocal taken, most
        for _ in range(300):
            taken += 1
            most = max(most, taken - done)
            yield tmp_path / "a.png"

    def begin(pixels: Tensor) -> Callable[[], np.ndarray]:  # type: ignore[type-arg]
        nonlocal done
        wait = Descriptor.begin(describe, pixels)
        done += len(pixels)
        return wait

    monkeypatch.setattr(describe, "begin", begin)
    vectors = describe(paths())
    assert vectors.shape == (300, 1280)
    assert (taken, done) == (300, 300)
    assert most <= 16
    close(vectors, vectors[:1].expand(300, -1))


def test_a_config_may_be_for_any_device() -> None:
    """Nothing is looked up by the kind of device: what torch does not have here is said, and what it has works."""
    for device in ("mps", "xpu", "hpu", "xla", "mtia", "vulkan", "privateuseone", "meta"):
        with pytest.raises(InputError, match="Usable: cpu"):
            Descriptor(config(), device=device)
