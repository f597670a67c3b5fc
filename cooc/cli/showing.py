"""Search results for people: a table with small pictures, a contact sheet, a page that needs no other file.

File names come from anywhere: they are shown so that no name can be taken for markup, hide a line break or fail to
print. Files that are gone since they were indexed get an empty frame.
"""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.style import Style
from rich.table import Table
from rich.text import Text

from cooc.errors import CoocError, counted
from cooc.pictures.boxes import Box
from cooc.pictures.decode import image_info, load_image

if TYPE_CHECKING:
    from cooc.index.shortlist import Match, Results
    from cooc.pictures import Collection as Files
    from cooc.pictures.decode import Picture

TILE, GAP, CAPTION, ACROSS = 220, 12, 36, 6  # of a contact sheet, in pixels; tiles in a row
PAPER, INK, MUTED, FRAME = (250, 250, 248), (25, 25, 25), (120, 120, 116), (200, 60, 30)
AGREED, REGION = (21, 128, 61), (46, 204, 113)  # of a mark, and of an outline
NO_MATCH = "Nothing in here seems to show the same thing: these are merely similar."
NOT_VERIFIED = "Nothing found: no picture agrees with the query in its details. These are merely similar."
BELOW = "merely similar from here on"
UNCALIBRATED = "This index has no calibration (cooc calibrate): whether anything shows the same thing cannot be told."


@dataclass(frozen=True, eq=False)
class Answer:
    """One query with its results."""

    title: str
    sources: Sequence[Picture]
    box: Box | None
    results: Results


def shown(name: str | os.PathLike[str]) -> str:
    """A name that prints on one line, whatever bytes it holds."""
    text = os.fsdecode(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def mark(match: Match) -> str:
    """What may be said of a result: vectors alone show that it is similar, never that it is the same."""
    if not match.verified or match.agreement is None or match.probability is None:
        return f"similar {match.score:.3f}"
    return f"{points_agree(match.agreement.inliers)}, {percent(match.probability)}"


def points_agree(count: int) -> str:
    return f"{counted(count, 'point')} agree{'s' * (count == 1)}"


def percent(probability: float) -> str:
    """Never 100: nothing is that certain."""
    return f"{min(round(100 * probability), 99)} %"


def note(results: Results) -> str:
    """What is to be said of all results together, if anything."""
    if not results.no_match or not results.matches:
        return ""
    return NOT_VERIFIED if results.checked else NO_MATCH


def turn(results: Results) -> int:
    """Where what is merely similar begins, below what is verified; 0 where nothing is."""
    count = sum(match.verified for match in results.matches)
    return count if count < len(results.matches) else 0


def thumbnail(source: Picture, side: int) -> Image.Image:
    try:
        return Image.fromarray(load_image(source, size=side))
    except CoocError:
        return Image.new("RGB", (side, side * 2 // 3), (230, 230, 228))


def _picture(match: Match, files: Files, side: int) -> Image.Image:
    """With the region that agrees with the query."""
    picture = thumbnail(files.picture(match.record.entry), side)
    if match.agreement is not None:
        _outline(picture, match.agreement.picture_region, match.agreement.picture_size)
    return picture


def _outline(picture: Image.Image, region: NDArray[np.float32], size: tuple[int, int]) -> None:
    corners = region * (picture.width / size[0], picture.height / size[1])
    around = [(x, y) for x, y in np.concatenate([corners, corners[:1]]).tolist()]
    ImageDraw.Draw(picture).line(around, REGION, width=2, joint="curve")


# Terminal


def table(answer: Answer, files: Files, pictures: bool) -> Table:
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 1 if pictures else 0, 0), show_edge=False)
    for title in ["#", ""] if pictures else ["#"]:
        rows.add_column(title, justify="right", no_wrap=True)
    rows.add_column("result", no_wrap=True)
    rows.add_column("picture", overflow="fold")  # a long name takes more lines, never the room of the others
    below = turn(answer.results)
    for number, match in enumerate(answer.results.matches, start=1):
        if below and number == below + 1:
            rows.add_row(*[""] * (2 if pictures else 1), "-" * 12, BELOW, style="dim")
        cells: list[Any] = [str(number)] + ([blocks(_picture(match, files, 32))] if pictures else [])
        name = Text(shown(match.path) + "  (away)" * match.away, Style(link=files.link(match.path)))
        rows.add_row(*cells, Text(mark(match), "green" if match.verified else ""), name)
    return rows


def blocks(picture: Image.Image, rows: int = 4) -> Text:
    """A picture in characters: each is an upper half block, two pixels in two colours."""
    width = max(1, min(3 * rows, round(2 * rows * picture.width / picture.height)))
    pixels = np.asarray(picture.resize((width, 2 * rows), Image.Resampling.BOX))
    text = Text()
    for above, below in zip(pixels[::2], pixels[1::2], strict=True):
        for a, b in zip(above, below, strict=True):
            text.append("▀", Style(color=f"#{a.tobytes().hex()}", bgcolor=f"#{b.tobytes().hex()}"))
        text.append("\n")
    return text[:-1]


# Contact sheet


def sheet(answers: Sequence[Answer], files: Files) -> Image.Image:
    """A line of tiles for each query, wrapped: the query first, its box drawn, then the results.

    What is merely similar begins a line of its own, below what is verified.
    """
    lines: list[list[tuple[Image.Image, str, str, tuple[int, int, int] | None]]] = []
    for answer in answers:
        tiles: list[Any] = [(picture, "query", answer.title, FRAME) for picture in _asked(answer)]
        tiles += [
            (_picture(match, files, TILE), mark(match), Path(match.path).name, AGREED if match.verified else None)
            for match in answer.results.matches
        ]
        below = turn(answer.results)
        first = len(answer.sources) + below if below else len(tiles)
        for part in (tiles[:first], tiles[first:]):
            lines += [part[i : i + ACROSS] for i in range(0, len(part), ACROSS)]
    width = GAP + max(len(line) for line in lines) * (TILE + GAP)
    canvas = Image.new("RGB", (width, GAP + len(lines) * (TILE + CAPTION + GAP)), PAPER)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(13)
    for row, line in enumerate(lines):
        for column, (picture, about, name, colour) in enumerate(line):
            x, y = GAP + column * (TILE + GAP), GAP + row * (TILE + CAPTION + GAP)
            at = x + (TILE - picture.width) // 2, y + (TILE - picture.height) // 2
            canvas.paste(picture, at)
            if colour is not None:
                corner = at[0] + picture.width, at[1] + picture.height
                draw.rectangle((at[0] - 3, at[1] - 3, corner[0] + 2, corner[1] + 2), outline=colour, width=3)
            draw.text((x, y + TILE + 3), about, AGREED if colour == AGREED else INK, font)
            draw.text((x, y + TILE + 19), _fitting(shown(name), font), MUTED, font)
    return canvas


def _fitting(text: str, font: Any) -> str:
    if font.getlength(text) <= TILE:
        return text
    while text and font.getlength(text + "...") > TILE:
        text = text[:-1]
    return text + "..."


def _asked(answer: Answer) -> list[Image.Image]:
    """The query's pictures with the box, and with the region that the best result agrees with."""
    pictures = [_with_box(source, answer.box) for source in answer.sources]
    for match in answer.results.matches[:1]:
        if match.agreement is not None:
            _outline(pictures[match.query], match.agreement.query_region, match.agreement.query_size)
    return pictures


def _with_box(source: Picture, box: Box | None) -> Image.Image:
    picture = thumbnail(source, TILE)
    if box is not None:
        scale = picture.width / image_info(source).width
        x0, y0, x1, y1 = (round(value * scale) for value in box)
        corner = min(x1, picture.width - 1), min(y1, picture.height - 1)
        ImageDraw.Draw(picture).rectangle((max(x0, 0), max(y0, 0), *corner), outline=FRAME, width=2)
    return picture


# Page

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#888}
body{font:15px/1.45 system-ui,sans-serif;max-width:1280px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.3rem}h2{font-size:1rem;margin-top:2.5rem;overflow-wrap:anywhere}
.note{padding:.6rem .9rem;border:1px solid var(--line);border-radius:8px}
.grid{display:flex;flex-wrap:wrap;gap:14px}
figure{margin:0;width:220px}img{max-width:220px;max-height:220px;display:block;border-radius:6px}
.query img{outline:3px solid #c83c1e}
.agrees b{color:#15803d}.line{color:var(--soft);border-top:1px solid var(--line);margin:1.4rem 0 .7rem}
@media(prefers-color-scheme:dark){.agrees b{color:#6ee7a0}}
figcaption{font-size:.85rem;overflow-wrap:anywhere}figcaption b{font-variant-numeric:tabular-nums}
small{color:var(--soft)}a{color:inherit}
"""


def head(title: str, heading: str) -> str:
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>\n"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; img-src data:; "
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escaped(title)}</title><style>{_STYLE}</style><h1>{escaped(heading)}</h1>"
    )


def page(answers: Sequence[Answer], files: Files, index: str) -> str:
    """HTML with everything inside, that may be mailed or kept."""
    parts = [head("cooc search", f"Pictures found in {index}")]
    for answer in answers:
        parts.append(f"<section><h2>{escaped(answer.title)}</h2>")
        if told := note(answer.results):
            parts.append(f"<p class=note>{told}</p>")
        parts.append("<div class=grid>")
        for picture in _asked(answer):
            parts.append(f"<figure class=query>{img(picture, 'query')}")
            parts.append("<figcaption>query</figcaption></figure>")
        figures = [_figure(match, files) for match in answer.results.matches]
        if below := turn(answer.results):
            figures.insert(below, f"</div><p class=line>{BELOW}</p><div class=grid>")
        parts += [*figures, "</div></section>"]
    return "\n".join(parts) + "\n"


def link(path: str, files: Files) -> str:
    return f"<a href='{html.escape(files.link(path))}'>{escaped(path)}</a>"


def _figure(match: Match, files: Files) -> str:
    name = link(match.path, files)
    date = f" <small>{match.record.taken[:10]}</small>" if match.record.taken else ""
    date += " <small>(away)</small>" * match.away
    picture = img(_picture(match, files, TILE), match.path)
    kind = " class=agrees" * match.verified
    return f"<figure{kind}>{picture}<figcaption><b>{mark(match)}</b><br>{name}{date}</figcaption></figure>"


def img(picture: Image.Image, about: str) -> str:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=82)
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img alt="{escaped(about)}" src="data:image/jpeg;base64,{data}">'


def escaped(text: str) -> str:
    return html.escape(shown(text))
