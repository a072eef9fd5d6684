"""Requests that nobody will end: whose engine says that nothing runs there. And those that waited for a scheduler."""

import asyncio
from typing import Any

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.requests import RequestArrived
from pointsman.contracts.subjects import follow_subject
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.policies.stranded import stranded
from pointsman.ports import Reply
from pointsman.primitives import Epoch, InstanceId, PoolName, RequestId, Term
from pointsman.runtime.health import HealthBoard
from pointsman.state.outages import DRAIN_SHARE, HELD_UP_WALL_SECONDS_MAX, HELD_UP_WALL_SECONDS_MIN, Outages
from pointsman.state.state import PoolSettings, State
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.in_flight import HEARTBEAT_WALL_SECONDS, InFlightRequests, send_heartbeats
from pointsman_lab.memory.log import MemoryBroker
from tests.support.engine_urls import ANY_URL
from tests.support.events import first_token, route
from tests.support.leading import leader_of
from tests.support.virtual_time import in_virtual_time

IDLE = 3.0
PREFILL = 0.065
"""Seconds of a prompt of one block and a token."""


def leader() -> Dispatcher:
    return leader_of(("a",), policy_set(routing="min_ttft", admission="none", ordering="fcfs"))


def report(at: float, running: int = 0, **fields: Any) -> InstanceReported:
    return InstanceReported(
        at=at, instance=InstanceId("a"), epoch=Epoch(1), serving=True, waiting=0, running=running, kv_usage=0.0,
        sequence=0, blocks=0, digest=0, **fields,
    )  # fmt: skip


def lost(dispatcher: Dispatcher, now: float) -> list[str]:
    return [request.id for request in stranded(dispatcher.state, now, idle_after=IDLE)]


def idle_from(dispatcher: Dispatcher, at: float, until: float) -> None:
    """The engine has had work, and from `at` on reports each second that it has none."""
    dispatcher.state.apply(report(at - 1.0, running=1))
    for second in range(int(until - at) + 1):
        dispatcher.state.apply(report(at + second))


def test_an_engine_that_says_for_seconds_that_nothing_runs_has_lost_what_was_granted_to_it() -> None:
    dispatcher = leader()
    dispatcher.route(route("r", [1]), 0.0)
    idle_from(dispatcher, 2.0, until=6.0)

    assert lost(dispatcher, 2.0 + IDLE + 2 * PREFILL - 0.01) == []
    assert lost(dispatcher, 2.0 + IDLE + 2 * PREFILL + 0.01) == ["r"]


def test_a_request_that_was_granted_since_is_given_its_time() -> None:
    dispatcher = leader()
    idle_from(dispatcher, 2.0, until=6.0)
    dispatcher.route(route("r", [1], arrived_at=5.9), 5.9)

    assert lost(dispatcher, 6.5) == []


def test_a_long_prefill_is_given_twice_what_was_predicted() -> None:
    dispatcher = leader()
    dispatcher.route(route("r", list(range(1, 101))), 0.0)  # 6.4 s
    idle_from(dispatcher, 1.0, until=18.0)

    assert lost(dispatcher, 16.0) == []
    assert lost(dispatcher, 18.0) == ["r"]


def test_an_engine_that_never_counts_is_not_believed() -> None:
    dispatcher = leader()
    dispatcher.route(route("r", [1]), 0.0)
    for second in range(20):
        dispatcher.state.apply(report(float(second)))

    assert lost(dispatcher, 20.0) == []


def test_an_engine_from_which_answers_come_is_at_work_whatever_it_says() -> None:
    dispatcher = leader()
    dispatcher.route(route("r", [1]), 0.0)
    dispatcher.route(route("s", [2]), 0.0)
    idle_from(dispatcher, 2.0, until=7.0)
    dispatcher.state.apply(first_token("s", "a", at=5.0))

    assert lost(dispatcher, 7.0) == []


def test_a_report_from_long_ago_does_not_make_an_engine_idle_since_then() -> None:
    dispatcher = leader()
    dispatcher.route(route("r", [1]), 0.0)
    dispatcher.state.apply(report(9.0, running=1))
    dispatcher.state.apply(report(1.0))

    assert lost(dispatcher, 9.5) == []


def test_a_prompt_that_nobody_could_prefill_is_not_waited_for_for_ever() -> None:
    dispatcher = leader()
    dispatcher.route(route("r", [1], prompt_tokens=2**40), 0.0)
    idle_from(dispatcher, 1.0, until=200.0)

    assert lost(dispatcher, 200.0) == ["r"]


def test_old_reports_say_nothing() -> None:
    dispatcher = leader()
    dispatcher.route(route("r", [1]), 0.0)
    idle_from(dispatcher, 2.0, until=6.0)

    assert lost(dispatcher, 6.0 + IDLE + 1.0) == []


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_the_budget_grows_by_what_a_request_was_held_up(speed: float) -> None:
    outages = Outages(speed)

    assert outages.allowance(0.9 * float(HELD_UP_WALL_SECONDS_MIN) * speed, 0.0) == 0.0
    assert outages.allowance(2.0 * speed, 1.0) == 2.0 * speed
    assert outages.allowance(3600.0, 2.0) == float(HELD_UP_WALL_SECONDS_MAX) * speed


def test_requests_behind_an_outage_are_given_what_is_left_of_its_backlog() -> None:
    outages = Outages(1.0)
    outages.allowance(2.0, 100.0)

    assert outages.allowance(0.0, 105.0) == pytest.approx(2.0 - 5.0 * DRAIN_SHARE)
    assert outages.allowance(1.0, 105.0) == pytest.approx(2.0 - 5.0 * DRAIN_SHARE)
    assert outages.allowance(0.0, 200.0) == 0.0


def test_what_was_held_up_moves_the_deadline_in_the_fold() -> None:
    state = State(PoolSettings())
    command = route("r", [1], arrived_at=10.0, slo_ttft=5.0)
    fields = {
        name: getattr(command, name) for name in command.__struct_fields__ if name in RequestArrived.__struct_fields__
    }
    state.apply(RequestArrived(at=13.0, **fields | {"held_up": 3.0}))

    assert state.workload.requests[RequestId("r")].deadline == 18.0


@in_virtual_time
async def test_an_ingress_that_hears_nothing_names_its_requests_as_often_as_one_that_is_answered() -> None:
    pool, clock, named = PoolName("default"), ScaledClock(1.0), list[float]()
    link = MemoryBroker(pool).client(clock, name="ingress")

    async def unanswered(_command: AnyCommand, _reply: Reply) -> None:
        named.append(asyncio.get_running_loop().time())

    in_flight = InFlightRequests(fleet=FleetView(clock, HealthBoard(), ANY_URL), events=link.log, clock=clock)
    heartbeats = send_heartbeats(in_flight, link.commands, pool, clock, lambda: Term(0))
    async with link.commands.serve(follow_subject(pool), unanswered):
        with in_flight.waiting_for_place(RequestId("r")):
            beating = asyncio.create_task(heartbeats)
            await asyncio.sleep(float(10.5 * HEARTBEAT_WALL_SECONDS))
            beating.cancel()

    assert len(named) >= 10
