"""Take docs/images/{page,why,browse,copies,phone}.jpg: the real page, in a browser, over photographs that may be shown.

    python docs/write_screenshots.py        needs the extra `dev` and chromium; a few minutes without a GPU

The photographs and their altered views are those of examples/demo.py: public domain or CC0.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "examples")]

import demo  # noqa: E402
from cooc.api import Settings, create_app  # noqa: E402
from cooc.image_search import ImageSearch  # noqa: E402
from tests.serving import encoded, serving  # noqa: E402

RECIPE = "paper-linear+size=512"
SIDE = 640
NAMES = ["astronaut", "cat", "coffee", "rocket", "camera", "galaxies", "clock", "bricks"]
BOX = (0.2, 0.08, 0.88, 0.92)  # around the cup


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "photos"
        query = write(root)
        with ImageSearch.create(root / ".cooc", recipe=RECIPE, root=root) as made:
            made.index([root])
        with ImageSearch.open(root / ".cooc") as search:
            settings = Settings(folders=(Path(),), keep_seconds=600)
            with serving(create_app(search, settings)) as address, sync_playwright() as playwright:
                path = shutil.which("chromium") or shutil.which("chromium-browser")
                browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox"])
                page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=1.5)
                page.goto(address)
                take(page, query)
                page.goto(address)
                browse(page)
                page.goto(f"{address}/#copies=1")
                page.reload()
                copies(page)
                hand = browser.new_context(**playwright.devices["Pixel 7"], color_scheme="dark").new_page()
                hand.goto(address)
                phone(hand, query)
                browser.close()


def write(root: Path) -> bytes:
    """The collection, and a view that is not in it."""
    rng = random.Random(demo.SEED)
    for name, photo in demo.load(NAMES).items():
        (root / name).mkdir(parents=True)
        photo.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        photo.save(root / name / "photo.jpg", quality=90)
        for kind in ("cropped", "at dusk", "in glare"):
            demo.VIEWS[kind](photo, rng).save(root / name / f"{kind}.jpg", quality=90)
        if name == "coffee":
            query = encoded(demo.turn(photo, rng))
    return query


def take(page: Page, query: bytes) -> None:
    page.set_input_files("#file", {"name": "query.png", "mimeType": "image/png", "buffer": query})
    page.wait_for_selector(".card .mark")
    area = page.locator("#canvas").bounding_box()
    assert area
    x0, y0, x1, y1 = BOX
    page.mouse.move(area["x"] + x0 * area["width"], area["y"] + y0 * area["height"])
    page.mouse.down()
    page.mouse.move(area["x"] + x1 * area["width"], area["y"] + y1 * area["height"], steps=4)
    with page.expect_response("**/search?*"):
        page.mouse.up()
    page.wait_for_selector("#grid:not([aria-busy]) .card:not(.waiting)")
    page.mouse.move(5, 5)
    shoot(page, "page")
    page.locator(".card").first.hover()
    page.locator(".card .why").first.click()
    page.wait_for_selector(".points circle, .here")
    shoot(page, "why")


def browse(page: Page) -> None:
    """The collection without a query, three pictures selected and tagged."""
    page.wait_for_selector("#grid:not([aria-busy]) .card:not(.waiting)")
    for i in (0, 1, 2):
        page.locator(".card").nth(i).hover()
        page.locator(".pick input").nth(i).check()
    page.fill("#tag-name", "space suit")
    page.get_by_role("button", name="Tag", exact=True).click()
    page.wait_for_selector(".name :text('#space suit')")
    page.get_by_role("button", name="Tag", exact=True).hover()
    page.evaluate("scrollTo(0, 420)")  # to the names
    shoot(page, "browse")


def copies(page: Page) -> None:
    """Groups of copies, the rest of the first selected."""
    page.wait_for_selector("#grid:not([aria-busy]) .divider")
    page.locator(".divider button").first.click()
    shoot(page, "copies")


def phone(page: Page, query: bytes) -> None:
    page.set_input_files("#file", {"name": "query.png", "mimeType": "image/png", "buffer": query})
    page.wait_for_selector("#grid:not([aria-busy]) .card:not(.waiting)")
    shoot(page, "phone")


def shoot(page: Page, name: str) -> None:
    page.wait_for_load_state("networkidle")
    page.screenshot(path=DOCS / f"images/{name}.jpg", type="jpeg", quality=80)


if __name__ == "__main__":
    main()
