"""The demo: photographs are altered (cropped, shrunk, turned, relit), and each view has to find its photograph again.

    make demo                    or: python examples/demo.py [--out FILE]

It prints a table and draws demo/demo.png: the view, where its co-occurrences are, the three nearest photographs. They
come with scikit-image; only those are used that it states to be in the public domain or CC0.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps
from rich.console import Console
from rich.table import Table

from cooc import Descriptor
from cooc.explanation.heatmaps import overlay, spatial_cooccurrences
from cooc.pictures.decode import open_image

RECIPE = "paper-linear"
SIZE = 256  # longest side in pixels: small, for machines without a GPU
SEED = 1

PHOTOGRAPHS = {  # name: (file in skimage/data, its licence as skimage/data/_fetchers.py states it)
    "astronaut": ("astronaut.png", "public domain, NASA"),
    "cat": ("chelsea.png", "CC0, Stefan van der Walt"),
    "coffee": ("coffee.png", "CC0, Rachel Michetti"),
    "rocket": ("rocket.jpg", "public domain, SpaceX"),
    "camera": ("camera.png", "CC0, Lav Varshney"),
    "galaxies": ("hubble_deep_field.jpg", "public domain, NASA"),
    "retina": ("retina.jpg", "CC0, Mikael Häggström"),
    "clock": ("clock_motion.png", "public domain, Stefan van der Walt"),
    "bricks": ("brick.png", "CC0, CC0Textures"),
    "cell": ("cell.png", "CC0, Paul Müller et al."),
    "grass": ("grass.png", "CC0, linolafett"),
    "gravel": ("gravel.png", "CC0, CC0Textures"),
}

# Views: a photograph -> a picture that someone else might have taken of the same thing.


def crop(photo: Image.Image, rng: random.Random) -> Image.Image:
    """About a third of it, anywhere."""
    share = rng.uniform(0.55, 0.65)
    w, h = round(photo.width * share), round(photo.height * share)
    x, y = rng.randint(0, photo.width - w), rng.randint(0, photo.height - h)
    return photo.crop((x, y, x + w, y + h))


def shrink(photo: Image.Image, rng: random.Random) -> Image.Image:
    """A thumbnail, less than half as wide."""
    side = round(SIZE * rng.uniform(0.4, 0.5))
    return ImageOps.contain(photo, (side, side))


def turn(photo: Image.Image, rng: random.Random) -> Image.Image:
    """Held at an angle; cut so that no empty corners show."""
    angle = rng.choice([-1, 1]) * rng.uniform(12, 20)
    w, h = photo.size
    return photo.rotate(angle, Image.Resampling.BICUBIC).crop((w // 5, h // 5, w - w // 5, h - h // 5))


def dusk(photo: Image.Image, rng: random.Random) -> Image.Image:
    """Less than half of the light, and bluish."""
    dark = ImageEnhance.Brightness(photo).enhance(rng.uniform(0.35, 0.45))
    return Image.blend(dark, Image.new("RGB", dark.size, (20, 30, 90)), 0.3)


def glare(photo: Image.Image, rng: random.Random) -> Image.Image:
    """Overexposed, hazy, and mirrored."""
    bright = ImageEnhance.Brightness(photo).enhance(rng.uniform(1.2, 1.5))
    return ImageOps.mirror(Image.blend(bright, Image.new("RGB", photo.size, "white"), 0.35))


VIEWS: dict[str, Callable[[Image.Image, random.Random], Image.Image]] = {
    "cropped": crop,
    "at dusk": dusk,
    "turned": turn,
    "in glare": glare,
    "shrunk": shrink,
}
VIEWS_OF_EACH = 2


@dataclass(frozen=True)
class Found:
    """A view, the photograph that it was made from, and the photographs nearest to it, best first."""

    kind: str
    name: str
    picture: Image.Image
    nearest: list[tuple[str, float]]

    @property
    def right(self) -> bool:
        return self.nearest[0][0] == self.name


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo/demo.png"), help="the picture to write")
    parser.add_argument("--recipe", default=RECIPE, help="see `cooc recipes`")
    parser.add_argument("--photographs", type=int, default=len(PHOTOGRAPHS), help="take only the first so many")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    console.print(f"{options.recipe} at {SIZE} pixels; the first run fetches the network's weights.")

    descriptor = Descriptor.from_recipe(options.recipe, size=SIZE)
    photographs = load(list(PHOTOGRAPHS)[: options.photographs])
    found = search(descriptor, photographs)
    console.print(table(found))
    right = sum(one.right for one in found)
    console.print(f"{right} of {len(found)} views found their photograph among {len(photographs)}.", style="bold")

    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(descriptor, photographs, choose(found)).save(options.out)
    console.print(f"Look at {options.out}")


def load(names: Sequence[str]) -> dict[str, Image.Image]:
    folder = Path(str(resources.files("skimage"))) / "data"
    return {name: open_image(folder / PHOTOGRAPHS[name][0]) for name in names}


def search(descriptor: Descriptor, photographs: Mapping[str, Image.Image]) -> list[Found]:
    """Describe photographs and views, and rank the photographs for each view."""
    rng = random.Random(SEED)
    kinds, names = list(VIEWS), list(photographs)
    made = [(kinds[(i + j) % len(kinds)], name) for j in range(VIEWS_OF_EACH) for i, name in enumerate(names)]
    pictures = [VIEWS[kind](photographs[name], rng) for kind, name in made]
    database = descriptor(list(photographs.values()))  # (photographs, D), unit length
    scores = (descriptor(pictures) @ database.T).numpy()  # (views, photographs), cosine similarity
    return [
        Found(kind, name, picture, [(names[k], float(row[k])) for k in np.argsort(-row)])
        for (kind, name), picture, row in zip(made, pictures, scores, strict=True)
    ]


def table(found: Sequence[Found]) -> Table:
    out = Table(box=None, pad_edge=False)
    for title in ("photograph", "view", "found", "score", "next", "its score", ""):
        out.add_column(title, justify="right" if "score" in title else "left")
    for one in found:
        (first, score), (second, next_score) = one.nearest[:2]
        verdict = "[green]right[/]" if one.right else "[red]wrong[/]"
        out.add_row(one.name, one.kind, first, f"{score:.2f}", second, f"{next_score:.2f}", verdict)
    return out


def choose(found: Sequence[Found]) -> list[Found]:
    """Rows to draw: one for each kind of view, each of another photograph; and a failure, if there is one."""
    rows: list[Found] = []
    for one in found:
        if one.right and one.kind not in {row.kind for row in rows} and one.name not in {row.name for row in rows}:
            rows.append(one)
    return rows + [one for one in found if not one.right][:1]


# The drawing: a row for each view.

TILE, GAP, TOP, LINE = (256, 192), 14, 44, 30
NIGHT, TEXT, FAINT = (22, 22, 28), (236, 236, 240), (140, 140, 150)
GREEN, RED, GREY = (64, 200, 110), (235, 75, 75), (80, 80, 90)


def draw(descriptor: Descriptor, photographs: Mapping[str, Image.Image], rows: Sequence[Found]) -> Image.Image:
    """view | heat map of its co-occurrences | the three nearest photographs, the right one framed in green."""
    heads = ("the view", "its co-occurrences", "nearest", "second", "third")
    width = len(heads) * (TILE[0] + GAP) + 2 * GAP
    page = Image.new("RGB", (width, TOP + len(rows) * (TILE[1] + LINE + GAP)), NIGHT)
    pen, large, small = ImageDraw.Draw(page), ImageFont.load_default(19), ImageFont.load_default(16)
    lefts = [GAP + i * (TILE[0] + GAP) + (GAP if i > 1 else 0) for i in range(len(heads))]
    for left, head in zip(lefts, heads, strict=True):
        pen.text((left, TOP - 12), head, TEXT, large, anchor="ls")
    for i, row in enumerate(rows):
        y = TOP + i * (TILE[1] + LINE + GAP)

        def place(column: int, picture: Image.Image, text: str, frame: tuple[int, int, int] | None, y: int = y) -> None:
            x = lefts[column]
            tile = picture if picture.width < TILE[0] and picture.height < TILE[1] else ImageOps.fit(picture, TILE)
            page.paste(tile, (x + (TILE[0] - tile.width) // 2, y + (TILE[1] - tile.height) // 2))
            if frame:
                pen.rectangle((x - 4, y - 4, x + TILE[0] + 3, y + TILE[1] + 3), outline=frame, width=4)
            pen.text((x, y + TILE[1] + 8), text, TEXT if frame != GREY else FAINT, small)

        pixels = descriptor.load(row.picture)  # (3, H, W)
        heat = overlay(
            pixels.permute(1, 2, 0).numpy(), spatial_cooccurrences(descriptor, pixels), descriptor.backbone.stride
        )
        place(0, row.picture, f"{row.name}, {row.kind}", None)
        place(1, Image.fromarray(heat), "", None)
        for rank, (name, score) in enumerate(row.nearest[:3]):
            frame = GREEN if name == row.name else GREY if rank else RED
            place(2 + rank, photographs[name], f"{score:.2f}  {name}", frame)
    return page


if __name__ == "__main__":
    main()
