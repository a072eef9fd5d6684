"""Every page for everybody: accessible, by keyboard alone, without JavaScript, and with names that an attacker chose. The log
has all that a fleet can do: failures, ejections, drains, moves, limits, elections."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ViewportSize, expect

from pointsman.contracts.requests import RequestArrived
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from tests.support.browsing import Scheme, Visit, press_until_focused, rows_of
from tests.support.commands import written
from tests.support.hostile import hostile_log
from tests.support.recorded_log import RecordedFleet
from tests.support.running_console import RunningConsole, running_console

pytestmark = pytest.mark.browser

PAGES = ("/", "/requests", "/doctor", "/history", "/tenants", "/hit-rate", "/shadow", "/what-if", "/api")
MARKUP = (
    """<img src=x onerror="document.title='taken'"><script>document.title='taken'</script></title>'"&{{7*7}}\u202egnp"""
)
RULES: dict[Scheme, dict[str, Any]] = {"dark": {}, "light": {"runOnly": ["color-contrast"]}}
"""All of axe in one scheme; in the other those that can differ."""
SETTLED = {"/doctor": ".finding"}
"""What is worked out beside, and shown when it is there."""
TIMELINE_MILLISECONDS_MAX = 20_000
PHONE: ViewportSize = {"width": 390, "height": 844}
POD = "vllm-qwen2-5-72b-instruct-prod-eu-central-1-7f9c6d8b5-x"
NOTE_FOCUS = """
  window.visited = [];
  document.addEventListener("focusin", () => {
    const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
    window.visited.push({
      name: one.tagName.toLowerCase() + ":" + (one.getAttribute("aria-label") || one.id || one.innerText || one.name || "").trim().slice(0, 40),
      seen: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 || style.boxShadow !== "none",
      inside: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
      place: [...document.querySelectorAll("*")].indexOf(one),
    });
  });
"""
"""Of each element that gets the focus: whether one sees that, and where it is."""
REACHABLE = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
  .filter(one => one.type !== "hidden" && !one.disabled && one.checkVisibility()).length"""


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    fleet = RecordedFleet(policy_set(prefill_window_tokens=900), seed=18, failing=True, limited=True).live(900)
    fleet.take_over()
    return fleet.live(900).write_all().entries


def _console(directory: Path, entries: list[LogEntry]) -> Any:
    return running_console(directory, str(written(entries, directory)), health="recorded")


@pytest.fixture(scope="module")
def console(
    chromium: Path, entries: list[LogEntry], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningConsole]:
    with _console(tmp_path_factory.mktemp("usable"), entries) as running:
        yield running


@pytest.fixture(scope="module")
def hostile_console(
    chromium: Path, entries: list[LogEntry], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningConsole]:
    hostile = hostile_log(entries, policies_too=False, text=MARKUP)
    with _console(tmp_path_factory.mktemp("hostile"), hostile) as running:
        yield running


@pytest.fixture(scope="module")
def long_names_console(
    chromium: Path, entries: list[LogEntry], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningConsole]:
    renamed = [
        LogEntry.read(
            entry.sequence, entry.subject.replace("engine-", POD), entry.payload.replace(b"engine-", POD.encode())
        )
        for entry in entries
    ]
    with _console(tmp_path_factory.mktemp("long"), renamed) as running:
        yield running


def a_request(console: RunningConsole) -> str:
    return str(console.api("requests?limit=1")["requests"][0]["request"])


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_no_page_violates_a_rule_of_axe(console: RunningConsole, visit: Visit, scheme: Scheme) -> None:
    visitor, axe, found = visit(console.url, scheme=scheme), Axe(), []
    for path in (*PAGES, f"/requests/{a_request(console)}"):
        page = visitor.open(f"{path}?limit=8")
        if path in SETTLED:
            page.locator(SETTLED[path]).first.wait_for(timeout=TIMELINE_MILLISECONDS_MAX)
        elif path.startswith("/requests/"):
            page.locator("table.waterfall").wait_for(timeout=TIMELINE_MILLISECONDS_MAX)
        found += [
            f"{path}: {violation['id']} at {[node['target'] for node in violation['nodes']][:3]}: {violation['help']}"
            for violation in axe.run(page, options=RULES[scheme]).response["violations"]
        ]

    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PAGES)
def test_the_keyboard_reaches_everything_in_order_and_is_seen(console: RunningConsole, visit: Visit, path: str) -> None:
    page = visit(console.url).open(path + "?limit=8")
    reachable = page.evaluate(REACHABLE)
    page.evaluate(NOTE_FOCUS)

    for _ in range(reachable):
        page.keyboard.press("Tab")
    visited: list[dict[str, Any]] = page.evaluate("visited")

    assert visited[0]["name"].startswith("a:Skip")
    assert len({focus["place"] for focus in visited}) == reachable
    assert [focus["name"] for focus in visited if not focus["seen"]] == []
    assert [focus["name"] for focus in visited if not focus["inside"]] == []
    places = [focus["place"] for focus in visited]
    assert places == sorted(places)


def test_a_request_is_found_and_opened_by_keyboard(console: RunningConsole, visit: Visit) -> None:
    page = visit(console.url).open("/requests")
    wanted = rows_of(page, "requests")[3]["Request"]

    page.keyboard.press("/")
    page.keyboard.type(wanted)
    page.keyboard.press("Enter")
    page.wait_for_url("**q=**")
    press_until_focused(page, page.get_by_role("link", name=wanted, exact=True))
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/requests/{wanted}")

    expect(page.locator(".verdict .say")).not_to_be_empty()


def test_the_skip_link_leads_to_the_content(console: RunningConsole, visit: Visit) -> None:
    page = visit(console.url).open("/")

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    assert page.evaluate("document.activeElement.id") == "main"


def test_pages_work_without_javascript(console: RunningConsole, visit: Visit, entries: list[LogEntry]) -> None:
    visitor = visit(console.url, java_script_enabled=False)
    tenants = {event.tenant for entry in entries if isinstance(event := entry.event, RequestArrived)}

    page = visitor.open("/requests")
    tenant = sorted(tenants)[0]
    page.locator("#tenant").select_option(tenant)
    page.get_by_role("button", name="Filter").click()
    cells = page.locator("#requests tr td.mid", has_text=tenant)
    assert cells.count() > 0
    assert page.locator("#requests tr").count() == page.locator("#requests tr", has_text=tenant).count()

    page = visitor.open("/")
    page.get_by_role("link", name="Blocks").click()
    assert "sort=blocks" in page.url
    blocks = [int(text.replace(",", "")) for text in page.locator("#engines tr td:nth-child(9)").all_inner_texts()]
    assert blocks == sorted(blocks, reverse=True)
    for path in PAGES:
        assert visitor.open(path).locator("main h1").count() == 1


def test_no_page_is_wider_than_a_phone_and_no_row_higher(long_names_console: RunningConsole, visit: Visit) -> None:
    visitor = visit(long_names_console.url)
    visitor.page.set_viewport_size(PHONE)
    for path in (*PAGES, f"/requests/{a_request(long_names_console)}"):
        page = visitor.open(path)
        width, highest = page.evaluate(
            "[document.documentElement.scrollWidth, Math.max(0, ...[...document.querySelectorAll('tr')].map(row => row.offsetHeight))]"
        )
        assert width <= PHONE["width"], path
        assert highest <= PHONE["height"] / 2, path


def test_long_names_that_begin_alike_are_told_apart(long_names_console: RunningConsole, visit: Visit) -> None:
    page = visit(long_names_console.url).open("/")
    tails = page.locator("#engines tr .short").evaluate_all(
        "names => names.map(name => { const cell = name.closest('th').getBoundingClientRect(), range = document.createRange();"
        " range.selectNode(name.lastChild); return range.getBoundingClientRect().right <= cell.right && name.lastChild.data; })"
    )

    assert len(tails) == len(set(tails)) > 1
    assert all(tails)


def test_names_from_the_log_are_text_and_nothing_else(hostile_console: RunningConsole, visit: Visit) -> None:
    visitor = visit(hostile_console.url)
    shown = ""
    for path in (*PAGES, f"/requests/{a_request(hostile_console)}"):
        page = visitor.open(f"{path}?limit=8")
        page.wait_for_timeout(50)  # what a script of theirs would need
        assert "taken" not in page.title().replace(MARKUP, "")
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("script:not([src])").count() == 0
        text = page.locator("body").inner_text()
        assert "\u202e" not in text
        shown += text

    assert "<img src=x" in shown
    assert "{{7*7}}" in shown
