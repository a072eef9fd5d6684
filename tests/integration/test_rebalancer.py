"""The rebalancer beside a scheduler, over the log in memory and over a real nats-server: a hot instance's queue moves.

Prompts of 100 blocks take 6.4 s by the cost model and objectives are 30 s, so that a slow machine changes nothing: on
one instance the fifth request and all behind it are predicted late. Each engine takes one request at a time.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.contracts.commands import (
    MigrateRequests,
    MigrationAnswered,
    PlannedMove,
    RouteGranted,
)
from pointsman.contracts.decisions import (
    LeaderElected,
    MigrationRefused,
    RequestGranted,
    RequestMigrated,
    RequestPlaced,
)
from pointsman.contracts.requests import RequestCancelled
from pointsman.contracts.subjects import command_subject
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set, rebalancing_policy
from pointsman.ports import Clock, Commands, EventLog, Link, LogEntry, Reply
from pointsman.primitives import InstanceId, PoolName, RequestId, Term, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman.state.state import PoolSettings, State
from pointsman_rebalancer.service import RebalancerService
from pointsman_rebalancer.settings import RebalancerSettings
from pointsman_scheduler import migrating
from pointsman_scheduler.service import SchedulerService
from tests.support.events import first_token, joined, route
from tests.support.log_worlds import LogWorld, MemoryWorld
from tests.support.services import running_scheduler
from tests.support.settable_clock import SettableClock
from tests.support.waiting import eventually

WAIT_SECONDS = 15.0
BLOCKS = 100
SLO = 30.0
CROWD = 12


@pytest.fixture
def in_memory() -> LogWorld:
    return MemoryWorld(PoolName("rebalanced"))


@dataclass
class Fleet:
    """A scheduler that leads, engines that a test speaks for, and clients whose answers are kept."""

    world: LogWorld
    client: Link
    clock: ScaledClock
    scheduler: SchedulerService
    asking: dict[str, "asyncio.Task[AnyCommand]"] = field(default_factory=dict)

    async def join(self, *instances: str) -> None:
        """Instances join, and the leader has read of it."""
        for instance in instances:
            await self.client.log.append(joined(instance, at=self.clock.now()))
        await eventually(lambda: all(self.scheduler.state.fleet.get(InstanceId(instance)) for instance in instances))

    async def crowd(self, number: int = CROWD) -> None:
        """So many requests ask, and the log has the placement of each."""
        for n in range(number):
            keys = [1000 * n + block + 1 for block in range(BLOCKS)]
            command = route(f"r{n}", keys, arrived_at=self.clock.now(), slo_ttft=SLO)
            asked = self.client.commands.request(
                command_subject(self.world.pool, "route"), command, timeout=WallSeconds(WAIT_SECONDS)
            )
            self.asking[f"r{n}"] = asyncio.ensure_future(asked)
        await eventually(lambda: self._refused() or len(self.scheduler.state.workload.requests) == number)
        assert not self._refused()
        assert len(await self.of_kind(RequestPlaced)) == number

    def _refused(self) -> list[object]:
        """What became of those who were answered, and not with a grant."""
        ended = (asking for asking in self.asking.values() if asking.done())
        answers = [asking.exception() or asking.result() for asking in ended]
        return [answer for answer in answers if not isinstance(answer, RouteGranted)]

    async def answer_all(self) -> dict[str, str]:
        """Engines give first tokens one after the other until everybody was granted; who was granted where."""
        answered: set[str] = set()
        while len(answered) < len(self.asking):
            await asyncio.wait(self.asking.values(), return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
            for request, asking in self.asking.items():
                if asking.done() and request not in answered:
                    answered.add(request)
                    await self.client.log.append(
                        first_token(request, self.granted(request).instance, at=self.clock.now())
                    )
        return {request: self.granted(request).instance for request in self.asking}

    def granted(self, request: str) -> RouteGranted:
        answer = self.asking[request].result()
        assert isinstance(answer, RouteGranted)
        return answer

    async def ask(self, *moves: PlannedMove, **fields: Any) -> MigrationAnswered:
        """Ask the leader as a rebalancer would."""
        state = self.scheduler.state
        told: dict[str, Any] = {"plan": "p.1", "policy": "by_hand", "term": state.term, "as_of": state.sequence}
        command = MigrateRequests(**told | fields, moves=list(moves))
        answer = await self.client.commands.request(
            command_subject(self.world.pool, "migrate"), command, timeout=WallSeconds(WAIT_SECONDS)
        )
        assert isinstance(answer, MigrationAnswered)
        return answer

    async def events(self) -> list[LogEvent]:
        """Everything in the log, the leader's last decision included."""
        await eventually(lambda: self.scheduler.dispatcher is not None)
        found: list[LogEvent] = []
        assert self.scheduler.dispatcher is not None
        async for entry in self.client.log.read(1):
            assert isinstance(entry, LogEntry)
            assert entry.event is not None
            found.append(entry.event)
            if entry.event.stamp and entry.event.stamp.number >= self.scheduler.dispatcher.decided:
                break
        return found

    async def of_kind(self, kind: type[LogEvent]) -> list[Any]:
        return [event for event in await self.events() if isinstance(event, kind)]

    @property
    def waiting(self) -> Counter[str]:
        """How many wait for each instance."""
        return Counter(
            {str(instance): len(line.pending) for instance, line in self.scheduler.state.workload.queues.items()}
        )


@asynccontextmanager
async def fleet(world: LogWorld) -> AsyncIterator[Fleet]:
    clock = ScaledClock()
    async with (
        world.client("scheduler") as link,
        world.client("test") as client,
        running_scheduler(
            link,
            clock,
            pool=world.pool,
            admission="none",
            prefill_window_tokens=10,
            waiter_seconds=60.0,
            suspect_seconds=60.0,
        ) as service,
    ):
        running = Fleet(world, client, clock, service)
        try:
            yield running
        finally:
            for asking in running.asking.values():
                asking.cancel()
            await asyncio.gather(*running.asking.values(), return_exceptions=True)


@asynccontextmanager
async def rebalancer(
    world: LogWorld,
    name: str = "rebalancer",
    *,
    policy: str = "global",
    commands: Commands | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[RebalancerService]:
    board = HealthBoard()
    async with world.client(name) as link:
        service = RebalancerService(
            link=replace(link, commands=commands or link.commands),
            clock=clock or ScaledClock(),
            board=board,
            settings=RebalancerSettings(pool=world.pool),
            policy=rebalancing_policy(policy),
            name=name,
        )
        async with Supervisor() as supervisor:
            supervisor.start(service.run(), name="fold")
            supervisor.start(service.rebalance(), name="rebalance")
            await eventually(lambda: board.whole)
            yield service


def move(request: str, target: str = "b", source: str = "a") -> PlannedMove:
    return PlannedMove(
        request=RequestId(request), source=InstanceId(source), target=InstanceId(target), benefit=1.0, reason="by hand"
    )


async def test_what_waits_for_a_hot_instance_moves_and_is_answered(world: LogWorld) -> None:
    reaction = telemetry.REBALANCING_REACTION_SECONDS.labels(world.pool)._sum
    async with fleet(world) as running, rebalancer(world):
        await running.join("a")
        await running.crowd()
        await running.join("b")
        await eventually(lambda: running.waiting["b"] == 3)
        granted = await running.answer_all()
        await eventually(lambda: reaction.get() > 0.0)

        moves = await running.of_kind(RequestMigrated)
        assert len(moves) >= 4
        assert {(m.source, m.instance, m.policy) for m in moves} == {("a", "b", "global")}
        assert all(m.plan.startswith("rebalancer.") and m.benefit > 0 and m.planned_as_of for m in moves)
        assert {m.request for m in moves} <= {request for request, instance in granted.items() if instance == "b"}
        grants = Counter(event.request for event in await running.of_kind(RequestGranted))
        assert set(grants.values()) == {1}
        assert len(grants) == CROWD


@pytest.mark.parametrize("ahead", [-120.0, 60.0, 3600.0])
async def test_a_rebalancer_with_a_wrong_clock_moves_the_same(in_memory: LogWorld, ahead: float) -> None:
    clock = SettableClock()
    clock.set_by = ahead
    async with fleet(in_memory) as running, rebalancer(in_memory, clock=clock):
        await running.join("a")
        await running.crowd()
        await running.join("b")
        await eventually(lambda: running.waiting["b"] == 3)

        assert not await running.of_kind(MigrationRefused)


async def test_a_refused_move_is_not_planned_again_at_once(in_memory: LogWorld) -> None:
    async with fleet(in_memory) as running, rebalancer(in_memory) as service:
        await running.join("a")
        await running.crowd()
        refusing = {RequestId(request): service._clock.wall() for request in running.asking}
        service._refused.update(refusing)
        await running.join("b")
        await asyncio.sleep(0.3)
        at_once = len(await running.of_kind(RequestMigrated))
        await eventually(lambda: running.waiting["b"] == 3)

        assert at_once == 0


async def test_a_leader_that_knows_more_refuses_and_the_log_says_why(in_memory: LogWorld) -> None:
    async with fleet(in_memory) as running:
        await running.join("a", "b")
        await running.crowd(6)
        pending = {
            request: line
            for line in "ab"
            for request in running.scheduler.state.workload.queue(InstanceId(line)).pending
        }
        assert Counter(pending.values()) == {"a": 2, "b": 2}
        (first, last), other = (
            [r for r, line in pending.items() if line == "a"],
            next(r for r, i in pending.items() if i == "b"),
        )
        in_engine = next(r for r in running.asking if r not in pending)

        answer = await running.ask(
            move("never-heard-of"), move(in_engine), move(other), move(first, "c"), move(last), move(first)
        )

        refusals = ["not_waiting", "not_waiting", "elsewhere", "target_unavailable", "no_gain", "no_gain"]
        assert [m.refusal for m in answer.moves] == refusals
        logged = await running.of_kind(MigrationRefused)
        assert [(e.reason, e.plan, e.policy) for e in logged] == [(reason, "p.1", "by_hand") for reason in refusals]
        assert not await running.of_kind(RequestMigrated)


async def test_what_would_be_late_at_the_target_too_stays(in_memory: LogWorld) -> None:
    async with fleet(in_memory) as running:
        await running.join("a")
        await running.crowd()
        await running.join("b")
        answer = await running.ask(*[move(f"r{n}") for n in range(CROWD - 1, 4, -1)])

        assert [m.refusal for m in answer.moves] == [""] * 4 + ["target_late"] * 3


async def test_a_plan_that_comes_twice_is_carried_out_once(in_memory: LogWorld) -> None:
    async with fleet(in_memory) as running:
        await running.join("a")
        await running.crowd()
        await running.join("b")
        first, second = await running.ask(move("r9")), await running.ask(move("r9"))

        assert first == second
        assert [m.refusal for m in first.moves] == [""]
        assert len(await running.of_kind(RequestMigrated)) == 1
        assert not await running.of_kind(MigrationRefused)


async def test_a_plan_that_is_out_of_date_is_refused_whole(
    in_memory: LogWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "PLAN_BEHIND_EVENTS_MAX", 10)
    monkeypatch.setattr(migrating, "PLAN_MOVES_MAX", 2)
    async with fleet(in_memory) as running:
        await running.join("a")
        await running.crowd()
        await running.join("b")
        as_of = running.scheduler.state.sequence
        answers = [
            await running.ask(move("r9"), plan="p.1", term=Term(0)),
            await running.ask(move("r9"), plan="p.2", as_of=as_of - 11),
            await running.ask(move("r9"), move("r8"), move("r7"), plan="p.3"),
        ]

        assert [(a.refusal, a.moves) for a in answers] == [("other_term", []), ("too_old", []), ("too_long", [])]
        assert not await running.of_kind(RequestMigrated)
        assert not await running.of_kind(MigrationRefused)


async def test_two_rebalancers_do_no_more_than_one(in_memory: LogWorld) -> None:
    async with fleet(in_memory) as running, rebalancer(in_memory, "one"), rebalancer(in_memory, "two"):
        await running.join("a")
        await running.crowd()
        await running.join("b")
        await eventually(lambda: running.waiting["b"] == 3)
        granted = await running.answer_all()

        moves = await running.of_kind(RequestMigrated)
        assert all((m.source, m.instance) == ("a", "b") for m in moves)
        assert set(Counter(m.request for m in moves).values()) == {1}
        assert len(granted) == CROWD


class DeafCommands(Commands):
    """Sends, and never hears the answer: what a process that is killed in the middle leaves behind."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self.sent = asyncio.Event()

    @property
    @override
    def connected(self) -> bool:
        return self._commands.connected

    @override
    async def request(self, subject: str, command: AnyCommand, *, timeout: WallSeconds) -> AnyCommand:
        await self._commands.request(subject, command, timeout=timeout)
        self.sent.set()
        await asyncio.Event().wait()
        raise AssertionError

    @override
    async def request_bytes(self, subject: str, payload: bytes, *, timeout: WallSeconds) -> bytes:
        return await self._commands.request_bytes(subject, payload, timeout=timeout)

    @override
    def serve(self, subject: str, handler: Any) -> Any:
        return self._commands.serve(subject, handler)

    @override
    def serve_payloads(self, subject: str, handler: Any, *, queue: str = "") -> Any:
        return self._commands.serve_payloads(subject, handler, queue=queue)


async def test_one_that_is_killed_in_the_middle_of_a_plan_leaves_nothing_undone(world: LogWorld) -> None:
    async with fleet(world) as running:
        deaf = DeafCommands(running.client.commands)
        async with rebalancer(world, "killed", commands=deaf):
            await running.join("a")
            await running.crowd()
            await running.join("b")
            await asyncio.wait_for(deaf.sent.wait(), WAIT_SECONDS)
        assert running.waiting["b"] == 3
        async with rebalancer(world, "next"):
            granted = await running.answer_all()

        assert len(granted) == CROWD
        assert not await running.of_kind(RequestCancelled)


async def test_the_same_plan_is_not_made_again_before_the_log_tells_what_became_of_it(in_memory: LogWorld) -> None:
    asked: list[MigrateRequests] = []

    async def take(command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, MigrateRequests)
        asked.append(command)
        await reply(MigrationAnswered(plan=command.plan, term=command.term, as_of=command.as_of, decided=10**6))

    async with in_memory.client("leader") as leader:
        await written_by_a_leader(leader.log)
        async with leader.commands.serve(command_subject(in_memory.pool, "migrate"), take), rebalancer(in_memory):
            await eventually(lambda: asked)
            await asyncio.sleep(0.3)

    assert len(asked) == 1
    assert (asked[0].term, asked[0].as_of, asked[0].policy) == (1, (await end_of(leader.log)), "global")
    assert asked[0].moves


async def test_off_asks_for_nothing_and_without_a_leader_nothing_breaks(in_memory: LogWorld) -> None:
    async with in_memory.client("leader") as leader:
        await written_by_a_leader(leader.log)
        async with rebalancer(in_memory, policy="off") as off, rebalancer(in_memory, "alone") as alone:
            await asyncio.sleep(0.2)

    assert off.state.sequence == alone.state.sequence == await end_of(leader.log)


async def written_by_a_leader(event_log: EventLog) -> None:
    """A log whose leader is gone: one instance with a long queue, another with none."""
    clock = ScaledClock()
    policies = policy_set(admission="none", prefill_window_tokens=10)
    dispatcher = Dispatcher(State(PoolSettings(), policies.trackers()), policies, term=Term(1))
    events: list[LogEvent] = [joined("a", at=clock.now())]
    dispatcher.state.apply(events[0])
    for number in range(CROWD):
        command = route(
            f"r{number}", [1000 * number + b + 1 for b in range(BLOCKS)], arrived_at=clock.now(), slo_ttft=SLO
        )
        events += dispatcher.route(command, clock.now())
    elected = LeaderElected(at=clock.now(), term=Term(1), scheduler="gone", as_of=0)
    for event in [elected, *events, joined("b", at=clock.now())]:
        await event_log.append(event)


async def end_of(event_log: EventLog) -> int:
    return (await event_log.extent()).last
