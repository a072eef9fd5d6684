"""The scaler as a service, beside a scheduler, over the in-memory log: one acts, decisions are done, and none does harm."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from pointsman.adapters.providers.static import StaticProvider
from pointsman.contracts.commands import (
    DrainAnswered,
    DrainInstance,
    RouteGranted,
    ScaleAnswered,
    ScalePool,
    UndrainInstance,
)
from pointsman.contracts.decisions import ScaleApplied, ScaleDecided
from pointsman.contracts.fleet import InstanceDraining, InstanceLeft, InstanceUndrained
from pointsman.policies.policy_set import scaling_policy
from pointsman.policies.setting_text import settings_of
from pointsman.ports import (
    CommandTimeoutError,
    InstanceProvider,
    NoResponderError,
    ProvidedInstance,
    ProviderError,
    StoreUnavailableError,
    Tenure,
)
from pointsman.primitives import Epoch, InstanceId, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman_cli.scale import show
from pointsman_scaler.service import ScalerService
from pointsman_scaler.settings import ScalerSettings
from tests.support.events import finished, first_token, reported
from tests.support.memory_pool import POOL, MemoryPool
from tests.support.settable_clock import SettableClock
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import eventually


class EnginesInTheLog(InstanceProvider):
    """Engines that are nothing but what their workers would write. Shared by all scalers of a test, like a machine."""

    name = "engines-in-the-log"

    def __init__(self, world: MemoryPool) -> None:
        self.world = world
        self.kept: dict[InstanceId, int] = {}
        self.answering = True
        self.broken = ""
        self.problems: dict[str, str] = {}
        self.down: set[InstanceId] = set()
        self.busy: set[InstanceId] = set()
        """With a request that an ingress placed alone."""
        self.age = 1.0
        self.started: list[str] = []
        self.stopped: list[str] = []

    @override
    async def running(self) -> list[ProvidedInstance]:
        if self.broken:
            raise ProviderError(self.broken)
        return [ProvidedInstance(name, self.age, self.problems.get(name, "")) for name in self.kept]

    @override
    async def grow(self, total: int) -> None:
        for number in range(1, 100):
            name = InstanceId(f"e{number}")
            if len(self.kept) >= total:
                return
            if name not in self.kept:
                await self._start(name)

    async def _start(self, name: InstanceId) -> None:
        epoch = self.kept[name] = len(self.started) + 1
        self.started.append(name)
        if self.answering:
            await self.world.append(self.world.joined(name, epoch=epoch))
            await self.report(name)

    async def report(self, name: str) -> None:
        epoch = self.kept[InstanceId(name)]
        serving = name not in self.down
        report = reported(name, 0, [], epoch=epoch, at=self.world.clock.now(), serving=serving)
        await self.world.append(msgspec.structs.replace(report, running=int(name in self.busy)))

    @override
    async def stop(self, instance: InstanceId) -> None:
        epoch = self.kept.pop(instance, None)
        if epoch is not None:
            self.stopped.append(instance)
            await self.world.append(
                InstanceLeft(at=self.world.clock.now(), instance=instance, epoch=Epoch(epoch), reason="stopped")
            )

    async def report_for_ever(self) -> None:
        while True:
            for name in list(self.kept) if self.answering else []:
                await self.report(name)
            await asyncio.sleep(0.3)


def scaler_of(
    world: MemoryPool, provider: InstanceProvider, name: str, *, ahead: float = 0.0, **settings: Any
) -> ScalerService:
    """`ahead`: its clock."""
    chosen = ScalerSettings(**{"min_instances": 1, "max_instances": 6, "scaler_lease_seconds": 0.6} | settings)
    clock = SettableClock()
    clock.set_by = ahead
    link = world.broker.client(name=name, clock=clock)
    return ScalerService(
        link=link,
        provider=provider,
        policy=scaling_policy(chosen.scaling, settings_of(chosen.set, {"scaling": ""})),
        clock=clock,
        board=HealthBoard(),
        settings=chosen,
        name=name,
    )


@asynccontextmanager
async def running(*scalers: ScalerService) -> AsyncIterator[None]:
    async with Supervisor() as supervisor:
        for scaler in scalers:
            supervisor.start(scaler.run(), name="fold")
            supervisor.start(scaler.act(), name="act")
            supervisor.start(scaler.pass_on_reads(), name="reads")
        yield


@asynccontextmanager
async def pool(**scheduler: Any) -> AsyncIterator[tuple[MemoryPool, EnginesInTheLog]]:
    world = MemoryPool()
    provider = EnginesInTheLog(world)
    async with world.leader(suspect_seconds=60.0, leave_seconds=120.0, **scheduler), Supervisor() as supervisor:
        supervisor.start(provider.report_for_ever(), name="reports")
        yield world, provider


async def scale(world: MemoryPool, wanted: int | None) -> ScaleAnswered:
    async with asyncio.timeout(5.0):
        while True:
            try:
                answer = await world.operate(ScalePool(wanted=wanted), action="scale", timeout=1.0)
            except (NoResponderError, CommandTimeoutError):
                await asyncio.sleep(0.05)
                continue
            assert isinstance(answer, ScaleAnswered)
            return answer


async def settled(world: MemoryPool, wanted: int) -> None:
    async with asyncio.timeout(15.0):
        while True:
            answer = await scale(world, None)
            if answer.applied and answer.wanted == answer.ready == wanted:
                return
            await asyncio.sleep(0.05)


async def drain(world: MemoryPool, command: DrainInstance | UndrainInstance) -> DrainAnswered:
    answer = await world.operate(command, action="drain", timeout=2.0)
    assert isinstance(answer, DrainAnswered)
    return answer


@in_virtual_time
async def test_a_pool_grows_and_shrinks_as_asked_and_the_log_says_who_and_when() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await settled(world, 1)
        await scale(world, 3)
        await settled(world, 3)
        await scale(world, 2)
        await settled(world, 2)
        refused = await scale(world, 9)
        events = await world.events()

    decisions = [event for event in events if isinstance(event, ScaleDecided)]
    assert [(d.number, d.wanted, d.by) for d in decisions] == [(1, 1, ""), (2, 3, "alice"), (3, 2, "alice")]
    assert {event.by for event in events if isinstance(event, InstanceDraining)} == {"scaler"}
    assert [e.number for e in events if isinstance(e, ScaleApplied)] == [1, 2, 3]
    assert "from 1 to 6" in refused.refusal
    assert provider.stopped == ["e1"]
    drained = next(i for i, e in enumerate(events) if isinstance(e, InstanceDraining) and e.leaving)
    left = next(i for i, e in enumerate(events) if isinstance(e, InstanceLeft))
    assert drained < left
    assert events[drained].stamp is not None


@in_virtual_time
async def test_an_instance_is_stopped_only_after_what_it_has_is_finished() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await scale(world, 2)
        await settled(world, 2)
        granted = [await world.route(f"r{n}", [n]) for n in range(2)]
        busy = [answer.instance for answer in granted if isinstance(answer, RouteGranted)]
        await scale(world, 1)
        await asyncio.sleep(3.5)
        stopped_too_early = list(provider.stopped)
        for number, instance in enumerate(busy):
            await world.append(first_token(f"r{number}", instance, at=world.clock.now()))
            await world.append(finished(f"r{number}", instance, at=world.clock.now()))
        await settled(world, 1)

    assert set(busy) == {"e1", "e2"}
    assert stopped_too_early == []
    assert len(provider.stopped) == 1


@in_virtual_time
async def test_an_engine_that_answers_what_no_scheduler_knows_of_is_not_stopped() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await scale(world, 2)
        await settled(world, 2)
        provider.busy |= provider.kept.keys()
        await scale(world, 1)
        await asyncio.sleep(5.0)
        stopped_too_early = list(provider.stopped)
        provider.busy.clear()
        await settled(world, 1)

    assert stopped_too_early == []
    assert len(provider.stopped) == 1


@in_virtual_time
async def test_an_instance_whose_requests_do_not_end_is_stopped_when_its_time_is_over() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1", drain_seconds_max=5.0)):
        await scale(world, 2)
        await settled(world, 2)
        for number in range(2):
            await world.route(f"r{number}", [number])
        await scale(world, 1)
        await settled(world, 1)

        assert len(provider.stopped) == 1


@in_virtual_time
async def test_two_scalers_do_the_work_of_one_and_the_second_takes_over() -> None:
    async with pool() as (world, provider):
        first, second = scaler_of(world, provider, "s1"), scaler_of(world, provider, "s2")
        async with running(second):
            async with running(first):
                await scale(world, 4)
                await settled(world, 4)
                acting = [first.acts, second.acts]
            await eventually(lambda: second.acts)  # the first is gone without a word
            await scale(world, 3)
            await settled(world, 3)

    assert sorted(acting) == [False, True]
    assert len(provider.started) == 4
    assert len(provider.stopped) == 1


@in_virtual_time
async def test_two_scalers_that_both_believe_to_act_do_no_harm() -> None:
    async with pool() as (world, provider):
        scalers = [scaler_of(world, provider, name) for name in ("s1", "s2")]
        async with running(scalers[0]):
            await settled(world, 1)
            world.broker.scaler_lease.forget()  # the server lost its memory: the other takes the lease at once
            async with running(scalers[1]):
                await asyncio.gather(scale(world, 3), scale(world, 3))
                await settled(world, 3)
        numbers = [event.number for event in await world.events() if isinstance(event, ScaleDecided)]

    assert len(provider.started) == 3
    assert numbers == sorted(set(numbers))


@in_virtual_time
async def test_a_scaler_whose_lease_runs_out_during_a_step_takes_no_further_one() -> None:
    async with pool() as (world, provider):
        scaler = scaler_of(world, provider, "s1", start_seconds_max=60.0)
        tried: list[InstanceId] = []

        async def refuse(*_: Any, **__: Any) -> Tenure:
            raise StoreUnavailableError("no answer")

        async def stop_slowly(instance: InstanceId) -> None:
            tried.append(instance)
            world.broker.scaler_lease.put = refuse  # type: ignore[method-assign]
            await eventually(lambda: not scaler.acts)

        async with running(scaler):
            await scale(world, 3)
            await settled(world, 3)
            provider.stop = stop_slowly  # type: ignore[method-assign]
            provider.age, provider.down = 1000.0, {InstanceId("e1"), InstanceId("e2")}
            await eventually(lambda: bool(tried), seconds=100.0)
            await asyncio.sleep(3.0)

    assert len(tried) == 1


@in_virtual_time
async def test_a_scaler_that_dies_between_decision_and_action_leaves_the_action_to_the_next() -> None:
    async with pool() as (world, provider):
        async with running(scaler_of(world, provider, "s1")):
            await settled(world, 1)
            provider.broken = "the machine is away"
            await scale(world, 3)
        provider.broken = ""
        async with running(scaler_of(world, provider, "s2")):
            await settled(world, 3)

    assert provider.started == ["e1", "e2", "e3"]


@in_virtual_time
async def test_engines_that_do_not_answer_are_not_started_over_and_over() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await settled(world, 1)
        provider.answering = False
        await scale(world, 3)
        await asyncio.sleep(2.5)
        answer = await scale(world, None)

    assert (answer.ready, answer.coming, answer.applied) == (1, 2, False)
    assert len(provider.started) == 3


@in_virtual_time
async def test_a_size_that_the_pool_has_lost_is_not_told_as_done() -> None:
    """The log goes on saying that it was applied."""
    async with pool() as (world, provider), running(scaler := scaler_of(world, provider, "s1")):
        await scale(world, 2)
        await settled(world, 2)
        await eventually(lambda: scaler.state.scaling.is_applied)
        provider.answering = False  # of what starts now
        await provider.stop(InstanceId("e1"))
        await asyncio.sleep(2.0)
        missing = await scale(world, 2)
        provider.answering = True
        await world.append(world.joined("e1", epoch=provider.kept[InstanceId("e1")]))
        await settled(world, 2)

    assert (missing.ready, missing.coming, missing.applied) == (1, 1, False)


@in_virtual_time
async def test_a_provider_in_trouble_is_told_of_and_the_pool_goes_on() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await settled(world, 1)
        provider.broken = "no room on this machine"
        await scale(world, 2)
        await asyncio.sleep(1.0)
        answer = await scale(world, None)
        granted = await world.route("r1", [1])

    assert answer.trouble == "no room on this machine"
    assert isinstance(granted, RouteGranted)


@in_virtual_time
async def test_what_keeps_an_engine_from_starting_is_told_until_it_starts() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await settled(world, 1)
        provider.answering = False
        provider.problems = dict.fromkeys(["e2", "e3"], "no GPU is free\n" * 1000)
        await scale(world, 3)
        await asyncio.sleep(2.0)
        during = await scale(world, None)
        provider.problems = {}
        await asyncio.sleep(2.0)
        after = await scale(world, None)

    assert during.trouble.startswith("2 of 3 engines do not start; e2: no GPU is free")
    assert (during.coming, after.trouble) == (2, "")


@in_virtual_time
async def test_a_trouble_that_is_over_is_not_told_any_more_though_the_pool_is_not_yet_as_wanted() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await settled(world, 1)
        provider.broken, provider.answering = "the machine is away", False
        await scale(world, 2)
        await asyncio.sleep(1.0)
        during = await scale(world, None)
        provider.broken = ""
        await asyncio.sleep(3.0)
        after = await scale(world, None)

    assert (during.trouble, after.trouble, after.applied) == ("the machine is away", "", False)


@in_virtual_time
async def test_why_nothing_could_be_started_is_told_until_it_is_tried_again_or_not_needed() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await settled(world, 1)

        async def refuse(total: int) -> None:
            attempts.append(total)
            raise ProviderError("no room")

        attempts: list[int] = []
        provider.grow = refuse  # type: ignore[method-assign]
        await scale(world, 2)
        await asyncio.sleep(1.0)
        told = []
        for _ in range(20):
            await asyncio.sleep(0.5)
            told.append((await scale(world, None)).trouble)
        await scale(world, 1)
        await asyncio.sleep(1.0)
        after = await scale(world, None)

    assert told == ["no room"] * 20
    assert len(attempts) < 8, "the attempts become rarer"
    assert after.trouble == ""


@in_virtual_time
async def test_an_engine_that_is_down_for_as_long_as_a_start_may_take_is_replaced() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1", start_seconds_max=60.0)):
        await scale(world, 2)
        await settled(world, 2)
        provider.age, provider.down = 1000.0, {InstanceId("e1")}
        await eventually(lambda: provider.stopped == ["e1"], seconds=100.0)
        provider.down = set()
        await settled(world, 2)

    assert len(provider.started) == 3


@in_virtual_time
async def test_who_has_served_is_not_stopped_while_its_worker_is_away_whatever_clock_dates_its_epochs() -> None:
    """Of a worker whose clock is behind, every epoch looks like one from before the engine's start."""
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1", start_seconds_max=60.0)):
        await settled(world, 1)
        provider.age = 20.0
        await asyncio.sleep(1.0)
        provider.answering = False
        await world.append(
            InstanceLeft(at=world.clock.now(), instance=InstanceId("e1"), epoch=Epoch(1), reason="not heard of")
        )
        provider.age = 120.0
        await asyncio.sleep(100.0)
        assert provider.stopped == []

        provider.age = 90.0  # it has been started again since, and has not joined
        await eventually(lambda: provider.stopped == ["e1"], seconds=5.0)


@in_virtual_time
async def test_a_step_that_fails_does_not_hold_up_the_others() -> None:
    async with pool() as (world, provider):

        async def refuse(instance: InstanceId) -> None:
            raise ProviderError(f"{instance} is not the last pod")

        provider.stop = refuse  # type: ignore[method-assign]
        scaler = scaler_of(world, provider, "s1", start_seconds_max=0.1)
        async with running(scaler):
            await settled(world, 1)
            provider.kept[InstanceId("stuck")] = 1
            provider.age = 1000.0
            scaler._runner._out_since[InstanceId("stuck")] = WallSeconds(-1000.0)
            await scale(world, 3)
            await eventually(lambda: "e2" in provider.started)
            await eventually(lambda: scaler._runner.error == "stuck is not the last pod")


@in_virtual_time
async def test_decisions_go_on_while_a_provider_hangs_and_it_is_told_that_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pointsman_scaler.decision_log.LOG_CHECK_WALL_SECONDS", 0.1)
    async with (
        pool() as (world, provider),
        running(scaler := scaler_of(world, provider, "s1")),
        Supervisor() as reports,
    ):
        reports.start(scaler.report(), name="report")
        await settled(world, 1)
        answers, listed = asyncio.Event(), provider.running

        async def hang() -> list[ProvidedInstance]:
            await answers.wait()
            return await listed()

        provider.running = hang  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        before = scaler.state.scaling.number
        world.broker.drop_before(world.broker.extent.last)
        await eventually(lambda: scaler.state.scaling.number > before, seconds=5.0)
        assert (await scale(world, 2)).refusal == ""

        await asyncio.sleep(61.0)
        told = "the provider 'engines-in-the-log' has not answered for 60 s"
        assert (await scale(world, None)).trouble == told
        assert scaler._board.degraded_parts["scaling"] == told
        assert telemetry.DEGRADED.labels("", "scaling")._value.get() == 1

        answers.set()
        await settled(world, 2)
        await eventually(lambda: "scaling" not in scaler._board.degraded_parts)


@in_virtual_time
async def test_an_engine_that_cannot_be_stopped_is_replaced_all_the_same() -> None:
    """As one whose process waits for its accelerator, which no signal ends."""
    async with pool() as (world, provider):
        stop, tried = provider.stop, list[float]()

        async def fail(instance: InstanceId) -> None:
            if instance in provider.down:
                tried.append(asyncio.get_running_loop().time())
                await asyncio.sleep(52.0)
                raise ProviderError(f"{instance} does not end")
            await stop(instance)

        provider.stop = fail  # type: ignore[method-assign]
        async with running(scaler_of(world, provider, "s1", start_seconds_max=60.0)):
            await scale(world, 3)
            await settled(world, 3)
            provider.age, provider.down = 1000.0, {InstanceId("e1"), InstanceId("e2")}
            await eventually(lambda: len(tried) == 2, seconds=180.0)
            await eventually(lambda: len(provider.started) == 5, seconds=60.0)
            answer = await scale(world, None)
            await eventually(lambda: len(tried) == 8, seconds=1000.0)
            provider.down = set()
            await settled(world, 3)

    assert answer.trouble in ("e1 does not end", "e2 does not end", "e1 does not end; e2 does not end")
    assert len(provider.started) == 5


@in_virtual_time
async def test_a_provider_that_says_it_starts_engines_and_lists_none_is_told_of() -> None:
    """As a cluster whose quota allows no more pods."""
    async with pool() as (world, provider), running(scaler := scaler_of(world, provider, "s1")):
        await settled(world, 1)
        grow, asked = provider.grow, list[int]()

        async def accept(total: int) -> None:
            asked.append(total)

        provider.grow = accept  # type: ignore[method-assign]
        await scale(world, 3)
        await asyncio.sleep(55.0)
        before = (await scale(world, None)).trouble
        await eventually(lambda: scaler._runner.error, seconds=120.0)
        told = (await scale(world, None)).trouble
        await asyncio.sleep(10.0)
        lasts = (await scale(world, None)).trouble
        provider.grow = grow  # type: ignore[method-assign]
        await eventually(lambda: len(provider.started) == 3, seconds=70.0)
        await settled(world, 3)
        await eventually(lambda: not scaler._runner.error)

    assert before == ""
    assert told == lasts
    assert "says that it starts engines, and still lists 1 of 3:" in told
    assert set(asked) == {3}


@in_virtual_time
async def test_as_many_as_may_be_are_started_beside_those_that_hang_and_the_rest_is_told() -> None:
    async with pool() as (world, provider):
        provider.stoppable = lambda running: []  # type: ignore[method-assign]
        scaler = scaler_of(world, provider, "s1", start_seconds_max=0.1, max_instances=4)
        async with running(scaler):
            await settled(world, 1)
            provider.age = 1000.0
            for number in range(4):
                provider.kept[InstanceId(f"stuck{number}")] = 1
                scaler._runner._out_since[InstanceId(f"stuck{number}")] = WallSeconds(-1000.0)
            await scale(world, 4)
            await eventually(lambda: "e2" in provider.started)
            await eventually(lambda: "4 engines run and have not joined" in scaler._runner.error)


@in_virtual_time
async def test_what_the_leader_does_waits_for_no_stop() -> None:
    async with pool() as (world, provider), running(scaler := scaler_of(world, provider, "s1")):
        await scale(world, 2)
        await settled(world, 2)
        await world.route("r1", [1])
        await world.route("r2", [2])
        await scale(world, 1)
        await eventually(lambda: any(i.leaving for i in scaler.state.fleet.instances))

        async def hang(instance: InstanceId) -> None:
            await asyncio.sleep(1e9)

        provider.stop = hang  # type: ignore[method-assign]
        provider.age, provider.kept[InstanceId("stuck")] = 1000.0, 1
        scaler._runner._out_since[InstanceId("stuck")] = WallSeconds(-1000.0)
        await scale(world, 2)
        await eventually(lambda: not any(i.leaving for i in scaler.state.fleet.instances), seconds=5.0)


@in_virtual_time
async def test_a_pool_of_data_parallel_ranks_is_refused_and_left_alone() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await settled(world, 1)
        provider.kept[InstanceId("dp")] = 1
        await world.append(*[world.joined(f"dp-rank-{rank}", epoch=1) for rank in range(2)])
        answer = await scale(world, 4)
        while not answer.trouble:
            await asyncio.sleep(0.05)
            answer = await scale(world, None)
        started = list(provider.started)

    assert "dp has several data-parallel ranks" in answer.trouble
    assert "--provider static" in answer.trouble
    assert started == ["e1"]
    assert provider.stopped == []


@in_virtual_time
async def test_what_a_person_drains_is_replaced_and_comes_back_when_asked() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "s1")):
        await scale(world, 2)
        await settled(world, 2)
        first = await drain(world, DrainInstance(instance=InstanceId("e1"), reason="to be repaired"))
        again = await drain(world, DrainInstance(instance=InstanceId("e1"), reason="to be repaired"))
        unknown = await drain(world, DrainInstance(instance=InstanceId("e9"), reason="?"))
        await eventually(lambda: "e3" in provider.started)
        stopped = list(provider.stopped)
        back = await drain(world, UndrainInstance(instance=InstanceId("e1")))
        events = await world.events()

    assert [e.by for e in events if isinstance(e, InstanceDraining | InstanceUndrained)] == ["alice", "alice"]
    assert first.draining
    assert again == first
    assert "there are: e1, e2" in unknown.refusal
    assert stopped == []
    assert not back.draining


@in_virtual_time
async def test_requests_wait_for_a_pool_that_sleeps_and_wake_it() -> None:
    settings: dict[str, Any] = {"scaling": "slo_attainment", "min_instances": 0}
    async with pool(hold_seconds=20.0) as (world, provider), running(scaler_of(world, provider, "s1", **settings)):
        await settled(world, 1)
        await scale(world, 0)
        await settled(world, 0)
        answer = await world.route("first", [1], timeout=15.0)

    assert isinstance(answer, RouteGranted)
    assert len(provider.started) == 2


@in_virtual_time
async def test_a_size_is_decided_again_before_the_log_loses_it_and_under_a_higher_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pointsman_scaler.decision_log.LOG_CHECK_WALL_SECONDS", 0.1)
    async with pool() as (world, provider):
        first, late = (scaler_of(world, provider, name) for name in ("s1", "s2"))
        async with running(first):
            await scale(world, 2)
            await eventually(lambda: first.state.scaling.is_applied)
            before = first.state.scaling.number
            world.broker.drop_before(world.broker.extent.last)
            await eventually(lambda: first.state.scaling.number > before)
            async with running(late):
                await eventually(lambda: late.state.scaling.wanted == 2 and late.state.scaling.is_applied)

        assert late.state.scaling.number == first.state.scaling.number
        assert provider.stopped == []


@in_virtual_time
async def test_a_static_provider_refuses_a_size_that_is_not_there_and_says_what_to_do() -> None:
    world = MemoryPool()
    await world.append(*[event for name in "ab" for event in (world.joined(name), reported(name, 0, []))])
    async with world.leader(suspect_seconds=60.0), running(scaler_of(world, StaticProvider(), "s1")):
        await settled(world, 2)
        answers = [await scale(world, wanted) for wanted in (3, 1)]
        same = await scale(world, 2)
        kinds = await world.kinds()

    assert [
        "2 are there; start 1 by hand" in answers[0].refusal,
        "2 are there; stop 1 by hand" in answers[1].refusal,
    ] == [
        True,
        True,
    ]
    assert (same.refusal, same.wanted, same.applied, same.by_hand) == ("", 2, True, "")
    assert "InstanceDraining" not in kinds
    assert msgspec.to_builtins(same)["provider"] == "static"


@pytest.mark.parametrize("manages", [True, False])
@in_virtual_time
async def test_only_a_provider_that_starts_engines_is_asked_for_more(manages: bool) -> None:
    world = MemoryPool()
    await world.append(world.joined("a"), reported("a", 0, []))
    scaler = scaler_of(world, EnginesInTheLog(world) if manages else StaticProvider(), "s1")
    async with running(scaler):
        await eventually(lambda: InstanceId("a") in scaler.state.fleet)
        steps = await scaler._runner.steps(scaler.state, 3)

    assert bool(steps) == manages


@in_virtual_time
async def test_what_came_after_the_first_decision_of_a_static_provider_is_what_is_wanted() -> None:
    world = MemoryPool()
    await world.append(world.joined("a"), reported("a", 0, []))
    async with world.leader(suspect_seconds=60.0), running(scaler_of(world, StaticProvider(), "s1")):
        await settled(world, 1)
        await world.append(world.joined("b"), reported("b", 0, []))
        await settled(world, 2)
        asked = await scale(world, 2)

    assert (asked.refusal, asked.wanted, asked.applied) == ("", 2, True)


@in_virtual_time
async def test_a_static_provider_wants_nothing_back_that_left_unless_all_left() -> None:
    world = MemoryPool()
    await world.append(*[event for name in "ab" for event in (world.joined(name), reported(name, 0, []))])
    scaler, shown = scaler_of(world, StaticProvider(), "s1"), telemetry.SCALER_DESIRED_ENGINES.labels(POOL)._value
    async with world.leader(suspect_seconds=60.0), running(scaler), Supervisor() as supervisor:
        supervisor.start(scaler.report(), name="report")
        await settled(world, 2)
        await eventually(lambda: shown.get() == 2)
        await world.append(InstanceLeft(at=world.clock.now(), instance=InstanceId("b"), epoch=Epoch(1), reason="gone"))
        await eventually(lambda: shown.get() == 1)
        asked = await scale(world, None)
        await world.append(InstanceLeft(at=world.clock.now(), instance=InstanceId("a"), epoch=Epoch(1), reason="gone"))
        await eventually(lambda: shown.get() == 2)

    assert (asked.wanted, asked.by_hand) == (1, "")


async def test_a_pool_whose_engines_an_operator_has_all_drained_is_told_without_contradiction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = MemoryPool()
    await world.append(*[event for name in "ab" for event in (world.joined(name), reported(name, 0, []))])
    async with world.leader(suspect_seconds=60.0), running(scaler_of(world, StaticProvider(), "s1")):
        await settled(world, 2)
        before = await scale(world, None)
        for name in "ab":
            await drain(world, DrainInstance(instance=InstanceId(name), reason="to be repaired"))
        await settled(world, 0)
        answer = await scale(world, None)
        await drain(world, UndrainInstance(instance=InstanceId("a")))
        await settled(world, 1)
        back = await scale(world, None)
    show(answer)

    assert [before.drained, answer.drained, back.drained] == [[], ["a", "b"], ["b"]]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0 wanted (done): 0 of 0 answer, 2 drained by operators: a and b"
    assert said[1] == "decided because: nobody asked for a size: all that are not drained"


@in_virtual_time
async def test_what_an_automatic_policy_wants_of_a_static_provider_is_left_to_people() -> None:
    world = MemoryPool()
    await world.append(world.joined("a"), reported("a", 0, []))
    scaler = scaler_of(world, StaticProvider(), "s1", scaling="slo_attainment")
    async with world.leader(suspect_seconds=60.0), running(scaler):
        await settled(world, 1)
        await world.append(world.joined("b"), reported("b", 0, []))

        async def left_to_people() -> bool:
            answer = await scale(world, None)
            return bool(answer.by_hand) and not answer.applied  # which is of the last tick

        await eventually(left_to_people)
        answer = await scale(world, None)
        scaler.desired()
        read = await scale(world, None)

    assert (answer.wanted, answer.applied) == (1, False)
    assert "2 are there; stop 1 by hand" in answer.by_hand
    assert read.by_hand == "", "an autoscaler does it"


@in_virtual_time
async def test_what_hangs_or_is_drained_under_a_static_provider_is_known_to_come_no_more() -> None:
    """Three are to serve."""
    world = MemoryPool()
    await world.append(*[event for name in "abc" for event in (world.joined(name), reported(name, 0, []))])
    settings: dict[str, Any] = {"scaling": "schedule", "set": ("scaling.times=* * * * * = 3",)}
    scaler = scaler_of(world, StaticProvider(), "s1", start_seconds_max=60.0, **settings)

    async def down(name: str) -> None:
        while True:
            await world.append(reported(name, 0, [], serving=False, at=world.clock.now()))
            await asyncio.sleep(1.0)

    async with (
        world.leader(suspect_seconds=60.0, leave_seconds=300.0), running(scaler), Supervisor() as supervisor
    ):  # fmt: skip
        await settled(world, 3)
        supervisor.start(down("a"), name="down")
        await asyncio.sleep(50.0)
        before = scaler.state.scaling.wanted
        await asyncio.sleep(20.0)
        after = scaler.state.scaling.wanted
        await drain(world, DrainInstance(instance=InstanceId("b"), reason="to be repaired"))
        await eventually(lambda: scaler.state.scaling.wanted == 5)
        await drain(world, UndrainInstance(instance=InstanceId("b")))
        await eventually(lambda: scaler.state.scaling.wanted == 4)

    assert (before, after) == (3, 4)


@in_virtual_time
async def test_an_autoscaler_may_read_the_scaler_that_only_follows() -> None:
    """As behind one Service, which leads its connection to either."""
    world = MemoryPool()
    await world.append(world.joined("a"), reported("a", 0, []))
    acting, following = (scaler_of(world, StaticProvider(), name) for name in ("s1", "s2"))

    async def taken() -> bool:
        return not (await scale(world, 3)).refusal

    async with world.leader(suspect_seconds=60.0), running(acting):
        await settled(world, 1)
        async with running(following):
            unread = await scale(world, 3)
            following.desired()
            await eventually(taken)
            acted = following.acts
        kinds = await world.kinds()

    assert "no autoscaler reads GET /desired" in unread.refusal
    assert not acted
    assert kinds.count("ScaleDecided") == 2


@in_virtual_time
async def test_an_autoscaler_reads_the_decided_size_and_nothing_before_there_is_one() -> None:
    world = MemoryPool()
    await world.append(world.joined("a"), reported("a", 0, []))
    acting, following = (scaler_of(world, StaticProvider(), name) for name in ("s1", "s2"))
    before = [acting.desired(), following.desired()]
    async with world.leader(suspect_seconds=60.0), running(following):
        await eventually(lambda: following.acts)
        async with running(acting):
            await scale(world, 3)
            await eventually(lambda: page_of(acting)["desired"] == page_of(following)["desired"] == 3)
            pages = [page_of(acting), page_of(following)]

    assert before == [None, None]
    assert pages == [{"pool": POOL, "desired": 3, "ready": 1, "number": 2, "reason": "somebody asked for 3"}] * 2


@in_virtual_time
async def test_a_pool_that_sleeps_is_told_to_have_no_roles() -> None:
    world = MemoryPool()
    asleep = ScaleDecided(
        at=0.0, policy="manual", settings={}, current=4, wanted=0, reason="r", number=1, prefill=3, decode=1
    )
    await world.append(asleep)
    scaler = scaler_of(world, StaticProvider(), "s1", min_instances=0)
    async with world.leader(suspect_seconds=60.0), running(scaler):
        await eventually(lambda: scaler.desired() is not None)
        answer = await scale(world, None)

    assert page_of(scaler) == {"pool": POOL, "desired": 0, "ready": 0, "number": 1, "reason": "r"}
    assert (answer.wanted, answer.prefill, answer.decode) == (0, 0, 0)


def page_of(scaler: ScalerService) -> dict[str, Any]:
    page: dict[str, Any] = json.loads(scaler.desired() or b'{"desired": null}')
    return page


@in_virtual_time
async def test_nobody_is_stopped_when_the_log_is_lost() -> None:
    """Workers take seconds to see it and to join again; the size is theirs meanwhile."""
    async with pool() as (world, provider), running(scaler := scaler_of(world, provider, "s1")):
        await scale(world, 3)
        await settled(world, 3)
        provider.age = 3600.0
        world.broker.recreate()
        await eventually(lambda: scaler.state.sequence < 10 and scaler.state.scaling.wanted is not None, seconds=20.0)
        await asyncio.sleep(1.0)
        assert (scaler.state.scaling.wanted, provider.stopped) == (3, [])
        for name, epoch in provider.kept.items():
            await world.append(world.joined(name, epoch=epoch))
        await settled(world, 3)

    assert provider.stopped == []
    assert provider.started == ["e1", "e2", "e3"]


@pytest.mark.parametrize("ahead", [0.0, 86_400.0, -86_400.0])
@in_virtual_time
async def test_a_scaler_whose_clock_is_wrong_sizes_the_pool_like_any_other(ahead: float) -> None:
    """It grows for nobody who is on time, sleeps no earlier and no later, and can tell after a restart."""
    settings: dict[str, Any] = {"ahead": ahead, "scaling": "slo_attainment", "min_instances": 0}
    settings["set"] = ("scaling.idle_s=80",)
    async with pool(hold_seconds=20.0) as (world, provider):
        async with running(scaler_of(world, provider, "s1", **settings)):
            await settled(world, 1)
            for number in range(25):  # as many as it judges by
                await world.route(f"r{number}", [], prompt_tokens=64, max_output_tokens=1)
            await asyncio.sleep(3.0)
        async with running(scaler := scaler_of(world, provider, "s2", **settings)):
            await asyncio.sleep(1.5)
            assert await decisions(world) == [1], "they still have half a second"
            for number in range(25):
                await world.append(first_token(f"r{number}", "e1", at=world.clock.now()))
                await world.append(finished(f"r{number}", "e1", at=world.clock.now()))
            await world.route("last", [1])
            await world.append(finished("last", "e1", at=world.clock.now()))
            await asyncio.sleep(78.0)
            assert await decisions(world) == [1], "the last came less than 80 s ago"
            await eventually(lambda: scaler.state.scaling.wanted == 0, seconds=5.0)


async def decisions(world: MemoryPool) -> list[int]:
    return [event.wanted for event in await world.events() if isinstance(event, ScaleDecided)]
