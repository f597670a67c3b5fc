"""A descriptor as one folder, which any command takes as a recipe, and which travels to another machine.

    descriptor.json          the settings, and where they come from
    filter.safetensors       where the recipe has a filter of its own
    tuning.safetensors       where its network was tuned: the change alone
    whitening.safetensors    where it whitens
    network.safetensors      the network's weights, where the folder is to travel: `cooc weights export`

`cooc train` and `Descriptor.save_pretrained` write one; `find_recipe` reads it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cooc.cooccurrence import Cooccurrence
from cooc.errors import InputError
from cooc.files import write_whole
from cooc.recipes import (
    ARTEFACT,
    RECIPES,
    DescriptorConfig,
    find_filter,
    find_recipe,
    find_tuning,
    find_whitening,
    kept_artefacts,
    read_artefact,
)
from cooc.weights import export_weights, import_weights
from cooc.whitening import Storage, Whitening
from cooc.whitening import save as save_whitening

FILTER, TUNING, WHITENING = "filter.safetensors", "tuning.safetensors", "whitening.safetensors"
NETWORK = "network.safetensors"


def write_artefact(
    folder: str | os.PathLike[str],
    config: DescriptorConfig,
    filter: Cooccurrence | None,
    whitening: Whitening | None,
    *,
    storage: Storage = "float32",
    about: Mapping[str, Any] | None = None,
) -> DescriptorConfig:
    """The descriptor of that config, with that whitening, and that filter in the place of the config's.

    Gives the config that reads them from there. descriptor.json comes last: a folder that has it is whole.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = find_filter(config.filter) if config.filter else None
    if filter is None and source is not None and source.suffix == ".npy":
        filter = Cooccurrence.load(source)
    if filter is not None:
        filter.save(folder / FILTER, storage="float32" if storage == "float32" else "float16", about=about)
    elif source is not None and source.resolve() != (folder / FILTER).resolve():
        write_whole(folder / FILTER, source.read_bytes())
    if filter is not None or source is not None:
        config = config.replace(cooccurrence="learned", filter=str(folder / FILTER))
    if config.tuning:
        change = find_tuning(config)
        if change.resolve() != (folder / TUNING).resolve():
            write_whole(folder / TUNING, change.read_bytes())
        config = config.replace(tuning=str(folder / TUNING))
    dim = 0
    if whitening is not None:
        dim, meta = whitening.dim, {"space": config.space, "space_hash": config.space_hash}
        fitted = Whitening(whitening.mean, whitening.projection.detach(), whitening.meta | meta, whitening.eigenvalues)
        save_whitening(fitted, folder / WHITENING, storage)
    names = {"filter": FILTER if config.filter else "", "whitening": WHITENING if whitening is not None else ""}
    names["tuning"] = TUNING if config.tuning else ""
    values = config.as_dict() | {"dtype": "auto", "dim": dim} | names
    write_whole(folder / ARTEFACT, json.dumps({**(about or {}), "config": values}, indent=1) + "\n")
    return config.replace(dtype="auto", dim=dim, whitening=str(folder / WHITENING) if whitening is not None else "")


def export_artefact(name: str, folder: str | os.PathLike[str]) -> Path:
    """A recipe or an artefact with all that it needs, its network's weights too (fetched first if need be)."""
    recipe, folder = find_recipe(name), Path(folder)
    config = recipe.config
    whitening = find_whitening(config) if config.whitening else None
    if whitening is not None:
        whitening = whitening.truncate(config.dim or whitening.dim)
    folder.mkdir(parents=True, exist_ok=True)
    export_weights(config.weights, folder / NETWORK)
    about = {"name": folder.resolve().name if "+" in name else Path(name).name, "source": recipe.source}
    write_artefact(folder, config, None, whitening, about=about)
    return folder


def import_artefact(folder: str | os.PathLike[str], name: str | None = None) -> str:
    """Take over what `export_artefact` wrote: weights into the cache, the rest under a name. Gives that name.

    Of a recipe that ships with cooc, only the weights are needed.
    """
    folder = Path(folder)
    recipe = read_artefact(folder)  # says what is wrong with the folder
    config = recipe.config
    about = json.loads((folder / ARTEFACT).read_text(encoding="utf-8"))
    name = name or str(about.get("name") or folder.resolve().name)
    ships = name in RECIPES and recipe.source == RECIPES[name].source
    if not ships and (name in RECIPES or Path(name).name != name or name.startswith(".") or "+" in name):
        raise InputError(f"{name!r} cannot be the name of another recipe. Give one: `--name NAME`.")
    if (folder / NETWORK).is_file():
        import_weights(folder / NETWORK, config.weights)
    if ships:
        return name
    target = kept_artefacts() / name
    new = target.with_name(f".{name}.{uuid.uuid4().hex}.tmp")
    new.mkdir(parents=True)
    try:
        for file in (FILTER, TUNING, WHITENING, ARTEFACT):
            if (folder / file).is_file():
                shutil.copyfile(folder / file, new / file)
        shutil.rmtree(target, ignore_errors=True)
        new.replace(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return name
