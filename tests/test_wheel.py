"""The wheel: what is in it, and that it alone, with what it says it needs, indexes and searches.

The environment is empty but for links to the packages that the wheel names, and those that they name in turn: to
install them once more would take minutes and show nothing else.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.labelled import write_labelled_folder

ROOT = Path(__file__).parent.parent
USERS = (
    "cloud",
    "figures",
    "milvus",
    "parquet",
    "postgres",
    "ray",
    "serve",
    "timm",
    "watch",
    "text",
)  # extras, as users install them
IF_THERE = {"triton"}  # torch brings it where it has a GPU to use it on; everything works without it


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("cooc-*.whl")
    return file


@pytest.fixture(scope="module")
def about(wheel: Path) -> metadata.PathDistribution:
    (folder,) = (name for name in zipfile.Path(wheel).iterdir() if name.name.endswith(".dist-info"))
    return metadata.PathDistribution(folder)


def needed(about: metadata.Distribution, extra: str = "") -> set[str]:
    """Names of all distributions that pip installs with it on this machine, by their own metadata."""
    found: set[str] = set()
    todo = [(about, extra)]
    while todo:
        one, wanted = todo.pop()
        for requirement in map(Requirement, one.requires or ()):
            name = canonicalize_name(requirement.name)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": wanted}):
                continue
            if name not in found:
                found.add(name)
                other = metadata.distribution(name)
                todo += [(other, ""), *((other, extra) for extra in requirement.extras)]
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, about: metadata.PathDistribution, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what it needs, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin/python"
    asked = subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], **captured())
    packages = Path(asked.stdout.strip())
    for name in needed(about):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-cache-dir"]
    subprocess.run([*pip, wheel], **captured())
    return python


def captured() -> dict[str, object]:
    """As a user's shell: nothing of this clone is found by chance."""
    hidden = ("PYTHONPATH", "COOC_INDEX")
    variables = {key: value for key, value in os.environ.items() if key not in hidden}
    return {"check": True, "capture_output": True, "text": True, "env": variables}


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cooc").rglob("*") if path.is_file()}
    assert inside == {name for name in ours if "__pycache__" not in name}
    assert {"cooc/py.typed", "cooc/web/index.html", "cooc/data/calibration.json"} <= inside
    assert not [name for name in inside if re.match(r"(tests|benchmarks|docs|examples|results)/", name)]


def test_it_indexes_and_searches(python: Path, tmp_path: Path) -> None:
    photos = write_labelled_folder(tmp_path / "things") / "jpg"
    options = {**captured(), "cwd": tmp_path}
    where = subprocess.run([python, "-c", "import cooc; print(cooc.__file__)"], **options)
    assert Path(where.stdout.strip()).is_relative_to(python.parents[1])
    cooc = python.parent / "cooc"
    done = subprocess.run([cooc, "index", photos, "--recipe", "light+size=96", "--device", "cpu"], **options)
    assert "9 described" in done.stdout
    shutil.copy(photos / "gate_000001.jpg", tmp_path / "query.jpg")
    words = ["search", tmp_path / "query.jpg", "--index", photos / ".cooc", "--device", "cpu"]
    found = json.loads(subprocess.run([cooc, *words, "--json"], **options).stdout)
    assert found["matches"][0]["path"] == "gate_000001.jpg"
    assert found["calibrated"]  # the whitening and the curve that ship with it were found
    page = tmp_path / "page.html"
    subprocess.run([cooc, *words, "--html", page, "--sheet", tmp_path / "sheet.jpg"], **options)
    assert page.stat().st_size > 10_000


def test_every_module_can_be_imported(python: Path) -> None:
    """What cannot lacks a package that an extra brings."""
    code = (
        "import importlib, json, pkgutil, cooc\n"
        "missing = {}\n"
        "for module in pkgutil.walk_packages(cooc.__path__, 'cooc.', onerror=lambda name: None):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        try: importlib.import_module(module.name)\n"
        "        except ModuleNotFoundError as error: missing[module.name] = error.name\n"
        "print(json.dumps(missing))"
    )
    missing = json.loads(subprocess.run([python, "-c", code], **captured()).stdout)
    assert {name.split(".")[0] for name in missing.values()} <= {"fastapi", "psycopg", "pymilvus", "triton"}, missing
    assert all(name.startswith(("cooc.api", "cooc.index.", "cooc.kernels.")) for name in missing), missing


def test_its_metadata_covers_its_imports(wheel: Path, about: metadata.PathDistribution) -> None:
    brought = needed(about).union(*(needed(about, extra) for extra in USERS))
    homes = metadata.packages_distributions()
    for name, package in imports(wheel):
        assert package in IF_THERE or {canonicalize_name(home) for home in homes[package]} & brought, (
            f"{name}: {package}"
        )


def imports(wheel: Path) -> Iterator[tuple[str, str]]:
    """(file, package of others that it imports), wherever in the file."""
    archive = zipfile.ZipFile(wheel)
    for name in archive.namelist():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(archive.read(name))):
                for module in _modules(node):
                    package = module.partition(".")[0]
                    if package != "cooc" and package not in sys.stdlib_module_names:
                        yield name, package


def _modules(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def test_its_metadata_is_that_of_the_project(about: metadata.PathDistribution) -> None:
    from cooc import __version__

    assert about.version == __version__
    assert about.metadata["Requires-Python"] == ">=3.11"
    assert [point.value for point in about.entry_points] == ["cooc.__main__:main"]
