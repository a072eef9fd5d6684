"""What the console costs with 500 instances and 200 requests a second: `python -m tests.console.measure --out FILE`.

A log of that load is recorded first, then written to a real nats-server as time passes, and followed by `pointsman
console`. Viewers are streams of `/live`; one more is a browser, in which the times between two frames are taken. Seconds of
the processor are those of the console's process. Minutes on two cores, most of them to record the log."""

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from playwright.async_api import async_playwright

from pointsman_cli.output_file import write_json
from pointsman_lab.proc import cpu_seconds
from tests.support.chromium import ARGUMENTS, found_chromium, unpacked_chromium
from tests.support.console_load import INSTANCES, REQUESTS_PER_SECOND, record_load
from tests.support.nats import running_nats
from tests.support.running_console import RunningConsole, running_console

PAGES = ("/", "/requests", "/history", "/tenants", "/hit-rate", "/shadow", "/doctor")
WARM_UP_SECONDS = 5.0
SETTLE_SECONDS = 3.0
TAKE_FRAMES = """
  window.frames_ = []; window.long_ = [];
  new PerformanceObserver(list => list.getEntries().forEach(e => window.long_.push(e.duration))).observe({entryTypes: ["longtask"]});
  let before = performance.now();
  const next = now => { window.frames_.push(now - before); before = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
"""


def memory_mib(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@dataclass
class Viewer:
    """Reads what a page is sent, as fast as it comes."""

    url: str
    page: str
    bytes_read: int = 0
    _task: asyncio.Task[None] | None = field(default=None, repr=False)

    def start(self) -> None:
        self._task = asyncio.create_task(self._read())

    async def stop(self) -> None:
        assert self._task is not None
        if self._task.done():
            self._task.result()
            raise AssertionError(f"the stream of {self.page} ended")
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _read(self) -> None:
        where = urllib.parse.urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=2**24)
        asked = f"/live?page={urllib.parse.quote(self.page, safe='')}"
        writer.write(f"GET {asked} HTTP/1.1\r\nHost: {where.netloc}\r\nAccept: text/event-stream\r\n\r\n".encode())
        try:
            status = await reader.readline()
            assert b" 200 " in status, status
            while read := await reader.read(2**16):
                self.bytes_read += len(read)
        finally:
            writer.close()


async def cost_of(shown: RunningConsole, pages: Sequence[str], seconds: float) -> dict[str, float]:
    """Of the console while these pages are looked at. `behind_seconds`: the newest entry that it has read is so old."""
    console, url = shown.process.pid, shown.url
    viewers = [Viewer(url, page) for page in pages]
    for viewer in viewers:
        viewer.start()
    await asyncio.sleep(SETTLE_SECONDS)
    cpu, read = cpu_seconds(console), sum(viewer.bytes_read for viewer in viewers)
    await asyncio.sleep(seconds)
    cpu, read = cpu_seconds(console) - cpu, sum(viewer.bytes_read for viewer in viewers) - read
    for viewer in viewers:
        await viewer.stop()
    return {
        "viewers": len(pages),
        "core_percent": round(100 * cpu / seconds, 1),
        "kib_per_second_and_viewer": round(read / seconds / 1024 / max(1, len(pages)), 1),
        "memory_mib": round(memory_mib(console), 1),
        "behind_seconds": round(time.time() - (await asyncio.to_thread(shown.api, "status"))["at"], 2),
    }


async def frames_of(url: str, page_path: str, seconds: float) -> dict[str, Any]:
    """In a browser that looks at this page. Frames and long tasks by the wall clock; `cpu` by the main thread's own, of all
    that the page did in a second: its one update and what follows from it."""
    async with async_playwright() as playwright:
        program = found_chromium() or unpacked_chromium()
        browser = await playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        await page.goto(url + page_path)
        devtools = await page.context.new_cdp_session(page)
        await devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        await asyncio.sleep(SETTLE_SECONDS)
        before = await _metrics(devtools)
        await page.evaluate(TAKE_FRAMES)
        await asyncio.sleep(seconds)
        frames: list[float] = (await page.evaluate("window.frames_"))[1:]
        long_tasks: list[float] = await page.evaluate("window.long_")
        after = await _metrics(devtools)
        nodes = await page.evaluate("document.querySelectorAll('*').length")
        await browser.close()
    return {
        "page": page_path,
        "frames": len(frames),
        "frame_ms_p50": round(statistics.median(frames), 1),
        "frame_ms_p99": round(statistics.quantiles(frames, n=100)[98], 1),
        "frame_ms_max": round(max(frames), 1),
        "long_tasks": len(long_tasks),
        "long_task_ms_max": round(max(long_tasks, default=0.0), 1),
        "elements": nodes,
        "heap_mib": round(after["JSHeapUsedSize"] / 2**20, 1),
        **{
            f"{name}_cpu_ms_per_second": round(1000 * (after[metric] - before[metric]) / seconds, 1)
            for name, metric in (("task", "TaskDuration"), ("script", "ScriptDuration"), ("layout", "LayoutDuration"))
        },
    }


async def _metrics(devtools: Any) -> dict[str, float]:
    answer = await devtools.send("Performance.getMetrics")
    return {metric["name"]: metric["value"] for metric in answer["metrics"]}


@contextlib.contextmanager
def written(load: Path, nats: str) -> Iterator[None]:
    writer = subprocess.Popen([sys.executable, "-m", "tests.support.console_load", str(load), nats])
    try:
        yield
        assert writer.poll() is None, "the recorded load ended before the measurement did"
    finally:
        writer.kill()
        writer.wait()


async def measure(directory: Path, load: Path, *, seconds: float, options: Sequence[str]) -> dict[str, Any]:
    async with running_nats(directory) as nats:
        following = running_console(directory, "--from", nats, *options, health="live")
        with written(load, nats), following as console:
            await asyncio.sleep(WARM_UP_SECONDS)
            costs = [await cost_of(console, ["/"] * count, seconds) for count in (0, 1, 5, 10)]
            mixed = await cost_of(console, (PAGES * 2)[:10], seconds)
            frames = [await frames_of(console.url, page, seconds) for page in ("/", "/requests")]
            shown = console.api("fleet")["totals"]
    return {
        "instances": shown["instances"],
        "requests_per_second": shown["requests_per_second"],
        "fleet_page": costs,
        "core_percent_per_viewer": round((costs[-1]["core_percent"] - costs[0]["core_percent"]) / 10, 2),
        "mixed_pages": mixed,
        "browser": frames,
    }


@click.command()
@click.option("--instances", default=INSTANCES, show_default=True)
@click.option("--rate", default=REQUESTS_PER_SECOND, show_default=True, help="Requests a second.")
@click.option("--seconds", default=10.0, show_default=True, help="Of each measurement.")
@click.option("--policy", default="pointsman", show_default=True, help="Of the recorded leader.")
@click.option(
    "--load", type=click.Path(path_type=Path), help="Keep the recorded load here, or use the one that is here."
)
@click.option("--option", "options", multiple=True, help="For `pointsman console`, for instance --shadow=dualmap.")
@click.option("--out", type=click.Path(path_type=Path))
def main(
    instances: int,
    rate: int,
    seconds: float,
    policy: str,
    load: Path | None,
    options: tuple[str, ...],
    out: Path | None,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        file = load or Path(scratch) / "load.jsonl"
        if not file.exists():
            record_load(
                file,
                seconds=round(8 * (seconds + 6) + 20),
                instances=instances,
                requests_per_second=rate,
                policy=policy,
            )
        found = asyncio.run(measure(Path(scratch), file, seconds=seconds, options=options))
    click.echo(found)
    if out:
        write_json(out, found)


if __name__ == "__main__":
    main()
