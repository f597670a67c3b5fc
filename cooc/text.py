"""Pictures by words: a second space beside an index, of a CLIP- or SigLIP-like model that the user brings (open_clip).

    update(index, store, collection, "ViT-B-32=weights.safetensors")    # or a folder, as open_clip publishes its models
    find(index, store, "a red car", Options(k=20))                      # Results, as of any other search

The vectors lie in the index's own folder, `text/`, an index of its own with the same pictures: what the first one
knows, the second follows. cooc has no such model, fetches none, and has measured none.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cooc.errors import CoocError, InputError, StoreMissingError, UnknownNameError
from cooc.files import file_hash
from cooc.index import create_store, is_folder, open_store
from cooc.index.records import Filter, StoreMeta
from cooc.index.shortlist import Options, Results, find_matches
from cooc.index.store import Store, blocks
from cooc.pictures import Collection
from cooc.pictures.decode import EXTENSIONS, load_image
from cooc.vectors import unit_rows

if TYPE_CHECKING:
    import torch

    from cooc.index.report import Progress, Report
    from cooc.pictures.batches import Item
    from cooc.pictures.shared_memory import Beside

PLACE = "text"  # in the folder of an index
LONGEST = 1024  # pixels, to which pictures are reduced before the model's own preprocessing
BATCH = 16
MOST = 10_000  # results among which those with a tag are
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # in a folder
INSTALL = (
    "To search by words, install open_clip beside the torch that is there (pip install --no-deps open_clip_torch "
    "ftfy regex wcwidth), bring the weights of a model, and let it describe the pictures: cooc index FOLDER --text "
    "ViT-B-32=WEIGHTS.safetensors"
)

Floats = NDArray[np.float32]


def are_words(text: str) -> bool:
    """Rather than the name of a picture that is not there?"""
    named = os.sep in text or Path(text).suffix.lower() in EXTENSIONS or text in ("-", "")
    return not named and "://" not in text and not os.path.lexists(text)


class Model:
    """A model of open_clip: pictures and words to unit vectors of one space."""

    def __init__(self, given: str, device: str = "auto") -> None:
        from cooc.activations import resolve_device

        self.device = resolve_device(device)
        clip = _open_clip()
        self.name, self.file = _files(given)
        local = self.name.startswith("local-dir:")
        if not local and self.name not in clip.list_models():
            raise UnknownNameError("model of open_clip", self.name, clip.list_models())
        self.fingerprint = _sha256(self.file)
        self.given = str(self.file.parent) if local else f"{self.name}={self.file}"
        try:
            made = clip.create_model_and_transforms(self.name, None if local else str(self.file), device=self.device)
            self.tokens = clip.get_tokenizer(self.name)
        except Exception as error:  # it has many
            raise InputError(f"open_clip cannot make {self.name} of {self.file}: {str(error)[:300]}") from error
        self.network, self.prepare = made[0].eval(), made[2]

    def words(self, text: str) -> Floats:
        """(D,)"""
        import torch

        with torch.inference_mode():
            found = self._unit(self.network.encode_text(self.tokens([text]).to(self.device)))
        return found.reshape(-1)

    def pictures(self, pixels: Iterable[NDArray[np.uint8]]) -> Floats:
        """(N, D)"""
        import torch

        images = torch.stack([self.prepare(Image.fromarray(one)) for one in pixels])
        with torch.inference_mode():
            return self._unit(self.network.encode_image(images.to(self.device)))

    def _unit(self, rows: torch.Tensor) -> Floats:
        return unit_rows(rows.float().cpu().numpy())

    def stream(
        self, items: Iterable[Item], *, workers: int | None = None, beside: Beside | None = None
    ) -> Iterator[tuple[Item, Floats | CoocError]]:
        """As a descriptor's, for `cooc.index.engine`: in this process, for the index has decoded them all before."""
        for block in blocks(items, BATCH):
            decoded: list[tuple[Item, NDArray[np.uint8]]] = []
            for item in block:
                try:
                    decoded.append((item, load_image(item.picture, size=LONGEST)))
                except CoocError as error:
                    yield item, error
            vectors = self.pictures(pixels for _, pixels in decoded) if decoded else ()
            yield from ((item, vector) for (item, _), vector in zip(decoded, vectors, strict=True))


def update(
    index: str,
    store: Store,
    collection: Collection,
    given: str = "",
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> Report | None:
    """Let the second space follow the index: describe what is new in it, forget what is gone. None if there is none.

    `given`: the model of a space that is not there yet.
    """
    from cooc.index.engine import Here  # not needed by who searches
    from cooc.index.sync import add_files

    if given and not is_folder(index):
        raise InputError(f"Words are for an index in a folder, not for {index}.")
    if not given and not knows_words(index):
        return None
    with _space(Path(index) / PLACE, given, device, store.meta.cooc_version) as words:
        known = {record.path: record.sha256 for record in words.records()}
        wanted = {record.path: record.sha256 for record in store.records()}
        new = [collection.address(path) for path, sha256 in wanted.items() if known.get(path) != sha256]
        engine = Here(lambda: _model_of(words, device), workers=0)
        report = add_files(words, collection, engine, new, progress=progress)
        # What has moved is known by now.
        report.removed = words.remove([record.path for record in words.records() if record.path not in wanted])
        return report


def knows_words(index: str) -> bool:
    return is_folder(index) and (Path(index) / PLACE).is_dir()


def find(index: str, store: Store, text: str, options: Options, *, device: str = "auto") -> Results:
    """The pictures of an index that words describe best. The second space knows neither their tags nor what was
    removed since it was made: the index does."""
    started = time.monotonic()
    if not knows_words(index):
        raise InputError(f"This index knows no words. {INSTALL}")
    where = options.where or Filter()
    wanted = replace(options, where=replace(where, tags=frozenset()))
    if where.tags:  # any of them may be the ones
        wanted = replace(wanted, k=MOST, offset=0)
    with open_store(Path(index) / PLACE) as words:
        found = find_matches(words, _model_of(words, device).words(text), wanted, started=started)
    records = store.get([match.id for match in found.matches])
    pairs = zip(found.matches, records, strict=True)
    matches = [replace(match, record=record) for match, record in pairs if record and where.tags <= record.tags]
    if where.tags:
        matches = matches[options.offset : options.offset + options.k]
    return replace(found, matches=matches)


def _space(folder: Path, given: str, device: str, version: str) -> Store:
    """Open for writing; made if it is not there."""
    try:
        words = open_store(folder, write=True)
    except StoreMissingError:
        model = Model(given, device)
        meta = StoreMeta(
            recipe=f"words by {model.name}",
            config={"given": model.given},
            config_hash=hashlib.sha256(model.name.encode()).hexdigest()[:16],
            weights_hash=model.fingerprint,
            dim=len(model.words("a picture")),
            root=os.path.join("..", ".."),  # noqa: PTH118
            cooc_version=version,
        )
        return create_store(folder, meta)
    if given and _files(given)[1].is_file() and _sha256(_files(given)[1]) != words.meta.weights_hash:
        words.close()
        raise InputError(f"{folder} holds words by another model. To take this one instead, remove that folder first.")
    return words


def _model_of(words: Store, device: str) -> Model:
    given = words.meta.config["given"]
    file = _files(given)[1]
    model = _loaded(given, device, file.stat().st_mtime_ns if file.is_file() else 0)
    if model.fingerprint != words.meta.weights_hash:
        raise InputError(
            f"{model.file} is not what it was when the pictures were described. Bring it back, or remove the words."
        )
    return model


@functools.lru_cache(maxsize=1)
def _loaded(given: str, device: str, changed: int) -> Model:
    """A process that stays (a server) loads a model once, until its file is `changed`."""
    return Model(given, device)


def _files(given: str) -> tuple[str, Path]:
    """MODEL=FILE, or a folder that has both: the model's name as open_clip knows it, and the file of its weights."""
    name, _, file = given.partition("=")
    if file:
        return name, Path(file).absolute()
    folder = Path(given).absolute()
    return f"local-dir:{folder}", next(
        (folder / one for one in WEIGHTS if (folder / one).is_file()), folder / WEIGHTS[0]
    )


def _sha256(file: Path) -> str:
    try:
        return file_hash(file)
    except OSError as error:
        raise InputError(f"The weights {file} cannot be read: {error.strerror}.") from error


def _open_clip() -> Any:
    if importlib.util.find_spec("open_clip") is None:
        raise InputError(INSTALL)
    from cooc.timm_models import import_timm

    import_timm()  # knows how to load torchvision, which open_clip imports
    import open_clip

    return open_clip
