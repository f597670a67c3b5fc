"""What the documentation says is run or looked up: it cannot drift."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

from benchmarks.__main__ import app as benchmarks_app
from cooc.cli import every

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
METHOD = (ROOT / "docs/method.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def look_up(name: str) -> Any:
    """`cooc.module.name`, at any depth."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def script(name: str) -> ModuleType:
    """docs/NAME.py, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cli_page_is_what_help_says() -> None:
    module = script("write_cli")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "docs/cli.md is old: run `make docs`"


def test_the_picture_of_the_rooms_is_that_of_the_contracts() -> None:
    """Drawn from pyproject.toml, and read back from CONTRIBUTING.md as a person does."""
    module = script("write_rooms")
    text = module.PAGE.read_text(encoding="utf-8")
    assert text == module.page(text), "the picture in CONTRIBUTING.md is old: run `make docs`"
    drawn = [[room.strip() for room in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (one["layers"] for one in settings["contracts"] if one["type"] == "layers")
    assert [" | ".join(f"cooc.{room}" for room in rooms) for rooms in drawn] == layers


def test_the_contracts_know_every_room_and_no_exception() -> None:
    module = script("write_rooms")
    rooms = {room for layer in module.rooms() for room in layer}
    code = {path.stem for path in (ROOT / "cooc").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms == code - {"__init__"}
    assert not [one["name"] for one in module.contracts() if "ignore_imports" in one]


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its Python, block after block, in a folder with the pictures that it names; the shapes in its comments are true.

    Gives back what the page leaves behind. docs/pytorch.md is run in tests/test_descriptor_module.py.
    """
    rng = np.random.default_rng(0)
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in set(re.findall(r'"(\w+\.jpg)"', text)):
        noise = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        noise.resize((128, 96), Image.Resampling.BICUBIC).save(folder / name)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    stated = 0
    for code in blocks("python", text):
        exec(compile(code, page, "exec"), names)
        for name, shape in re.findall(r"^(\w+) = .*# \(([\d, ]+)\)", code, re.MULTILINE):
            assert tuple(names[name].shape) == tuple(int(n) for n in shape.split(",")), name
            stated += 1
    assert stated >= 3
    return names


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page("README.md", tmp_path, monkeypatch)


PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {ROOT / "docs/cli.md"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    """Every `cooc ...` and `python -m benchmarks ...` line names a command, and options that it has."""
    apps = {"cooc ": every(), "python -m benchmarks ": benchmarks_app}
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks("sh", text) for line in block.splitlines()]
    lines += re.findall(r"^    ((?:cooc|python -m benchmarks) .*)", text, re.MULTILINE)
    found = [(start, line) for line in lines for start in apps if line.startswith(start)]
    if page.name == "README.md":
        assert len(found) >= 3
        assert max(map(len, lines)) <= 120  # a first screen, not a log
    for start, line in found:
        command: Any = typer.main.get_command(apps[start])
        words = shlex.split(line.removeprefix(start), comments=True)
        while words and hasattr(command, "commands"):
            if words[0] not in command.commands and command.name == "bench":
                words.insert(0, "dataset")  # cooc bench DATASET
            assert words[0] in command.commands, f"{page.name} names `{start}{words[0]}`"
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        used = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
        assert used <= options, f"{command.name}: {page.name} uses {used - options}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files that exist, and headings that they have."""
    for target, heading in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
            titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page.name}: {target}#{heading}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make (\w+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_method_page_quotes_the_code() -> None:
    """Each function that the page names exists, and each line that it quotes is in that function."""
    rows = re.findall(r"^\|.*\| (`cooc\.[^|]*) \|(.*)\|$", METHOD, re.MULTILINE)
    assert len(rows) >= 20
    for functions, line in rows:
        names = re.findall(r"`(cooc\.[\w.]+)`", functions)
        sources = [inspect.getsource(look_up(name)) for name in names]
        for quoted in re.findall(r"`([^`]+)`", line):
            assert quoted in sources[0], f"{names[0]} does not hold `{quoted}`"
    for name in re.findall(r"`(cooc\.[\w.]+)`", METHOD):
        look_up(name)


def test_method_page_covers_every_equation() -> None:
    for number in range(1, 12):
        assert re.search(rf"^\| Eq\. {number}\b", METHOD, re.MULTILINE), number
