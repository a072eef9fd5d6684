"""A browser, and pages that must be without fault: an error in a script, a refused or failed load, or a request to
anywhere but the console fails the test that opened the page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.support.browsing import Scheme, Visit, Visitor
from tests.support.chromium import ARGUMENTS, found_chromium


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
