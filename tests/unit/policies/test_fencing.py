"""What a deposed leader says: passed over by the fold, void at the ingress, and made up for by the next leader."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.contracts.commands import RouteGranted, RouteRequest
from pointsman.contracts.decisions import LeaderElected, RequestGranted
from pointsman.contracts.subjects import command_subject
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.ports import Reply
from pointsman.primitives import PoolName, RequestId, Term, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Stage
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.hold_queue import HoldQueue
from pointsman_ingress.placement.in_flight import InFlightRequests
from pointsman_ingress.placement.scheduler_client import REPEAT_WALL_SECONDS, SchedulerClient, SchedulerLiveness
from pointsman_lab.background import background
from pointsman_lab.memory.log import MemoryBroker
from tests.support.engine_urls import ANY_URL
from tests.support.events import grant, joined, route
from tests.support.memory_pool import LogView

POOL = PoolName("default")


def elected(term: int) -> LeaderElected:
    return LeaderElected(at=0.0, term=Term(term), scheduler=f"s{term}", as_of=0)


def decided(term: int) -> list[LogEvent]:
    """What a leader of this term decides about a request: it arrived, was placed and granted."""
    state = State(PoolSettings(), policy_set().trackers())
    state.apply(joined("a"), 1)
    return Dispatcher(state, policy_set(), term=Term(term)).route(route("r", [1]), now=0.0)


def folded(*events: LogEvent) -> State:
    state = State(PoolSettings(), policy_set().trackers())
    for number, event in enumerate(events, 1):
        state.apply(event, number)
    return state


def test_decisions_count_until_another_leader_is_elected() -> None:
    before = folded(joined("a"), elected(1), *decided(1), elected(2))
    after = folded(joined("a"), elected(1), elected(2), *decided(1))
    between = folded(joined("a"), elected(1), *decided(1)[:2], elected(2), *decided(1)[2:])

    assert (before.workload.requests[RequestId("r")].stage, before.fenced) == (Stage.PREFILL, 0)
    assert (after.workload.requests, after.fenced) == ({}, 3)
    assert (between.workload.requests[RequestId("r")].stage, between.fenced) == (Stage.PENDING, 1)


def test_a_term_begins_at_its_place_in_the_log_for_its_own_leader_too() -> None:
    state = folded(joined("a"), elected(1))
    state.apply(elected(2))
    for number, event in enumerate(decided(1), 3):
        state.apply(event, number)

    assert state.fenced == 0
    assert state.term == 1


def test_an_ingress_that_says_where_a_request_is_is_believed_and_repeating_it_changes_nothing() -> None:
    arrived, placed, _ = decided(1)
    pending = folded(joined("a"), joined("b"), elected(1), arrived, placed, elected(2))
    there = pending.workload.requests[RequestId("r")].instance
    told = RequestGranted(at=1.0, request=RequestId("r"), instance=there)
    hit_tokens = pending.workload.requests[RequestId("r")].uncached_tokens
    for number in (10, 11):
        pending.apply(told, number)

    request = pending.workload.requests[RequestId("r")]
    assert (request.stage, request.granted_at, request.uncached_tokens) == (Stage.PREFILL, 1.0, hit_tokens)
    assert pending.workload.queues[there].prefill_tokens == request.uncached_tokens


@dataclass
class Rig:
    """A router, and a leader that a test plays."""

    broker: MemoryBroker
    scheduler: SchedulerClient
    in_flight: InFlightRequests
    asked: list[tuple[RouteRequest, Reply]]

    async def asked_times(self, count: int) -> None:
        async with asyncio.timeout(float(REPEAT_WALL_SECONDS / 2)):
            while len(self.asked) < count:  # noqa: ASYNC110 - what a test waits for has no event
                await asyncio.sleep(0.005)

    async def answer(self, term: int, number: int = -1, *, attempt: int = 0) -> None:
        """`attempt`: 0 for the one that was asked for."""
        command, reply = self.asked[number]
        instance = "failed" if attempt else f"by-{term}"
        await reply(grant(command.request, instance, attempt=attempt or command.attempt, term=Term(term)))

    def grants_told(self) -> list[RequestGranted]:
        return LogView(self.broker).of(RequestGranted)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    broker, clock, board = MemoryBroker(POOL), ScaledClock(), HealthBoard()
    link = broker.client(clock, name="ingress")
    fleet = FleetView(clock, board, ANY_URL)
    in_flight = InFlightRequests(fleet=fleet, events=link.log, clock=clock)
    liveness = SchedulerLiveness(
        commands=link.commands, pool=POOL, clock=clock, board=board, timeout_seconds=WallSeconds(3.0)
    )
    scheduler = SchedulerClient(
        commands=link.commands,
        fleet=fleet,
        in_flight=in_flight,
        liveness=liveness,
        pool=POOL,
        clock=clock,
        hold=HoldQueue(WallSeconds(30.0), clock),
    )
    asked: list[tuple[RouteRequest, Reply]] = []

    async def leader(command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, RouteRequest)
        asked.append((command, reply))

    commands = broker.client(clock, name="leader").commands
    async with background(fleet.follow(link.log)), commands.serve(command_subject(POOL, "route"), leader):
        yield Rig(broker, scheduler, in_flight, asked)


async def test_who_waits_asks_again_as_soon_as_another_leads(rig: Rig) -> None:
    waiting = asyncio.create_task(rig.scheduler.route(route("r", [1]), ScaledClock(), owner="t"))
    await rig.asked_times(1)
    rig.broker.elect(elected(2), 0)
    await rig.asked_times(2)
    await rig.answer(2)
    answer = await waiting

    assert isinstance(answer, RouteGranted)
    assert answer.term == 2


async def test_the_answer_of_a_deposed_leader_is_void(rig: Rig) -> None:
    waiting = asyncio.create_task(rig.scheduler.route(route("r", [1]), ScaledClock(), owner="t"))
    await rig.asked_times(1)
    rig.broker.elect(elected(2), 0)
    await rig.asked_times(2)
    await rig.answer(1)
    await rig.asked_times(3)
    await rig.answer(2)
    answer = await waiting

    assert isinstance(answer, RouteGranted)
    assert answer.instance == "by-2"


async def test_a_grant_of_an_earlier_attempt_is_no_answer_to_a_later_one(rig: Rig) -> None:
    """It does not know which engine has failed the request meanwhile."""
    waiting = asyncio.create_task(
        rig.scheduler.route(route("r", [1], attempt=2, excluded=["failed"]), ScaledClock(), owner="t")
    )
    await rig.asked_times(1)
    await rig.answer(1, attempt=1)
    await rig.asked_times(2)
    await rig.answer(1)
    answer = await waiting

    assert isinstance(answer, RouteGranted)
    assert (answer.attempt, answer.instance) == (2, "by-1")


async def test_a_log_that_begins_anew_begins_its_terms_anew(rig: Rig) -> None:
    rig.broker.elect(elected(5), 0)
    waiting = asyncio.create_task(rig.scheduler.route(route("r", [1]), ScaledClock(), owner="t"))
    await rig.asked_times(1)
    rig.broker.recreate()
    rig.broker.elect(elected(1), 0)
    await rig.asked_times(2)
    await rig.answer(1)

    assert isinstance(await waiting, RouteGranted)


async def test_a_new_leader_is_told_of_grants_that_it_may_not_know(rig: Rig) -> None:
    waiting = asyncio.create_task(rig.scheduler.route(route("r", [1], attempt=2), ScaledClock(), owner="t"))
    await rig.asked_times(1)
    await rig.answer(1)
    granted = await waiting
    assert isinstance(granted, RouteGranted)
    async with rig.in_flight.at_engine(granted, ScaledClock()):
        rig.broker.elect(elected(2), 0)
        async with asyncio.timeout(2):
            while not rig.grants_told():  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.005)
    rig.broker.elect(elected(3), 1)
    await asyncio.sleep(0.02)

    (told,) = rig.grants_told()
    assert (told.request, told.instance, told.attempt, told.stamp) == ("r", "by-1", 2, None)
