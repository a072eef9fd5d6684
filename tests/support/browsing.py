"""A person with a browser, and what a page shows them."""

import re
from collections.abc import Callable
from typing import Any, Literal

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Response, Route, expect

WAIT_MILLISECONDS_MAX = 8_000
TABS_MAX = 200
Scheme = Literal["dark", "light"]


class Visitor:
    """A person with a browser window of their own. `troubles`: what no page may do."""

    def __init__(self, browser: Browser, origin: str, *, scheme: Scheme, **options: Any) -> None:
        self.origin = origin
        self.troubles: list[str] = []
        self.context: BrowserContext = browser.new_context(
            base_url=origin, color_scheme=scheme, viewport={"width": 1280, "height": 800}, reduced_motion="reduce", **options
        )  # fmt: skip
        self.context.set_default_timeout(WAIT_MILLISECONDS_MAX)
        self.context.route("**/*", self._same_origin)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.troubles.append(f"script: {error}"))
        self.page.on("response", self._answered)

    def open(self, path: str) -> Page:
        self.page.goto(path, wait_until="load")
        return self.page

    def _same_origin(self, route: Route) -> None:
        if route.request.url.startswith((self.origin, "data:", "blob:")):
            route.continue_()
        else:
            self.troubles.append(f"asked for {route.request.url}")
            route.abort()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(f"{message.type}: {message.text}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.troubles.append(f"{response.status} of {response.url}")


Visit = Callable[..., Visitor]
"""Of the fixture `visit`."""


def rows_of(page: Page, table: str) -> list[dict[str, str]]:
    """What a table shows: of each row the text under each heading. `table`: id of its body."""
    found: list[dict[str, str]] = page.locator(f"#{table}").evaluate(
        """body => {
          const names = [...body.parentElement.tHead.rows[0].cells].map(cell => cell.textContent.trim());
          return [...body.rows].map(row => Object.fromEntries([...row.cells].map((cell, i) => [names[i], cell.innerText.trim()])));
        }"""
    )
    return found


def facts_of(page: Page) -> dict[str, str]:
    """The key figures of a page, by name."""
    found: dict[str, str] = page.locator("dl.facts").first.evaluate(
        "list => Object.fromEntries([...list.children].map(one => [one.children[0].innerText.trim(), one.children[1].innerText.trim()]))"
    )
    return found


def press_until_focused(page: Page, wanted: Locator) -> None:
    """Press the tabulator until this element has the focus."""
    expect(wanted).to_be_visible()
    for _ in range(TABS_MAX):
        if wanted.evaluate("one => one === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{wanted} cannot be reached")


def number(text: str) -> float:
    """The first number of a text."""
    found = re.search(r"-?[\d,]+(?:\.\d+)?", text)
    assert found, f"no number in '{text}'"
    return float(found[0].replace(",", ""))
