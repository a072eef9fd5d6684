"""Leaders come and go over one log in memory: who may decide, what is void, and where a fold begins."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from pointsman.adapters.clocks import ForwardClock, ScaledClock
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import RouteGranted, RouteRejected
from pointsman.contracts.decisions import LeaderElected, RequestGranted
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.requests import RequestArrived
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.ports import (
    CheckpointLabel,
    CommandHandler,
    CommandTimeoutError,
    EventLog,
    Fence,
    LogEntry,
    LogReset,
    NoResponderError,
    Reply,
)
from pointsman.primitives import InstanceId, RequestId, Term, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.recovery import Recovery
from pointsman.runtime.supervision import Supervisor
from pointsman.state.checkpoint import state_digest
from pointsman.state.state import State
from pointsman_lab.memory.log import MemoryLog
from pointsman_lab.memory.stores import MemoryCheckpoints
from pointsman_scheduler import checkpointing, leader
from pointsman_scheduler.checkpointer import checkpointer_over
from pointsman_scheduler.checkpointing import Cadence
from pointsman_scheduler.context import SchedulerContext
from pointsman_scheduler.leader import ELECTION_RETRY_WALL_SECONDS, LEADERSHIP, Candidacy
from pointsman_scheduler.log_liveness import LogLiveness
from pointsman_scheduler.replica import Replica
from pointsman_scheduler.settings import SchedulerSettings
from tests.support.events import first_token, joined, route, stored
from tests.support.log_reading import folded
from tests.support.memory_pool import POOL, WAIT_SECONDS, MemoryPool
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import eventually

LEASE_SECONDS = 0.6


class PausableClock(ScaledClock):
    """A process that is stopped: its sleeps do not end before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._runs = asyncio.Event()
        self._runs.set()

    def stop(self) -> None:
        self._runs.clear()

    def go_on(self) -> None:
        self._runs.set()

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        await super().sleep_wall(seconds)
        await self._runs.wait()


class SuspendableClock(ScaledClock):
    """Of a machine that was suspended: it stood still, and does not know for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.stands_at: WallSeconds | None = None

    @override
    def wall(self) -> WallSeconds:
        return super().wall() if self.stands_at is None else self.stands_at


@dataclass
class LeadershipPool(MemoryPool):
    usual: dict[str, Any] = field(default_factory=lambda: {"lease_seconds": LEASE_SECONDS, "prefill_window_tokens": 10})

    def candidacy(self) -> Candidacy:
        settings, policies = SchedulerSettings(lease_seconds=WallSeconds(LEASE_SECONDS)), policy_set()
        context = SchedulerContext(
            settings=settings,
            policies=policies,
            link=self.client,
            clock=ForwardClock(self.clock),
            board=HealthBoard(),
            name="one",
        )
        liveness = LogLiveness(self.clock, suspect_seconds=settings.suspect_seconds)
        return Candidacy(context, Replica(settings.empty_state(policies), POOL), liveness)

    @override
    async def route(self, request: str, keys: list[int], *, timeout: float = WAIT_SECONDS, **fields: Any) -> Any:
        """As an ingress does: again and again until somebody answers."""
        async with asyncio.timeout(timeout):
            while True:
                with suppress(NoResponderError, CommandTimeoutError):
                    return await super().route(request, keys, timeout=0.3, **fields)
                await asyncio.sleep(0.02)

    async def folded(self) -> State:
        """A cold fold, in the order of the log."""
        return await folded(self.client.log, SchedulerSettings().empty_state(policy_set()))

    def following(self) -> Recovery:
        return Recovery(
            event_log=self.client.log,
            checkpoints=self.broker.checkpoints,
            clock=self.clock,
            board=HealthBoard(),
            part="fold",
            empty_state=lambda: SchedulerSettings().empty_state(policy_set()),
        )

    @asynccontextmanager
    async def checkpointer(self, events: int = 1, seconds: float = 3600.0) -> AsyncIterator[None]:
        cadence = Cadence(events=events, seconds=WallSeconds(seconds))
        checkpointer = checkpointer_over(
            self.client, SchedulerSettings(), clock=self.clock, board=HealthBoard(), cadence=cadence
        )
        async with Supervisor() as supervisor:
            supervisor.start(checkpointer.run(), name="checkpoints")
            yield

    async def newest(self) -> int:
        labels = await self.broker.checkpoints.labels()
        return labels[0].as_of if labels else 0


# Leading


@in_virtual_time
async def test_a_follower_takes_over_from_a_leader_that_was_killed_and_knows_what_it_knew() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()), stored("a", 1, [1, 2]))
    async with pool.scheduler("one") as one, asyncio.timeout(WAIT_SECONDS):
        assert one.leading
        async with pool.scheduler("two") as two:
            running = await pool.route("running", [1, 2])
            waiting = asyncio.create_task(pool.route("waiting", [7]))
            await eventually(lambda: RequestId("waiting") in two.state.workload.requests)
            assert not two.leading
            one_is_gone = pool.clock.wall()
            one.leader._leadership._acts_until = WallSeconds(0.0)  # no more renewals either: its tasks are stuck
            one.leader._leadership._lease = StuckLease()  # type: ignore[assignment]
            await eventually(lambda: two.leading)

            print(f"took over after {pool.clock.wall() - one_is_gone:.2f} s")
            assert await pool.route("running", [1, 2]) == RouteGranted(**fields_of(running) | {"term": Term(2)})
            await pool.append(first_token("running", "a", at=pool.clock.now()))
            assert isinstance(await waiting, RouteGranted)
            assert two.state.term == 2
            arrivals = [e.request for e in await pool.events() if isinstance(e, RequestArrived)]
            assert arrivals == ["running", "waiting"]


class StuckLease:
    async def look(self) -> None:
        await asyncio.Event().wait()

    async def put(self, *_: object, **__: object) -> None:
        await asyncio.Event().wait()


def fields_of(answer: RouteGranted | RouteRejected) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in answer.__struct_fields__}


@in_virtual_time
async def test_a_leader_that_stood_still_decides_nothing_more_and_follows() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    stopped = PausableClock()
    async with pool.scheduler("one", stopped) as one, pool.scheduler("two") as two:
        await pool.route("before", [1])
        await pool.append(first_token("before", "a", at=pool.clock.now()))
        stopped.stop()
        await eventually(lambda: two.leading)
        assert one.dispatcher is not None, "it does not know yet"
        assert one.leading is None
        granted = await pool.route("after", [2])
        stopped.go_on()
        await eventually(lambda: one.dispatcher is None)
        await eventually(lambda: one.state.sequence >= pool.broker.extent.last)

        assert granted.term == 2
        assert state_digest(one.state) == state_digest(await pool.folded())
        terms = [event.stamp.term for event in await pool.events() if event.stamp]
        assert terms == sorted(terms)


@in_virtual_time
async def test_a_leader_whose_clock_stood_still_decides_nothing_once_it_reads_that_another_was_elected() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    suspended = SuspendableClock()
    async with pool.scheduler("one", suspended) as one:
        await pool.route("before", [1])
        suspended.stands_at = suspended.wall()
        elected = LeaderElected(at=pool.clock.now(), term=Term(2), scheduler="two", as_of=0)
        await pool.client.log.elect(elected, after=one.state.elected)
        await eventually(lambda: one.state.term == 2)

        assert one.leading is None
        assert one.leader._leadership.holds, "by its clock"


@in_virtual_time
async def test_a_leader_that_gives_the_lease_back_is_followed_before_the_lease_would_end() -> None:
    pool = LeadershipPool()
    async with pool.scheduler("one", lease_seconds=8.0) as one, pool.scheduler("two", lease_seconds=8.0) as two:
        await one.resign()

        assert one.leading is None
        await eventually(lambda: two.leading)


@in_virtual_time
async def test_what_a_deposed_leader_writes_is_passed_over_by_every_fold() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    async with pool.scheduler("one") as one:
        await pool.route("first", [1])
        late = RequestGranted(
            at=pool.clock.now(),
            stamp=Stamp(term=Term(0), number=99, as_of=1),
            request=RequestId("first"),
            instance=InstanceId("nowhere"),
        )
        await pool.append(late)
        await eventually(lambda: one.state.fenced == 1)

        assert (await pool.folded()).fenced == 1
        assert one.state.workload.requests[RequestId("first")].instance == "a"


@in_virtual_time
async def test_an_election_that_came_first_is_followed_by_the_next_term() -> None:
    """The lease was lost with the server's memory, and somebody was elected that it does not know of."""
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    fence = await pool.client.log.elect(
        LeaderElected(at=pool.clock.now(), term=Term(7), scheduler="ghost", as_of=1), after=0
    )
    async with pool.scheduler("one") as one:
        assert one.leading
        assert one.leading.term == 8
        assert not pool.broker.may_write(fence)


@pytest.mark.parametrize("how", ["it expired", "it was given back"])
@in_virtual_time
async def test_who_does_not_hold_the_lease_any_more_is_not_elected(how: str) -> None:
    pool = LeadershipPool()
    candidacy = pool.candidacy()
    leadership = candidacy._leadership
    await candidacy.obtain_lease()
    if how == "it expired":
        await eventually(lambda: not leadership.holds)
    else:
        await leadership.resign()
    taking_office = asyncio.create_task(candidacy.take_office())
    await asyncio.sleep(3 * float(ELECTION_RETRY_WALL_SECONDS))

    assert not taking_office.done()
    assert pool.broker.extent.last == 0, "it wrote nothing"
    taking_office.cancel()


@in_virtual_time
async def test_who_reads_a_later_election_together_with_its_own_follows_and_may_be_elected_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    elect, reached = MemoryLog.elect, Replica.reached

    async def passed(log: MemoryLog, event: LeaderElected, *, after: int) -> Fence:
        fence = await elect(log, event, after=after)
        if event.term == 1:
            ghost = LeaderElected(at=pool.clock.now(), term=Term(2), scheduler="ghost", as_of=0)
            await elect(log, ghost, after=fence.elected)
        return fence

    async def reached_with_all_that_follows(replica: Replica, sequence: int) -> None:
        await reached(replica, sequence)
        await reached(replica, pool.broker.extent.last)

    monkeypatch.setattr(MemoryLog, "elect", passed)
    monkeypatch.setattr(Replica, "reached", reached_with_all_that_follows)
    async with pool.scheduler("one") as one:
        await eventually(lambda: one.leading is not None and one.leading.term == 3)
        assert isinstance(await pool.route("r", [1]), RouteGranted)


async def test_a_leader_that_cannot_read_the_log_leaves_the_lease_to_one_that_can_and_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unreadable = _logs_that_cannot_be_read(monkeypatch)
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    async with pool.scheduler("one", lease_seconds=12.0) as one, pool.scheduler("two", lease_seconds=12.0) as two:
        unreadable.add(one.context.link.log)
        await pool.append(stored("a", 1, [1]))
        await eventually(lambda: two.leading, seconds=8.0, what="taking over before the lease would end")

        assert (await pool.route("r", [1])).term == 2
        unreadable.clear()
        await eventually(lambda: one.state.sequence >= pool.broker.extent.last)
        assert one.leading is None
        assert two.leading
        await two.resign()
        await eventually(lambda: one.leading)


async def test_who_cannot_read_its_own_election_leaves_the_lease_to_one_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unreadable = _logs_that_cannot_be_read(monkeypatch)
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    async with pool.scheduler("one") as one, pool.scheduler("two") as two:
        unreadable.add(two.context.link.log)
        await one.resign()
        await eventually(lambda: two.leader._leadership.holds)
        async with pool.scheduler("three") as three:
            await eventually(lambda: three.leading)

            assert (await pool.route("r", [1])).term == three.state.term
            assert not two.leader._leadership.holds
            elections = [event.scheduler for event in await pool.events() if isinstance(event, LeaderElected)]
            assert elections.count("two") <= 1


def _logs_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> set[EventLog]:
    """Those in it, though they can be written and tell how far they go. Schedulers look often."""
    unreadable: set[EventLog] = set()
    read = MemoryLog.read

    async def read_if_it_can_be(log: MemoryLog, start: int = 1, **options: Any) -> AsyncIterator[LogEntry | LogReset]:
        async for found in read(log, start, **options):
            while log in unreadable:  # noqa: ASYNC110 - until the test says so
                await asyncio.sleep(0.01)
            yield found

    monkeypatch.setattr(MemoryLog, "read", read_if_it_can_be)
    monkeypatch.setattr(leader, "LOOK_WALL_SECONDS", 0.05)
    return unreadable


async def test_a_leader_begins_and_ends_serving_all_commands_in_as_many_round_trips_as_one() -> None:
    pool = LeadershipPool()
    served = [(f"pm.test.cmd.{number}", _answers_nothing) for number in range(9)]
    commands, candidacy = MeetingCommands(len(served)), pool.candidacy()
    async with asyncio.timeout(WAIT_SECONDS):
        await candidacy.open(commands, served)  # type: ignore[arg-type]
        assert commands.serving == {subject for subject, _ in served}
        await candidacy.close()

    assert commands.serving == set()


async def test_a_leader_that_is_cancelled_while_it_begins_to_serve_serves_nothing() -> None:
    commands, candidacy = MeetingCommands(3), LeadershipPool().candidacy()
    served = [(f"pm.test.cmd.{number}", _answers_nothing) for number in range(2)]
    opening = asyncio.create_task(candidacy.open(commands, served))  # type: ignore[arg-type]
    await eventually(lambda: len(commands.serving) == 2)
    opening.cancel()
    await asyncio.wait([opening])

    assert commands.serving == set()


async def _answers_nothing(_command: AnyCommand, _reply: Reply) -> None:
    return


class MeetingCommands:
    """A server that answers only once so many wait for it."""

    def __init__(self, together: int) -> None:
        self.serving: set[str] = set()
        self._meeting = asyncio.Barrier(together)

    @asynccontextmanager
    async def serve(self, subject: str, _handler: CommandHandler) -> AsyncIterator[None]:
        self.serving.add(subject)
        try:
            await self._meeting.wait()
            yield
            await self._meeting.wait()
        finally:
            self.serving.discard(subject)


@in_virtual_time
async def test_a_restarted_server_that_forgot_the_lease_costs_the_leader_nothing() -> None:
    pool = LeadershipPool()
    async with pool.scheduler("one") as one, pool.scheduler("two") as two:
        term = one.state.term
        pool.broker.lease.forget()
        await asyncio.sleep(2 * LEASE_SECONDS)

        assert one.leading
        assert not two.leading
        assert one.state.term == term


@in_virtual_time
async def test_while_the_lease_cannot_be_renewed_nobody_decides_and_then_the_leader_goes_on() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    async with pool.scheduler("one") as one, pool.scheduler("two") as two:
        pool.broker.disconnect()
        await eventually(lambda: one.leading is None)
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert two.leading is None
        assert "the lease cannot be written: the broker is away" in one.board.missing_parts["leadership"]
        pool.broker.reconnect()

        assert (await pool.route("r", [1])).term == 1
        assert one.leading


@in_virtual_time
async def test_a_request_that_a_dead_leader_took_in_and_did_not_place_is_placed() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    state = await pool.folded()
    now = pool.clock.now()
    arrived, *_ = Dispatcher(state, policy_set(), term=Term(0)).route(route("r", [1], arrived_at=now), now)
    await pool.append(arrived)
    async with pool.scheduler("one"):
        granted = await pool.route("r", [1])

        assert isinstance(granted, RouteGranted)
        assert [type(e).__name__ for e in await pool.events()].count("RequestArrived") == 1


@in_virtual_time
async def test_an_answer_that_is_not_streamed_is_granted_again_though_its_prefill_is_assumed_over() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    async with pool.scheduler("one") as one:
        first = await pool.route("r", [1], streaming=False)
        await eventually(lambda: one.state.workload.queues[InstanceId("a")].decoding)

        assert await pool.route("r", [1], streaming=False) == first


@in_virtual_time
async def test_an_ingress_tells_a_new_leader_where_a_request_is() -> None:
    """The grant of the leader before it never reached the log."""
    pool = LeadershipPool()
    now = pool.clock.now()
    await pool.append(joined("a", at=now), joined("b", at=now))
    async with pool.scheduler("one") as one:
        await pool.route("full", [9])
        placed = asyncio.create_task(pool.route("r", [9, 1]))
        await eventually(lambda: RequestId("r") in one.state.workload.requests)
        told = RequestGranted(at=now, request=RequestId("r"), instance=InstanceId("b"))
        await pool.append(told)
        request = one.state.workload.requests[RequestId("r")]
        await eventually(lambda: request.instance == "b" and request.granted_at)

        assert isinstance(await placed, RouteGranted)
        await pool.append(first_token("r", "b", at=now + 1))
        await eventually(lambda: RequestId("r") in one.state.workload.queues[InstanceId("b")].decoding)


# Checkpoints


@in_virtual_time
async def test_a_start_from_a_checkpoint_reads_only_what_came_after_it() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()), *(stored("a", n, [n]) for n in range(1, 50)))
    async with pool.checkpointer(events=50):
        await eventually(lambda: pool.newest())
    await pool.append(*(stored("a", n, [n]) for n in range(50, 60)))
    beginning = await pool.following().begin()

    assert beginning.state.sequence == 50
    async with pool.scheduler("leader") as leader:
        await eventually(lambda: leader.leading)
        async with pool.scheduler("follower") as follower:
            await eventually(lambda: follower.state.sequence >= pool.broker.extent.last)

            async def follows() -> bool:  # the leader may write meanwhile
                return state_digest(follower.state) == state_digest(await pool.folded())

            await eventually(follows)
            assert follower.state.index.blocks(InstanceId("a")) == 59


async def _with_a_checkpoint() -> tuple[LeadershipPool, dict[CheckpointLabel, bytes]]:
    """And the store's one checkpoint, for tests to damage."""
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()), *(stored("a", n, [n]) for n in range(1, 10)))
    async with pool.checkpointer(events=10):
        await eventually(lambda: pool.newest())
    return pool, pool.broker.checkpoints._kept


@in_virtual_time
async def test_a_follower_that_reads_a_large_checkpoint_after_the_log_went_back_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, _ = await _with_a_checkpoint()
    read, load = asyncio.Event(), MemoryCheckpoints.load

    async def slowly(store: MemoryCheckpoints, label: CheckpointLabel) -> bytes | None:
        await read.wait()
        return await load(store, label)

    async with pool.scheduler("leader"), pool.scheduler("follower") as follower:
        await eventually(lambda: follower.board.whole)
        monkeypatch.setattr(MemoryCheckpoints, "load", slowly)
        pool.broker.lose_after(await pool.newest())
        await asyncio.sleep(5.0)
        lacks = dict(follower.board.lacks)
        read.set()

        assert lacks == {LEADERSHIP: "folding the log"}
        await eventually(lambda: follower.board.whole)


@in_virtual_time
async def test_a_start_waits_for_no_checkpoint_of_entries_that_a_restored_log_has_no_more() -> None:
    pool, _ = await _with_a_checkpoint()
    pool.broker.drop_before(3)
    pool.broker.lose_after(await pool.newest() - 4)
    begun = pool.clock.wall()
    async with pool.scheduler("one") as one:
        await eventually(lambda: one.leading)

        assert pool.clock.wall() - begun < WallSeconds(10.0)


@pytest.mark.parametrize("how", ["damaged", "other form", "recreated", "rewritten", "expired"])
@in_virtual_time
async def test_a_checkpoint_that_does_not_fit_is_passed_over(how: str) -> None:
    pool, kept = await _with_a_checkpoint()
    ((label, content),) = kept.items()
    match how:
        case "damaged":
            kept[label] = content[:-1]
        case "other form":
            object.__setattr__(label, "form", "0")
        case "recreated":
            pool.broker.recreate()
            await pool.append(*(joined("b", epoch=n) for n in range(1, 12)))
        case "rewritten":
            pool.broker.lose_after(5)
            await pool.append(*(stored("a", n, [100 + n]) for n in range(5, 12)))
        case "expired":
            pool.broker.drop_before(11)
            await pool.append(joined("b"))
        case _:
            raise AssertionError(how)
    async with pool.scheduler("one") as one:
        await eventually(lambda: one.state.sequence >= pool.broker.extent.last)

        expected = await pool.folded()
        assert one.state.index.pack(canonical=True) == expected.index.pack(canonical=True)
        assert [i.id for i in one.state.fleet.instances] == [i.id for i in expected.fleet.instances]


@pytest.mark.parametrize("how", ["damaged", "beyond the log"])
@in_virtual_time
async def test_checkpoints_are_taken_though_the_newest_cannot_be_used(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "REST_WALL_SECONDS", 0.01)
    pool, kept = await _with_a_checkpoint()
    ((label, content),) = kept.items()
    if how == "damaged":
        kept[label] = content[:-1]
    else:  # the log has lost its tail
        del kept[label]
        kept[replace(label, as_of=1_000_000)] = content

    async def usable() -> bool:
        begun = (await pool.following().begin()).label
        return begun is not None and begun.as_of > label.as_of

    async with pool.checkpointer(events=10):
        await pool.append(*(stored("a", n, [n]) for n in range(10, 60)))
        await eventually(usable)


@in_virtual_time
async def test_a_checkpoint_is_taken_before_the_log_drops_what_it_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "EXTENT_WALL_SECONDS", 0.0)
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    async with pool.checkpointer(events=1_000_000):
        pool.broker.bytes_max = 20_000
        last_seen = 0
        for start in range(1, 2000, 20):
            await pool.append(*(stored("a", n, [n]) for n in range(start, start + 20)))
            await asyncio.sleep(0.002)
            last_seen = max(last_seen, await pool.newest())
            assert not last_seen or await pool.newest() >= pool.broker.extent.first

        assert pool.broker.extent.first > 1000
        assert last_seen >= pool.broker.extent.first
        assert (await pool.following().begin()).label is not None


@in_virtual_time
async def test_of_two_checkpointers_one_saves() -> None:
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    async with pool.checkpointer(events=100), pool.checkpointer(events=100):
        for start in range(1, 1000, 50):
            await pool.append(*(stored("a", n, [n]) for n in range(start, start + 50)))
            await asyncio.sleep(0.01)
        await eventually(lambda: _reached(pool, 900))

    assert await pool.newest() <= 1001


@in_virtual_time
async def test_of_two_checkpointers_the_second_keeps_no_state_until_the_first_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpointing, "EXTENT_WALL_SECONDS", 0.0)
    monkeypatch.setattr(checkpointing, "REST_WALL_SECONDS", 0.01)
    monkeypatch.setattr(checkpointing, "SAVE_RETRY_WALL_SECONDS", 0.0)
    pool = LeadershipPool()
    await pool.append(joined("a", at=pool.clock.now()))
    others = _states()
    with capture_logs() as logged:
        async with pool.checkpointer(events=100):
            async with pool.checkpointer(events=50):
                await pool.append(*(stored("a", n, [n]) for n in range(1, 60)))
                await eventually(lambda: _reached(pool, 50))
                await pool.append(*(stored("a", n, [n]) for n in range(60, 130)))
                await eventually(lambda: _said(logged, "checkpointer_rests"))
                assert _states() == others + 1
            assert not _said(logged, "checkpointer_resumes")
            await pool.append(*(stored("a", n, [n]) for n in range(130, 400)))
            await eventually(lambda: _reached(pool, 390))

    assert _said(logged, "checkpointer_resumes")
    beginning = await pool.following().begin()
    assert beginning.state.index.blocks(InstanceId("a")) == beginning.state.sequence - 1


def _states() -> int:
    """States in memory that have folded something."""
    gc.collect()
    return sum(isinstance(found, State) and found.sequence > 0 for found in gc.get_objects())


def _said(logged: Iterable[MutableMapping[str, Any]], event: str) -> bool:
    return any(line["event"] == event for line in logged)


async def _reached(pool: LeadershipPool, sequence: int) -> bool:
    return await pool.newest() >= sequence
