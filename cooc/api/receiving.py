"""Pictures that clients add to the collection's folder: under names that are safe, and never over another file."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from starlette.exceptions import HTTPException

from cooc.api.writing import Writer
from cooc.errors import InputError
from cooc.files import write_whole
from cooc.pictures import Folder
from cooc.pictures.decode import EXTENSIONS

LONGEST = 150  # bytes of a name, of which file systems allow 255
DEEPEST = 20  # folders in one another
ENDINGS = {"HEIF": ".heic", "JPEG": ".jpg", "MPO": ".jpg", "TIFF": ".tif"}  # of others it is the format's name
UNSAFE = set('<>:"/\\|?*')  # here or on another system


def safe_name(name: str, form: str) -> str:
    """The last part of a name, without what a file system or a person may stumble over; the ending of a picture."""
    base = _clean(unicodedata.normalize("NFC", name.replace("\\", "/").rpartition("/")[2]))
    stem, ending = os.path.splitext(base)  # noqa: PTH122
    if ending.lower() not in EXTENSIONS:
        stem, ending = base, ENDINGS.get(form, f".{form.lower()}")
    if ending.lower() not in EXTENSIONS:
        raise InputError(f"Pictures of the format {form} are not indexed: save it as JPEG or PNG.")
    while len(os.fsencode(stem)) > LONGEST:
        stem = stem[:-1]
    return f"{stem or 'picture'}{ending.lower()}"


def safe_folder(folder: str) -> str:
    """A folder below the root. None that is hidden: there the index itself may lie, and nothing is indexed there."""
    parts = [part for part in folder.split("/") if part]
    if len(parts) > DEEPEST or any(part != _clean(part) or len(os.fsencode(part)) > LONGEST for part in parts):
        raise InputError(
            f"{folder[:200]!r} is no folder for pictures: parts begin and end without dot or space, and hold none of "
            f"{' '.join(sorted(UNSAFE))}"
        )
    return "/".join(parts)


def _clean(text: str) -> str:
    return "".join("_" if one in UNSAFE or not one.isprintable() else one for one in text).strip(" .")


def place(writer: Writer, folder: str, name: str, data: bytes) -> Path:
    """Where it lies now. A name that is taken gets a number."""
    folder = safe_folder(folder)
    if not isinstance(writer.search.collection, Folder):
        raise HTTPException(403, "Pictures are added to a folder of this machine only, not to an object store or tar.")
    if not writer.allowed(folder):
        raise HTTPException(403, f"Nothing is added to {folder!r}: `cooc serve --allow FOLDER` allows it.")
    target = writer.search.root / folder
    stem, ending = os.path.splitext(name)  # noqa: PTH122
    try:
        target.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = target / (f"{stem}-{number}{ending}" if number > 1 else name)
            try:
                path.touch(exist_ok=False)  # now the name is ours
                break
            except FileExistsError:
                number += 1
        try:
            write_whole(path, data)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise HTTPException(409, f"{name} cannot be written to {folder or 'the root'!r} ({error.strerror}).") from None
    return path
