"""What the pages show of a recorded log, held against the log itself by rules of this file."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestFinished
from pointsman.ports import LogEntry
from tests.support.browsing import Visit, facts_of, number, rows_of
from tests.support.commands import written
from tests.support.running_console import RunningConsole, running_console
from tests.support.served_log import ServedLog

pytestmark = pytest.mark.browser

ENGINES = 5
TENANTS = ("search", "support", "coding")
SLO_TTFT = 5.0
TIMELINE_MILLISECONDS_MAX = 20_000


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    return ServedLog(requests=400, gap=0.06, engines=ENGINES, tenants=TENANTS, pace={"engine-3": 8.0}).entries


@pytest.fixture(scope="module")
def console(
    chromium: Path, entries: list[LogEntry], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningConsole]:
    directory = tmp_path_factory.mktemp("recorded")
    with running_console(directory, str(written(entries, directory)), health="recorded") as running:
        yield running


class Truth:
    """The log as this file reads it."""

    def __init__(self, entries: list[LogEntry]) -> None:
        events = [entry.event for entry in entries]
        self.arrived = [event for event in events if isinstance(event, RequestArrived)]
        self.ttft = {event.request: event.ttft for event in events if isinstance(event, PrefillFinished)}
        self.finished = {event.request: event for event in events if isinstance(event, RequestFinished)}
        self.late = {request for request, ttft in self.ttft.items() if ttft > SLO_TTFT}

    @property
    def hit_rate(self) -> float:
        done = self.finished.values()
        return sum(event.cached_tokens for event in done) / sum(event.prompt_tokens for event in done)


@pytest.fixture(scope="module")
def truth(entries: list[LogEntry]) -> Truth:
    return Truth(entries)


def test_the_fleet_page_shows_every_engine_and_which_is_slow(
    console: RunningConsole, visit: Visit, truth: Truth
) -> None:
    page = visit(console.url).open("/?sort=pace&order=desc")

    shown = rows_of(page, "engines")
    assert sorted(row["Engine"] for row in shown) == sorted(f"engine-{number}" for number in range(1, ENGINES + 1))
    assert shown[0]["Engine"] == "engine-3"
    assert all(row["Status"] == "ready" for row in shown)
    facts = facts_of(page)
    assert facts["Engines ready"].split() == [str(ENGINES), "of", str(ENGINES)]


def test_the_requests_page_lists_the_newest_requests_and_filters_them(
    console: RunningConsole, visit: Visit, truth: Truth
) -> None:
    visitor = visit(console.url)
    page = visitor.open("/requests?limit=20")
    newest = [event.request for event in reversed(truth.arrived)]
    assert [row["Request"] for row in rows_of(page, "requests")][:20] == newest[:20]

    page.get_by_label("Tenant").select_option("coding")
    page.get_by_label("Late only").check()
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**late=1**")

    expected = [
        event.request for event in reversed(truth.arrived) if event.tenant == "coding" and event.request in truth.late
    ]
    assert expected, "the log has no late request of this tenant"
    shown = rows_of(page, "requests")
    assert [row["Request"] for row in shown] == expected[: len(shown)]
    assert len(shown) == min(len(expected), 50)
    assert {row["Tenant"] for row in shown} == {"coding"}


def test_one_request_is_told_as_the_log_has_it(console: RunningConsole, visit: Visit, truth: Truth) -> None:
    worst = max(truth.ttft, key=lambda request: truth.ttft[request])
    done = truth.finished[worst]

    page = visit(console.url).open(f"/requests/{worst}")
    page.locator("table.waterfall").wait_for(timeout=TIMELINE_MILLISECONDS_MAX)

    facts = facts_of(page)
    assert number(facts["TTFT"]) == pytest.approx(truth.ttft[worst], abs=0.006)
    assert number(facts["Prompt"]) == done.prompt_tokens
    assert number(facts["Cached"]) == done.cached_tokens
    assert facts["Engine"] == done.instance
    assert facts["Tenant"] == next(event.tenant for event in truth.arrived if event.request == worst)
    phases = page.locator("table.waterfall tbody tr")
    took = [cells[2] for cells in (row.locator("th, td").all_inner_texts() for row in phases.all())]
    assert sum(_seconds(text) for text in took) == pytest.approx(done.e2e, rel=0.02)


def test_tenants_and_hit_rate_add_up_to_the_log(console: RunningConsole, visit: Visit, truth: Truth) -> None:
    visitor = visit(console.url)

    shown = {row["Tenant"]: row for row in rows_of(visitor.open("/tenants"), "tenants")}
    arrived = Counter(event.tenant for event in truth.arrived)
    prompts = Counter[str]()
    for event in truth.arrived:
        prompts[event.tenant] += event.prompt_tokens
    assert {tenant: number(row["Arrived"]) for tenant, row in shown.items()} == dict(arrived)
    assert {tenant: number(row["Prompt"]) for tenant, row in shown.items()} == dict(prompts)

    page = visitor.open("/hit-rate")
    rungs = page.locator("table.ladder tbody tr")
    shares = [number(text) for text in rungs.locator("td:nth-child(2)").all_inner_texts()]
    assert shares[-1] == pytest.approx(100 * truth.hit_rate, abs=0.06)
    assert shares[0] >= shares[1] >= shares[2]


def test_the_examination_names_the_slow_engine(console: RunningConsole, visit: Visit) -> None:
    page = visit(console.url).open("/doctor")

    finding = page.locator(".finding", has_text="engine-3").first
    finding.wait_for(timeout=TIMELINE_MILLISECONDS_MAX)
    assert page.locator(".verdict .say").inner_text()


def _seconds(text: str) -> float:
    value = number(text)
    return value / 1000 if "ms" in text else value


def test_a_what_if_is_started_from_the_page_and_compared_with_the_record(
    console: RunningConsole, visit: Visit, truth: Truth
) -> None:
    visitor = visit(console.url)
    page = visitor.open("/what-if")
    page.get_by_label("Routing policy").select_option("round_robin")
    page.get_by_label("Engines", exact=True).fill("8")
    page.get_by_role("button", name="Simulate").click()

    page.wait_for_url("**/what-if/*")
    page.locator("table.compare").wait_for(timeout=TIMELINE_MILLISECONDS_MAX)
    figures = {
        cells[0]: cells[1:]
        for cells in (row.locator("th, td").all_inner_texts() for row in page.locator("table.compare tbody tr").all())
    }
    hit = next(values for name, values in figures.items() if "hit rate" in name.lower())
    assert number(hit[0]) == pytest.approx(100 * truth.hit_rate if "%" in hit[0] else truth.hit_rate, abs=0.06)
    assert any(recorded != changed for recorded, _, changed, _ in figures.values())
    run = page.url.rpartition("/")[2]
    row = visitor.open("/what-if").locator("main table tbody tr", has=page.get_by_role("link", name=run, exact=True))
    assert "round_robin" in row.inner_text()
    assert "done" in row.inner_text()
