"""Local features of an index on Milvus: files in a folder or an object store, one for each content.

Milvus holds all its fields in memory, and texts of 64 kB at most, so codes lie elsewhere: where the index's address
says (`?features=s3://bucket/prefix` or a folder that all machines see; beside the file, for milvus-lite), below the
name of the index. A file is written before the row that says that it is there, and holds a checksum before the code.
Pictures that are removed, and whatever is cut short, leave files that no row speaks of: they are not seen, and are
written again, or removed by compacting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cooc.errors import InputError, StoreError
from cooc.files import write_whole
from cooc.index.checks import checksum
from cooc.index.milvus.server import Address
from cooc.index.store import blocks
from cooc.pictures.objects import file_system

CHECK = 8  # bytes of the checksum
READ = 64  # codes read at once


def place(where: Address, kept: str = "") -> str:
    """Where the features of an index lie: what its address says, else what was kept of that."""
    if where.features:
        return "/".join(filter(None, [where.features.rstrip("/"), where.database, where.name]))
    if not (at := kept or (f"{where.uri}.features/{where.name}" if where.lite else "")):
        joint = "&" if "?" in where.shown else "?"
        raise InputError(
            "An index on Milvus keeps local features as files: say where they are to lie, in a bucket or a folder that "
            f"all machines see. --index '{where.shown}{joint}features=s3://BUCKET/PREFIX'"
        )
    return at


class FeatureFiles:
    """Codes by content (sha256)."""

    def __init__(self, url: str) -> None:
        self.url, (self._files, self._root) = url, file_system(url)

    def _path(self, sha256: str) -> str:
        return f"{self._root}/{sha256[:2]}/{sha256}"

    def write(self, codes: Mapping[str, bytes]) -> None:
        with self._explained():
            for path, data in ((self._path(one), checksum(code) + code) for one, code in codes.items()):
                if "file" in self._files.protocol:
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    write_whole(path, data)
                else:  # an object appears when it is complete
                    self._files.pipe_file(path, data)

    def read(self, contents: Iterable[str]) -> dict[str, bytes | None]:
        """None where a file is gone or not what was written. One that cannot be reached is an error."""
        found = dict[str, bytes | None]()
        for block in blocks(dict.fromkeys(contents), READ):
            with self._explained():
                read = self._files.cat([self._path(one) for one in block], on_error="return")
                for path, data in read.items():
                    if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                        raise data
                    good = isinstance(data, bytes) and data[:CHECK] == checksum(data[CHECK:])
                    found[path.rpartition("/")[2]] = data[CHECK:] if good else None
        return found

    def remove(self, contents: Iterable[str]) -> None:
        with self._explained():
            for sha256 in contents:
                with suppress(FileNotFoundError):
                    self._files.rm_file(self._path(sha256))

    def contents(self) -> Iterator[str]:
        """All that are there."""
        with self._explained():
            for number in range(256):
                with suppress(FileNotFoundError):
                    listed = self._files.ls(f"{self._root}/{number:02x}", detail=False)
                    yield from (name.rpartition("/")[2] for name in listed)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # every store has errors of its own
            raise StoreError(
                f"Local features in {self.url} could not be read or written ({type(error).__name__}: {error}). Nothing "
                "is lost: see that the place can be reached, and try again."
            ) from error
