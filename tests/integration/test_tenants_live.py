"""Tenants on real processes: three ingresses, two schedulers. Limits hold across the ingresses and a leader's death, the
command changes them live, and a higher class overtakes a lower one."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, RequestGranted
from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.ports import Link
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.tenants import BURST_SECONDS
from pointsman_cli.discovery import FleetFile
from pointsman_lab.tenants.limits import LogReading, leader, most
from pointsman_lab.tenants.load import TenantClients, Traffic
from tests.support.log_reading import events_in
from tests.support.up import POINTSMAN, RunningUp, pointsman_up

SPEED = 10.0
RATE = 4.0  # a second of engine time
CONCURRENCY = 3
WINDOW_SECONDS = 20.0  # engine time
TURN_REQUESTS = 5  # in one turn of the leader's event loop, with room for a slow machine
FILE = f"""
[default]
priority = "interactive"

[tenants.by-requests]
requests_per_second = {RATE}

[tenants.by-concurrency]
concurrency = {CONCURRENCY}

[tenants.nightly]
priority = "batch"
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    arguments = ("--instances", "2", "--schedulers", "2", "--ingresses", "3", "--speed", str(SPEED))
    window = ("--set", "scheduler.prefill_window_tokens=4096")
    with pointsman_up(tmp_path_factory.mktemp("fleet"), *arguments, *window) as running:
        running.wait_for("Try it")
        yield running
        running.stop()


def clients_of(fleet: FleetFile) -> TenantClients:
    urls = [process.url for process in fleet.of_role("ingress")]
    assert len(urls) == 3
    return TenantClients(fleet.model, urls, seed=1)


async def tenants(up: RunningUp, *words: str) -> Any:
    """What the command prints; fails the test if it fails."""
    command = [POINTSMAN, "tenants", *words, "--from", str(up.data), "--json"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


async def log_of(link: Link) -> list[LogEvent]:
    return [event async for event in _events(link)]


async def _events(link: Link) -> AsyncIterator[LogEvent]:
    for event in await events_in(link.log):
        yield event


async def test_limits_hold_over_three_ingresses_and_the_death_of_the_leader(
    up: RunningUp, fleet: FleetFile, link: Link, tmp_path: Path
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    await tenants(up, "apply", str(path))
    flood = [
        Traffic(tenant="by-requests", rate=2.5 * RATE * SPEED, prompt_tokens=64, output_tokens=2),
        Traffic(tenant="by-concurrency", rate=20.0, prompt_tokens=64, output_tokens=100),
    ]

    async def kill_the_leader() -> None:
        await asyncio.sleep(1.5)
        found = await leader(link.commands, fleet.settings())
        os.kill(int(found.scheduler.split("-")[1]), signal.SIGKILL)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kill_the_leader())
        sending = tasks.create_task(clients_of(fleet).run(flood, 4.5))

    events = await log_of(link)
    log = LogReading(events)
    admitted = [(at, 1.0) for at in log.admitted("by-requests")]
    burst = 1.0 + RATE * BURST_SECONDS
    assert sum(isinstance(event, LeaderElected) for event in events) == 2
    assert most(admitted, WINDOW_SECONDS) <= 1.02 * (RATE * WINDOW_SECONDS + burst)
    assert most(admitted, WINDOW_SECONDS) >= 0.5 * RATE * WINDOW_SECONDS, "the clients sent enough"
    assert log.most_in_flight("by-concurrency") == CONCURRENCY
    answered = [sample for sample in sending.result() if sample.tenant == "by-requests" and sample.status == 200]
    ended = {e.request for e in events if isinstance(e, RequestFinished | RequestFailed | RequestCancelled)}
    lost = len(ended - log.arrivals.keys())
    assert lost <= TURN_REQUESTS, "a killed leader has answered requests whose arrival it had not yet written"
    assert 0 <= len(answered) - len(admitted) <= lost, "what the leader counted is what clients got"
    starved = RejectReason.SCHEDULER_OVERLOADED  # the next leader, on a busy machine
    assert {sample.status for sample in sending.result() if sample.reason != starved} == {200, 429}


async def test_a_limit_is_lifted_live(up: RunningUp, fleet: FleetFile, link: Link) -> None:
    await tenants(up, "set", "by-requests", "requests_per_second=0")
    burst = [Traffic(tenant="by-requests", rate=100.0, prompt_tokens=64, output_tokens=2)]
    samples = await clients_of(fleet).run(burst, 0.5)

    assert [sample.status for sample in samples] == [200] * 50
    shown = await tenants(up, "show")
    assert shown["policies"]["tenants"]["by-requests"].get("requests_per_second", 0) == 0
    changes = [event for event in await log_of(link) if isinstance(event, TenantPoliciesSet)]
    assert changes[-1].by


async def test_interactive_requests_overtake_batch_requests_that_wait(fleet: FleetFile, link: Link) -> None:
    backlog = Traffic(tenant="nightly", rate=60.0, prompt_tokens=4_000, output_tokens=2)
    chat = Traffic(tenant="somebody", rate=10.0, prompt_tokens=1_000, output_tokens=2)
    samples = await clients_of(fleet).run([backlog, chat], 1.0)

    # Their order is the log's: an ingress stamps `at` before it counts tokens, and long prompts take longer. Each engine has a
    # queue of its own.
    arrived: dict[RequestId, tuple[int, RequestArrived]] = {}
    granted: list[tuple[int, RequestArrived]] = []
    engine_of: dict[RequestId, InstanceId] = {}
    for event in await log_of(link):
        if isinstance(event, RequestArrived) and event.tenant in ("nightly", "somebody"):
            arrived[event.request] = len(arrived), event
        elif isinstance(event, RequestGranted) and event.request in arrived:
            granted.append(arrived[event.request])
            engine_of[event.request] = event.instance
    overtaken = {
        chat.request: sum(other.priority == "batch" and before < place for before, other in granted[number:])
        for number, (place, chat) in enumerate(granted)
        if chat.priority == "interactive"
    }
    overtook = [
        sum(
            other.priority == "batch" and after > place and engine_of[other.request] == engine_of[chat.request]
            for after, other in granted[:number]
        )
        for number, (place, chat) in enumerate(granted)
        if chat.priority == "interactive"
    ]
    print(f"batch requests overtaken by each interactive one: {sorted(overtaken.values())}")
    assert {sample.status for sample in samples} == {200}
    assert len(overtaken) == 10
    assert sum(overtook) == 0, "no batch request that came later goes first"
    assert max(overtaken.values()) >= 5
