"""Files that are there whole or not at all, what one holds in one number; what ships, and where others are kept."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

DATA = Path(__file__).parent / "data"  # what ships


def cache_home() -> Path:
    """Where weights, and what is made of them, are kept for this user."""
    import platformdirs  # processes that decode pictures have no use for it

    return Path(os.environ.get("COOC_HOME") or platformdirs.user_cache_dir("cooc")).expanduser()


def file_hash(path: Path) -> str:
    """sha256 in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that takes `path`'s place, on disk, when the block ends, and leaves no trace when it fails."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    with replacing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
