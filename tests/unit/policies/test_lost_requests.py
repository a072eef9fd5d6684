"""Requests that nobody will end: whose engine says that nothing runs there. And those that waited for a scheduler."""

import asyncio
from typing import Any

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.fleet import DecodeCost, InstanceReported
from pointsman.contracts.requests import RequestArrived
from pointsman.contracts.subjects import command_subject
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.heard_reports import HeardReports
from pointsman.policies.lost_requests import LostRequests
from pointsman.policies.policy_set import policy_set
from pointsman.ports import Reply
from pointsman.primitives import InstanceId, PoolName, RequestId, Term
from pointsman.runtime.health import HealthBoard
from pointsman.state.outages import DRAIN_SHARE, HELD_UP_WALL_SECONDS_MAX, HELD_UP_WALL_SECONDS_MIN, Outages
from pointsman.state.state import PoolSettings, State
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.in_flight import HEARTBEAT_WALL_SECONDS, InFlightRequests, send_heartbeats
from pointsman_lab.memory.log import MemoryBroker
from tests.support.engine_urls import ANY_URL
from tests.support.events import finished, first_token, joined, reported, route
from tests.support.leading import leader_of
from tests.support.virtual_time import in_virtual_time

IDLE = 3.0
PREFILL = 0.065
"""Seconds of a prompt of one block and a token."""
FIRST_STEP = 5.0
"""Seconds that vLLM may take for one before its counters show it."""


def leader() -> Dispatcher:
    return leader_of(("a",), policy_set(routing="min_ttft", admission="none", ordering="fcfs"))


def report(at: float, running: int = 0, *, instance: str = "a", **fields: Any) -> InstanceReported:
    return reported(instance, 0, [], at=at, running=running, **fields)


class Watch:
    """A leader that looks once a second by its own clock, while reports come. `ahead`: the worker's clock."""

    def __init__(self, dispatcher: Dispatcher, *, ahead: float = 0.0) -> None:
        self.dispatcher = dispatcher
        self.heard = HeardReports()
        self._found = LostRequests()
        self._ahead = ahead

    def hears(self, now: float, *, running: int = 0, at: float | None = None) -> None:
        """Of the engine, through the log, and looks."""
        self.reads(report((now if at is None else at) + self._ahead, running), now)
        self.lost(now)

    def reads(self, told: InstanceReported, now: float) -> None:
        self.dispatcher.state.apply(told)
        self.heard.read(self.dispatcher.state, told, now)

    def hears_idle(self, since: float, until: float) -> None:
        """The engine has had work, and reports each second that it has none."""
        self.hears(since - 1.0, running=1)
        for second in range(int(until - since) + 1):
            self.hears(since + second)

    def lost(self, now: float, *, steady_since: float = 0.0) -> list[str]:
        found = self._found.find(self.dispatcher.state, self.heard, now, steady_since=steady_since, idle_after=IDLE)
        return [request.id for request in found]


@pytest.mark.parametrize("ahead", [0.0, 600.0, -2.5, -600.0])
def test_an_engine_that_says_for_seconds_that_nothing_runs_has_lost_what_was_granted_to_it(ahead: float) -> None:
    """Whatever its worker's clock shows: the leader's measures."""
    watch = Watch(leader(), ahead=1_000.0 + ahead)
    watch.dispatcher.route(route("r", [1]), 0.0)
    watch.hears_idle(2.0, until=9.0)

    assert watch.lost(2.0 + IDLE + FIRST_STEP - 0.01) == []
    assert watch.lost(2.0 + IDLE + FIRST_STEP + 0.01) == ["r"]


def test_a_report_that_only_the_leader_hears_is_as_fresh_as_one_in_the_log() -> None:
    watch = Watch(leader())
    watch.dispatcher.route(route("r", [1]), 0.0)
    watch.hears_idle(2.0, until=2.0)
    assert watch.lost(2.0 + IDLE + FIRST_STEP + 1.0) == [], "it has not been heard for longer than that"

    watch.heard.note(watch.dispatcher.state, report(11.5), 11.5)

    assert watch.lost(11.6) == ["r"]


def test_a_request_that_was_granted_since_is_given_its_time() -> None:
    watch = Watch(leader())
    watch.hears_idle(2.0, until=6.0)
    watch.dispatcher.route(route("r", [1], arrived_at=5.9), 5.9)

    assert watch.lost(6.5) == []


@pytest.mark.parametrize("step", [3_600.0, -3_600.0])
def test_a_leader_whose_clock_was_set_measures_from_then_on(step: float) -> None:
    watch = Watch(leader(), ahead=10_000.0)
    watch.dispatcher.route(route("r", [1]), 5_000.0)
    watch.hears(5_001.0, running=1)
    watch.hears(5_002.0)
    steady_since = 5_003.0 + step
    watch.reads(report(15_005.0), steady_since + 0.5)

    assert watch.lost(steady_since + 0.5, steady_since=steady_since) == []
    later = IDLE + FIRST_STEP + 1.0
    watch.reads(report(15_013.0), steady_since + later)
    assert watch.lost(steady_since + later, steady_since=steady_since) == ["r"]


def test_a_long_prefill_is_given_twice_what_was_predicted() -> None:
    watch = Watch(leader())
    watch.dispatcher.route(route("r", list(range(1, 101))), 0.0)  # 6.4 s
    watch.hears_idle(1.0, until=18.0)

    assert watch.lost(16.0) == []
    assert watch.lost(18.0) == ["r"]


def test_an_engine_that_never_counts_is_not_believed() -> None:
    watch = Watch(leader())
    watch.dispatcher.route(route("r", [1]), 0.0)
    for second in range(20):
        watch.hears(float(second))

    assert watch.lost(20.0) == []


@pytest.mark.parametrize("before", [2.0, 3600.0])
def test_an_engine_from_which_answers_come_is_at_work_whatever_it_says(before: float) -> None:
    """And whatever dates they have: those of an ingress whose clock is ahead do not hide later ones."""
    watch = Watch(leader())
    for name, key in (("q", 3), ("r", 1), ("s", 2)):
        watch.dispatcher.route(route(name, [key]), 0.0)
    watch.hears_idle(2.0, until=3.0)
    watch.dispatcher.state.apply(first_token("q", "a", at=before))
    watch.dispatcher.state.apply(finished("q", "a", at=before))
    for second in range(4, 9):
        watch.hears(float(second))
    watch.dispatcher.state.apply(first_token("s", "a", at=9.0))
    watch.hears(9.0)
    watch.hears(10.0)

    assert watch.lost(11.0) == []


def test_a_report_from_long_ago_does_not_make_an_engine_idle_since_then() -> None:
    watch = Watch(leader())
    watch.dispatcher.route(route("r", [1]), 0.0)
    watch.hears(9.0, running=1)
    watch.hears(9.2, at=1.0)

    assert watch.lost(9.5) == []


def handed_over_watch(*, took: float, told: bool = True) -> tuple[Watch, float]:
    """`d` has been idle for long, and gets a request whose prefill at `p` took so many times what the cost model says, as
    those before if the leader was `told`. And when it did."""
    decode = DecodeCost(step_s=0.02, per_request_s=0.02)
    policies = policy_set(routing="min_ttft", admission="none", ordering="fcfs")
    state = State(PoolSettings(), policies.trackers())
    for name, role in (("p", "prefill"), ("d", "decode")):
        state.apply(joined(name, role=role, decode=decode, transfer_tokens_per_s=1e6))
    watch = Watch(Dispatcher(state, policies, term=Term(1)))
    for number in range(10):  # what `p` is known for
        _hand_over(watch, f"w{number}", [number], float(number), PREFILL * took, told=told)
        state.apply(first_token(f"w{number}", "d", at=number + 0.9))
        state.apply(finished(f"w{number}", "d", at=number + 0.95))
    watch.reads(report(11.0, 1, instance="d"), 11.0)
    at, took = 20.0, 6.4 * took
    for second in range(12, int(at + took) + 1):
        watch.reads(report(float(second), instance="d"), float(second))
        watch.lost(float(second))
    _hand_over(watch, "r", list(range(100, 200)), at, took, told=told)
    watch.reads(report(at + took, instance="d"), at + took)
    return watch, at + took


def _hand_over(watch: Watch, request: str, keys: list[int], at: float, took: float, *, told: bool) -> None:
    watch.dispatcher.route(route(request, keys, arrived_at=at), at)
    command = HandOverRequest(
        request=RequestId(request), attempt=1, instance=InstanceId("p"), prefill=took if told else 0.0
    )
    watch.dispatcher.hand_over(command, at + took)


def test_what_an_idle_decode_engine_got_just_now_it_has_not_lost_however_long_the_prefill_took() -> None:
    watch, at = handed_over_watch(took=4.0, told=False)

    assert watch.lost(at + 0.1) == []


def test_a_decode_engine_is_given_what_its_prefill_engine_taught() -> None:
    watch, at = handed_over_watch(took=4.0)
    for second in range(1, 40):
        watch.reads(report(at + second, instance="d"), at + second)
        assert watch.lost(at + second) == []
    for second in range(40, 60):
        watch.reads(report(at + second, instance="d"), at + second)

    assert watch.lost(at + 60.0) == ["r"]


def test_a_prompt_that_nobody_could_prefill_is_not_waited_for_for_ever() -> None:
    watch = Watch(leader())
    watch.dispatcher.route(route("r", [1], prompt_tokens=2**40), 0.0)
    watch.hears_idle(1.0, until=200.0)

    assert watch.lost(200.0) == ["r"]


def test_old_reports_say_nothing() -> None:
    watch = Watch(leader())
    watch.dispatcher.route(route("r", [1]), 0.0)
    watch.hears_idle(2.0, until=10.0)

    assert watch.lost(10.0 + IDLE + 1.0) == []


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
    heartbeats = send_heartbeats(in_flight, link.commands, pool, clock, lambda: Term(0), "ingress")
    async with link.commands.serve(command_subject(pool, "follow"), unanswered):
        with in_flight.waiting_for_place(RequestId("r")):
            beating = asyncio.create_task(heartbeats)
            await asyncio.sleep(float(10.5 * HEARTBEAT_WALL_SECONDS))
            beating.cancel()

    assert len(named) >= 10
