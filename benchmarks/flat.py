"""A labelled set of flat things, made out of any folder of pictures: prints, seen by a camera, among clutter.

    python benchmarks/flat.py PICTURES OUT --clutter PHOTOS --things 200 --absent 200 --series 6 --seed 0

Each picture becomes a print (with `--series`, a cover: band, badge and lettering that all covers of a series share,
as volumes of one publisher do). A view puts the print before a pinhole camera, tilted and turned, lights it, hides a
part of it, and lays it on a photo; then come defocus, motion, noise and JPEG. Half of `--absent` shares its series with
prints that are in the database, so that a shared logo can raise a false alarm.

OUT is a labelled folder: `jpg/` and `ground_truth.json` (database, queries with box and positives), which `cooc bench`
reads, with two more keys: `absent`, the queries whose print is not in the database, and for each query `transform`,
the 3x3 matrix from the print's pixels to the view's. The same pictures, seed and options give the same views.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]
Matrix = NDArray[np.float64]

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
WORDS = "the of night river winter secret garden last house memory stone blue island time lost empire moon road glass"


# ---- prints --------------------------------------------------------------------------------------------------------


def read(path: Path, longest: int) -> Pixels:
    with Image.open(path) as image:
        image.draft("RGB", (2 * longest, 2 * longest))
        rgb = image.convert("RGB")
        rgb.thumbnail((longest, longest), Image.Resampling.LANCZOS)
        return np.asarray(rgb)


def cover(art: Pixels, series: int, volume: int, seed: int) -> Pixels:
    """A cover of a series: its look is drawn from the series' number alone, its title from the volume's."""
    look, own = random.Random(f"{seed}/series/{series}"), random.Random(f"{seed}/title/{series}/{volume}")
    width, height = 640, 900
    ink, paper = [tuple(look.randrange(low, low + 90) for _ in range(3)) for low in (0, 150)]
    page = Image.new("RGB", (width, height), paper)
    top, bottom = look.randrange(60, 170), look.randrange(50, 130)
    picture = Image.fromarray(art)
    scale = max(width / picture.width, (height - top - bottom) / picture.height)
    picture = picture.resize((math.ceil(picture.width * scale), math.ceil(picture.height * scale)))
    page.paste(picture.crop((0, 0, width, height - top - bottom)), (0, top))
    draw = ImageDraw.Draw(page)

    def write(x: int, y: int, text: str, size: int, fill: tuple[int, ...]) -> None:
        draw.text((x, y), text, font=ImageFont.load_default(size), fill=fill)

    publisher = " ".join(look.sample(WORDS.split(), 2)).upper()
    write(look.randrange(20, 120), 10, publisher, min(top - 25, 64), ink)
    x, y, r = look.randrange(80, width - 80), height - bottom - 20, look.randrange(40, 75)  # the badge
    draw.ellipse((x - r, y - r, x + r, y + r), fill=ink)
    for spoke in range(look.randrange(5, 12)):
        angle = spoke * look.choice((0.7, 1.1, 1.9))
        draw.line((x, y, x + 0.8 * r * math.cos(angle), y + 0.8 * r * math.sin(angle)), fill=paper, width=5)
    for row in range(2):
        write(30, height - bottom + 8 + 24 * row, " ".join(look.sample(WORDS.split(), 6)), 20, ink)
    title = " ".join(own.sample(WORDS.split(), own.choice((2, 3)))).title()
    write(own.randrange(20, 90), top + own.randrange(10, 90), title, own.randrange(44, 64), (250, 250, 240))
    write(width - 90, height - bottom - 60, str(volume + 1), 52, (250, 250, 240))
    return np.asarray(page)


# ---- views ---------------------------------------------------------------------------------------------------------


def camera(size: tuple[int, int], photo: tuple[int, int], rng: np.random.Generator) -> Matrix:
    """A homography from a print's pixels to a photo's: a pinhole camera before a print, tilted by up to 45 degrees."""
    (width, height), (across, down) = size, photo
    tilt, axis = math.radians(rng.uniform(0, 45)), rng.uniform(0, 2 * math.pi)
    turn = math.radians(rng.choice((rng.normal(0, 12), 90 * rng.integers(1, 4) + rng.normal(0, 8), rng.uniform(0, 360)),
                                   p=(0.6, 0.2, 0.2)))  # fmt: skip
    rotation = cv2.Rodrigues(tilt * np.array([math.cos(axis), math.sin(axis), 0.0]))[0]
    rotation = rotation @ cv2.Rodrigues(np.array([0.0, 0.0, turn]))[0]
    focal = rng.uniform(0.9, 1.5) * max(photo)
    distance = focal * math.sqrt(width * height / (rng.uniform(0.15, 0.65) * across * down))
    to_plane = np.column_stack([rotation[:, 0], rotation[:, 1], (0, 0, distance)])
    lens = np.array([[focal, 0, 0], [0, focal, 0], [0, 0, 1.0]])
    seen = lens @ to_plane @ np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1.0]])
    corners = project(seen, outline(size))
    low, high = corners.min(0), corners.max(0)
    margin = 0.08 * np.array(photo)  # a little of the print may lie outside the photo
    room = np.array(photo) + 2 * margin - (high - low)
    if (room < 0).any():
        fit = float(np.min((np.array(photo) + 2 * margin) / (high - low))) * 0.98
        seen = np.diag([fit, fit, 1]) @ seen
        low, high, room = low * fit, high * fit, np.array(photo) + 2 * margin - (high - low) * fit
    shift = rng.uniform(0, np.maximum(room, 1e-6)) - margin - low
    return np.asarray(np.array([[1, 0, shift[0]], [0, 1, shift[1]], [0, 0, 1.0]]) @ seen)


def scaled(pixels: Pixels, factor: float) -> Pixels:
    how = cv2.INTER_AREA if factor <= 1 else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=how), np.uint8)


def outline(size: tuple[int, int]) -> Matrix:
    return np.array([(0, 0), (size[0], 0), size, (0, size[1])], np.float64)


def project(matrix: Matrix, points: Matrix) -> Matrix:
    mapped = np.column_stack([points, np.ones(len(points))]) @ matrix.T
    return mapped[:, :2] / mapped[:, 2:]


def view(thing: Pixels, clutter: Pixels, rng: np.random.Generator) -> tuple[Pixels, Matrix]:
    """One photo of a print among clutter, and the transform from the print's pixels to the photo's."""
    photo = (clutter.shape[1], clutter.shape[0])
    size = (thing.shape[1], thing.shape[0])
    matrix = camera(size, photo, rng)
    shrink = min(
        1.0, 1.5 * math.sqrt(cv2.contourArea(project(matrix, outline(size)).astype(np.float32)) / np.prod(size))
    )
    small = scaled(thing, shrink)  # before warping: no aliasing
    exact = np.diag([small.shape[1] / size[0], small.shape[0] / size[1], 1.0])
    warp = matrix @ np.linalg.inv(exact)
    seen = cv2.warpPerspective(light(small, rng), warp, photo, flags=cv2.INTER_LINEAR)
    whole = np.ones(small.shape[:2], np.float32)
    mask = np.asarray(cv2.warpPerspective(whole, warp, photo, flags=cv2.INTER_LINEAR), np.float32)
    if rng.random() < 0.4:
        hide(mask, project(matrix, outline(size)), rng)
    mask = mask[..., None]
    mixed = clutter * (1 - mask) + seen * mask
    return spoil(mixed, rng), matrix


def light(pixels: Pixels, rng: np.random.Generator) -> NDArray[np.float32]:
    """Uneven light, gamma, colour of the lamp, and sometimes a reflection."""
    height, width = pixels.shape[:2]
    y, x = np.mgrid[0 : 1 : complex(height), 0 : 1 : complex(width)].astype(np.float32)
    angle = rng.uniform(0, 2 * math.pi)
    slope = 1 + rng.uniform(0, 0.5) * ((x - 0.5) * math.cos(angle) + (y - 0.5) * math.sin(angle))
    lit = 255 * (pixels / 255.0) ** rng.uniform(0.7, 1.5) * rng.uniform(0.7, 1.15)
    lit = lit * slope[..., None] * rng.uniform(0.85, 1.1, 3)
    if rng.random() < 0.3:
        spot = np.exp(-((x - rng.random()) ** 2 + (y - rng.random()) ** 2) / rng.uniform(0.004, 0.03))
        lit = lit + rng.uniform(80, 200) * spot[..., None]
    return np.asarray(np.clip(lit, 0, 255), np.float32)


def hide(mask: NDArray[np.float32], corners: Matrix, rng: np.random.Generator) -> None:
    """Something lies on a part of the print (up to about a fifth of it)."""
    centre = corners.mean(0) + 0.35 * (corners[rng.integers(4)] - corners.mean(0)) * rng.uniform(0.5, 2)
    radius = math.sqrt(cv2.contourArea(corners.astype(np.float32)))
    axes = (int(radius * rng.uniform(0.1, 0.35)), int(radius * rng.uniform(0.1, 0.25)))
    cv2.ellipse(mask, tuple(map(int, centre)), axes, float(rng.uniform(0, 180)), 0, 360, 0, -1)


def spoil(photo: NDArray[Any], rng: np.random.Generator) -> Pixels:
    """Defocus or motion, noise, and a camera's JPEG."""
    photo = np.clip(photo, 0, 255).astype(np.float32)
    kind = rng.random()
    if kind < 0.4:
        photo = cv2.GaussianBlur(photo, (0, 0), float(rng.uniform(0.5, 1.5)))
    elif kind < 0.6:
        length = int(rng.integers(3, 7))
        kernel = np.zeros((length, length), np.float32)
        kernel[length // 2] = 1 / length
        turned = cv2.getRotationMatrix2D((length / 2 - 0.5, length / 2 - 0.5), float(rng.uniform(0, 180)), 1)
        kernel = np.asarray(cv2.warpAffine(kernel, turned, (length, length)))
        photo = cv2.filter2D(photo, -1, kernel / kernel.sum())
    photo = np.clip(photo + rng.normal(0, rng.uniform(0, 6), photo.shape), 0, 255)
    quality = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(45, 92))]
    code = cv2.imencode(".jpg", photo.astype(np.uint8)[..., ::-1], quality)[1]
    return np.ascontiguousarray(np.asarray(cv2.imdecode(code, cv2.IMREAD_COLOR), np.uint8)[..., ::-1])


# ---- the set -------------------------------------------------------------------------------------------------------


def pictures(folder: Path, seed: str) -> list[Path]:
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    random.Random(seed).shuffle(found)
    return found


def make(
    folder: Path,
    out: Path,
    clutter: Path,
    *,
    things: int = 200,
    queries: int = 0,
    absent: int = 200,
    series: int = 0,
    views: int = 1,
    size: int = 1024,
    seed: int = 0,
) -> dict[str, Any]:
    """Write the set to `out`. `series` is the number of covers that share a look; 0: the pictures as they are.

    Of the first `queries` things there are views; 0: of all.
    """
    arts, backgrounds = pictures(folder, f"{seed}/things"), pictures(clutter, f"{seed}/clutter")
    if len(arts) < things + absent or not backgrounds:
        sys.exit(
            f"{things + absent} pictures and some clutter are needed; {len(arts)} and {len(backgrounds)} are there."
        )
    (out / "jpg").mkdir(parents=True, exist_ok=True)

    def save(name: str, pixels: Pixels) -> str:
        Image.fromarray(pixels).save(out / "jpg" / name, quality=90)
        return name

    truth: dict[str, Any] = {"name": out.name, "database": [], "queries": [], "absent": []}
    for number, path in enumerate(arts[: things + absent]):
        there = number < things
        volume = number if there else number - things
        group = volume // series if series else 0
        if not there and volume >= absent // 2:
            group += 1_000_000  # the other half: series of which nothing is in the database
        art = read(path, size)
        thing = cover(art, group, volume % series + (0 if there else series), seed) if series else art
        name = f"{number:05d}.jpg"
        if there:
            truth["database"].append(save(name, thing))
        for turn in range(views if not there or not queries or number < queries else 0):
            rng = np.random.default_rng((seed, number, turn))
            back = read(backgrounds[int(rng.integers(len(backgrounds)))], size)
            if max(back.shape) < size:  # a small photo of a set: clutter may be soft, as it is behind a thing
                back = scaled(back, size / max(back.shape))
            pixels, matrix = view(thing, back, rng)
            corners = np.clip(project(matrix, outline((thing.shape[1], thing.shape[0]))), 0, pixels.shape[1::-1])
            query = {
                "image": save(f"view_{number:05d}_{turn}.jpg", pixels),
                "bbox": [round(float(v), 1) for v in (*corners.min(0), *corners.max(0))],
                "positives": [name] if there else [],
                "junk": [],
                "transform": matrix.tolist(),
            }
            truth["queries" if there else "absent"].append(query)
    (out / "ground_truth.json").write_text(json.dumps(truth, indent=1))
    return truth


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pictures", type=Path, help="a folder of pictures: artwork, covers, photos")
    parser.add_argument("out", type=Path)
    parser.add_argument("--clutter", type=Path, required=True, help="a folder of photos to lie behind the prints")
    numbers = {"things": 200, "queries": 0, "absent": 200, "series": 0, "views": 1, "size": 1024, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args(arguments))
    truth = make(options.pop("pictures"), options.pop("out"), options.pop("clutter"), **options)
    print(f"{len(truth['database'])} prints, {len(truth['queries'])} views, {len(truth['absent'])} of absent ones")


if __name__ == "__main__":
    main()
