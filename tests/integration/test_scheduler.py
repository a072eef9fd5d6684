"""The scheduler as a service, over the in-memory log: its commands, its log, its restart, its care for silence."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import groupby
from typing import Any

import msgspec
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand, LogEvent, encode
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    DescribeFleet,
    DrainAnswered,
    DrainInstance,
    FleetDescribed,
    FollowRequests,
    ResyncAnswered,
    ResyncCache,
    RouteGranted,
    RouteRejected,
    RouteRequest,
    SentRequest,
    SetTenantPolicies,
    UndrainInstance,
)
from pointsman.contracts.decisions import LeaderElected, RequestPlaced
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceEjected,
    InstanceLeft,
    InstanceRoleChanged,
    InstanceUnejected,
    LivenessTimeouts,
)
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import PrefillFinished, RequestAttemptFailed, RequestCancelled
from pointsman.contracts.subjects import (
    resync_subject,
)
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.dispatch import Dispatcher
from pointsman.ports import CommandTimeoutError, LogEntry, Reply, UnconfirmedWrites
from pointsman.primitives import Epoch, InstanceId, RequestId, Tenant, Term, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.health import HealthBoard
from pointsman.simulation.replay import verify
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.in_flight import InFlightRequests, send_heartbeats
from pointsman_lab.memory.log import Fault, MemoryLog
from pointsman_scheduler import housekeeping
from pointsman_scheduler.checkpoint_watch import CHECKPOINTS_PART
from pointsman_scheduler.leader import ActiveTerm
from tests.support.engine_urls import ANY_URL
from tests.support.events import finished, first_token, reported, stored
from tests.support.log_reading import whole_log
from tests.support.memory_pool import POOL, MemoryPool
from tests.support.settable_clock import SettableClock
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def _no_error_is_swallowed() -> Iterator[None]:
    """A service goes on behind an unexpected error; a test that only looks at what it does otherwise would pass."""
    before = _unexpected_errors()
    yield
    assert _unexpected_errors() == before


def _unexpected_errors() -> float:
    return sum(
        s.value for metric in telemetry.UNEXPECTED_ERRORS.collect() for s in metric.samples if "_total" in s.name
    )


class SchedulerPool(MemoryPool):
    """A pool, and what tests do to its leader from outside."""

    async def waits(self, request: str, keys: list[int], **fields: Any) -> bool:
        """Whether the request gets no answer for now."""
        try:
            await self.route(request, keys, timeout=0.2, **fields)
        except CommandTimeoutError:
            return True
        return False

    async def follow(self, *requests: str, waiting: list[str]) -> None:
        """Name what an ingress has."""
        sent = [SentRequest(request=RequestId(r), attempt=1, instance=InstanceId("a")) for r in requests]
        command = FollowRequests(requests=sent, waiting=[RequestId(r) for r in waiting])
        await self.ask(command, kind="follow")

    async def tell_first_token(self, request: str, attempt: int, instance: str) -> None:
        sent = SentRequest(request=RequestId(request), attempt=attempt, instance=InstanceId(instance))
        command = FollowRequests(requests=[], answered=[sent])
        await self.ask(command, kind="follow")


@in_virtual_time
async def test_a_request_is_granted_and_the_log_says_why() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"), stored("a", 1, [1, 2]))
    async with world.leader():
        granted = await world.route("r", [1, 2, 3])

        assert isinstance(granted, RouteGranted)
        assert (granted.instance, granted.url, granted.hit_tokens) == ("a", "http://a", 128)
        assert await world.kinds() == [
            "InstanceJoined",
            "BlocksStored",
            "LeaderElected",
            "RequestArrived",
            "RequestPlaced",
            "RequestGranted",
        ]
        stamps = [event.stamp for event in await world.events() if event.stamp]
        assert [(stamp.term, stamp.number, stamp.as_of) for stamp in stamps] == [(1, 1, 3), (1, 2, 3), (1, 3, 3)]


@in_virtual_time
async def test_a_command_that_comes_twice_is_answered_twice_and_decided_once() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader():
        first, second = await world.route("r", [1]), await world.route("r", [1])

        assert first == second
        assert (await world.kinds()).count("RequestPlaced") == 1


@in_virtual_time
async def test_what_does_not_fit_the_window_waits_for_the_first_token_before_it() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(prefill_window_tokens=10):
        await world.route("first", [1])
        assert await world.waits("second", [2])
        await world.append(first_token("first", "a", at=world.clock.now()))

        assert isinstance(await world.route("second", [2]), RouteGranted)


@in_virtual_time
async def test_a_first_token_of_which_the_log_tells_nothing_is_told_by_its_ingress_and_makes_room_once() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"), world.joined("b", role="decode"))
    async with world.leader(prefill_window_tokens=10) as scheduler:
        await world.route("first", [1])
        await world.tell_first_token("first", 1, "a")
        assert await world.waits("second", [2])
        for request, attempt, instance in (
            ("first", 2, "a"),
            ("first", 1, "b"),
            ("second", 1, "a"),
            ("nobody", 1, "a"),
        ):
            await world.tell_first_token(request, attempt, instance)
        assert await world.waits("second", [2])
        for _ in range(2):
            await world.tell_first_token("first", 1, "a")
        assert isinstance(await world.route("second", [2]), RouteGranted)

        learned = scheduler.state.latency.correction(InstanceId("a"))
        await world.append(first_token("first", "a", at=world.clock.now(), prefill=20.0))
        await world.append(finished("first", "a", at=world.clock.now()))
        await eventually(lambda: "first" not in scheduler.state.workload.requests)
        assert scheduler.state.latency.correction(InstanceId("a")) == learned
        by_leader = [e.request for e in await world.events() if isinstance(e, PrefillFinished) and e.stamp]
        assert by_leader == ["first"]
        assert verify(await whole_log(world.client.log)).ok


@in_virtual_time
async def test_a_waiting_request_is_cancelled_by_the_leader_and_a_granted_one_is_not() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(prefill_window_tokens=10):
        await world.route("granted", [1])
        assert await world.waits("waiting", [2])
        answers = [
            await world.ask(CancelRequest(request=RequestId(name), reason="gone"), kind="cancel")
            for name in ("granted", "waiting", "waiting")
        ]

        assert [a.ended for a in answers if isinstance(a, CancelAnswered)] == [False, True, True]
        assert (await world.kinds()).count("RequestCancelled") == 1


@in_virtual_time
async def test_an_engine_that_failed_a_request_is_not_asked_again() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"), world.joined("b"))
    async with world.leader():
        first = await world.route("r", [1])
        assert isinstance(first, RouteGranted)
        second = await world.route("r", [1], attempt=2, excluded=[first.instance])
        third = await world.route("r", [1], attempt=3, excluded=[InstanceId("a"), InstanceId("b")])

        assert isinstance(second, RouteGranted)
        assert second.instance != first.instance
        assert isinstance(third, RouteRejected)
        assert (third.status, third.reason) == (503, "no_instance")


@in_virtual_time
async def test_a_restarted_scheduler_knows_what_the_first_one_knew() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"), stored("a", 1, [1, 2]))
    async with world.leader("one", prefill_window_tokens=10):
        await world.route("running", [1, 2])
        assert await world.waits("waiting", [7])
    async with world.leader("two", prefill_window_tokens=10) as second:
        assert await world.waits("waiting", [7])
        again = await world.route("running", [1, 2])
        await world.append(first_token("running", "a", at=world.clock.now()))
        granted = await world.route("waiting", [7])

        assert isinstance(again, RouteGranted)
        assert isinstance(granted, RouteGranted)
        assert second.state.index.keys(InstanceId("a")) == {1, 2}
        assert second.state.term == 2
        assert (await world.kinds()).count("RequestArrived") == 2


@in_virtual_time
async def test_a_rejection_whose_answer_was_lost_is_said_again_by_this_leader_and_by_the_next() -> None:
    world = SchedulerPool()
    asked_at = world.clock.now()
    async with world.leader("one", hold_seconds=0.0):
        first, repeated = [await world.route("r", [1], arrived_at=asked_at) for _ in range(2)]
    await world.append(world.joined("a"))
    async with world.leader("two"):
        after_takeover = await world.route("r", [1], arrived_at=asked_at)
        another = await world.route("r", [1], arrived_at=asked_at + 1.0)

    assert isinstance(first, RouteRejected)
    assert isinstance(after_takeover, RouteRejected)
    assert isinstance(another, RouteRejected)
    assert (first.status, first.reason, first.retry_after) == (503, "no_instance", 1.0)
    assert repeated == first
    assert after_takeover == msgspec.structs.replace(first, term=Term(2))
    assert another.reason == "already_ended", "who uses an id again asks something else"
    assert [kind for kind in await world.kinds() if kind.startswith("Request")] == ["RequestArrived", "RequestRejected"]


@in_virtual_time
async def test_a_leader_whose_decision_the_log_has_lost_leads_on_in_a_new_term_from_what_the_log_says() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    losses: list[Fault] = ["lose"]
    world.broker.fault = lambda event: losses.pop() if losses and isinstance(event, RequestPlaced) else "none"
    async with world.leader() as service:
        await world.route("r", [1])
        await eventually(lambda: service.leading is not None and service.leading.term == 2)
        for number in range(2, 6):
            await world.route(f"r{number}", [number])

    verdict = verify([LogEntry(n, "", b"", event) for n, event in enumerate(await world.events(), start=1)])
    assert verdict.problems == ["decision 2 of term 1 is missing"]
    assert sum(verdict.unchecked.values()) == 1, "the grant in term 1"
    assert (verdict.identical, verdict.different) == (verdict.decisions - 1, 0)
    assert verdict.identical >= 8


@in_virtual_time
async def test_a_leader_that_fails_behind_a_decision_writes_it_and_leads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world, failures = SchedulerPool(), [KeyError("route"), KeyError("liveness")]
    decide, look = Dispatcher.route, Dispatcher.check_liveness

    def route_and_fail(self: Dispatcher, command: RouteRequest, now: float) -> list[LogEvent]:
        events = decide(self, command, now)
        if command.request == "bad":
            raise failures[0]
        return events

    def always_fail(
        self: Dispatcher, timeouts: LivenessTimeouts, now: float, heard: Mapping[InstanceId, float]
    ) -> list[LogEvent]:
        look(self, timeouts, now, heard)
        raise failures[1]

    monkeypatch.setattr(Dispatcher, "route", route_and_fail)
    monkeypatch.setattr(Dispatcher, "check_liveness", always_fail)
    await world.append(world.joined("a"))
    async with world.leader() as service:
        assert await world.waits("bad", [1])
        assert isinstance(await world.route("good", [2]), RouteGranted)
        broken = msgspec.structs.replace(reported("a", 0, [], at=world.clock.now()), instance=InstanceId("b"))
        world.broker.store_raw(f"pm.{POOL}.fleet.a", encode(broken))
        assert isinstance(await world.route("better", [3]), RouteGranted)
        assert (service.state.term, service.state.dead_letters.undecodable) == (1, 1)

    entries = [entry async for entry in _entries(world)]
    verdict = verify(entries)
    assert (verdict.different, verdict.undecodable, verdict.problems) == (0, 1, [])
    assert verdict.identical == verdict.decisions == 6, "placed and granted, three times"


async def _entries(world: SchedulerPool) -> AsyncIterator[LogEntry]:
    """What the log has by now."""
    last = world.broker.extent.last
    async for entry in world.client.log.read(1):
        assert isinstance(entry, LogEntry)
        yield entry
        if entry.sequence == last:
            return


@in_virtual_time
async def test_a_silent_worker_is_suspected_and_what_waits_for_it_moves() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(prefill_window_tokens=10, suspect_seconds=0.4, leave_seconds=60.0):
        await world.route("running", [1])
        assert await world.waits("waiting", [2])
        await eventually(lambda: _alive(world, "b"))
        granted = await world.route("waiting", [2])

        assert isinstance(granted, RouteGranted)
        assert granted.instance == "b"
        assert {"InstanceSuspected", "RequestMigrated"} <= set(await world.kinds())


async def _alive(world: SchedulerPool, instance: str) -> bool:
    """Let an instance join and report until another has been suspected."""
    kinds = await world.kinds()
    if kinds.count("InstanceJoined") == 1:
        await world.append(world.joined(instance))
    await world.append(reported(instance, 0, [], at=world.clock.now()))
    await asyncio.sleep(0.1)
    return "InstanceSuspected" in kinds


@in_virtual_time
async def test_a_grant_of_an_engine_that_has_left_is_not_given_to_who_asks_again_and_what_waits_stays() -> None:
    """The ingress has not heard of the grant, or it would not ask."""
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(prefill_window_tokens=10) as leader:
        granted = await world.route("running", [1])
        assert await world.waits("waiting", [2])
        await world.append(InstanceLeft(at=world.clock.now(), instance=InstanceId("a"), epoch=Epoch(1), reason="stops"))
        await eventually(lambda: InstanceId("a") not in leader.state.fleet)
        again = await world.route("running", [1])
        await world.append(world.joined("b"))
        moved = await world.route("waiting", [2])
        cancelled = [event for event in await world.events() if isinstance(event, RequestCancelled)]

        assert isinstance(granted, RouteGranted)
        assert isinstance(again, RouteRejected)
        assert [(end.request, end.cause) for end in cancelled] == [("running", CancelCause.GRANT_UNHEARD)]
        assert isinstance(moved, RouteGranted)


@in_virtual_time
async def test_a_request_whose_ingress_died_while_it_waited_is_cancelled() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(prefill_window_tokens=10, waiter_seconds=0.3):
        await world.route("running", [1])
        assert await world.waits("orphan", [2])

        await eventually(lambda: _contains(world, "RequestCancelled"))


@in_virtual_time
async def test_all_that_a_dead_ingress_had_is_ended_in_parts_between_which_the_leader_does_other_things(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []
    publish = ActiveTerm.publish

    async def counted(term: ActiveTerm) -> None:
        left.append(len(term.dispatcher.state.workload.requests))
        await publish(term)

    monkeypatch.setattr(ActiveTerm, "publish", counted)
    monkeypatch.setattr(housekeeping, "ENDED_MAX", 5)
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(prefill_window_tokens=10, waiter_seconds=0.3) as scheduler:
        await world.route("running", [0], followed=True)
        asking = [asyncio.create_task(world.waits(f"orphan-{n}", [n], followed=True)) for n in range(1, 12)]
        assert all(await asyncio.gather(*asking))
        await eventually(lambda: not scheduler.state.workload.requests)

        assert [count for count, _ in groupby(left)][-4:] == [12, 7, 2, 0]
        assert (await world.kinds()).count("RequestGranted") == 1
        assert verify(await whole_log(world.client.log)).ok


@in_virtual_time
async def test_what_a_dead_ingress_had_at_engines_is_ended_and_what_a_living_one_has_is_not() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(prefill_window_tokens=150, waiter_seconds=0.6) as scheduler:
        await world.route("lost", [1], followed=True)
        await world.route("kept", [2], followed=True)
        assert await world.waits("next", [3], followed=True)

        async def named() -> None:
            while True:
                await world.follow("kept", waiting=["next"])
                await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as living:
            naming = living.create_task(named())
            asking = living.create_task(world.route("next", [3], followed=True))
            await eventually(lambda: "lost" not in scheduler.state.workload.requests)
            assert isinstance(await asking, RouteGranted)
            naming.cancel()

        ended = [e for e in await world.events() if isinstance(e, RequestCancelled)]
        assert [(e.request, e.reason, e.cause, e.instance) for e in ended] == [
            ("lost", "its ingress is gone, or has it no longer", CancelCause.INGRESS_SILENT, "a")
        ]
        assert verify(await whole_log(world.client.log)).ok


@in_virtual_time
async def test_an_ingress_that_never_names_what_it_has_is_borne_with() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(waiter_seconds=0.1):
        await world.route("old", [1])
        await asyncio.sleep(0.6)  # two looks of the housekeeper

        assert "RequestCancelled" not in await world.kinds()


@in_virtual_time
async def test_a_new_leader_waits_for_ingresses_to_name_what_they_have_and_ends_the_rest() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader("first"):
        await world.route("lost", [1], followed=True)
    async with world.leader("second", waiter_seconds=0.5):
        assert "RequestCancelled" not in await world.kinds()

        await eventually(lambda: _contains(world, "RequestCancelled"))


@in_virtual_time
async def test_a_request_that_waited_for_a_scheduler_is_not_refused_for_that() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader():
        late, long_ago = {"slo_ttft": 1.0}, world.clock.now() - 4.0
        refused = await world.route("late", [1], arrived_at=long_ago, **late)
        granted = await world.route("held-up", [2], arrived_at=long_ago, held_up=4.0, **late)

        assert isinstance(refused, RouteRejected)
        assert isinstance(granted, RouteGranted)
        assert verify(await whole_log(world.client.log)).ok


async def _contains(world: SchedulerPool, kind: str) -> bool:
    return kind in await world.kinds()


@in_virtual_time
async def test_a_doubt_is_healed_by_asking_for_a_snapshot() -> None:
    world = SchedulerPool()
    asked: list[ResyncCache] = []

    async def answer(command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, ResyncCache)
        asked.append(command)
        await world.append(reported("a", 3, [1]))
        await reply(ResyncAnswered(instance=command.instance, accepted=True))

    await world.append(world.joined("a"), stored("a", 1, [1]), stored("a", 3, [1]))
    async with world.client.commands.serve(resync_subject(POOL, InstanceId("a")), answer), world.leader() as service:
        await eventually(lambda: asked and not service.state.fleet[InstanceId("a")].doubt)

        assert asked[0].reason == "cache events 2 to 2 are missing"


@in_virtual_time
async def test_an_instance_in_whose_name_somebody_else_writes_is_asked_to_join_anew() -> None:
    world = SchedulerPool()
    asked: list[ResyncCache] = []

    async def answer(command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, ResyncCache)
        asked.append(command)
        await world.append(world.joined("a", epoch=2), reported("a", 0, [], epoch=2, at=world.clock.now()))
        await reply(ResyncAnswered(instance=command.instance, accepted=True))

    await world.append(world.joined("a"), stored("a", 1, [1]), stored("a", 1000, [2]))
    async with world.client.commands.serve(resync_subject(POOL, InstanceId("a")), answer), world.leader() as service:
        await world.append(reported("a", 1, [1], at=world.clock.now()))
        await eventually(lambda: asked and not service.state.fleet[InstanceId("a")].doubt)

        assert (asked[-1].rejoin, asked[-1].above) == (True, 1)
        assert service.state.fleet[InstanceId("a")].epoch == 2


@in_virtual_time
async def test_an_instance_whose_keys_stand_for_other_blocks_than_the_pools_is_described_with_what_to_do() -> None:
    world = SchedulerPool()
    async with world.leader(block_tokens=128) as service:
        await world.append(world.joined("a", block_tokens=128), world.joined("b", block_tokens=32))
        await eventually(lambda: len(service.state.fleet.instances) == 2)
        described = await world.ask(DescribeFleet(), kind="fleet")

        assert isinstance(described, FleetDescribed)
        assert [instance.doubt for instance in described.instances] == [
            "",
            "its keys stand for 32 tokens, those of the pool for 128: start its worker with --block-tokens 128",
        ]


@in_virtual_time
async def test_the_fleet_is_described_to_who_asks() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"), stored("a", 1, [1, 2]))
    async with world.leader():
        await world.route("r", [1])
        described = await world.ask(DescribeFleet(), kind="fleet")

        assert isinstance(described, FleetDescribed)
        (instance,) = described.instances
        assert (instance.instance, instance.status, instance.in_prefill, instance.cached_blocks) == ("a", "ready", 1, 2)


@in_virtual_time
async def test_the_fleet_is_described_with_why_checkpoints_are_overdue() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    told = []
    async with world.leader() as service:
        await eventually(lambda: service.leading)
        for reason in ("none for long", ""):
            if reason:
                service.board.degraded(CHECKPOINTS_PART, reason)
            else:
                service.board.restored(CHECKPOINTS_PART)
            described = await world.ask(DescribeFleet(), kind="fleet")
            assert isinstance(described, FleetDescribed)
            told.append(described.checkpoints_overdue)

    assert told == ["none for long", ""]


@in_virtual_time
async def test_the_fleet_is_described_with_what_the_log_owes_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader() as service:
        await eventually(lambda: service.leading)
        monkeypatch.setattr(MemoryLog, "unconfirmed", property(lambda _log: UnconfirmedWrites(7, WallSeconds(42.0))))
        described = await world.ask(DescribeFleet(), kind="fleet")

    assert isinstance(described, FleetDescribed)
    assert (described.unconfirmed_writes, described.unconfirmed_seconds) == (7, 42.0)


@in_virtual_time
async def test_who_drains_the_last_that_serves_something_is_warned_and_told_how_to_undo_it() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a", adapters=["poet"]), world.joined("b"))

    async def warning(instance: str, **how: Any) -> str:
        command = DrainInstance(instance=InstanceId(instance), reason="test", **how)
        answer = await world.operate(command, action="drain")
        assert isinstance(answer, DrainAnswered)
        assert answer.draining
        return answer.warning

    async with world.leader(hold_seconds=12.0) as service:
        await eventually(lambda: len(service.state.fleet.instances) == 2 and service.leading)
        harmless = await warning("b")
        await world.operate(UndrainInstance(instance=InstanceId("b")), action="drain")
        adapter, last = await warning("a"), await warning("b")

    then = "requests wait up to 12 s (--hold-seconds) and then get 503; undo with: pointsman drain"
    assert harmless == ""
    assert adapter == f"no instance takes requests for poet now; {then} a --undo"
    assert last == f"no instance takes requests now; {then} b --undo"


@in_virtual_time
async def test_a_changed_role_is_told_again_behind_each_join_and_by_each_leader() -> None:
    """An ingress may begin behind the change."""
    world = SchedulerPool()
    either = {"role_switching": True}
    roles = {"a": "prefill", "b": "prefill", "c": "decode"}
    await world.append(*(world.joined(instance, role=role, **either) for instance, role in roles.items()))

    async def kinds_of_a() -> list[str]:
        return [type(event).__name__ for event in await world.events() if getattr(event, "instance", "") == "a"]

    async def is_told(times: int) -> bool:
        return (await kinds_of_a()).count("InstanceRoleChanged") == times

    async with world.leader() as service:
        await eventually(lambda: service.leading)
        await world.operate(DrainInstance(instance=InstanceId("a"), reason="test", becomes="decode"), action="drain")
        await eventually(lambda: is_told(1))
        await world.append(
            world.joined("a", role="prefill", epoch=2, **either), world.joined("b", role="prefill", epoch=2)
        )
        await eventually(lambda: is_told(2))
        rejoined = await kinds_of_a()
    async with world.leader():
        await eventually(lambda: is_told(3))
        roles_told = [event.role for event in await world.events() if isinstance(event, InstanceRoleChanged)]

    assert rejoined[-2:] == ["InstanceJoined", "InstanceRoleChanged"]
    assert roles_told == ["decode"] * 3
    assert verify(await world.entries()).different == 0


@in_virtual_time
async def test_an_ingress_that_begins_behind_a_drain_knows_of_it_from_the_next_join_or_leader() -> None:
    pool = SchedulerPool()
    await pool.append(pool.joined("a"), pool.joined("b"))

    async def is_told(times: int) -> bool:
        return sum(isinstance(event, InstanceDraining) for event in await pool.events()) == times

    async def reachable_from(first: int) -> list[str]:
        """By an ingress that reads the log from there on."""
        view = FleetView(ScaledClock(), HealthBoard(), EngineUrls.of(["http://*"]))
        for entry in (await pool.entries())[first:]:
            view._apply(entry)
        return [instance.id for instance in view.reachable]

    async with pool.leader() as service:
        await eventually(lambda: service.leading)
        await pool.operate(DrainInstance(instance=InstanceId("a"), reason="test"), action="drain")
        join = len(await pool.entries())
        await pool.append(pool.joined("a", epoch=2), pool.joined("b", epoch=2))
        await eventually(lambda: is_told(2))
        from_a_join = await reachable_from(join)
    join = len(await pool.entries())
    await pool.append(pool.joined("a", epoch=3), pool.joined("b", epoch=3))  # while none leads
    async with pool.leader():
        await eventually(lambda: is_told(3))
        from_an_election = await reachable_from(join)

    assert from_a_join == from_an_election == ["b"]
    assert verify(await pool.entries()).different == 0


@in_virtual_time
async def test_a_log_that_was_recreated_is_read_anew() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader() as service:
        await world.route("r", [1])
        world.broker.recreate()
        await world.append(world.joined("b", epoch=2))
        await eventually(lambda: [i.id for i in service.state.fleet.instances] == ["b"])

        granted = await world.route("s", [1])
        assert isinstance(granted, RouteGranted)
        assert granted.instance == "b"


@in_virtual_time
async def test_a_leader_that_stood_still_first_hears_what_was_said_meanwhile() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(waiter_seconds=2.0) as scheduler:
        await world.route("kept", [1], followed=True)
        time.sleep(3.0)  # noqa: ASYNC251 - its process stands still, and so does everybody's here
        await asyncio.sleep(0.6)  # it looks after things before it has read what lies in its sockets
        await world.follow("kept", waiting=[])

        assert RequestId("kept") in scheduler.state.workload.requests


@pytest.mark.parametrize("speed", [1.0, 10.0])
@in_virtual_time
async def test_a_leader_whose_clock_is_set_forward_removes_nobody_who_goes_on_reporting(speed: float) -> None:
    clock = SettableClock(speed)
    world = SchedulerPool(clock=clock)
    await world.append(world.joined("a"))
    async with world.leader(suspect_seconds=3.0, leave_seconds=30.0) as scheduler:
        clock.set_by = 600.0
        await asyncio.sleep(0.6)  # it looks after things

        assert not {"InstanceSuspected", "InstanceLeft"} & set(await world.kinds())
        assert InstanceId("a") in scheduler.state.fleet


@pytest.mark.parametrize("set_by", [86_400.0, -86_400.0])
@in_virtual_time
async def test_a_leader_whose_clock_is_set_ends_only_what_has_run_too_long_since(set_by: float) -> None:
    """So does a successor whose clock differs by as much."""
    clock = SettableClock()
    world = SchedulerPool(clock=clock)
    await world.append(world.joined("a"))
    settings: dict[str, Any] = {
        "request_seconds_max": 20.0,
        "waiter_seconds": 600.0,
        "suspect_seconds": 60.0,
        "leave_seconds": 60.0,
    }
    async with world.leader(**settings) as first:
        await world.route("r", [1])
        clock.set_by = set_by
        await asyncio.sleep(5.0)
        assert RequestId("r") in first.state.workload.requests, "it has run for 5 s"
    async with world.leader("successor", **settings) as second:
        clock.set_by = 2 * set_by
        await asyncio.sleep(15.0)
        assert RequestId("r") in second.state.workload.requests
        await eventually(lambda: RequestId("r") not in second.state.workload.requests, seconds=10.0)

    cancelled = [event.cause for event in await world.events() if isinstance(event, RequestCancelled)]
    assert cancelled == [CancelCause.NEVER_ENDED]


@pytest.mark.parametrize("behind", [45.0, 180.0, 3000.0])
@in_virtual_time
async def test_limits_refill_under_a_successor_whose_clock_is_behind(behind: float) -> None:
    clock = SettableClock()
    world = SchedulerPool(clock=clock)
    once_in_two_seconds = TenantPolicies(tenants={Tenant("alice"): TenantPolicy(requests_per_second=0.5)})
    await world.append(world.joined("a"))
    answers: list[AnyCommand] = []
    settings: dict[str, Any] = {"suspect_seconds": 60.0, "leave_seconds": 60.0}

    async def asks(request: str) -> None:
        answers.append(await world.route(request, [1], tenant=Tenant("alice"), sent_at=clock.now()))

    async with world.leader(**settings):
        command = SetTenantPolicies(policies=once_in_two_seconds)
        await world.operate(command, action="tenants", operator="carol")
        await asks("first")
        await asks("second")
    clock.set_by = -behind
    async with world.leader("successor", **settings):
        await asks("again")
        for number in range(3):
            await asyncio.sleep(3.0)
            await asks(f"later-{number}")

    granted, refused = RouteGranted, RouteRejected
    assert [type(answer) for answer in answers] == [granted, refused, refused, granted, granted, granted]
    dates = [event.at for event in await world.events() if event.stamp is not None or isinstance(event, LeaderElected)]
    assert dates == sorted(dates)


@in_virtual_time
async def test_an_idle_ingress_whose_clock_was_set_back_has_its_next_request_granted() -> None:
    world, clock = SchedulerPool(), SettableClock()
    await world.append(world.joined("a"))
    in_flight = InFlightRequests(fleet=FleetView(clock, HealthBoard(), ANY_URL), events=world.client.log, clock=clock)
    heartbeats = send_heartbeats(in_flight, world.client.commands, POOL, clock, lambda: Term(0), "i")
    async with world.leader(suspect_seconds=60.0):
        beating = asyncio.create_task(heartbeats)
        dates: dict[str, Any] = {"arrived_at": clock.now(), "sent_at": clock.now()}
        await world.route("before", [1], ingress="i", **dates)
        clock.set_by = -60.0
        await asyncio.sleep(5.0)
        dates = {"arrived_at": clock.now(), "sent_at": clock.now()}
        answer = await world.route("behind", [1], ingress="i", slo_ttft=5.0, **dates)
        beating.cancel()

    assert isinstance(answer, RouteGranted), answer


@in_virtual_time
async def test_a_leader_that_stands_still_now_and_then_ends_what_has_run_too_long_all_the_same() -> None:
    clock = SettableClock()
    world = SchedulerPool(clock=clock)
    await world.append(world.joined("a"))
    settings: dict[str, Any] = {"request_seconds_max": 20.0, "waiter_seconds": 600.0, "leave_seconds": 600.0}
    async with world.leader(**settings) as scheduler:
        await world.route("r", [1])
        for _ in range(10):
            clock.waited += WallSeconds(2.0)
            await asyncio.sleep(0.3)

        assert RequestId("r") not in scheduler.state.workload.requests


@in_virtual_time
async def test_the_leader_keeps_no_reply_to_a_request_that_its_ingress_has_ended() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"))
    async with world.leader(prefill_window_tokens=10) as scheduler:
        await world.route("running", [1])
        assert await world.waits("ended", [2])
        term = scheduler.leading
        assert term is not None
        assert list(term.waiters._waiters) == ["ended"]
        await world.append(finished("ended", "a", at=world.clock.now()))

        await eventually(lambda: not term.waiters._waiters)


@in_virtual_time
async def test_of_a_log_whose_entries_have_all_expired_a_leader_is_elected() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"), world.joined("b"))
    world.broker.drop_before(3)
    assert (world.broker.extent.first, world.broker.extent.last) == (3, 2)
    async with world.leader() as scheduler:
        await world.append(world.joined("c"))

        assert isinstance(await world.route("r", [1]), RouteGranted)
        assert [instance.id for instance in scheduler.state.fleet.instances] == ["c"]


@in_virtual_time
async def test_an_engine_that_fails_requests_is_ejected_described_and_tried_again() -> None:
    world = SchedulerPool()
    await world.append(world.joined("a"), world.joined("b"))
    settings = ("outlier.base_ejection_seconds=0.5",)
    async with world.leader(policy="round_robin", set=settings) as service:
        for number in range(5):
            await world.append(failed_attempt(f"r{number}", "a", at=world.clock.now()))
        await eventually(lambda: service.state.fleet.ready == ("b",))
        described = await world.ask(DescribeFleet(), kind="fleet")

        assert isinstance(described, FleetDescribed)
        assert described.instances[0].status == "ejected"
        assert "5 requests in a row failed there: connect_failure" in described.instances[0].doubt
        await eventually(lambda: service.state.fleet[InstanceId("a")].half_open)
        for trial in ("t1", "t2", "t3"):
            granted = await world.route(trial, [1])
            assert isinstance(granted, RouteGranted)
            assert granted.instance == "a"
            await world.append(first_token(trial, "a", at=world.clock.now(), prefill=0.0))
            await world.append(finished(trial, "a", at=world.clock.now()))
            await eventually(lambda: not service.state.workload.requests)
        await eventually(lambda: not service.state.fleet[InstanceId("a")].half_open)

        entries = await whole_log(world.client.log)
        assert verify(entries).ok
        ejections = [e.event for e in entries if isinstance(e.event, InstanceEjected | InstanceUnejected)]
        assert [type(event).__name__ for event in ejections] == [
            "InstanceEjected",
            "InstanceUnejected",
            "InstanceUnejected",
        ]


def failed_attempt(request: str, instance: str, *, at: float) -> RequestAttemptFailed:
    return RequestAttemptFailed(
        at=at, request=RequestId(request), instance=InstanceId(instance), failure="connect_failure"
    )
