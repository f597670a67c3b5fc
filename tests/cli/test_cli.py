"""The real commands on small real pictures, through `main`, so that exit codes and messages are those of the shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image

from cooc.cli import COMMANDS, app
from cooc.cli.bars import now_and_then
from cooc.cli.options import DEFAULT
from cooc.cooccurrence import Cooccurrence
from cooc.descriptor import Descriptor
from cooc.errors import counted
from cooc.recipes import RECIPES, find_recipe, find_whitening
from cooc.weights import WEIGHTS
from cooc.whitening import load
from tests.shell import Shell

RAW = "paper-linear+raw+size=96"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small smooth pictures in two sizes, and one in a folder below."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "below").mkdir()
    rng = np.random.default_rng(0)
    for i in range(12):
        rough = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        name = f"below/{i:02}.png" if i == 11 else f"{i:02}.jpg"
        rough.resize((96, 64) if i % 2 else (64, 96), Image.Resampling.BICUBIC).save(folder / name)
    return folder


# describe


def test_describe_writes_vectors_and_names(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    done = cooc("describe", photos, "-o", tmp_path / "v.npy", "-r", RAW, "--device", "cpu")
    assert done.code == 0
    vectors, about = np.load(tmp_path / "v.npy"), json.loads((tmp_path / "v.json").read_text())
    assert vectors.dtype == np.float32
    assert vectors.shape == (12, 512) == tuple(about["shape"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert about["paths"] == [str(p) for p in (photos / f"{i:02}.jpg" for i in range(11))] + [
        str(photos / "below/11.png")
    ]
    assert about["recipe"] == RAW
    assert about["config"]["size"] == 96
    assert about["bad"] == []
    direct = Descriptor.from_recipe(RAW, device="cpu")
    some = [0, 1, 11]
    expected = direct([about["paths"][i] for i in some])
    torch.testing.assert_close(torch.from_numpy(vectors[some]), expected, atol=1e-5, rtol=0)
    assert about["fingerprint"] == direct.fingerprint
    assert {p.name for p in tmp_path.iterdir()} == {"v.npy", "v.json"}


def test_describe_leaves_bad_files_out(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no picture")
    words = (photos / "00.jpg", tmp_path / "text.jpg", photos / "01.jpg", "-o", tmp_path / "v.npy", "-r", RAW)
    done = cooc("describe", *words, "--json")
    assert done.code == 3
    assert "text.jpg" in done.err
    about = json.loads(done.out)
    assert about["paths"] == [str(photos / "00.jpg"), str(photos / "01.jpg")]
    assert [one["path"] for one in about["bad"]] == [str(tmp_path / "text.jpg")]
    assert np.load(tmp_path / "v.npy").shape == (2, 512)


def test_describe_box_is_a_part(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    picture, target = photos / "01.jpg", tmp_path / "v.npy"
    assert cooc("describe", picture, "-o", target, "-r", RAW, "--box", "10,5,80,60").code == 0
    expected = Descriptor.from_recipe(RAW)([picture], [(10, 5, 80, 60)])
    torch.testing.assert_close(torch.from_numpy(np.load(target)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("missing.jpg", "-o", "v.npy"), "missing.jpg"),
        (("00.jpg", "-o", "v.txt"), ".npy"),
        (("00.jpg", "-o", "nowhere/v.npy"), "nowhere"),
        (("00.jpg", "-o", "v.npy", "-r", "paper-linaer"), "'paper-linear'"),
        (("00.jpg", "-o", "v.npy", "-r", "paper-linear+raw+siez=3"), "'size'"),
        (("00.jpg", "-o", "v.npy", "-r", RAW, "--box", "5,5,1"), "x0,y0,x1,y1"),
        (("00.jpg", "-o", "v.npy", "-r", RAW, "--box", "500,500,600,600"), "outside"),
        (("00.jpg", "01.jpg", "-o", "v.npy", "-r", RAW, "--box", "1,1,60,60"), "one picture"),
        (("00.jpg", "-o", "v.npy", "-r", RAW, "--device", "abacus"), "abacus"),
        (("empty", "-o", "v.npy"), "No pictures"),
        (("00.jpg",), "--output"),
    ],
)
def test_describe_refuses(
    cooc: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    (photos / "empty").mkdir(exist_ok=True)
    monkeypatch.chdir(photos)
    done = cooc("describe", *words)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err
    assert not list(photos.glob("v.*")) + list(photos.glob(".v*"))


def test_describe_needs_weights(cooc: Shell, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COOC_OFFLINE", "1")
    done = cooc("describe", photos / "00.jpg", "-o", tmp_path / "v.npy", "-r", RAW)
    assert done.code == 4
    assert "cooc weights import" in done.err


def test_a_failed_write_leaves_the_old_file(
    cooc: Shell, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v.npy").write_bytes(b"old")
    (tmp_path / "v.json").mkdir()  # the second of the two files cannot be written
    done = cooc("describe", photos / "00.jpg", "-o", tmp_path / "v.npy", "-r", RAW)
    assert done.code == 2
    assert "v.json" in done.err
    assert {p.name for p in tmp_path.iterdir()} == {"v.npy", "v.json"}


# heatmap


def test_heatmap_draws_direct_and_learned(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    assert cooc("heatmap", photos / "01.jpg", "-o", tmp_path / "one.png", "-r", "crow").code == 0
    Cooccurrence("factored", channels=512, rank=2).save(tmp_path / "filter.safetensors")
    words = ("-o", tmp_path / "two.jpg", "--learned", tmp_path / "filter.safetensors", "--size", 64)
    assert cooc("heatmap", photos / "01.jpg", *words).code == 0
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "two.jpg") as two:
        assert (one.format, two.format) == ("PNG", "JPEG")
        assert two.width > one.width  # three panels, not two
        assert len(one.getcolors(1 << 20) or []) > 100


def test_heatmap_refuses(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    picture = photos / "00.jpg"
    for words, says in [
        ((picture, "-o", tmp_path / "heat.docx"), ".png"),
        ((tmp_path / "no.jpg", "-o", tmp_path / "heat.png"), "no.jpg"),
        ((picture, "-o", tmp_path / "heat.png", "--learned", tmp_path / "no.npy"), "no.npy"),
    ]:
        done = cooc("heatmap", *words)
        assert (done.code, says in done.err) == (2, True), done.err
    assert not list(tmp_path.iterdir())


# whiten


@pytest.mark.parametrize("changes", ["", "+layer=conv5_3+mask=top-down"])
def test_whiten_then_use_it(cooc: Shell, photos: Path, tmp_path: Path, changes: str) -> None:
    target = tmp_path / "own.safetensors"
    asked = ("-r", f"paper-linear{changes}+dim=16+raw") if changes else ()
    done = cooc("whiten", photos, "-o", target, "--dim", 8, "--size", 96, "--storage", "float16", *asked)
    assert done.code == 0
    recipe = f"{'paper-linear' if changes else DEFAULT}{changes}+whitening={target}+dim=8"
    assert recipe in done.out
    config = find_recipe(recipe).config
    assert find_whitening(config).dim == 8  # it is accepted as one of this recipe's space
    meta = load(target).meta
    assert (meta["fitted_on"], meta["samples"], meta["space"]) == (photos.name, "12", config.space)
    assert cooc("describe", photos / "00.jpg", "-o", tmp_path / "v.npy", "-r", recipe + "+size=96").code == 0
    assert np.load(tmp_path / "v.npy").shape == (1, 8)


def test_whiten_says_at_once_that_pictures_are_too_few(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    done = cooc("whiten", photos, "-o", tmp_path / "own.safetensors")
    assert done.code == 2
    assert "--dim 11" in done.err


# recipes


def test_recipes(cooc: Shell) -> None:
    done = cooc("recipes")
    assert all(name in done.out for name in RECIPES)
    listed = json.loads(cooc("recipes", "--json").out)
    assert [one["name"] for one in listed] == list(RECIPES)
    (one,) = json.loads(cooc("recipes", "gem+p=4", "--json").out)
    assert one["config"]["options"] == {"p": 4}
    assert "chco-sct" in cooc("recipes", "paper-linear").out
    done = cooc("recipes", "crwo")
    assert (done.code, "Did you mean 'crow'?" in done.err) == (2, True)


# weights


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COOC_OFFLINE", "1")
    return tmp_path / "home"


def test_weights_travel(cooc: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """export here, import on a machine that has nothing and reaches nothing."""
    name = "vgg16-caffe"
    assert cooc("weights", "fetch", name).code == 0
    assert cooc("weights", "verify", name).out.strip() == f"{name}: good"
    assert cooc("weights", "export", name, tmp_path).code == 0
    monkeypatch.setenv("COOC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COOC_OFFLINE", "1")
    done = cooc("weights", "import", tmp_path / f"{name}.safetensors")
    assert (done.code, done.out.startswith(f"{name}:")) == (0, True)
    assert cooc("weights", "verify").out.strip() == f"{name}: good"
    present = {one["name"]: one["present"] for one in json.loads(cooc("weights", "list", "--json").out)}
    assert present == {known: known == name for known in WEIGHTS}
    cached = tmp_path / "home/weights" / f"{name}.safetensors"
    cached.write_bytes(cached.read_bytes()[:-1])
    done = cooc("weights", "verify")
    assert (done.code, "is damaged" in done.err) == (4, True)


def test_weights_that_are_not_there(cooc: Shell, empty_home: Path, photos: Path) -> None:
    done = cooc("weights", "list")
    assert all(name in done.out for name in WEIGHTS)
    assert "no weights here" in cooc("weights", "verify").out
    for words in (("verify", "vgg16"), ("fetch", "vgg16"), ("fetch", "all"), ("import", photos / "00.jpg")):
        assert cooc("weights", *words).code == 4, words
    done = cooc("weights", "fetch", "vgg61")
    assert (done.code, "'vgg16'" in done.err) == (2, True)


# the shell


def test_as_a_process() -> None:
    """The module runs; --help and --version do not wait for torch; how threads wait is said before numpy is loaded."""
    code = (
        "import os, sys; from cooc.cli import main\ntry: main()\n"
        "finally: print({'torch', 'numpy'} & set(sys.modules), os.environ['OMP_WAIT_POLICY'])"
    )
    for given, expected in ({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active"):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        words = [sys.executable, "-c", code, "--version"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
        assert done.stdout.splitlines()[0].startswith("cooc ")
        assert done.stdout.splitlines()[1] == f"set() {expected}"
    done = subprocess.run([sys.executable, "-m", "cooc.cli", "describe", "no.jpg"], capture_output=True, text=True)
    assert done.returncode == 2


def test_a_command_is_imported_alone() -> None:
    code = (
        "import sys; from cooc.cli import COMMANDS, only; app = only('search')\n"
        "print(len(app.registered_commands), sys.modules.keys() & {f'cooc.cli.{name}' for name in COMMANDS})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 {'cooc.cli.searching'}"


def test_the_table_of_commands_says_which_module_has_them() -> None:
    listed = {name: f"cooc.cli.{module}" for module, names in COMMANDS.items() for name in names}
    found = {
        command.name or typer.main.get_command_name(command.callback.__name__): command.callback.__module__
        for command in app.registered_commands
        if command.callback is not None
    }
    for group in app.registered_groups:
        (found[str(group.name)],) = (
            module for module in set(listed.values()) if group.typer_instance in vars(sys.modules[module]).values()
        )
    assert found == listed


def test_help_says_first_what_users_do_every_day(cooc: Shell) -> None:
    text = cooc("--help").out
    everyday, rest = text.split("Everyday:")[1].split("Research and operation:")
    listed = [[line.split()[0] for line in part.splitlines() if line.strip()] for part in (everyday, rest)]
    assert listed[0][:3] == ["index", "search", "duplicates"]
    assert {"status", "add", "remove", "tag", "serve", "explain"} <= set(listed[0])
    assert {"bench", "train", "weights", "compact", "export"} <= set(listed[1])
    every = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    every |= {group.name for group in app.registered_groups if group.name}
    assert sorted([*listed[0], *listed[1]]) == sorted(every)


def test_what_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal: never more often than asked, and nothing of a short run."""
    clock = [0.0]
    monkeypatch.setattr("cooc.cli.bars.time.monotonic", lambda: clock[0])
    said: list[float] = []
    later, at_once = (now_and_then(10, said.append, at_once=first) for first in (False, True))
    for second in range(25):
        clock[0] = second
        later(second)
    assert said == [10, 20]
    said.clear()
    for second in range(25, 40):
        clock[0] = second
        at_once(second)
    assert said == [25, 35]


def test_commands_that_moved_say_where(cooc: Shell) -> None:
    assert "python -m benchmarks figures" in cooc("figures").err
    assert "python -m benchmarks speed" in cooc("bench", "speed").err


# words


@pytest.mark.parametrize(("count", "said"), [(0, "0 boxes"), (1, "1 box"), (2, "2 boxes"), (1000, "1,000 boxes")])
def test_things_are_counted_as_people_do(count: int, said: str) -> None:
    assert counted(count, "box") == said
    assert counted(count, "picture") == said.replace("boxes", "pictures").replace("box", "picture")


def test_the_shell_completes_commands_and_options(tmp_path: Path) -> None:
    """The real bash, with what `cooc --install-completion` writes into a home of its own."""
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def bash(script: str) -> list[str]:
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    bash("cooc --install-completion; exit $?")  # one that has something left to do, so that it is there to be asked
    asked = "source ~/.bashrc; COMP_WORDS=(cooc {0}); COMP_CWORD={1}; _cooc_completion cooc; echo ${{COMPREPLY[@]}}"
    assert bash(asked.format("du", 1)) == ["duplicates"]
    assert bash(asked.format("search --rer", 2)) == ["--rerank"]
    assert bash("source ~/.bashrc; complete -p cooc")[1:3] == ["-o", "default"]  # else the names of files
