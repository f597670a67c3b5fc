"""Local features of pictures that are indexed, in the pass that makes their vectors.

`extraction = Extraction("sift+xfeat")` is called where a picture is decoded, in a process that has no torch: what needs
none is made there, at once, so that a GPU never waits for it. For an engine that is a network the pixels come along,
and `extraction.finish` makes the rest, beside the network that describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cooc.errors import CoocError, MachineError, first_line
from cooc.verification.engine import Pixels
from cooc.verification.engines import ENGINES, LONGEST, extract, parts
from cooc.verification.features import pack


class Aside(NamedTuple):
    """Of one picture: codes by engine, as far as they are made, and what the others need."""

    codes: dict[str, bytes]
    pixels: Pixels | None
    size: tuple[int, int]


@dataclass(frozen=True)
class Extraction:
    engines: str
    size: int = LONGEST  # pixels of the longer side

    def __post_init__(self) -> None:
        parts(self.engines)  # or an error that names those that there are

    def __call__(self, pixels: Pixels, size: tuple[int, int]) -> Aside:
        light = [part for part in parts(self.engines) if ENGINES[part].weights is None]
        codes = {part: pack(extract(part, pixels, size=size)) for part in light}
        heavy = len(light) < len(parts(self.engines))
        return Aside(codes, pixels if heavy else None, size)

    def finish(self, aside: Aside, device: str = "cpu") -> bytes:
        """The code of the picture: engines in their order."""
        return b"".join(aside.codes.get(part) or self._made(part, aside, device) for part in parts(self.engines))

    def _made(self, part: str, aside: Aside, device: str) -> bytes:
        assert aside.pixels is not None
        try:
            return pack(extract(part, aside.pixels, size=aside.size, device=device))
        except CoocError:
            raise
        except (RuntimeError, MemoryError) as error:  # whatever a device says, out of memory too
            if device != "cpu":
                return self._made(part, aside, "cpu")
            raise MachineError(
                f"Its local features could not be made ({first_line(error)}). Free memory, and try again."
            ) from error
