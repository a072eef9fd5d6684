"""A browser, and pages that must be without fault: an error in a script, a refused or failed load, or a request to
anywhere but the console fails the test that opened the page."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Response, Route, sync_playwright

from tests.support.chromium import ARGUMENTS, found_chromium

WAIT_MILLISECONDS_MAX = 8_000
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


@pytest.fixture(scope="session")
def chromium() -> Path:
    found = found_chromium()
    if found is None:
        pytest.skip("there is no Chromium here; make test-console gets one")
    return found


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Makes visitors: `visit(url)`, `visit(url, scheme="light")`, `visit(url, java_script_enabled=False)`."""
    visitors: list[Visitor] = []

    def make(origin: str, *, scheme: Scheme = "dark", **options: Any) -> Visitor:
        visitors.append(Visitor(browser, origin, scheme=scheme, **options))
        return visitors[-1]

    yield make
    troubles = [trouble for visitor in visitors for trouble in visitor.troubles]
    for visitor in visitors:
        visitor.context.close()
    assert troubles == []
