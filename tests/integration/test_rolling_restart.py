"""Two ingresses behind a load balancer; one is restarted while both stream, and no client notices.

`pointsman-lab faults --rolling` does the same to every service, behind haproxy and under more load.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pointsman_cli.discovery import FleetFile, FleetProcess, find_fleet
from tests.support.balancer import TestBalancer, balancer_before
from tests.support.up import RunningUp, pointsman_up
from tests.support.waiting import eventually

SPEED = 5.0
LONG_TOKENS = 1500
"""Some ten wall seconds, so that every stream outlives the lame duck's time."""
STREAMS = 8
RESTART_SECONDS_MAX = 60.0


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[RunningUp]:
    arguments = ("--instances", "2", "--ingresses", "2", "--speed", str(SPEED), "--engine-args", "--stream-interval 10")
    with pointsman_up(tmp_path, *arguments) as running:
        await asyncio.to_thread(running.wait_for, "Try it")
        yield running
        await asyncio.to_thread(running.stop)


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
    up: RunningUp,
) -> None:
    fleet = find_fleet(data=up.data)
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
    assert [backend.fell for backend in balancer.backends] == [1, 0]
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
