"""Working with the page: looking through a collection, choosing pictures, taking them along, links; on a screen and on
a phone, light and dark, with a pointer, a finger and the keyboard alone. axe-core looks at every step."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pillow_heif
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import CDPSession, Locator, Page, expect

from cooc.api import Settings, create_app
from cooc.image_search import ImageSearch
from cooc.keeping import choose
from cooc.text import update
from tests.page import PHONE, Visit, drag, give, keep, names
from tests.serving import descriptor, encoded, photo, serving
from tests.test_text import write_model

SCREEN = {"viewport": {"width": 1400, "height": 900}}
HAND = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
LOOKS = {
    f"{kind}-{scheme}": {**size, "color_scheme": scheme}
    for kind, size in (("screen", SCREEN), ("phone", HAND))
    for scheme in ("light", "dark")
}


SIZES = ["screen-light", "phone-dark"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("clip") / "small")


@pytest.fixture
def address(search: ImageSearch) -> Iterator[str]:
    with serving(create_app(search, Settings(folders=(Path(),), keep_seconds=600, rate=0))) as address:
        yield address


def check(page: Page) -> None:
    """Nothing that axe-core calls serious or critical, and nothing that sticks out of the screen."""
    found = Axe().run(page).response["violations"]
    faults = [
        (one["id"], [node["html"][:200] for node in one["nodes"]])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert faults == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def box(page: Page, name: str) -> Locator:
    return page.get_by_role("checkbox", name=f"Select {name}", exact=True)


def until(page: Page, true: str) -> None:
    """Playwright's own way evaluates text in the page, which its policy forbids."""
    for _ in range(400):
        if page.evaluate(true):
            return
        page.wait_for_timeout(50)
    raise AssertionError(true)


def unfold(page: Page) -> None:
    if page.locator("#filters").get_attribute("open") is None:
        page.get_by_text("Folder, tag and date").click()


def saved(page: Page, button: str) -> bytes:
    with page.expect_download() as download:
        page.get_by_role("button", name=button, exact=True).click()
    return Path(download.value.path()).read_bytes()


@pytest.mark.parametrize("look", LOOKS)
def test_every_path(visit: Visit, search: ImageSearch, look: str) -> None:
    page = visit(**LOOKS[look])
    assert len(names(page)) == 18
    expect(page.locator(".card .name").first).to_have_text("cat-0.jpganimals")
    unfold(page)
    check(page)
    keep(page, f"{look}-browse")

    # The collection by month and folder, without a query.
    page.get_by_label("Month").select_option(label="2021-12 (3)")
    expect(page.locator(".card .by")).to_have_count(3)
    assert {name.rpartition("-")[0] for name in names(page)} == {"space/galaxies"}
    expect(page.get_by_label("Taken from")).to_have_value("2021-12-01")
    expect(page.get_by_label("until")).to_have_value("2021-12-31")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".card .by")).to_have_count(18)
    page.get_by_label("Folder").select_option("space")
    expect(page.locator(".card .by")).to_have_count(6)

    # Choose three, tag them, look for the tag.
    for i in range(3):
        page.locator(".card").nth(i).hover()
        box(page, f"space/galaxies-{i}.jpg").check()
    expect(page.locator("#selected")).to_have_text("3 selected")
    expect(page.locator("#marking")).to_be_hidden()  # nothing was looked for
    page.get_by_label("A tag for them").fill("deep field")
    page.get_by_role("button", name="Tag", exact=True).click()
    expect(page.locator("#selected")).to_have_text("3 have the tag deep field")
    expect(page.locator(".card .name").first).to_contain_text("#deep field")
    box(page, "space/galaxies-0.jpg").uncheck()
    page.get_by_label("A tag for them").fill("deep field")
    page.get_by_role("button", name="Untag").click()
    expect(page.locator("#selected")).to_have_text("2 no longer have the tag deep field")
    check(page)
    keep(page, f"{look}-selected")
    page.locator("#none").click()
    expect(page.locator("#selection")).to_be_hidden()
    page.get_by_label("Folder").select_option("")
    page.locator("#tag").select_option(label="deep field (1)")
    expect(page.locator(".card .by")).to_have_count(1)
    tagged = {record.path for record in search.store.records() if record.tags}
    assert tagged == {"space/galaxies-0.jpg"}
    page.locator("#clear").click()
    expect(page.locator(".card .by")).to_have_count(18)

    # Search by one, mark what is right and wrong, take it along.
    page.get_by_role("button", name="Search by space/rocket-0.jpg").click()
    expect(page.locator("#summary")).to_contain_text("Most similar")
    first, second, *others = names(page)
    for name in (first, second):
        box(page, name).check()
    page.get_by_role("button", name="Right").click()
    expect(page.locator("#selected")).to_have_text("2 marked right")
    expect(page.locator(".card.right")).to_have_count(2)
    packed = zipfile.ZipFile(io.BytesIO(saved(page, "ZIP")))
    assert packed.namelist() == [first, second]
    assert packed.read(first) == (search.root / first).read_bytes()
    rows = list(csv.DictReader(io.StringIO(saved(page, "CSV").decode())))
    assert [row["path"] for row in rows] == [first, second]
    assert [row["path"] for row in json.loads(saved(page, "JSON"))] == [first, second]
    page.locator("#none").click()
    box(page, others[-1]).check()
    page.get_by_role("button", name="Wrong").click()
    expect(page.locator(".card.wrong")).to_have_count(1)
    check(page)
    keep(page, f"{look}-marked")
    page.reload()
    expect(page.locator(".card.right")).to_have_count(2)  # the index keeps them
    expect(page.locator(".card.wrong")).to_have_count(1)
    box(page, others[-1]).check()
    page.get_by_role("button", name="Wrong").click()
    expect(page.locator(".card.wrong")).to_have_count(0)  # the same mark again takes it back

    # Why, and back.
    page.locator("#none").click()
    page.locator(".card").first.hover()
    page.get_by_role("button", name=f"Why is {first} similar?").click()
    expect(page.locator("#why")).to_contain_text("add up to it")
    check(page)
    page.get_by_role("button", name="Close").click()


def test_ranges_by_shift_and_by_key(visit: Visit) -> None:
    page = visit(**SCREEN)
    all = names(page)
    picked = page.locator(".card.picked")
    page.locator(".card").nth(2).hover()
    box(page, all[2]).click()
    page.locator(".card .by").nth(6).click(modifiers=["Shift"])
    expect(picked).to_have_count(5)
    page.locator(".card .by").nth(4).click()  # while some are selected, a click on a picture selects, too
    expect(picked).to_have_count(4)
    expect(page.locator("body")).not_to_have_class(re.compile("searching"))
    page.keyboard.press("Escape")
    expect(picked).to_have_count(0)
    page.locator(".card .by").nth(1).focus()
    page.keyboard.press("x")
    page.locator(".card .by").nth(3).focus()
    page.keyboard.press("Shift+X")
    expect(picked).to_have_count(3)
    page.keyboard.press("Control+a")
    expect(picked).to_have_count(18)
    page.keyboard.press("x")
    expect(picked).to_have_count(17)
    page.locator(".card .by").nth(9).click(modifiers=["Control"])
    expect(picked).to_have_count(16)
    page.get_by_role("button", name="Select all shown").click()
    expect(page.locator("#selected")).to_have_text("18 selected")


def test_the_keyboard_alone(visit: Visit, search: ImageSearch) -> None:
    """All the way through: browse, search, a box, select, tag, mark, why; the pointer is never used."""
    page = visit(**SCREEN)
    names(page)
    press = page.keyboard.press

    def to(id: str, most: int = 60) -> None:
        for _ in range(most):
            press("Tab")
            if page.evaluate("document.activeElement.id") == id:
                return
        raise AssertionError(f"Tab does not lead to {id}")

    to("folder")
    page.keyboard.type("space")
    expect(page.locator(".card .by")).to_have_count(6)
    press("Tab")
    while page.evaluate("document.activeElement.className") != "by":
        press("Tab")
    press("Enter")
    expect(page.locator("#summary")).to_contain_text("Most similar")
    names(page)
    for _ in range(30):  # back to the query
        press("Shift+Tab")
        if page.evaluate("document.activeElement.id") == "part":
            break
    with page.expect_response(re.compile("similar.*box=")):
        press("Enter")
    expect(page.locator(".box")).to_be_focused()
    with page.expect_response(re.compile("similar.*box=")):
        press("ArrowRight")
        press("Shift+ArrowDown")
    first = names(page)[0]
    page.locator(".skip").focus()  # the first stop of all: as Tab from the address bar
    press("Enter")
    press("Tab")
    press("x")
    expect(page.locator("#selected")).to_have_text("1 selected")
    to("mark-right")
    press("Enter")
    expect(page.locator(".card.right")).to_have_count(1)
    to("tag-name")
    page.keyboard.type("mine")
    press("Enter")
    expect(page.locator("#selected")).to_have_text("1 have the tag mine")
    assert [record.path for record in search.store.records() if record.tags] == [first]
    press("Escape")
    expect(page.locator("#selection")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "results"  # where one goes on from
    press("Tab")
    press("Tab")
    assert page.evaluate("document.activeElement.className") == "why"
    press("Enter")
    expect(page.locator("#why")).to_contain_text("add up to it")
    press("Escape")
    assert page.evaluate("document.activeElement.className") == "why"


# Keeping a collection


def given(name: str, data: bytes) -> Any:
    return {"name": name, "mimeType": "image/png", "buffer": data}


@pytest.mark.parametrize("look", SIZES)
def test_pictures_are_added_and_removed(visit: Visit, search: ImageSearch, look: str) -> None:
    page = visit(calm=False, **LOOKS[look])  # the browser reports a refused file by itself
    names(page)
    cat, coffee = encoded(photo("animals/cat", 90)), encoded(photo("things/coffee", 90))
    page.get_by_role("button", name="Add pictures").click()
    page.get_by_label("Put into").fill("new")
    page.set_input_files("#adding-files", [given("a.png", cat), given("bad.png", b"none"), given("b.png", coffee)])
    expect(page.locator("#adding-state")).to_have_text("2 of 3 added.")
    lines = ["\u2713 new/a.png", re.compile("^bad.png: .*not a picture"), "\u2713 new/b.png"]
    expect(page.locator("#adding-list li")).to_have_text(lines)
    assert page.locator("#adding-progress").get_attribute("value") == "3"
    check(page)
    keep(page, f"{look}-adding")
    drop = """data => { const t = new DataTransfer();
        t.items.add(new File([new Uint8Array(data)], "c.png", { type: "image/png" })); return t; }"""
    page.dispatch_event("#adding", "drop", {"dataTransfer": page.evaluate_handle(drop, list(cat))})
    expect(page.locator("#adding-list li").last).to_have_text("\u2713 new/c.png")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#collection")).to_contain_text("21 pictures")
    expect(page.locator(".card .by")).to_have_count(21)
    expect(page.locator("body")).not_to_have_class(re.compile("searching"))  # what is dropped there is no query
    assert [(search.root / f"new/{name}.png").read_bytes() for name in "abc"] == [cat, coffee, cat]

    # Removing asks first, and says what becomes of the files.
    unfold(page)
    page.get_by_label("Folder").select_option("new")
    expect(page.locator(".card .by")).to_have_count(3)
    for name in ("new/a.png", "new/b.png"):
        page.get_by_role("button", name=f"Search by {name}").hover()
        box(page, name).check()
    dialog, remove = page.get_by_role("dialog"), page.locator("#remove")
    remove.click()
    expect(dialog.get_by_role("heading")).to_have_text("Remove 2 pictures?")
    expect(dialog).to_contain_text("Their files stay")
    check(page)
    keep(page, f"{look}-removing")
    page.keyboard.press("Escape")
    remove.click()
    page.keyboard.press("Enter")  # the first button: cancel
    expect(dialog).to_be_hidden()
    assert len(names(page)) == 3
    remove.click()
    dialog.get_by_role("button", name="Remove").click()
    expect(page.locator("#summary")).to_have_text("2 removed.")
    expect(page.locator(".card .by")).to_have_count(1)
    expect(page.locator("#collection")).to_contain_text("19 pictures")
    assert (search.root / "new/a.png").exists()
    page.get_by_role("button", name="Search by new/c.png").hover()
    box(page, "new/c.png").check()
    remove.click()
    dialog.get_by_label("Delete the files, too").check()
    dialog.get_by_role("button", name="Remove").click()
    expect(page.locator("#summary")).to_have_text("1 removed, their files deleted.")
    assert not (search.root / "new/c.png").exists()


@pytest.mark.parametrize("look", SIZES)
def test_groups_of_copies(visit: Visit, search: ImageSearch, look: str) -> None:
    for name in ("animals/cat", "things/coffee"):
        photo(name).save(search.root / f"{name}-copy.jpg", quality=60)
    with ImageSearch.open(search.index_path, write=True, descriptor=descriptor()) as writer:
        writer.index([search.root], workers=0)
    wanted = [choose(group, search.collection) for group in search.duplicates()]
    page = visit(**LOOKS[look])
    names(page)
    page.get_by_role("button", name="Find copies").click()
    expect(page.locator("#summary")).to_contain_text("Groups of copies")
    assert names(page) == [record.path for choice in wanted for record in (choice.keep, *choice.rest)]
    expect(page.locator(".card .mark:not(:empty)")).to_have_text([f"keep: {choice.why}" for choice in wanted])
    first = wanted[0]
    about = f"{first.keep.width} x {first.keep.height}, {math.ceil(first.keep.size / 1000)} kB"
    expect(page.locator(".card .name").first).to_contain_text(about)
    check(page)
    keep(page, f"{look}-copies")
    page.get_by_role("button", name=f"Select the rest of the copies of {first.keep.path}").click()
    expect(page.locator("#selected")).to_have_text(f"{len(first.rest)} selected")
    page.get_by_role("button", name="Select all but those to keep").click()
    rest = [record.path for choice in wanted for record in choice.rest]
    expect(page.locator("#selected")).to_have_text(f"{len(rest)} selected")
    rows = list(csv.DictReader(io.StringIO(saved(page, "CSV").decode())))
    assert [row["path"] for row in rows] == rest
    page.locator("#remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.locator("#summary")).to_have_text(f"{len(rest)} removed.")
    expect(page.locator(".card")).to_have_count(0)
    page.reload()  # the address says what is shown
    expect(page.locator("#notice")).to_contain_text("There are no copies.")
    page.get_by_role("button", name="Find copies", pressed=True).click()
    assert len(names(page)) == 20 - len(rest)


@pytest.mark.parametrize("look", SIZES)
def test_words(visit: Visit, search: ImageSearch, clip: Path, look: str) -> None:
    with ImageSearch.open(search.index_path, write=True, descriptor=descriptor()) as writer:
        update(writer.index_path, writer.store, writer.collection, str(clip), device="cpu")
    page = visit(**LOOKS[look])
    names(page)
    page.get_by_label("Search by words").fill("a red car")
    page.keyboard.press("Enter")
    expect(page.locator("#summary")).to_contain_text("a red car")
    assert names(page) == [match.path for match in search.search_text("a red car").matches]
    check(page)
    unfold(page)
    page.get_by_label("Folder").select_option("space")
    expect(page.locator(".card .by")).to_have_count(6)
    page.reload()
    expect(page.locator(".card .by")).to_have_count(6)
    expect(page.get_by_label("Search by words")).to_have_value("a red car")


# Links


def test_a_link_holds_the_search(visit: Visit) -> None:
    """Id, box, filters and switches: another browser that is given the address shows the same."""
    page = visit(**SCREEN)
    names(page)
    page.get_by_role("button", name="Search by things/coffee-0.jpg").click()
    expect(page.locator("#summary")).to_contain_text("Most similar")
    drag(page, 0.2, 0.1, 0.8, 0.9)
    with page.expect_response(re.compile("rerank=superglobal")):
        page.get_by_label("Re-rank").check()
    page.get_by_label("Folder").select_option("things")
    expect(page.locator(".card .by")).to_have_count(5)
    found, drawn = names(page), page.locator(".box").get_attribute("aria-label")
    for other in (page, visit(page.url, **SCREEN)):
        if other is page:
            page.reload()
        expect(other.locator(".card .by")).to_have_count(5)
        assert names(other) == found
        expect(other.locator(".box")).to_have_attribute("aria-label", str(drawn))
        expect(other.get_by_label("Re-rank")).to_be_checked()
        expect(other.get_by_label("Folder")).to_have_value("things")
    page.goto("about:blank")
    page.go_back()
    expect(page.locator(".card .by")).to_have_count(5)


def test_a_photo_that_was_given_survives_a_reload(visit: Visit, search: ImageSearch) -> None:
    page = visit(**SCREEN)
    give(page, "things/coffee", 300)
    drag(page, 0.2, 0.1, 0.8, 0.9)
    page.wait_for_url(re.compile("photo=[0-9a-f]{64}&box="))
    found = names(page)
    page.reload()
    expect(page.locator(".box")).to_be_visible()
    assert names(page) == found
    page.locator(".card").first.hover()
    page.get_by_role("button", name="Why is").first.click()  # it is there as if it had just been given
    expect(page.locator("#why")).to_contain_text("add up to it")
    with serving(create_app(search)) as address, visit(address, calm=False) as other:  # one that keeps nothing
        names(other)
        give(other)
        assert re.search("#photo=$", other.url) or "photo=" not in other.url
        other.goto(f"{address}/#photo={'0' * 64}")  # in the same page: the address alone changes
        expect(other.locator("#notice")).to_contain_text("not kept any more")
        assert len(names(other)) == 18
        box(other, "animals/cat-0.jpg").check(force=True)
        for id in ("#tagging", "#remove", "#add-pictures", "#by-words"):  # nothing may be changed there, nor asked
            expect(other.locator(id)).to_be_hidden()


# Formats, broken files


@pytest.mark.parametrize("form", ["HEIF", "TIFF"])
def test_a_box_on_what_browsers_do_not_show(visit: Visit, form: str) -> None:
    pillow_heif.register_heif_opener()
    page = visit(**SCREEN)
    names(page)
    cat, coffee = photo("animals/cat", 300), photo("things/coffee", 300)
    both = Image.new("RGB", (cat.width + coffee.width, max(cat.height, coffee.height)))
    both.paste(cat, (0, 0))
    both.paste(coffee, (cat.width, 0))
    page.set_input_files("#file", {"name": f"a.{form.lower()}", "mimeType": "", "buffer": encoded(both, form)})
    until(page, "document.querySelector('#canvas img')?.naturalWidth > 0")
    names(page)
    with page.expect_response(re.compile("/search")):
        drag(page, 0.51, 0.02, 0.99, 0.98)
    assert names(page)[0].startswith("things/coffee")
    width = re.search(r"Box, (\d+) by", str(page.locator(".box").get_attribute("aria-label")))
    assert width
    assert int(width[1]) == pytest.approx(0.48 * both.width, abs=6)  # of the full-size picture
    keep(page, f"preview-{form.lower()}")


def test_a_broken_file_says_only_that_it_is_broken(visit: Visit, search: ImageSearch) -> None:
    page = visit(calm=False, **SCREEN)
    names(page)
    page.set_input_files("#file", {"name": "a.heic", "mimeType": "image/heic", "buffer": b"no picture"})
    expect(page.locator("#notice.problem")).to_be_visible()
    expect(page.locator("#canvas")).to_have_text("This file is broken.")
    assert "works all the same" not in page.inner_text("body")
    (search.root / "animals/cat-0.jpg").write_bytes(b"no picture")
    other = visit(calm=False, **SCREEN)  # which has no thumbnail of it yet
    gone = other.locator(".card.gone")
    expect(gone).to_have_count(1)
    said = gone.locator(".by").evaluate("one => getComputedStyle(one, '::after').content")
    assert said == '"This file is broken or gone"'


# A finger


def touch(session: CDPSession, kind: str, *points: tuple[float, float]) -> None:
    session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y} for x, y in points]})


def test_a_swipe_scrolls_and_a_long_press_draws(visit: Visit) -> None:
    options: dict[str, Any] = HAND
    page = visit(**options)
    give(page, "things/coffee", 300)
    names(page)
    area = page.locator("#canvas").bounding_box()
    assert area
    x, y, w, h = area["x"], area["y"], area["width"], area["height"]
    session = page.context.new_cdp_session(page)
    touch(session, "touchStart", (x + w / 2, y + 0.9 * h))
    for part in range(85, 10, -5):
        touch(session, "touchMove", (x + w / 2, y + part / 100 * h))
    page.wait_for_timeout(300)  # it ends at rest, or the page would roll on
    touch(session, "touchEnd")
    until(page, "scrollY > 50")
    expect(page.locator(".box")).to_have_count(0)
    page.evaluate("scrollTo(0, 0)")
    until(page, "scrollY === 0")
    touch(session, "touchStart", (x + 0.2 * w, y + 0.2 * h))
    expect(page.locator("#canvas")).to_have_class(re.compile("drawing"))
    with page.expect_response(re.compile("/search")):
        for part in (0.4, 0.6, 0.8):
            touch(session, "touchMove", (x + part * w, y + part * h))
        touch(session, "touchEnd")
    placed = page.locator(".box").evaluate("b => ['left', 'top', 'width', 'height'].map(s => parseFloat(b.style[s]))")
    assert placed == pytest.approx([20, 20, 60, 60], abs=2)
    assert page.evaluate("scrollY") == 0
    touch(session, "touchStart", (x + 0.5 * w, y + 0.5 * h))  # the box itself follows at once
    touch(session, "touchMove", (x + 0.6 * w, y + 0.5 * h))
    touch(session, "touchEnd")
    moved = page.locator(".box").evaluate("b => parseFloat(b.style.left)")
    assert moved == pytest.approx(30, abs=3)


def test_the_question_for_the_token(visit: Visit, search: ImageSearch) -> None:
    settings = Settings(token="a token of more than sixteen characters")
    with serving(create_app(search, settings)) as address, visit(address, calm=False, **HAND) as page:
        expect(page.get_by_role("dialog")).to_be_visible()
        check(page)
