"""The whole system as people run it: `pointsman up`, real processes, the real nats-server, HTTP from outside.

The engines have small caches, so that every run evicts, and drop every third batch of their KV events on the way,
so that the workers live from the replay socket. After each story the index must agree with the engines key by key.
"""

import asyncio
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import reduce
from io import BytesIO
from operator import xor
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from pointsman.contracts.block_keys import KeyChain
from pointsman.contracts.commands import DescribeFleet, FleetDescribed
from pointsman.contracts.decisions import RequestRejected
from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from pointsman.contracts.subjects import command_subject
from pointsman.ports import CommandTimeoutError, Link, NoResponderError
from pointsman.primitives import InstanceId, PoolName, WallSeconds
from pointsman.state.state import PoolSettings, State
from pointsman_cli.discovery import FleetFile, find_fleet
from pointsman_lab.faults.engine_truth import held_keys, replay_endpoint_of
from tests.support.log_reading import events_in, folded
from tests.support.up import RunningUp, pointsman_up
from tests.support.waiting import eventually

SPEED = 40.0
ENGINE_BLOCKS = 160
QUIET_SECONDS_MAX = 15.0
ENDS = (RequestFinished, RequestFailed, RequestCancelled, RequestRejected)
PATIENT = {"x-slo-ttft-ms": "3600000"}
"""A restart of a process takes wall seconds, many times as long in the engines' time."""

SEED = 20261121


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POINTSMAN_FAULT_DROP_EVENT_BATCHES", "3")
        arguments = ("--instances", "2", "--speed", str(SPEED), "--kv-blocks", str(ENGINE_BLOCKS))
        with pointsman_up(tmp_path_factory.mktemp("fleet"), *arguments) as running:
            running.wait_for("Try it")
            yield running
            running.stop()
            assert "killed, for not stopping" not in running.output, running.output


class Traffic:
    """Prompts that share prefixes, sent as a few clients at once would."""

    def __init__(self, fleet: FleetFile, seed: int) -> None:
        self._fleet = fleet
        self._random = Random(seed)
        self._stems = [self._tokens(64 * self._random.randint(4, 12)) for _ in range(8)]
        self.statuses: Counter[int] = Counter()
        self.instances: Counter[str] = Counter()

    async def send(self, requests: int, *, at_once: int = 8) -> None:
        bodies = [self._body() for _ in range(requests)]
        async with aiohttp.ClientSession() as session:
            gate = asyncio.Semaphore(at_once)
            await asyncio.gather(*(self._one(session, gate, body) for body in bodies))

    async def _one(self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, body: dict[str, Any]) -> None:
        url = f"{self._fleet.ingress}/v1/completions"
        async with gate, session.post(url, json=body, headers=PATIENT) as answer:
            await answer.read()
            self.statuses[answer.status] += 1
            self.instances[answer.headers.get("x-pointsman-instance", "")] += 1

    def _body(self) -> dict[str, Any]:
        prompt = [*self._random.choice(self._stems), *self._tokens(self._random.randint(10, 300))]
        return {
            "model": self._fleet.model,
            "prompt": prompt,
            "max_tokens": self._random.randint(1, 80),
            "stream": self._random.random() < 0.7,
        }

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randint(300, 4000) for _ in range(count)]


async def assert_index_agrees(fleet: FleetFile, link: Link) -> None:
    """Engines, workers, log and scheduler hold the same keys, as soon as everything is quiet."""
    settings = fleet.settings()
    chain = KeyChain(secret=settings.secret.encode(), model=fleet.model, block_tokens=settings.block_tokens)
    disagreement = "nothing was compared"

    async def agree() -> bool:
        nonlocal disagreement
        state = await folded(link.log, State(PoolSettings(speed=SPEED)))
        try:
            described = await link.commands.request(
                command_subject(PoolName(fleet.pool), "fleet"), DescribeFleet(), timeout=WallSeconds(2.0)
            )
        except (NoResponderError, CommandTimeoutError) as nobody:
            disagreement = f"no scheduler describes the fleet: {nobody}"
            return False
        assert isinstance(described, FleetDescribed)
        led = {i.instance: i for i in described.instances}
        for engine in find_fleet(data=Path(fleet.data)).of_role("engine"):
            instance = InstanceId(engine.name)
            truth = await held_keys(replay_endpoint_of(engine.pid), chain)
            index = state.index.keys(instance)
            view = led.get(instance)
            if index != truth:
                disagreement = f"{instance}: {len(truth - index)} keys missing, {len(index - truth)} too many"
                return False
            if view is None or (view.cached_blocks, view.digest) != (len(truth), reduce(xor, truth, 0)):
                disagreement = f"{instance}: the scheduler has {view}, the engine {len(truth)} blocks"
                return False
            if view.knowledge != "exact" or view.status != "ready":
                disagreement = f"{instance} is {view.status}, {view.knowledge} ({view.doubt})"
                return False
        return True

    deadline = time.monotonic() + QUIET_SECONDS_MAX
    while not await agree():
        assert time.monotonic() < deadline, f"{disagreement} (seed {SEED})"
        await asyncio.sleep(0.2)


def kill(fleet: FleetFile, name: str) -> None:
    (process,) = [p for p in fleet.processes if p.name == name]
    os.kill(process.pid, signal.SIGKILL)


async def test_traffic_is_served_and_every_request_has_one_end(fleet: FleetFile, link: Link) -> None:
    traffic = Traffic(fleet, SEED)
    await traffic.send(120)

    assert traffic.statuses == {200: 120}
    assert set(traffic.instances) == {"engine-1", "engine-2"}
    await eventually(lambda: _every_request_ended(link), what="every request has an end")
    events = await events_in(link.log)
    arrived = [event.request for event in events if isinstance(event, RequestArrived)]
    ended = [event.request for event in events if isinstance(event, ENDS)]
    assert len(arrived) == 120
    assert sorted(arrived) == sorted(ended)
    assert any(type(event).__name__ == "BlocksRemoved" for event in events), "the caches are small enough to evict"


async def _every_request_ended(link: Link) -> bool:
    events = await events_in(link.log)
    arrived = {event.request for event in events if isinstance(event, RequestArrived)}
    return bool(arrived) and arrived <= {event.request for event in events if isinstance(event, ENDS)}


async def test_the_index_agrees_with_the_engines_after_evictions_and_dropped_messages(
    fleet: FleetFile, link: Link
) -> None:
    await Traffic(fleet, SEED + 1).send(40)

    await assert_index_agrees(fleet, link)


async def test_the_archive_holds_the_whole_log(fleet: FleetFile, link: Link) -> None:
    def archived() -> int:
        with closing(sqlite3.connect(Path(fleet.data) / "archive.sqlite")) as archive:
            return int(archive.execute("select count(*) from events").fetchone()[0])

    last = (await link.log.extent()).last
    await eventually(lambda: archived() >= last, what="the recorder has caught up")
    events = await events_in(link.log)
    with closing(sqlite3.connect(Path(fleet.data) / "archive.sqlite")) as archive:
        ends = archive.execute(
            "select count(*) from events where type in "
            "('RequestFinished', 'RequestFailed', 'RequestCancelled', 'RequestRejected')"
        ).fetchone()[0]

    assert ends == sum(isinstance(event, ENDS) for event in events)


async def test_a_restarted_scheduler_leads_on_with_the_same_index(fleet: FleetFile, link: Link, up: RunningUp) -> None:
    traffic = Traffic(fleet, SEED + 2)
    kill(fleet, "scheduler")
    await traffic.send(20)

    assert traffic.statuses == {200: 20}
    assert "scheduler" in up.output.partition("Try it")[2], "a restart is never silent"
    await assert_index_agrees(find_fleet(data=up.data), link)


async def test_a_killed_engine_comes_back_empty_and_costs_no_client_an_answer_that_had_not_begun(
    fleet: FleetFile, link: Link, up: RunningUp
) -> None:
    traffic = Traffic(fleet, SEED + 3)
    kill(fleet, "engine-1")
    await traffic.send(30)
    await eventually(lambda: _joined_again(link), what="engine-1 has a new epoch")
    await traffic.send(30)

    assert traffic.statuses == {200: 60}
    await assert_index_agrees(find_fleet(data=up.data), link)


async def _joined_again(link: Link) -> bool:
    events = await events_in(link.log)
    joins = [e for e in events if type(e).__name__ == "InstanceJoined" and getattr(e, "instance", "") == "engine-1"]
    return len(joins) > 1


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "pointsman-sim", "prompt": "x", ', 400, None),
        (b'{"model": "pointsman-sim", "prompt": "x", "max_tokens": -1}', 400, None),
        (b'{"model": "nobody", "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": "pointsman-sim", "prompt": "' + b"x" * 10_000_000 + b'"}', 413, None),
        (b'{"model": "pointsman-sim", "prompt": [' + b"1," * 20_000 + b"1]}", 400, "context_length_exceeded"),
    ],
    ids=["malformed", "negative max_tokens", "unknown model", "10 MB", "longer than the model"],
)
async def test_bad_input_gets_a_clear_error_and_leaves_no_trace(
    fleet: FleetFile, link: Link, body: bytes, status: int, code: str | None
) -> None:
    before = await events_in(link.log)
    async with aiohttp.ClientSession() as session:
        headers = {"content-type": "application/json"}
        async with session.post(f"{fleet.ingress}/v1/completions", data=BytesIO(body), headers=headers) as answer:
            error = (await answer.json())["error"]
    after = await events_in(link.log)

    assert (answer.status, error["message"] != "") == (status, True)
    assert code is None or error["code"] == code
    assert [e for e in after[len(before) :] if type(e).__name__.startswith("Request")] == []
