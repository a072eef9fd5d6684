"""Engines come and go in a fleet of real processes; afterwards no page of metrics names those that left, in any label."""

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from pointsman_cli.discovery import read_fleet_file
from tests.support.patched_processes import patch_processes
from tests.support.up import POINTSMAN, RunningUp, pointsman_up
from tests.support.waiting import eventually

KEPT_SECONDS = 2.0
"""Two minutes in production."""
LABELS = re.compile(r'"((?:[^"\\]|\\.)*)"')
ENGINE = re.compile(r"scaled-\d+")
REQUESTS = 30
ENGINES = {"scaled-1", "scaled-2", "scaled-3"}


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningUp]:
    patch_processes(monkeypatch, tmp_path, {"pointsman.runtime.engine_series.KEPT_WALL_SECONDS": KEPT_SECONDS})
    options = (
        "--instances",
        "1..3",
        "--set",
        "scaler.scaling=manual",
        "--speed",
        "4",
        "--schedulers",
        "2",
        "--console",
        "--console-port",
        "0",
    )
    with pointsman_up(tmp_path, *options) as running:
        running.wait_for("ready in", seconds=240)
        yield running
        running.stop()


async def pages(up: RunningUp) -> dict[str, str]:
    """By role and URL, of every process that has such a page now."""
    described, found = read_fleet_file(up.data), {}
    assert described is not None
    async with aiohttp.ClientSession() as session:
        for process in described.processes:
            if not process.probes:
                continue
            try:
                async with session.get(f"{process.probes}/metrics") as answer:
                    if answer.status == 200:
                        found[f"{process.role} {process.probes}"] = await answer.text()
            except aiohttp.ClientError:
                pass
    return found


async def named(up: RunningUp) -> dict[str, set[str]]:
    """The engines in label values of each page, but for the engines' own and their workers'."""
    return {
        who: {engine for label in LABELS.findall(page) for engine in ENGINE.findall(label)}
        for who, page in (await pages(up)).items()
        if not who.startswith("engine")
    }


async def scale(up: RunningUp, wanted: int) -> None:
    command = [POINTSMAN, "scale", str(wanted), "--from", str(up.data)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def ask_much(up: RunningUp) -> None:
    async with aiohttp.ClientSession() as session:
        for number in range(REQUESTS):
            body = {"model": "pointsman-sim", "max_tokens": 4, "prompt": [number * 50 + token for token in range(300)]}
            async with session.post(f"{up.url}/v1/completions", json=body) as answer:
                assert answer.status == 200


@pytest.mark.timeout(400)
async def test_no_page_of_any_process_names_an_engine_that_left(up: RunningUp) -> None:
    await scale(up, 3)

    async def all_are_named() -> bool:
        await ask_much(up)
        found = await named(up)
        return set().union(*found.values()) == ENGINES

    await eventually(all_are_named, seconds=60)
    showing = {who.split()[0] for who, engines in (await named(up)).items() if engines}
    assert {"ingress", "scheduler"} <= showing

    await scale(up, 1)

    async def only_one_is_named() -> bool:
        left = set().union(*(await named(up)).values())
        return len(left) == 1

    await eventually(only_one_is_named, seconds=60)
    (kept,) = set().union(*(await named(up)).values())
    assert kept in ENGINES
    await ask_much(up)
    assert set().union(*(await named(up)).values()) == {kept}
