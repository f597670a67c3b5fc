"""timm's own small models with random numbers, against what timm computes with the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cooc import weights
from cooc.activations import build_backbone
from cooc.descriptor import load_backbone
from cooc.errors import InputError, UnknownNameError, WeightsError
from cooc.recipes import DescriptorConfig
from cooc.timm_models import import_timm, timm_model
from tests.test_activations import pictures

ANY_SIZE = {"test_vit": {"dynamic_img_size": True, "dynamic_img_pad": True}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COOC_OFFLINE", "1")
    return tmp_path


def whole_model(name: str) -> Any:
    torch.manual_seed(0)
    model = import_timm().create_model(name, **ANY_SIZE.get(name, {})).eval()
    for key, value in model.state_dict().items():  # fresh batch norms and biases would hide a tensor in another's place
        if value.is_floating_point():
            value += 0.1 * torch.rand(value.shape) if "running_var" in key else 0.1 * torch.randn(value.shape)
    return model


@pytest.mark.parametrize(
    ("name", "layer", "index"),
    [
        ("test_resnet", None, -1),
        ("test_resnet", "layer3", 3),
        ("test_resnet", "0", 0),
        ("test_convnext", "stages.2", 2),
        ("test_efficientnet", "-2", 3),
        ("test_mambaout", None, -1),  # keeps its maps channels-last
        ("test_vit", "blocks.4", 4),
    ],
)
@torch.inference_mode()
def test_a_map_is_the_whole_models(name: str, layer: str | None, index: int) -> None:
    model, images = whole_model(name), pictures(2, 100, 70)
    backbone = build_backbone(f"timm:{name}", layer, weights=model.state_dict())
    mean, std = (torch.tensor(model.pretrained_cfg[part]).reshape(1, 3, 1, 1) for part in ("mean", "std"))
    (wanted,) = model.forward_intermediates(
        (images / 255 - mean) / std, indices=[index], intermediates_only=True, output_fmt="NCHW"
    )
    out = backbone(images)
    torch.testing.assert_close(out, wanted.relu(), rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    assert out.any()
    stride = backbone.stride
    assert backbone(pictures(1, 2 * stride, 3 * stride)).shape == (1, backbone.channels, 2, 3)


def test_what_cannot_be_used_says_why() -> None:
    with pytest.raises(InputError, match=r"timm:resnt18 cannot be used: Unknown model"):
        timm_model("resnt18")
    with pytest.raises(InputError, match=r"features_only not implemented for ConvMixer"):
        timm_model("convmixer_768_32")
    for name in ("levit_128s", "swin_tiny_patch4_window7_224"):
        with pytest.raises(InputError, match=rf"timm:{name} takes only pictures of certain sizes \(.*Choose a conv"):
            timm_model(name)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'layer4'\? Choices: act1, layer1"):
        timm_model("test_resnet", "layer5")


def test_weights_must_be_there() -> None:
    state = whole_model("test_resnet").state_dict()
    with pytest.raises(InputError, match=r"load_weights\('timm:test_resnet'\)"):
        build_backbone("timm:test_resnet", weights=None)
    with pytest.raises(WeightsError, match=r"not for timm:test_convnext: \d+ tensors are missing"):
        build_backbone("timm:test_convnext", weights=state)
    del state["layer4.0.conv1.weight"]
    with pytest.raises(WeightsError, match=r"1 tensors are missing, first 'model\.layer4\.0\.conv1\.weight'"):
        build_backbone("timm:test_resnet", weights=state)
    assert build_backbone("timm:test_resnet", "layer3", weights=state).layer == "layer3"  # it needs no more


def test_a_checkpoint_of_the_users_is_kept_and_carried(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, state = "timm:test_resnet", whole_model("test_resnet").state_dict()
    torch.save(state, home / "mine.pth")
    with pytest.raises(WeightsError, match=r"holds none of .* with `--name timm:NAME`"):
        weights.import_weights(home / "mine.pth")
    assert weights.import_weights(home / "mine.pth", name) == name
    kept = weights.load_weights(name)
    assert kept.keys() == {k for k in state if not k.startswith("fc.") and not k.endswith("num_batches_tracked")}
    assert all(tensor.equal(state[key]) for key, tensor in kept.items())
    (status,) = (one for one in weights.weights_status() if one.name == name)
    assert (status.present, status.hash) == (True, weights.content_hash(kept))
    exported = weights.export_weights(name, home)
    monkeypatch.setenv("COOC_HOME", str(home / "elsewhere"))
    assert weights.import_weights(exported) == name
    backbone = load_backbone(DescriptorConfig(backbone=name, layer="layer3", dtype="float32"), torch.device("cpu"))
    assert (backbone.channels, backbone.stride, backbone.layer) == (192, 16, "layer3")
    exported.write_bytes(exported.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsError, match="content hash"):
        weights.import_weights(exported, name)


def test_weights_that_timm_cannot_bring(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COOC_OFFLINE")
    with pytest.raises(WeightsError, match=r"timm, nf_regnet_b2: .*No pretrained weights exist"):
        weights.load_weights("timm:nf_regnet_b2")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "hub")}
    command = [sys.executable, "-m", "cooc.cli", "weights", "fetch", "timm:test_resnet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == WeightsError.exit_code, done.stderr
    for part in ("timm, test_resnet", "cooc weights export timm:test_resnet FILE", "cooc weights import FILE"):
        assert part in done.stderr


def test_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # as where it is not installed
    with pytest.raises(InputError, match=r"pip install 'cooc\[timm\]'"):
        build_backbone("timm:resnet18", weights={})


def test_without_a_connection_it_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No address ends with .invalid; timm would try for a minute, and tell of each attempt."""
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://weights.invalid")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("COOC_HOME", str(tmp_path))
    monkeypatch.delenv("COOC_OFFLINE", raising=False)
    with pytest.raises(WeightsError, match=r"weights\.invalid cannot be reached, and timm's own cache") as said:
        weights.load_weights("timm:resnet18")
    assert "cooc weights export timm:resnet18" in str(said.value)
    assert not [line for line in caplog.messages if "Retrying" in line]
    assert constants.HF_HUB_OFFLINE is False
