"""Requests that are taken out of an engine which does not answer: the ingress with a scheduler that does as a test says, and
scheduler, rebalancer and ingress together, in front of engines that take a request and keep silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.decisions import RequestGranted, RequestMigrated
from pointsman.contracts.requests import PrefillFinished, RequestEvent, RequestFinished
from pointsman.policies.policy_set import rebalancing_policy
from pointsman.primitives import InstanceId, PoolName, Term
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman.simulation.replay import verify
from pointsman.state.workload import Stage
from pointsman_ingress.placement import in_flight
from pointsman_ingress.placement.in_flight import InFlightRequest
from pointsman_rebalancer.service import RebalancerService
from pointsman_rebalancer.settings import RebalancerSettings
from pointsman_scheduler.service import SchedulerService
from tests.support.events import grant
from tests.support.fake_engine import Behaviour, FakeEngine, running_engine
from tests.support.ingress_world import COMPLETIONS, ONE, STREAM, TOKENS, TWO, IngressBench, world_with
from tests.support.log_reading import life_of
from tests.support.memory_pool import MemoryPool
from tests.support.waiting import eventually

POOL = PoolName("default")
SPEED = 10.0
"""What is overdue by 3 s is so after 0.3 s wall."""
ENDS = ("RequestFinished", "RequestFailed", "RequestCancelled", "RequestRejected")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader is asked twenty times a second."""
    monkeypatch.setattr(in_flight, "HEARTBEAT_WALL_SECONDS", 0.05)


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    """Requests go to engine one, may be re-bound, and then go to engine two."""
    async with world_with() as opened:
        opened.scheduler.grant_fields = {"rebind": True}
        opened.scheduler.rebinds = {ONE: TWO}
        yield opened


@pytest.mark.parametrize(
    ("body", "silence"),
    [(STREAM, Behaviour.HANGS), (STREAM, Behaviour.HANGS_AFTER_HEAD), (TOKENS, Behaviour.HANGS)],
)
async def test_an_engine_that_keeps_silent_is_left_and_another_answers(
    world: IngressBench, body: dict[str, object], silence: Behaviour
) -> None:
    world.one.script.append(silence)
    async with world.post(COMPLETIONS, body, X_Request_Id="mine") as answer:
        content = await answer.text()

    assert answer.status == 200
    assert answer.headers["x-pointsman-instance"] == TWO
    assert "t2" in content if body is STREAM else json.loads(content)["choices"]
    await eventually(lambda: world.one.given_up == 1)
    assert [len(engine.received) for engine in (world.one, world.two)] == [1, 1]
    assert world.one.received[0].body == world.two.received[0].body
    events = await world.events()
    assert [type(e).__name__ for e in events if type(e).__name__ in ENDS] == ["RequestFinished"]
    assert {e.instance for e in events if isinstance(e, PrefillFinished | RequestFinished)} == {TWO}


async def test_from_the_first_bytes_on_the_request_stays(world: IngressBench) -> None:
    world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
    async with world.post(COMPLETIONS, STREAM) as answer:
        await answer.content.readany()
        await asyncio.sleep(0.3)

        assert answer.headers["x-pointsman-instance"] == ONE
        assert world.one.given_up == 0
    assert world.two.received == []


async def test_where_both_come_in_the_same_moment_the_answer_counts() -> None:
    here, there = (grant("r1", instance) for instance in (ONE, TWO))
    async with asyncio.timeout(None) as interrupt:
        request = InFlightRequest(here, ScaledClock(), interrupt=interrupt)
        request.redispatch(there)
        assert request.redispatched_to is there
        request.answered()
        await asyncio.sleep(0.01)

    assert request.redispatched_to is None


async def test_answers_that_are_lost_or_of_a_leader_that_is_deposed_change_nothing(world: IngressBench) -> None:
    world.one.script.append(Behaviour.HANGS)
    world.scheduler.grant_fields = {"rebind": True, "term": Term(2)}
    world.scheduler.silent_follows = 2
    world.scheduler.term = Term(1)
    asking = asyncio.create_task(_answer(world))
    await eventually(lambda: len(world.scheduler.followed) >= 5)
    assert world.two.received == []
    world.scheduler.term = Term(2)

    assert await asking == (200, TWO)


async def test_where_the_other_engine_fails_too_it_is_placed_again(world: IngressBench) -> None:
    world.one.script.append(Behaviour.HANGS)
    world.two.script.append(Behaviour.ERRS)

    assert await _answer(world) == (200, ONE)
    assert [(command.attempt, command.excluded) for command in world.scheduler.asked] == [(1, []), (2, [TWO])]


async def test_a_client_that_hangs_up_meanwhile_is_the_end_of_it(world: IngressBench) -> None:
    world.one.script.append(Behaviour.HANGS)
    world.two.script.append(Behaviour.HANGS)
    asking = asyncio.create_task(_answer(world))
    await eventually(lambda: world.two.received)
    asking.cancel()

    await eventually(lambda: world.two.given_up == 1)
    await asyncio.sleep(0.05)
    ends = [e for e in await world.events() if type(e).__name__ in ENDS]
    assert [type(e).__name__ for e in ends] == ["RequestCancelled"]


async def test_what_was_not_granted_so_is_named_to_the_leader_and_stays() -> None:
    async with world_with() as world:
        world.scheduler.rebinds = {ONE: TWO}
        world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
        async with world.post(COMPLETIONS, STREAM) as answer:
            await answer.content.readany()
            await asyncio.sleep(0.2)
        named = [sent.instance for command in world.scheduler.followed for sent in command.requests]
        assert set(named) == {ONE}
        assert world.two.received == []


async def _answer(world: IngressBench) -> tuple[int, str]:
    async with world.post(COMPLETIONS, STREAM) as answer:
        await answer.text()
        return answer.status, answer.headers["x-pointsman-instance"]


# Scheduler, rebalancer and ingress together


@dataclass
class Fleet:
    url: str
    pool: MemoryPool
    scheduler: SchedulerService
    client: aiohttp.ClientSession
    engines: dict[InstanceId, FakeEngine]

    async def ask(self, request: str) -> tuple[int, str]:
        headers = {"x-request-id": request, "x-slo-ttft-ms": "600000"}
        async with self.client.post(self.url + COMPLETIONS, json=STREAM, headers=headers) as answer:
            await answer.text()
            return answer.status, answer.headers.get("x-pointsman-instance", "")

    async def life_of(self, request: str) -> list[RequestEvent]:
        return life_of(await self.pool.entries(), request)


@asynccontextmanager
async def fleet(*, rebind: bool) -> AsyncIterator[Fleet]:
    """Two engines, of which the first in name is asked first; requests wait nowhere and nothing else moves them."""
    usual = {"speed": SPEED, "rebind": rebind, "policy": "min_ttft", "admission": "none", "suspect_seconds": 600.0}
    pool = MemoryPool(clock=ScaledClock(SPEED), usual=usual)
    async with AsyncExitStack() as stack:
        supervisor = await stack.enter_async_context(Supervisor())
        engines = {name: await stack.enter_async_context(running_engine()) for name in (ONE, TWO)}
        for name, engine in engines.items():
            await pool.append(pool.joined(name, url=engine.url, max_model_len=1000))
        scheduler = await stack.enter_async_context(pool.scheduler())
        await eventually(lambda: scheduler.leading)
        _rebalancer(supervisor, pool, RebalancerSettings(speed=SPEED, rebind=rebind, rebalance="off"))
        url = await stack.enter_async_context(pool.ingress(speed=SPEED))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleet(url, pool, scheduler, client, engines)


def _rebalancer(supervisor: Supervisor, pool: MemoryPool, settings: RebalancerSettings) -> None:
    link = pool.broker.client(pool.clock, name="r")
    service = RebalancerService(
        link=link,
        clock=pool.clock,
        board=HealthBoard(),
        settings=settings,
        policy=rebalancing_policy(settings.rebalance),
        name="r",
    )
    supervisor.start(service.run(), name="fold-r")
    supervisor.start(service.rebalance(), name="rebalance")


async def test_a_stalled_engine_loses_its_requests_to_another_and_the_log_explains_it() -> None:
    async with fleet(rebind=True) as running:
        one = running.engines[ONE]
        one.script.extend([Behaviour.HANGS] * 3)
        answers = await asyncio.gather(*(running.ask(f"r{n}") for n in range(6)))
        await eventually(lambda: not running.scheduler.state.workload.requests)
        verdict = verify(await running.pool.entries())
        lives = [await running.life_of(f"r{n}") for n in range(6)]

        assert {status for status, _ in answers} == {200}
        moves = [event for life in lives for event in life if isinstance(event, RequestMigrated)]
        hanging = {received.headers["x-request-id"] for received in one.received[:3]}
        assert hanging <= {move.request for move in moves}  # and any that a busy machine held up as long
        assert one.given_up >= 3
        assert all(sum(isinstance(event, RequestMigrated) for event in life) <= 1 for life in lives)
        assert all((m.rebound, m.source, m.instance, m.plan.startswith("r.")) == (True, ONE, TWO, True) for m in moves)
        assert all(m.benefit > 0 for m in moves)
        for life in lives:
            assert [type(e).__name__ for e in life if type(e).__name__ in ENDS] == ["RequestFinished"]
            grants = [e for e in life if isinstance(e, RequestGranted)]
            assert [g.rebind for g in grants] == [True, False][: len(grants)]
        assert (verdict.different, verdict.problems) == (0, [])
        assert verdict.identical == verdict.decisions
        assert not any(line.requests for line in running.scheduler.state.workload.queues.values())


async def test_where_nobody_asked_for_it_a_request_stays_where_it_is() -> None:
    async with fleet(rebind=False) as running:
        running.engines[ONE].script.append(Behaviour.HANGS)
        asking = asyncio.create_task(running.ask("r1"))
        await asyncio.sleep(1.0)

        assert not asking.done()
        (request,) = running.scheduler.state.workload.requests.values()
        assert (request.instance, request.stage, request.rebind) == (ONE, Stage.PREFILL, False)
        assert not any(isinstance(e, RequestMigrated) for e in await running.life_of("r1"))
        asking.cancel()
