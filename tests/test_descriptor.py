"""Pictures to vectors: the same one alone, in company, and in every run; what a config is; what is refused."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import skimage.data
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from cooc.activations import Activations, build_backbone
from cooc.cooccurrence import Cooccurrence, cooccurrence
from cooc.descriptor import Descriptor, rescale
from cooc.errors import BoxError, ImageError, InputError, MachineError, UnknownNameError, WhiteningError
from cooc.pooling import POOLINGS, chco_sct, gem, l2_normalise, mask
from cooc.recipes import MULTI_SCALE, DescriptorConfig
from cooc.whitening import Whitening, fit_pca
from cooc.whitening import save as save_whitening
from tests.test_activations import random_weights

Picture = NDArray[np.uint8]
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
SMALL = {"backbone": "efficientnet-lite0", "size": 128, "dtype": "float32"}


@functools.cache
def backbone(name: str = "efficientnet-lite0") -> Activations:
    """A real network with random weights, shared by all tests."""
    return build_backbone(name, weights=random_weights(name))


def config(**changes: object) -> DescriptorConfig:
    return DescriptorConfig(**{**SMALL, **changes})  # type: ignore[arg-type]


def descriptor(**changes: object) -> Descriptor:
    return Descriptor(config(**changes), device="cpu", backbone=backbone())


def photo(width: int = 128, height: int = 96, seed: int = 0) -> Picture:
    """A piece of a photograph, at its own resolution."""
    photos = (skimage.data.astronaut(), skimage.data.coffee(), skimage.data.chelsea())
    image: Picture = photos[seed % 3]
    x, y = 20 + 7 * seed, 30 + 5 * seed
    return np.ascontiguousarray(image[y : y + height, x : x + width])


@functools.cache
def whitening(dim: int = 16) -> Whitening:
    """Fitted on what the default config of these tests gives."""
    vectors = F.normalize(torch.rand(64, 1280, generator=torch.Generator().manual_seed(0)), dim=1)
    return fit_pca(vectors, dim, meta={"space_hash": config().space_hash, "space": config().space})


# The chain


def test_unit_float32_vectors() -> None:
    describe = descriptor()
    vectors = describe([photo(), photo(seed=1), photo(80, 64)])
    assert vectors.shape == (3, 1280)
    assert vectors.dtype == torch.float32
    assert vectors.device.type == "cpu"
    close(vectors.norm(dim=1), torch.ones(3))
    assert not vectors.requires_grad
    assert describe.dim == describe.raw_dim == 1280
    assert float(vectors[0] @ vectors[1]) < 0.99


def test_it_is_the_stages_joined() -> None:
    """Mask, co-occurrence, pooling, L2, whitening, L2: each as its own module gives it."""
    images = torch.from_numpy(photo()).permute(2, 0, 1)[None]
    describe = Descriptor(config(mask="top-down", radius=2), device="cpu", backbone=backbone(), whitening=whitening())
    A = mask(backbone()(images), "top-down")
    raw = F.normalize(chco_sct(A, cooccurrence(A, 2)), dim=1)
    close(describe.raw(describe.load(photo())[None]), raw)
    close(describe([photo()]), whitening()(raw))
    assert describe.dim == 16
    close(describe([photo()]).norm(dim=1), torch.ones(1))


@pytest.mark.parametrize(
    ("pooling", "scales"), [*((name, (1.0,)) for name in POOLINGS), ("chco-sct", MULTI_SCALE), ("gem", MULTI_SCALE)]
)
def test_alone_in_a_mixed_batch_and_again(pooling: str, scales: tuple[float, ...]) -> None:
    options = {"dim": 256} if pooling == "compact-bilinear" else {}
    describe = descriptor(pooling=pooling, options=options, scales=scales)
    pictures = [photo(96, 64), photo(64, 96), photo(96, 64, seed=1), photo(64, 64), photo(96, 64, seed=2)]
    together = describe(pictures)
    for i, picture in enumerate(pictures):
        close(describe([picture])[0], together[i])
    close(describe(pictures[::-1]).flip(0), together)
    assert describe(pictures).equal(together)


def test_a_second_descriptor_gives_the_same() -> None:
    close(descriptor()([photo()]), descriptor()([photo()]))
    assert descriptor().fingerprint == descriptor().fingerprint


def test_every_kind_of_picture(tmp_path: Path) -> None:
    describe = descriptor()
    path, buffer = tmp_path / "a.png", io.BytesIO()
    Image.fromarray(photo()).save(path)
    Image.fromarray(photo()).save(buffer, "png")
    as_bytes = torch.from_numpy(photo()).permute(2, 0, 1)
    wanted = describe([photo()])
    for one in (
        path,
        str(path),
        path.read_bytes(),
        buffer,
        Image.fromarray(photo()),
        photo(),
        as_bytes,
        as_bytes / 255,
    ):
        close(describe(one), wanted)
        close(describe([one]), wanted)
    close(describe(as_bytes[None]), wanted)


def test_bytes_and_floats_in_one_call() -> None:
    """Stacked into one tensor, the bytes would become floats far above 1."""
    describe = descriptor()
    as_bytes = torch.from_numpy(photo()).permute(2, 0, 1)
    both = describe([as_bytes, as_bytes / 255])
    close(both[0], both[1])
    close(both[:1], describe(as_bytes))


def test_nothing_to_describe() -> None:
    assert descriptor()([]).shape == (0, 1280)
    whitened = Descriptor(config(), device="cpu", backbone=backbone(), whitening=whitening())
    assert whitened([]).shape == (0, 16)


def test_a_black_picture_is_no_error() -> None:
    """Zero activations have no direction. EfficientNet's biases fire even on black; a VGG without biases does not."""
    weights = {k: v if v.dim() == 4 else v * 0 for k, v in backbone("vgg16-caffe").network.state_dict().items()}
    dark = build_backbone("vgg16", weights=weights)
    dark.mean.zero_()
    for pooling in POOLINGS:
        vector = Descriptor(config(backbone="vgg16", pooling=pooling), device="cpu", backbone=dark, whitening=None)(
            torch.zeros(3, 64, 64)
        )
        assert vector.eq(0).all()


def test_nan_is_refused() -> None:
    describe = descriptor(pooling="ucrow", cooccurrence="none")
    with pytest.raises(MachineError, match="NaN or infinity"):
        describe(torch.full((3, 64, 64), torch.nan))


def test_large_pictures_are_reduced_and_small_ones_kept() -> None:
    describe = descriptor(size=64)
    assert describe.load(photo(128, 96)).shape == (3, 48, 64)
    assert describe.load(photo(60, 40)).shape == (3, 40, 60)
    assert describe.load(photo(60, 40)).dtype == torch.uint8


# Boxes


def test_a_box_is_the_crop() -> None:
    describe, picture = descriptor(), photo()
    crop = np.ascontiguousarray(picture[16:80, 32:128])
    close(describe([picture], boxes=[(32, 16, 128, 80)]), describe([crop]))
    close(describe([picture, picture], boxes=[None, (32, 16, 128, 80)]), describe([picture, crop]))


def test_a_crop_is_scaled_by_the_pictures_factor() -> None:
    """Things must be as large in a query as in the index: a crop is never scaled by a factor of its own."""
    describe, picture = descriptor(size=64), photo(128, 96)
    half = np.asarray(Image.fromarray(picture[:64, 64:]).resize((32, 32), Image.Resampling.LANCZOS))
    assert describe.load(picture, (64, 0, 128, 64)).shape == (3, 32, 32)
    close(describe([picture], boxes=[(64, 0, 128, 64)]), describe([half]), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("name", ["efficientnet-lite0", "vgg16"])
def test_a_tiny_box_gives_one_position(name: str) -> None:
    describe = Descriptor(config(backbone=name), device="cpu", backbone=backbone(name))
    pixels = describe.load(photo(), (5, 5, 8, 7))
    assert backbone(name)(pixels[None]).shape[2:] == (1, 1)
    vector = describe([photo()], boxes=[(5, 5, 8, 7)])
    close(vector.norm(dim=1), torch.ones(1))


def test_boxes_that_do_not_fit() -> None:
    describe = descriptor()
    with pytest.raises(BoxError, match="outside"):
        describe([photo()], boxes=[(500, 500, 600, 600)])
    with pytest.raises(InputError, match="1 images, but 2 boxes"):
        describe([photo()], boxes=[None, None])
    with pytest.raises(InputError, match="crop it before"):
        describe(torch.zeros(1, 3, 64, 64), boxes=[(0, 0, 10, 10)])
    with pytest.raises(ImageError):
        describe([b"text"])


# Multi-scale


def test_multi_scale_is_the_mean_of_scales() -> None:
    describe = descriptor(scales=(1.0, 0.5))
    images = torch.from_numpy(photo()).permute(2, 0, 1)[None]
    half = F.interpolate(images.float() / 255, size=(48, 64), mode="bilinear", antialias=True)
    one, two = descriptor().raw(images), descriptor().raw(half)
    close(describe.raw(images), F.normalize((one + two) / 2, dim=1))
    assert float(one[0] @ two[0]) < 0.9999


@pytest.mark.parametrize("p", [3.0, 5])
def test_multi_scale_gem_takes_its_own_power_mean(p: float) -> None:
    options = {"p": p}
    describe = descriptor(pooling="gem", cooccurrence="none", scales=(1.0, 0.5), options=options)
    images = torch.from_numpy(photo()).permute(2, 0, 1)[None]
    one, two = (l2_normalise(gem(backbone()(rescale(images, s, 32)), p=p)).double() for s in (1.0, 0.5))
    wanted = F.normalize(((one**p + two**p) / 2) ** (1 / p), dim=1)
    close(describe.raw(images).double(), wanted)
    assert not torch.allclose(wanted, F.normalize(one + two, dim=1), atol=1e-4)


def test_rescale_keeps_one_position() -> None:
    images = torch.zeros(1, 3, 40, 200)
    assert rescale(images, 1.0, 32) is images
    assert rescale(images, 0.5, 32).shape == (1, 3, 32, 100)
    assert rescale(images[:, :, :20], 0.5, 32).shape == (1, 3, 20, 100)  # never upsampled
    as_bytes = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    close(rescale(as_bytes, 0.5, 32), rescale(as_bytes.float() / 255, 0.5, 32))


# Configs


def test_config_survives_json() -> None:
    original = config(
        pooling="gem", cooccurrence="none", options={"p": 4.5}, scales=MULTI_SCALE, mask="centre", sigma=1
    )
    again = DescriptorConfig.from_dict(json.loads(json.dumps(original.as_dict())))
    assert again == original
    assert (again.hash, again.pooling_hash, again.space_hash) == (
        original.hash,
        original.pooling_hash,
        original.space_hash,
    )
    assert hash(again) == hash(original)


def test_hashes_are_the_same_for_ever() -> None:
    """An index stores them. If this fails, every index and every whitening file there is has become foreign."""
    default = DescriptorConfig()
    assert (default.hash, default.pooling_hash, default.space_hash) == (
        "4b1f05755a5775e9",
        "00cf34b8432c254c",
        "3d150f1946a1cbba",
    )
    assert default.space == "vgg16-caffe-chco-sct-act"


def test_equal_configs_have_one_hash() -> None:
    assert config(sigma=1) == config(sigma=1.0)
    assert config(sigma=1).hash == config(sigma=1.0).hash
    one, two = (config(pooling="gem", options={"p": p}) for p in (3, 3.0))
    assert one == two
    assert one.hash == two.hash
    assert config(options={"a": 2, "b": 3}).hash == config(options=(("b", 3), ("a", 2))).hash
    assert config(layer="").hash == config(layer="head").hash


def test_what_a_hash_depends_on() -> None:
    base = config()
    assert base.replace(dtype="bfloat16").hash == base.hash
    for change in ({"size": 64}, {"scales": (1.0, 0.5)}):
        assert base.replace(**change).hash != base.hash
        assert base.replace(**change).pooling_hash != base.pooling_hash
        assert base.replace(**change).space_hash == base.space_hash
    for change in ({"whitening": "landmarks"}, {"dim": 64}):
        assert base.replace(**change).hash != base.hash
        assert base.replace(**change).pooling_hash == base.pooling_hash
    for change in (
        {"mask": "centre"},
        {"radius": 2},
        {"pooling": "crow"},
        {"cooccurrence": "shih"},
        {"options": {"b": 3}},
    ):
        assert base.replace(**change).space_hash != base.space_hash


def test_spaces_for_people() -> None:
    assert config(pooling="crow").space == "efficientnet-lite0-crow"
    assert config(pooling="bilinear", cooccurrence="none").space == "efficientnet-lite0-bilinear-aa"
    assert config(cooccurrence="shih", mask="top-down").space == "efficientnet-lite0-chco-sct-shih-top-down"


def test_a_layer_is_named_unless_it_is_the_default() -> None:
    """Two layers of one network are two spaces, and their whitenings two files."""
    for backbone, layer, named in (
        ("vgg16-caffe", "pool5", "vgg16-caffe-gem"),
        ("vgg16-caffe", "conv5_3", "vgg16-caffe-conv5_3-gem"),
        ("resnet50-caffe", "", "resnet50-caffe-gem"),
        ("resnet50-caffe", "conv4", "resnet50-caffe-conv4-gem"),
        ("timm:resnet18", "", "timm:resnet18-gem"),
        ("timm:resnet18", "layer3", "timm:resnet18-layer3-gem"),
    ):
        assert config(backbone=backbone, layer=layer, pooling="gem").space == named


@pytest.mark.parametrize(
    ("changes", "nearest"),
    [
        ({"backbone": "vgg-16"}, "vgg16"),
        ({"layer": "heads"}, "head"),
        ({"mask": "topdown"}, "top-down"),
        ({"pooling": "chco-sctt"}, "chco-sct"),
        ({"cooccurrence": "direkt"}, "direct"),
        ({"options": {"epps": 1}}, "eps"),
    ],
)
def test_unknown_names_offer_the_nearest(changes: dict[str, object], nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"Did you mean '{nearest}'"):
        config(**changes)


def test_unknown_settings() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'radius'"):
        config().replace(radios=3)
    with pytest.raises(UnknownNameError, match="Did you mean 'radius'"):
        DescriptorConfig.from_dict({"radios": 3})


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 0},
        {"dim": -1},
        {"scales": ()},
        {"scales": (2.0,)},
        {"scales": (0.0,)},
        {"sigma": 0},
        {"radius": -1},
        {"cooccurrence": "learned"},
    ],
    ids=str,
)
def test_impossible_settings(changes: dict[str, object]) -> None:
    with pytest.raises(InputError):
        config(**changes)


def test_dtype_is_recorded() -> None:
    assert descriptor().config.dtype == "float32"
    assert descriptor(dtype="auto").config.dtype == "float32"  # of the network that was given
    half = build_backbone("efficientnet-lite0", weights=random_weights("efficientnet-lite0"), dtype=torch.bfloat16)
    low = Descriptor(config(), device="cpu", backbone=half)
    assert low.config.dtype == "bfloat16"
    assert low.config.hash == descriptor().config.hash
    assert low.fingerprint == descriptor().fingerprint  # a machine with bfloat16 may search what another indexed
    vectors = low([photo()])
    assert vectors.dtype == torch.float32
    assert float(vectors[0] @ descriptor()([photo()])[0]) > 0.99


def test_fingerprint_knows_weights_and_whitening() -> None:
    base = descriptor().fingerprint
    weights = {key: value.clone() for key, value in random_weights("efficientnet-lite0").items()}
    weights["_conv_head.weight"][0, 0] += 1
    other = Descriptor(config(), device="cpu", backbone=build_backbone("efficientnet-lite0", weights=weights))
    whitened = Descriptor(config(), device="cpu", backbone=backbone(), whitening=whitening())
    assert len({base, other.fingerprint, whitened.fingerprint}) == 3


# Filters and whitening from files


def test_learned_filter(tmp_path: Path) -> None:
    filter = torch.rand(512, 512, 1, 1, generator=torch.Generator().manual_seed(0))
    Cooccurrence("learned", filter=filter).save(tmp_path / "f.safetensors")
    vgg = backbone("vgg16")
    settings = config(backbone="vgg16", cooccurrence="learned", filter=str(tmp_path / "f.safetensors"))
    describe = Descriptor(settings, device="cpu", backbone=vgg)
    A = vgg(torch.from_numpy(photo()).permute(2, 0, 1)[None])
    close(describe([photo()]), l2_normalise(chco_sct(A, Cooccurrence("learned", filter=filter)(A).detach())))
    assert describe.fingerprint != Descriptor(config(backbone="vgg16"), device="cpu", backbone=vgg).fingerprint
    with pytest.raises(InputError, match="No filter 'nowhere' ships"):
        Descriptor(settings.replace(filter="nowhere"), device="cpu", backbone=vgg)


def test_whitening_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_whitening(whitening(), path)
    describe = Descriptor(config(whitening=str(path), dim=8), device="cpu", backbone=backbone())
    assert describe.dim == 8
    close(describe([photo()]), whitening().truncate(8)(descriptor()([photo()])))
    everything = Descriptor(config(whitening=str(path)), device="cpu", backbone=backbone())
    assert everything.dim == 16
    with pytest.raises(WhiteningError, match="1 to 16 dimensions"):
        Descriptor(config(whitening=str(path), dim=17), device="cpu", backbone=backbone())


def test_whitening_serves_any_size_of_its_space(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_whitening(whitening(), path)
    for changes in ({"size": 64}, {"scales": MULTI_SCALE}):
        assert Descriptor(config(whitening=str(path), **changes), device="cpu", backbone=backbone()).dim == 16
    for changes in ({"pooling": "crow"}, {"mask": "top-down"}, {"radius": 3}):
        with pytest.raises(WhiteningError, match=r"fitted for other vectors .*Fit one"):
            Descriptor(config(whitening=str(path), **changes), device="cpu", backbone=backbone())


def test_whitening_that_does_not_ship() -> None:
    with pytest.raises(WhiteningError, match=r"No whitening 'nowhere' for efficientnet-lite0-crow ships.*raw"):
        Descriptor(config(pooling="crow", whitening="nowhere"), device="cpu", backbone=backbone())


# The real weights


def test_real_weights_find_the_same_thing(real_weights: Callable[[str], dict[str, Tensor]]) -> None:
    """From a recipe by name, as a user does: another crop of a photograph is nearer than any other photograph."""
    real_weights("vgg16-caffe")
    describe = Descriptor.from_recipe("paper-linear-topdown+raw", device="cpu", size=160)
    assert describe.config.backbone == "vgg16-caffe"
    pictures = [skimage.data.astronaut(), skimage.data.coffee(), skimage.data.chelsea()]
    crops = [picture[10:-30, 20:-10] for picture in pictures]
    scores = describe(crops) @ describe(pictures).T
    assert scores.argmax(1).tolist() == [0, 1, 2]
    assert scores.diag().min() > scores.fill_diagonal_(-1).max() + 0.1
