"""A fleet whose scaler runs its engines, as people run it: they come and go, after which no page of metrics names those that
left; a busy one is drained, another killed, and who noticed."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.contracts.decisions import RequestMigrated, RequestPlaced
from pointsman.contracts.fleet import InstanceDraining, InstanceLeft, InstanceUndrained
from pointsman.contracts.requests import RequestAttemptFailed, RequestFailed
from pointsman_cli.discovery import read_fleet_file
from pointsman_cli.history.live import LiveHistory
from tests.support.patched_processes import patch_processes
from tests.support.up import POINTSMAN, RunningUp, pointsman_up
from tests.support.waiting import eventually

REQUESTS = 50
SECONDS_MAX = 60.0
COMMAND_SECONDS_MAX = 120.0
"""Of one that waits for engines to start."""
KEEPER_SECONDS = 20.0
# So that nothing is shed for load on a slow machine: what is tested is that nothing is lost.
PATIENT = {"x-slo-ttft-ms": "60000"}
KEPT_SECONDS = 2.0
"""Two minutes in production."""
LABELS = re.compile(r'"((?:[^"\\]|\\.)*)"')
ENGINE = re.compile(r"scaled-\d+")
ASKED = 30
"""Enough for each of three engines to get some."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    directory = tmp_path_factory.mktemp("fleet")
    told = ("--instances", "1..3", "--set", "scaler.scaling=manual", "--speed", "4", "--schedulers", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch_processes(patch, directory, {"pointsman.runtime.engine_series.KEPT_WALL_SECONDS": KEPT_SECONDS})
        with pointsman_up(directory, *told, "--console", "--console-port", "0") as running:
            running.wait_for("ready in")
            yield running


async def _ask(session: aiohttp.ClientSession, url: str, number: int, first_token: asyncio.Event) -> tuple[bool, str]:
    """Whether a first token came, and how it ended: `whole`, or what was said instead."""
    body = {
        "model": "pointsman-sim", "stream": True, "max_tokens": 200,
        "prompt": [number * 7 % 4000 + token % 50 for token in range(1500)],
    }  # fmt: skip
    begun = False
    async with session.post(f"{url}/v1/completions", json=body, headers=PATIENT) as answer:
        if answer.status != 200:
            return False, f"{answer.status} {(await answer.text())[:200]}"
        async for line in answer.content:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return begun, "whole"
            if text.startswith("data: "):
                content: dict[str, Any] = json.loads(text[6:])
                if "error" in content:
                    return begun, f"error: {content['error']['message']}"
                begun = True
                first_token.set()
    return begun, "cut off without a word"


async def _burst(url: str, meanwhile: Any) -> list[tuple[bool, str]]:
    async with asyncio.timeout(SECONDS_MAX), aiohttp.ClientSession() as session:
        first_token = asyncio.Event()
        asking = [asyncio.create_task(_ask(session, url, number, first_token)) for number in range(REQUESTS)]
        await first_token.wait()
        await asyncio.to_thread(meanwhile)
        return await asyncio.gather(*asking)


def _pointsman(fleet: RunningUp, *arguments: str) -> str:
    command = [POINTSMAN, *arguments, "--from", str(fleet.data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _placed_while_draining(fleet: RunningUp, instance: str) -> int:
    described = read_fleet_file(fleet.data)
    assert described is not None
    draining, placed = False, 0
    for entry in LiveHistory(described.settings()).entries():
        event = entry.event
        if isinstance(event, InstanceDraining | InstanceUndrained | InstanceLeft) and event.instance == instance:
            draining = isinstance(event, InstanceDraining)
        if isinstance(event, RequestPlaced | RequestMigrated) and event.instance == instance:
            placed += draining
    return placed


def _a_ready_instance(fleet: RunningUp) -> str:
    """The process of a drained instance may run on for a moment after `scale --wait`."""
    instances = json.loads(_pointsman(fleet, "fleet", "--json"))["instances"]
    return str(min(one["instance"] for one in instances if one["status"] == "ready"))


def _failed_at(fleet: RunningUp, instance: str) -> int:
    """Requests that an instance had and did not finish."""
    described = read_fleet_file(fleet.data)
    assert described is not None
    ends = (e.event for e in LiveHistory(described.settings()).entries())
    return sum(isinstance(e, RequestAttemptFailed | RequestFailed) and e.instance == instance for e in ends)


def _still_running(keepers: list[Path]) -> list[Path]:
    """Who has not ended with the fleet, after KEEPER_SECONDS at most."""
    until = time.monotonic() + KEEPER_SECONDS
    while True:
        left = [lock for lock in keepers if (Path("/proc") / lock.read_text()).exists()]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


async def _pages(up: RunningUp) -> dict[str, str]:
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


async def _named(up: RunningUp) -> dict[str, set[str]]:
    """The engines in label values of each page, but for the engines' own and their workers'."""
    return {
        who: {engine for label in LABELS.findall(page) for engine in ENGINE.findall(label)}
        for who, page in (await _pages(up)).items()
        if not who.startswith("engine")
    }


async def _ask_much(up: RunningUp) -> None:
    async with aiohttp.ClientSession() as session:
        for number in range(ASKED):
            body = {"model": "pointsman-sim", "max_tokens": 4, "prompt": [number * 50 + token for token in range(300)]}
            async with session.post(f"{up.url}/v1/completions", json=body) as answer:
                assert answer.status == 200


async def test_no_page_of_any_process_names_an_engine_that_left(up: RunningUp) -> None:
    _pointsman(up, "scale", "3", "--wait")

    async def all_are_named() -> bool:
        await _ask_much(up)
        found = await _named(up)
        return set().union(*found.values()) == {"scaled-1", "scaled-2", "scaled-3"}

    await eventually(all_are_named, seconds=60)
    showing = {who.split()[0] for who, engines in (await _named(up)).items() if engines}
    assert {"ingress", "scheduler"} <= showing

    _pointsman(up, "scale", "1", "--wait")
    kept = {_a_ready_instance(up)}

    async def only_one_is_named() -> bool:
        return set().union(*(await _named(up)).values()) == kept

    await eventually(only_one_is_named, seconds=60)
    await _ask_much(up)
    assert set().union(*(await _named(up)).values()) == kept


def test_draining_loses_nothing_and_a_killed_instance_only_what_it_had_begun(up: RunningUp) -> None:
    _pointsman(up, "scale", "2", "--wait")
    idle = _a_ready_instance(up)

    drained = asyncio.run(_burst(up.url, lambda: _pointsman(up, "drain", idle, "--wait")))
    placed = _placed_while_draining(up, idle)
    _pointsman(up, "drain", idle, "--undo")
    _pointsman(up, "scale", "2", "--wait")
    keepers = sorted((up.data / "instances").glob("scaled-*.lock"))
    victim = _a_ready_instance(up)  # before the burst, which is over sooner than a command
    keeper = int((up.data / "instances" / f"{victim}.lock").read_text())
    killed = asyncio.run(_burst(up.url, lambda: os.kill(keeper, signal.SIGKILL)))
    after = _pointsman(up, "scale", "2", "--wait")
    failed = _failed_at(up, victim)
    up.stop()
    left = _still_running(keepers)

    assert [how for _, how in drained] == ["whole"] * REQUESTS
    assert placed == 0
    broken = [(begun, how) for begun, how in killed if how != "whole"]
    assert all(begun and how.startswith("error:") for begun, how in broken), broken
    assert failed > 0, "the killed instance had requests"
    assert "2 wanted (done)" in after
    assert left == []
