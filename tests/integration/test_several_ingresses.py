"""Three ingresses and two schedulers as real processes. Tenants: limits hold across the ingresses and a leader's death, the
command changes them live, and a higher class overtakes a lower one. Behind a load balancer, one ingress is restarted while all
stream, and no client notices; `pointsman-lab faults --rolling` does that to every service, behind haproxy and under more load.
"""

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, RequestGranted
from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.ports import Link
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.tenants import BURST_SECONDS
from pointsman_cli.discovery import FleetFile, FleetProcess, find_fleet
from pointsman_lab.tenants.limits import LogReading, leader, most
from pointsman_lab.tenants.load import TenantClients, Traffic
from tests.support.balancer import TestBalancer, balancer_before
from tests.support.log_reading import events_in
from tests.support.up import POINTSMAN, RunningUp, pointsman_up
from tests.support.waiting import eventually

SPEED = 10.0
RATE = 4.0  # a second of engine time
CONCURRENCY = 3
WINDOW_SECONDS = 20.0  # engine time
TURN_REQUESTS = 5  # in one turn of the leader's event loop, with room for a slow machine
LONG_TOKENS = 3000
"""Some ten wall seconds, so that every stream outlives the lame duck's time."""
STREAMS = 8
RESTART_SECONDS_MAX = 60.0
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
    more = ("--set", "scheduler.prefill_window_tokens=4096", "--engine-args", "--stream-interval 20")
    with pointsman_up(tmp_path_factory.mktemp("fleet"), *arguments, *more) as running:
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


class Client:
    """Streams one answer after the other, and counts how they ended."""

    def __init__(self, url: str, model: str) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self.ends: Counter[str] = Counter()
        self.under_way = 0

    async def stream(self, session: aiohttp.ClientSession, number: int, tokens: int) -> None:
        body = {"model": self._model, "prompt": [500 + number] * 100, "max_tokens": tokens, "stream": True}
        try:
            async with session.post(self._url, json=body, headers={"x-slo-ttft-ms": "3600000"}) as answer:
                self.under_way += 1
                said = (await answer.read()).decode()
                self.under_way -= 1
            self.ends[_end(answer.status, said)] += 1
        except (aiohttp.ClientError, OSError) as error:
            self.under_way -= 1
            self.ends[type(error).__name__] += 1


def _end(status: int, said: str) -> str:
    if status != 200:
        return f"status {status}"
    if '"error"' in said:
        return "error event"
    return "whole" if said.endswith("data: [DONE]\n\n") else "no end mark"


def ingress(fleet: FleetFile, name: str) -> FleetProcess:
    (found,) = [process for process in fleet.of_role("ingress") if process.name == name]
    return found


async def test_an_ingress_that_is_restarted_behind_a_load_balancer_cuts_no_stream_and_refuses_nobody(
    up: RunningUp, fleet: FleetFile
) -> None:
    async with (
        balancer_before(*fleet.of_role("ingress")) as balancer,
        aiohttp.ClientSession() as session,
    ):
        await eventually(lambda: all(backend.well for backend in balancer.backends), what="both are in rotation")
        client = Client(balancer.url, fleet.model)
        async with asyncio.TaskGroup() as clients:
            for number in range(STREAMS):
                clients.create_task(client.stream(session, number, LONG_TOKENS))
            await eventually(lambda: client.under_way == STREAMS, what="all stream")
            old = ingress(fleet, "ingress")
            os.kill(old.pid, signal.SIGTERM)
            short = clients.create_task(_ask_on(client, session, balancer, old, up))
        await short

    assert set(client.ends) == {"whole"}, client.ends
    assert client.ends["whole"] > STREAMS
    assert [backend.fell for backend in balancer.backends] == [1, 0, 0]
    assert "with exit code 0" in up.output


async def _ask_on(
    client: Client, session: aiohttp.ClientSession, balancer: TestBalancer, old: FleetProcess, up: RunningUp
) -> None:
    """One short request after the other, until the ingress is back in rotation."""

    async def back() -> bool:
        await client.stream(session, 100 + sum(client.ends.values()), 4)
        new = ingress(find_fleet(data=up.data), old.name)
        return new.pid != old.pid and balancer.backends[0].fell == 1 and all(b.well for b in balancer.backends)

    await eventually(back, seconds=RESTART_SECONDS_MAX, what="the restarted ingress is in rotation again")
