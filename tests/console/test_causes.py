"""A newcomer's path to "why was this request slow", on the console alone: from the first page by links that they see, to the
cause on the first screen of the request."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.browsing import Visit
from tests.support.commands import written
from tests.support.planted_causes import CASES, planted, slowest_of
from tests.support.running_console import running_console

pytestmark = pytest.mark.browser

TIMELINE_MILLISECONDS_MAX = 20_000


@pytest.mark.parametrize("name", CASES)
def test_the_cause_stands_on_the_first_screen_of_the_request(
    chromium: Path, visit: Visit, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    entries = planted(case)
    request = slowest_of(entries, case)
    with running_console(tmp_path, str(written(entries, tmp_path)), health="recorded") as console:
        page = visit(console.url).open("/")
        page.get_by_role("link", name="Requests", exact=True).click()
        find_slowest(page, request)
        page.get_by_role("link", name=request, exact=True).click()
        page.wait_for_url(f"**/requests/{request}")

        verdict = page.locator(".verdict .say")
        expect(verdict).to_contain_text(re.compile(case.says), timeout=TIMELINE_MILLISECONDS_MAX)
        box, window = verdict.bounding_box(), page.viewport_size
        assert box is not None
        assert window is not None
        assert box["y"] + box["height"] <= window["height"]
        assert page.evaluate("scrollY") == 0
        assert console.api(f"requests/{request}")["timeline"]["cause"] == case.cause
        why = page.locator("ol.why li")
        assert 1 <= why.count() <= 7
        for word in case.never:
            assert not re.search(rf"\b{word}\b", " ".join(why.all_inner_texts())), word


def find_slowest(page: Page, request: str) -> None:
    """Sort by TTFT, slowest first, as anybody would; a request that others exceed is searched by its id."""
    page.get_by_role("link", name=re.compile("^TTFT")).click()
    page.wait_for_url("**sort=ttft**")
    if page.get_by_role("link", name=request, exact=True).count() == 0:
        page.get_by_label("Request id").fill(request)
        page.get_by_role("button", name="Filter").click()
        page.wait_for_url("**q=**")
