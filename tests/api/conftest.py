"""An index that tests may change, a server of it, a browser (Debian's chromium, driven by Playwright), and pages in it.

What pages show is kept in `build/web/`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from cooc.api import Settings, create_app
from cooc.image_search import ImageSearch
from tests.page import Visit
from tests.serving import Start, descriptor, make_index, serving, write_collection

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_collection(tmp_path_factory.mktemp("indexed") / "photos")
    make_index(root).close()
    return root


@pytest.fixture
def root(indexed: Path, tmp_path: Path) -> Path:
    """A copy: tests change it."""
    return Path(shutil.copytree(indexed, tmp_path / "photos"))


@pytest.fixture
def search(root: Path) -> Iterator[ImageSearch]:
    with ImageSearch.open(root / ".cooc", descriptor=descriptor()) as search:
        yield search


@pytest.fixture
def start(search: ImageSearch) -> Iterator[Start]:
    """A server of it that allows changes, unless told otherwise."""
    with ExitStack() as stack:

        def go(**changes: Any) -> httpx.Client:
            settings = Settings(**{"folders": (Path(),), "rate": 0, **changes})
            address = stack.enter_context(serving(create_app(search, settings)))
            return stack.enter_context(httpx.Client(base_url=f"{address}/api/v1", timeout=60))

        yield go


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one file of tests: as long as it is there, an event loop runs, and no other can."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "These tests need a browser: `apt-get install chromium` (as root) brings it, or any package manager."
    expect.set_options(timeout=20_000)  # a busy machine is slow
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Visit]:
    """A new page; what it complains about, and what it asks of other hosts, are failures.

    A page of a server that stops before the test ends is closed before that: it may still be asking for something.
    """
    troubles: list[str] = []
    contexts = []

    def go(url: str = "", calm: bool = True, **options: object) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})  # type: ignore[arg-type]
        contexts.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        if calm:
            page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
        host = url.partition("#")[0] or address
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((host.removesuffix("/docs"), "blob:")) else troubles.append(asked.url)
            ),
        )
        page.goto(url or address)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not troubles
