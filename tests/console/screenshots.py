"""Pictures of the console for README and docs: `make screenshots`. A fleet of simulated engines under load, one of which is
made slow for a while, is looked at in a browser; `docs/images/console-NAME.png` is what it shows. Two minutes."""

import asyncio
import itertools
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.chromium import ARGUMENTS, found_chromium, unpacked_chromium
from tests.support.loop_thread import loop_thread
from tests.support.running_console import RunningConsole, running_console
from tests.support.up import RunningUp, pointsman_up

IMAGES = Path(__file__).parents[2] / "docs" / "images"
BYTES_MAX = 250_000
VIEWPORT = {"width": 1280, "height": 800}
SPEED = 5.0
LOAD_SECONDS = 60.0
SLOW_AFTER_SECONDS, SLOW_SECONDS, SLOW_FACTOR = 15.0, 20.0, 30.0
CONVERSATIONS = 32
RUN_MILLISECONDS_MAX = 60_000
TENANTS = ("search", "support", "coding", "batch")
SLOW_ENGINE = "scaled-2"


@dataclass(frozen=True)
class Picture:
    """`path`: of the page; `{request}` is one that the slow engine served late, `{run}` a what-if that was run. `shows`: what
    has to be there first. `live`: taken while the load lasts."""

    name: str
    path: str
    shows: str = ".verdict .say"
    scheme: str = "dark"
    live: bool = False


PICTURES = (
    Picture("fleet", "/", live=True),
    Picture("fleet-light", "/", scheme="light", live=True),
    Picture("requests", "/requests", live=True),
    Picture("request", "/requests/{request}", "table.waterfall"),
    Picture("doctor", "/doctor", ".finding"),
    Picture("history", "/history"),
    Picture("tenants", "/tenants"),
    Picture("hit-rate", "/hit-rate", "table.ladder"),
    Picture("shadow", "/shadow"),
    Picture("what-if", "/what-if/{run}", "table.compare"),
)


def file_of(picture: Picture) -> Path:
    return IMAGES / f"console-{picture.name}.png"


async def converse(session: aiohttp.ClientSession, url: str, number: int, until: float) -> None:
    """One conversation after the other; each turn sends all that was said before."""
    chance, loop = Random(number), asyncio.get_running_loop()
    tenant = TENANTS[number % len(TENANTS)]
    for conversation in itertools.count():
        said = [TENANTS.index(tenant) * 900 + token % 800 for token in range(2_000)]
        for _ in range(chance.randint(3, 8)):
            said += [chance.randrange(4_000) for _ in range(chance.choice((200, 400, 800, 3_000)))]
            if loop.time() > until:
                return
            body = {"model": "pointsman-sim", "prompt": said, "stream": True, "max_tokens": chance.randint(20, 120)}
            names = {"x-llm-d-inference-fairness-id": tenant, "x-session-id": f"{tenant}-{number}-{conversation}"}
            async with session.post(f"{url}/v1/completions", json=body, headers=names) as answer:
                await answer.read()
            await asyncio.sleep(chance.expovariate(1 / 0.3))


async def plant(console: RunningConsole) -> None:
    """Make an engine slow for a while."""
    await asyncio.sleep(SLOW_AFTER_SECONDS)
    fleet = await asyncio.to_thread(console.api, "fleet")
    (url,) = (engine["url"] for engine in fleet["instances"] if engine["instance"] == SLOW_ENGINE)
    await asyncio.to_thread(_misbehave, url, {"kind": "slow", "factor": SLOW_FACTOR})
    await asyncio.sleep(SLOW_SECONDS)
    await asyncio.to_thread(_misbehave, url, {"kind": ""})


async def load(up: RunningUp, console: RunningConsole) -> None:
    until = asyncio.get_running_loop().time() + LOAD_SECONDS
    async with aiohttp.ClientSession() as session:
        planting = asyncio.create_task(plant(console))
        await asyncio.gather(*(converse(session, up.url, number, until) for number in range(CONVERSATIONS)))
        await planting


def slow_request(console: RunningConsole) -> str:
    """The latest one that was late at the slow engine, and for that reason."""
    late = console.api(f"requests?late=1&instance={SLOW_ENGINE}&limit=200")["requests"]
    for request in sorted(late, key=lambda row: -(row["ttft"] or 0.0)):
        if cause_of(console, request["request"]) == "slow_engine":
            return str(request["request"])
    raise AssertionError(f"none of {len(late)} late requests was late because of its engine")


def cause_of(console: RunningConsole, request: str) -> str:
    page: dict[str, Any] = {"state": "waiting"}
    while page["state"] in ("waiting", "running"):
        time.sleep(0.1)
        page = console.api(f"requests/{request}")
    assert page["timeline"] is not None, page["problem"]
    return str(page["timeline"]["cause"])


def _misbehave(url: str, how: dict[str, Any]) -> None:
    asked = urllib.request.Request(f"{url}/sim/misbehave", json.dumps(how).encode(), method="POST")
    with urllib.request.urlopen(asked, timeout=10):
        pass


@contextmanager
def opened(browser: Browser, url: str, scheme: Any) -> Iterator[Page]:
    context = browser.new_context(base_url=url, color_scheme=scheme, viewport=VIEWPORT, reduced_motion="reduce")  # type: ignore[arg-type]
    yield context.new_page()
    context.close()


def take(picture: Picture, browser: Browser, console: RunningConsole, **names: str) -> None:
    with opened(browser, console.url, picture.scheme) as page:
        page.goto(picture.path.format(**names))
        page.locator(picture.shows).first.wait_for(timeout=RUN_MILLISECONDS_MAX)
        page.screenshot(path=file_of(picture))
    size = file_of(picture).stat().st_size
    assert size <= BYTES_MAX, f"{file_of(picture).name} has {size} bytes"
    print(f"{file_of(picture).name}: {size:,} bytes")


def what_if(browser: Browser, console: RunningConsole) -> str:
    """The number of a run that the page started and that has ended."""
    with opened(browser, console.url, "dark") as page:
        page.goto("/what-if")
        page.get_by_label("Routing policy").select_option("round_robin")
        page.get_by_role("button", name="Simulate").click()
        page.wait_for_url("**/what-if/*")
        page.locator("table.compare").wait_for(timeout=RUN_MILLISECONDS_MAX)
        return page.url.rpartition("/")[2]


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with pointsman_up(directory, "--instances", "4..6", "--speed", str(SPEED)) as up:
            up.wait_for("Ctrl-C")
            shown = running_console(directory, "--from", str(up.data), "--shadow", "dualmap", health="live")
            with shown as console, loop_thread() as thread:
                loading = thread.start(load(up, console))
                time.sleep(SLOW_AFTER_SECONDS + SLOW_SECONDS / 2)
                with sync_playwright() as playwright:
                    program = found_chromium() or unpacked_chromium()
                    browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
                    for picture in (picture for picture in PICTURES if picture.live):
                        take(picture, browser, console)
                    loading.result()
                    names = {"request": slow_request(console), "run": what_if(browser, console)}
                    for picture in (picture for picture in PICTURES if not picture.live):
                        take(picture, browser, console, **names)
                    browser.close()


if __name__ == "__main__":
    main()
