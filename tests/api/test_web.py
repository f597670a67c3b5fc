"""The page in a real browser (Debian's chromium, driven by Playwright) against a real server on loopback.

What was on the screen is kept in `build/web/`: look at it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from cooc.api import Settings, create_app
from cooc.explanation.heatmaps import RAMP
from cooc.image_search import ImageSearch
from cooc.index.calibration import Calibration
from tests.page import PHONE, Visit, drag, falling, give, keep, names
from tests.serving import encoded, make_index, photo, serving, views, write_collection

ROOT = Path(__file__).parents[2]
WEB = ROOT / "cooc/web"
TOKEN = "a token of more than sixteen characters"


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageSearch]:
    root = write_collection(tmp_path_factory.mktemp("web") / "photos")
    with make_index(root, Calibration(slope=40, offset=-26)) as search:
        yield search


@pytest.fixture(scope="module")
def address(search: ImageSearch) -> Iterator[str]:
    with serving(create_app(search, Settings(folders=(Path(),)))) as address:
        yield address


def test_welcome_and_upload(visit: Visit) -> None:
    page = visit()
    expect(page.get_by_role("heading", name="show the same thing")).to_be_visible()
    expect(page.locator("#collection")).to_have_text("18 pictures in photos")
    assert len(names(page)) == 18
    keep(page, "welcome")
    give(page)
    expect(page.locator("#summary")).to_contain_text("Most similar pictures first")
    assert names(page)[0] == "things/coffee-0.jpg"
    expect(page.locator("#welcome")).to_be_hidden()
    keep(page, "results")


def test_what_is_not_verified_is_only_similar(visit: Visit, search: ImageSearch) -> None:
    """By vectors alone nothing is ticked, no percentage is shown and no match is claimed, however high the score."""
    page = visit()
    give(page)
    scores = [match.score for match in search.search(encoded(photo("things/coffee", 400)), k=18).matches]
    expect(page.locator(".card .mark")).to_have_text([f"similar {score:.2f}" for score in scores])
    assert page.evaluate("getComputedStyle(document.querySelector('.mark'), '::before').content") == "none"
    page.locator(".card").first.hover()
    page.get_by_role("button", name="Why is").first.click()
    expect(page.locator("#why")).to_contain_text("not verified")
    told = page.evaluate(
        """() => document.body.innerText + [...document.querySelectorAll("[aria-label], [title]")]
        .map(e => `${e.getAttribute("aria-label")} ${e.title}`).join()"""
    )
    assert not re.search(r"\bmatch|%|likely", told, re.IGNORECASE)


@pytest.fixture(scope="module")
def verifying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over an index with local features: larger pictures, in which there is something to agree on."""
    root = tmp_path_factory.mktemp("verified") / "photos"
    root.mkdir()
    for name in ("animals/cat", "things/coffee", "people/astronaut"):
        for i, view in enumerate(views(photo(name, 420))):
            view.save(root / f"{name.partition('/')[2]}-{i}.jpg", quality=92)
    with make_index(root, features="sift") as search, serving(create_app(search)) as address:
        yield address


def test_what_is_verified_leads_and_is_divided(visit: Visit, verifying: str) -> None:
    page = visit(verifying)
    give(page)
    marks = page.locator(".card .mark")
    expect(marks).to_have_text([re.compile(r"^\d+ points agree$")] * 3 + ["similar"] * 6)
    assert {name.partition("-")[0] for name in names(page)[:3]} == {"coffee"}
    assert "\u2713" in page.evaluate("getComputedStyle(document.querySelector('.mark'), '::before').content")
    expect(page.locator("#summary")).to_contain_text("What shows the same thing first")
    order = page.locator("#grid > li").evaluate_all("all => all.map(one => one.className)")
    assert order == ["card"] * 3 + ["filler", "divider"] + ["card"] * 6
    heights = [box["height"] for one in page.locator(".card").all()[:3] if (box := one.bounding_box())]
    assert max(heights) < 1.5 * min(heights)  # the last one of its row did not grow over all of it
    expect(page.locator(".divider")).to_have_text("Merely similar")
    keep(page, "verified")
    with page.expect_response(re.compile("verify=false")):
        page.get_by_label("Verify").uncheck()
    expect(marks).to_have_text([re.compile("^similar ")] * 9)
    expect(page.locator(".divider")).to_have_count(0)
    noise = encoded(Image.effect_noise((200, 160), 90).convert("RGB"))
    page.get_by_label("Verify").check()
    page.set_input_files("#file", {"name": "noise.png", "mimeType": "image/png", "buffer": noise})
    expect(page.locator("#notice")).to_contain_text("Nothing found")
    expect(page.locator("#notice")).to_contain_text("merely similar")
    keep(page, "nothing-verified")


def test_points_and_lines_between_the_pictures(visit: Visit, verifying: str) -> None:
    """Each line begins and ends at a point that agrees, and the regions lie over both pictures."""
    page = visit(verifying)
    give(page)
    page.locator(".card").first.hover()
    page.get_by_role("button", name="Why is").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("#why")).to_contain_text(re.compile(r"\d+ points agree: the same thing, \d\d %"))
    expect(dialog.locator(".points polygon")).to_have_count(2)
    points = dialog.locator("#left .points circle").count()
    assert points == dialog.locator("#right .points circle").count() > 10
    lines = dialog.locator("#lines line")
    assert 10 < lines.count() <= 60
    ends = """() => { const middle = element => { const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; };
        const all = document.getElementById("lines").getBoundingClientRect();
        const line = document.querySelector("#lines line");
        const at = n => [all.x + +line.getAttribute("x" + n), all.y + +line.getAttribute("y" + n)];
        return [at(1), middle(document.querySelector("#left .points circle")),
                at(2), middle(document.querySelector("#right .points circle"))]; }"""
    first, left, second, right = page.evaluate(ends)
    assert first == pytest.approx(left, abs=1.5)
    assert second == pytest.approx(right, abs=1.5)
    expect(dialog.get_by_label("Show the shares")).not_to_be_checked()
    keep(page, "points")
    page.set_viewport_size({"width": 900, "height": 700})  # the lines go along
    page.wait_for_timeout(100)
    first, left, second, right = page.evaluate(ends)
    assert first == pytest.approx(left, abs=1.5)
    assert second == pytest.approx(right, abs=1.5)
    dialog.get_by_label("Show the shares").check()
    expect(dialog.locator(".clip")).to_have_count(2)
    dialog.get_by_label("Show the points").uncheck()
    expect(dialog.locator(".points, #lines line")).to_have_count(0)


def test_rows_are_justified(visit: Visit) -> None:
    """Pictures of a row have one height, fill the width, and keep their shape."""
    page = visit()
    names(page)
    boxes = [box for card in page.locator(".card").all() if (box := card.bounding_box())]
    rows: dict[float, list[dict[str, float]]] = {}
    for box in boxes:
        rows.setdefault(round(box["y"]), []).append(dict(box))
    assert len(rows) > 2
    for row in list(rows.values())[:-1]:
        assert max(box["height"] for box in row) - min(box["height"] for box in row) < 2
        assert row[-1]["x"] + row[-1]["width"] == pytest.approx(1260, abs=3)


def test_drop_and_paste(visit: Visit) -> None:
    page = visit()
    data = list(encoded(photo("animals/cat", 300)))
    transfer = page.evaluate_handle(
        """data => { const t = new DataTransfer();
        t.items.add(new File([new Uint8Array(data)], "cat.png", { type: "image/png" })); return t; }""",
        data,
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": transfer})
    expect(page.locator("body")).to_have_class(re.compile("dropping"))
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    expect(page.locator("#summary")).to_contain_text("Most similar")
    assert names(page)[0].startswith("animals/cat")
    other = visit()
    names(other)
    pasted = """data => { const t = new DataTransfer();
        t.items.add(new File([new Uint8Array(data)], "cat.png", { type: "image/png" }));
        window.dispatchEvent(new ClipboardEvent("paste", { clipboardData: t })); }"""
    other.evaluate(pasted, data)
    expect(other.locator("#summary")).to_contain_text("Most similar")
    assert names(other)[0].startswith("animals/cat")


def test_a_box_is_drawn_moved_resized_and_removed(visit: Visit) -> None:
    """Two photographs in one picture: the box decides which is found."""
    page = visit()
    cat, coffee = photo("animals/cat", 300), photo("things/coffee", 300)
    both = Image.new("RGB", (cat.width + coffee.width, max(cat.height, coffee.height)))
    both.paste(cat, (0, 0))
    both.paste(coffee, (cat.width, 0))
    page.set_input_files("#file", {"name": "both.png", "mimeType": "image/png", "buffer": encoded(both)})
    names(page)
    box = page.locator(".box")
    with page.expect_response(re.compile("/search")):
        drag(page, 0.51, 0.02, 0.99, 0.98)
    assert names(page)[0].startswith("things/coffee")
    placed = box.evaluate("b => ['left', 'top', 'width', 'height'].map(side => parseFloat(b.style[side]))")
    assert placed == pytest.approx([51, 2, 48, 96], abs=1.5)
    expect(box).to_have_attribute("aria-label", re.compile(r"Box, 2\d\d by 1\d\d pixels"))  # of the full-size picture
    keep(page, "box")
    with page.expect_response(re.compile("/search")):
        drag(page, 0.75, 0.5, 0.2, 0.5)  # by its middle, to the left
    assert names(page)[0].startswith("animals/cat")
    before = box.bounding_box()
    with page.expect_response(re.compile("/search")):
        drag(page, *(_corner(page, "se")), 0.3, 0.6)
    after = box.bounding_box()
    assert before
    assert after
    assert after["width"] < before["width"]
    assert after["height"] < before["height"]
    box.focus()
    with page.expect_response(re.compile("/search")):
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Shift+ArrowDown")
    moved = box.bounding_box()
    assert moved
    assert moved["x"] > after["x"]
    assert moved["height"] > after["height"]
    with page.expect_response(re.compile("/search")):
        page.get_by_role("button", name="Whole picture").click()
    expect(box).to_have_count(0)


def _corner(page: Page, name: str) -> tuple[float, float]:
    area, handle = page.locator("#canvas").bounding_box(), page.locator(f"[data-handle={name}]").bounding_box()
    assert area
    assert handle
    x, y = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
    return (x - area["x"]) / area["width"], (y - area["y"]) / area["height"]


def test_click_through_and_back(visit: Visit) -> None:
    page = visit()
    names(page)
    page.get_by_role("button", name="Search by space/rocket-0.jpg").click()
    expect(page.locator("#summary")).to_contain_text("Most similar")
    found = names(page)
    assert "space/rocket-0.jpg" not in found
    assert found[0].startswith("space/rocket")
    page.locator(".card .by").nth(5).click()
    expect(page.locator("#grid .waiting")).to_have_count(0)
    assert names(page) != found
    page.go_back()
    expect(page.locator(".card .by").first).to_have_attribute("title", found[0])
    page.reload()  # the address says what was looked for
    expect(page.locator(".card .by").first).to_have_attribute("title", found[0])


def test_several_photos_are_joined(visit: Visit) -> None:
    page = visit()
    give(page, "animals/cat")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add a photo").click()
    rocket = {"name": "r.png", "mimeType": "image/png", "buffer": encoded(photo("space/rocket"))}
    chooser.value.set_files(rocket)  # type: ignore[arg-type]
    expect(page.locator("#strip button")).to_have_count(2)
    page.wait_for_selector("#grid:not([aria-busy])")
    assert {name.rpartition("-")[0] for name in names(page)[:4]} == {"animals/cat", "space/rocket"}


def test_explanation(visit: Visit) -> None:
    page = visit()
    give(page)
    drag(page, 0.25, 0.1, 0.85, 0.9)
    page.wait_for_timeout(400)
    names(page)
    page.locator(".card").nth(1).hover()
    page.get_by_role("button", name=f"Why is {names(page)[1]} similar?").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("#why")).to_contain_text("add up to it")
    expect(dialog.locator(".here")).to_have_count(2)
    for side in ("left", "right"):
        picture, heat = dialog.locator(f"#{side} img").bounding_box(), dialog.locator(f"#{side} .clip").bounding_box()
        assert picture
        assert heat
        assert picture["x"] - 1 <= heat["x"]
        assert heat["x"] + heat["width"] <= picture["x"] + picture["width"] + 1
    keep(page, "explanation")
    page.keyboard.press("ArrowRight")
    expect(dialog.locator("#right-name")).to_have_text(names(page)[2])
    dialog.get_by_label("Show the shares").uncheck()
    expect(dialog.locator("canvas:not(#ramp)")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_filters_and_toggles(visit: Visit) -> None:
    page = visit()
    give(page)
    page.get_by_label("Folder").select_option("space")
    expect(page.locator(".card .by")).to_have_count(6)
    assert all(name.startswith("space/") for name in names(page))
    page.get_by_label("Taken from").fill("2023-01-01")
    expect(page.locator(".card .by")).to_have_count(3)
    page.get_by_label("until").fill("2022-01-01")
    expect(page.locator("#notice")).to_contain_text("No picture passes the filters")
    keep(page, "nothing-passes")
    page.get_by_role("button", name="Clear the filters").click()
    expect(page.locator(".card .by")).to_have_count(18)
    for label, option in (("Expand the query", "expand=alpha"), ("Re-rank", "rerank=superglobal")):
        with page.expect_response(re.compile(option)) as asked:
            page.get_by_label(label).check()
        assert asked.value.ok
        names(page)
        assert falling(page)


def test_no_match(visit: Visit) -> None:
    page = visit()
    noise = encoded(Image.effect_noise((200, 160), 90).convert("RGB"))
    page.set_input_files("#file", {"name": "noise.png", "mimeType": "image/png", "buffer": noise})
    expect(page.locator("#notice")).to_contain_text("Nothing in this collection seems to show the same thing")
    expect(page.locator("#notice")).to_contain_text("Draw a box")
    expect(page.locator("#notice")).to_contain_text("merely similar")
    keep(page, "no-match")


def test_errors_help(visit: Visit) -> None:
    page = visit(calm=False)  # the browser reports failed requests by itself
    names(page)
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"})
    expect(page.locator("#notice.problem")).to_contain_text("picture")
    expect(page.locator("#canvas")).to_have_text("This file is broken.")
    expect(page.get_by_role("button", name="Try again")).to_have_count(0)  # it would be broken again
    keep(page, "error")
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"})
    expect(page.locator("#notice")).to_contain_text("no picture")
    page.context.set_offline(True)
    give_offline = {"name": "q.png", "mimeType": "image/png", "buffer": encoded(photo("animals/cat"))}
    page.set_input_files("#file", give_offline)  # type: ignore[arg-type]
    expect(page.locator("#notice")).to_contain_text("cannot be reached")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#summary")).to_contain_text("Most similar")


def test_a_busy_server_is_asked_again(visit: Visit, search: ImageSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 503 is no error for a person: the page waits as long as it was told."""
    describe, go_on = search._describe, threading.Event()
    monkeypatch.setattr(search, "_describe", lambda *asked: describe(*asked) if go_on.wait(60) else None)
    app = create_app(search, Settings(describing=1, describing_waiting=0))
    picture = encoded(photo("things/coffee"))
    with serving(app) as address, ThreadPoolExecutor(1) as other, visit(address, calm=False) as page:
        names(page)
        first = other.submit(httpx.post, f"{address}/api/v1/search", files={"image": picture}, timeout=60)
        while not app.state.services.describing.busy and not first.done():
            page.wait_for_timeout(20)
        page.set_input_files("#file", {"name": "q.png", "mimeType": "image/png", "buffer": picture})
        expect(page.locator("#summary")).to_contain_text("busy")
        go_on.set()
        assert first.result().status_code == 200
        expect(page.locator("#summary")).to_contain_text("Most similar")


def test_endless_scroll(visit: Visit, search: ImageSearch, tmp_path: Path) -> None:
    """More pictures come as one scrolls, never all at once, and each one only once."""
    for i in range(70):
        photo("animals/cat", 64).rotate(5 * i).save(tmp_path / f"{i:03}.jpg")
    size = {"width": 1280, "height": 500}
    with make_index(tmp_path) as many, serving(create_app(many)) as address, visit(address, viewport=size) as page:
        names(page)
        assert page.locator(".card").count() <= 60
        page.locator(".card .by").first.click()
        expect(page.locator("#summary")).to_contain_text("Most similar")
        while page.locator(".card:not(.waiting)").count() < 69:
            page.mouse.wheel(0, 3000)
            page.wait_for_timeout(50)
        found = names(page)
        assert len(found) == len(set(found)) == 69


def test_keyboard_alone(visit: Visit) -> None:
    """Tab and Enter reach the results, the explanation, and out of it."""
    page = visit()
    names(page)
    page.locator(".card .by").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#summary")).to_contain_text("Most similar")
    assert page.evaluate("document.activeElement.id") == "results"
    names(page)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "why"
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").locator("#why")).to_contain_text("score")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "why"


def test_names_for_screen_readers(visit: Visit) -> None:
    page = visit()
    give(page)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, img, dialog, section")]
        .filter(e => !(e.getAttribute("aria-label") ?? e.getAttribute("aria-labelledby") ?? e.alt ?? "").length
            && !e.textContent.trim() && !e.labels?.length && e.alt !== "").map(e => e.outerHTML)"""
    )
    assert unnamed == []
    assert page.get_attribute("html", "lang") == "en"


def test_phone(visit: Visit) -> None:
    page = visit(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    names(page)
    keep(page, "phone-welcome")
    give(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    keep(page, "phone-results")
    for card in page.locator(".card").all():
        mark, why, pick = (card.locator(part).bounding_box() for part in (".mark", ".why", ".pick"))
        assert mark
        assert why
        assert pick
        assert mark["y"] + mark["height"] <= min(why["y"], pick["y"])  # none lies over another
        assert pick["x"] + pick["width"] <= why["x"]
    page.get_by_role("button", name=re.compile("Why")).first.tap()
    expect(page.get_by_role("dialog").locator(".here")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    keep(page, "phone-explanation")


def test_dark(visit: Visit) -> None:
    page = visit(color_scheme="dark")
    give(page)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", background))) < 150
    keep(page, "dark")


def test_token(visit: Visit, search: ImageSearch) -> None:
    with serving(create_app(search, Settings(token=TOKEN))) as address, visit(address, calm=False) as page:
        page.get_by_label("Token", exact=True).fill("wrong")
        page.get_by_role("button", name="Go on").click()
        expect(page.locator("#login-problem")).to_contain_text("not the server's token")
        keep(page, "token")
        page.get_by_label("Token", exact=True).fill(TOKEN)
        page.get_by_role("button", name="Go on").click()
        expect(page.locator(".card img").first).to_be_visible()
        assert len(names(page)) == 18


def test_updating_the_index(visit: Visit, tmp_path: Path) -> None:
    write_collection(tmp_path)
    with (
        make_index(tmp_path) as search,
        serving(create_app(search, Settings(folders=(Path(),)))) as address,
        visit(address) as page,
    ):
        names(page)
        photo("animals/cat", 90).rotate(20).save(tmp_path / "new.jpg")
        (tmp_path / "bad.jpg").write_text("no picture")
        page.get_by_role("button", name="Update the index").click()
        expect(page.locator("#collection")).to_contain_text("19 pictures")
        expect(page.locator("#notice")).to_contain_text("Files that were left out: 1.")
        expect(page.locator("#notice li")).to_have_text(re.compile("^bad.jpg: .*not a picture"))


def test_api_page(visit: Visit, address: str) -> None:
    """To read and to try, without anything from elsewhere."""
    page = visit(f"{address}/docs")
    page.locator("#operations-server-get_health button").first.click()
    page.get_by_role("button", name="Try it out").click()
    with page.expect_response(re.compile("/health")) as answer:
        page.get_by_role("button", name="Execute").click()
    assert answer.value.ok
    expect(page.get_by_text('"status": "ok"').first).to_be_visible()
    keep(page, "docs")


def test_no_script_or_style_in_the_page_and_none_from_elsewhere() -> None:
    for file in WEB.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", text), file.name
        for found in re.findall(r"https?://[^\s\"')]+", text):
            assert found == "http://www.w3.org/2000/svg", file.name  # a name, nothing is fetched


def test_colours_are_those_of_the_library() -> None:
    rows = re.findall(r"\[(\d+), (\d+), (\d+)\],", (WEB / "heat.js").read_text(encoding="utf-8"))
    np.testing.assert_array_equal(np.array(rows, int), RAMP[::17])
