"""A fleet whose scaler runs its engines, as people run it: a busy instance drained, another killed, and who noticed."""

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

from pointsman.contracts.decisions import RequestMigrated, RequestPlaced
from pointsman.contracts.fleet import InstanceDraining, InstanceUndrained
from pointsman.contracts.requests import RequestAttemptFailed, RequestFailed
from pointsman_cli.discovery import read_fleet_file
from pointsman_cli.history.live import LiveHistory
from tests.support.up import POINTSMAN, RunningUp, pointsman_up

REQUESTS = 50
SECONDS_MAX = 60.0
KEEPER_SECONDS = 20.0
# So that nothing is shed for load on a slow machine: what is tested is that nothing is lost.
PATIENT = {"x-slo-ttft-ms": "60000"}


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _placed_while_draining(fleet: RunningUp, instance: str) -> int:
    described = read_fleet_file(fleet.data)
    assert described is not None
    draining, placed = False, 0
    for entry in LiveHistory(described.settings()).entries():
        event = entry.event
        if isinstance(event, InstanceDraining | InstanceUndrained) and event.instance == instance:
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


def test_draining_loses_nothing_and_a_killed_instance_only_what_it_had_begun(tmp_path: Path) -> None:
    with pointsman_up(tmp_path, "--instances", "2..3", "--set", "scaler.scaling=manual", "--speed", "4") as fleet:
        fleet.wait_for("ready in")
        url = f"http://127.0.0.1:{fleet.port}"

        drained = asyncio.run(_burst(url, lambda: _pointsman(fleet, "drain", "scaled-1", "--wait")))
        placed = _placed_while_draining(fleet, "scaled-1")
        _pointsman(fleet, "drain", "scaled-1", "--undo")
        _pointsman(fleet, "scale", "2", "--wait")
        keepers = sorted((fleet.data / "instances").glob("scaled-*.lock"))
        victim = _a_ready_instance(fleet)  # before the burst, which is over sooner than a command
        keeper = int((fleet.data / "instances" / f"{victim}.lock").read_text())
        killed = asyncio.run(_burst(url, lambda: os.kill(keeper, signal.SIGKILL)))
        after = _pointsman(fleet, "scale", "2", "--wait")
        failed = _failed_at(fleet, victim)
        fleet.stop()
        left = _still_running(keepers)

    assert [how for _, how in drained] == ["whole"] * REQUESTS
    assert placed == 0
    broken = [(begun, how) for begun, how in killed if how != "whole"]
    assert all(begun and how.startswith("error:") for begun, how in broken), broken
    assert failed > 0, "the killed instance had requests"
    assert "2 wanted (done)" in after
    assert left == []
