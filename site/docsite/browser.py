"""A browser, where the system has one: pictures of pages, and whether a site works from disk."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGES = (
    "index.html",
    "gallery.html",
    "examples/01_first_minute.html",
    "reference/index.html",
    "reference/classes/Estimate.html",
)
WIDTHS = (390, 1280)  # pixels: of a phone, of a desk
SOUGHT = "tornado", "Sensitivity"  # a word, and what the title of a page about it begins with
PATIENCE = 60_000  # ms: a loaded machine takes long, and nothing is measured here


@contextlib.contextmanager
def browser() -> Iterator[Browser | None]:
    """The system's Chromium, None where there is none."""
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if program is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        window = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield window
        finally:
            window.close()


def photograph(
    page: Path, picture: Path, place: str = "", size: tuple[int, int] = (1280, 1500)
) -> bool:
    """Take a picture of a page of HTML from a place on; False where there is no browser."""
    with browser() as window:
        if window is None:
            return False
        tab = window.new_page(viewport={"width": size[0], "height": size[1]})
        tab.goto(page.as_uri())
        if place:
            tab.locator(f"#{place}").evaluate("(found) => found.scrollIntoView()")
        tab.screenshot(path=picture)
    return True


def troubles(site: Path) -> list[str]:
    """What goes wrong when pages of a site are opened from disk, a sentence each."""
    told: list[str] = []
    with browser() as window:
        if window is None:
            return []
        for width in WIDTHS:
            for name in PAGES:
                tab = window.new_page(viewport={"width": width, "height": 900})
                _listen(tab, f"{name} at {width} pixels", told)
                tab.goto((site / name).as_uri())
                if tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    told.append(f"{name} at {width} pixels is wider than the window")
                tab.close()
        told += _search(window, site)
    return told


def _listen(tab: Page, where: str, told: list[str]) -> None:
    """Tell of everything that a page asks of a network, and of every error that it has."""
    tab.on(
        "request",
        lambda asked: (
            None
            if asked.url.startswith(("file:", "data:"))
            else told.append(f"{where} asks for {asked.url}")
        ),
    )
    tab.on("requestfailed", lambda asked: told.append(f"{where} does not get {asked.url}"))
    tab.on("pageerror", lambda error: told.append(f"{where} has an error: {error}"))
    tab.on(
        "console",
        lambda said: told.append(f"{where} says: {said.text}") if said.type == "error" else None,
    )


def _search(window: Browser, site: Path) -> Iterator[str]:
    """Whether the search finds a page, from disk."""
    from playwright.sync_api import TimeoutError

    word, title = SOUGHT
    told: list[str] = []
    tab = window.new_page()
    _listen(tab, "the search", told)
    tab.goto((site / "index.html").as_uri())
    tab.locator(".md-search__input").focus()
    tab.keyboard.type(word, delay=50)
    try:
        tab.locator(".md-search-result__article h1", has_text=title).first.wait_for(
            state="attached", timeout=PATIENCE
        )
    except TimeoutError:
        yield f"the search for {word!r} finds no page that is called {title!r}"
    yield from told
