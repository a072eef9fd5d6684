"""Pages that change while somebody looks, over a real nats-server: new requests, a log that is away for a while, a console that
is away for a while."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from tests.support.browsing import Visit, rows_of
from tests.support.console_load import write_as_time_passes
from tests.support.log_worlds import SharedServer
from tests.support.loop_thread import LoopThread, loop_thread
from tests.support.running_console import RunningConsole, running_console
from tests.support.served_log import POOL, ServedLog
from tests.support.waiting import eventually

pytestmark = pytest.mark.browser

REQUESTS, GAP = 1_200, 0.1
AWAY_MILLISECONDS_MAX = 15_000


@dataclass
class Log:
    """A real log that grows by ten requests a second."""

    server: SharedServer
    thread: LoopThread
    _writing: "Future[None]" = field(init=False)

    def start(self) -> None:
        self.thread.run(self.server.start())
        self._writing = self.thread.start(self._write())

    def stop_server(self) -> None:
        self.thread.run(self.server.running.kill())

    def start_server(self) -> None:
        self.thread.run(self.server.start())

    async def _write(self) -> None:
        clock = ScaledClock()
        entries = ServedLog(requests=REQUESTS, gap=GAP, engines=6, tenants=("search", "coding")).entries
        async with jetstream.connect(self.server.url, POOL, clock, name="writer") as link:
            await eventually(lambda: link.commands.connected)
            await write_as_time_passes(link.log, entries, clock)


@pytest.fixture(scope="module")
def log(chromium: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Log]:
    with loop_thread() as thread:
        made = Log(SharedServer(tmp_path_factory.mktemp("log")), thread)
        made.start()
        yield made
        thread.run(made.server.running.stop())


@pytest.fixture(scope="module")
def console(log: Log, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    with running_console(tmp_path_factory.mktemp("live"), "--from", log.server.url, health="live") as running:
        yield running


def wait_for_newer(page: Page) -> None:
    """Until the page shows a request that it did not show when this began."""
    before = {row["Request"] for row in rows_of(page, "requests")}
    page.wait_for_function(
        "before => [...document.querySelectorAll('#requests tr th')].some(cell => !before.includes(cell.innerText.trim()))",
        arg=sorted(before),
    )


def test_requests_appear_as_they_arrive_and_what_was_shown_goes_on(console: RunningConsole, visit: Visit) -> None:
    page = visit(console.url).open("/requests")
    wait_for_newer(page)

    running = next(row["Request"] for row in rows_of(page, "requests") if "finished" not in row["Stage"])
    expect(page.locator(f"#r-{running}")).to_contain_text("finished")
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1


def test_paused_pages_stand_still(console: RunningConsole, visit: Visit) -> None:
    page = visit(console.url).open("/requests")
    wait_for_newer(page)

    page.keyboard.press("p")
    shown = page.locator("#requests").inner_text()
    page.wait_for_timeout(2_500)
    assert page.locator("#requests").inner_text() == shown

    page.get_by_role("button", name="Resume").click()
    wait_for_newer(page)


def test_a_log_that_is_away_is_told_and_comes_back(log: Log, console: RunningConsole, visit: Visit) -> None:
    page = visit(console.url).open("/requests")

    log.stop_server()
    banner = page.locator("#live-banner")
    expect(banner).to_contain_text("No connection to the log", timeout=AWAY_MILLISECONDS_MAX)
    log.start_server()
    expect(banner).not_to_contain_text("No connection", timeout=AWAY_MILLISECONDS_MAX)
    wait_for_newer(page)


def test_a_console_that_is_away_is_told_and_comes_back(
    log: Log, visit: Visit, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("restarted")
    with running_console(directory, "--from", log.server.url, health="live") as first:
        visitor = visit(first.url)
        page = visitor.open("/requests")
        wait_for_newer(page)
    lost = page.locator("#lost")
    expect(lost).to_be_visible(timeout=AWAY_MILLISECONDS_MAX)

    port = int(first.url.rpartition(":")[2])
    with running_console(directory, "--from", log.server.url, health="live", port=port):
        expect(lost).to_be_hidden(timeout=AWAY_MILLISECONDS_MAX)
        wait_for_newer(page)
        visitor.troubles.clear()  # the browser says that nobody answered
