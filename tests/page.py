"""What tests of the page do with it: give a photo, draw, read the cards, keep a picture of the screen."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.serving import encoded, photo

SCREENSHOTS = Path(__file__).parents[1] / "build/web"
PHONE = {"width": 390, "height": 844}
Visit = Callable[..., Page]


def keep(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.wait_for_load_state("networkidle")
    page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")


def give(page: Page, name: str = "things/coffee", side: int = 400) -> None:
    page.set_input_files("#file", {"name": "q.png", "mimeType": "image/png", "buffer": encoded(photo(name, side))})
    expect(page.locator(".card .mark").first).to_be_visible()


def drag(page: Page, x0: float, y0: float, x1: float, y1: float) -> None:
    """Over the query, in parts of its width and height."""
    area = page.locator("#canvas").bounding_box()
    assert area
    page.mouse.move(area["x"] + x0 * area["width"], area["y"] + y0 * area["height"])
    page.mouse.down()
    page.mouse.move(area["x"] + x1 * area["width"], area["y"] + y1 * area["height"], steps=3)
    page.mouse.up()


def falling(page: Page) -> bool:
    """Numbers on cards never rise from one to the next, whatever ordered them."""
    said = page.locator(".card .mark").all_inner_texts()
    scores = [float(text.removeprefix("similar ")) for text in said if re.fullmatch(r"similar -?\d\.\d\d", text)]
    return scores == sorted(scores, reverse=True)


def names(page: Page) -> list[str]:
    page.wait_for_selector("#grid:not([aria-busy]) .card:not(.waiting)")
    return [str(button.get_attribute("title")) for button in page.locator(".card .by").all()]
