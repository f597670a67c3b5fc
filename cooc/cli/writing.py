"""Files that a command writes: refused before the work, not after it, and there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cooc.errors import InputError
from cooc.files import replacing

if TYPE_CHECKING:
    from PIL import Image

PICTURES = (".jpg", ".jpeg", ".png", ".webp")


def check_output(path: Path, *endings: str) -> None:
    if path.suffix.lower() not in endings:
        raise InputError(f"{path}: the name must end in {' or '.join(sorted(endings))}.")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}. Create it, or write elsewhere.")


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """`replacing`, with the message for a disk that is full or not ours."""
    try:
        with replacing(path) as stream:
            yield stream
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}). Make room, or write elsewhere.") from error


def check_drawing(path: Path) -> None:
    """In any format that Pillow writes."""
    from PIL import Image

    Image.init()
    check_output(path, *(end for end, form in Image.EXTENSION.items() if form in Image.SAVE))


def save_picture(picture: Image.Image, path: Path, **options: Any) -> None:
    """In the format that the name says."""
    from PIL import Image

    Image.init()
    with writing(path) as stream:
        picture.save(stream, Image.EXTENSION[path.suffix.lower()], **options)
