"""One worker that follows several engines: readiness, replacement, disappearance, and engines that fail beside others."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.discovery.listed import ListedEngines
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft, InstanceReported
from pointsman.ports import EventLog
from pointsman.primitives import InstanceId
from pointsman.runtime import telemetry
from pointsman_lab.memory.log import MemoryBroker
from pointsman_worker.settings import SettingsError
from tests.support.fake_publisher import BLOCK, FakePublisher, ScriptedCache
from tests.support.memory_pool import POOL
from tests.support.services import ToldEngine
from tests.support.told_engines import Failures, FollowingWorker, ToldEngines, following, target
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import eventually

A, B = "a", "b"


def prompt(*numbers: int) -> list[int]:
    return [number for number in numbers for _ in range(2 * BLOCK)]


def blocks_held(worker: FollowingWorker, instance: str) -> int:
    """As schedulers know it."""
    return len(worker.state().index.keys(InstanceId(instance)))


async def until_serving(worker: FollowingWorker, *instances: str, blocks: int = 0) -> None:
    for instance in instances:
        await eventually(lambda: worker.serves(instance), what=f"{instance} serving")  # noqa: B023
        await eventually(lambda: worker.last_report(instance).blocks == blocks)  # type: ignore[union-attr]  # noqa: B023


async def test_an_engine_that_is_not_ready_keeps_its_session_and_its_cache_and_gets_nothing() -> None:
    cache = ScriptedCache()
    async with FakePublisher() as publisher:
        await publisher.publish(cache.store(prompt(1)))
        ready = target(A, publisher)
        source = ToldEngines(ready)
        async with following(source) as worker:
            await until_serving(worker, A, blocks=1)

            source.tell(target(A, publisher, ready=False))
            await eventually(lambda: not worker.serves(A))
            withheld = worker.state()
            await publisher.publish(cache.store(prompt(2)))
            await eventually(lambda: worker.last_report(A).blocks == 2)  # type: ignore[union-attr]
            still_withheld = not worker.serves(A)
            source.tell(ready)
            await eventually(lambda: worker.serves(A))

            assert withheld.fleet.ready == ()
            assert len(withheld.index.keys(InstanceId(A))) == 1
            assert still_withheld
            assert len(worker.log.of(InstanceJoined, A)) == 1
            assert worker.state().fleet.ready == (A,)
            assert blocks_held(worker, A) == 2
            assert worker.lacks(A) == {}


async def test_an_engine_that_was_never_ready_does_not_join() -> None:
    async with FakePublisher() as publisher:
        source = ToldEngines(target(A, publisher, ready=False))
        async with following(source) as worker:
            await publisher.publish(ScriptedCache().store(prompt(1)))
            await eventually(lambda: A in worker.engines and worker.engines[A].asked > 3)
            before = worker.log.of(InstanceJoined, A)
            source.tell(target(A, publisher))
            await until_serving(worker, A, blocks=1)

    assert before == []


async def test_a_short_absence_from_the_list_costs_nothing_and_a_longer_one_is_a_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pointsman_worker.engine_fleet.TICK_SECONDS", 0.05)
    async with FakePublisher() as publisher:
        await publisher.publish(ScriptedCache().store(prompt(1)))
        source = ToldEngines(target(A, publisher))
        async with following(source, vanished_seconds=3.0) as worker:
            await until_serving(worker, A, blocks=1)
            source.tell()
            await eventually(lambda: not worker.serves(A))
            await asyncio.sleep(0.3)
            source.tell(target(A, publisher))
            await until_serving(worker, A, blocks=1)
            flapped = worker.log.of(InstanceLeft, A), len(worker.log.of(InstanceJoined, A))
            source.tell()
            await eventually(lambda: worker.log.of(InstanceLeft, A))

            assert flapped == ([], 1)
            assert InstanceId(A) not in worker.state().fleet
            await eventually(lambda: not worker.lacks(A))


class _SlowToLeave:
    """A log that takes a second to confirm an InstanceLeft."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.leaving = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, event: LogEvent) -> int:
        if isinstance(event, InstanceLeft):
            self.leaving.set()
            await asyncio.sleep(1.0)
        return await self._log.append(event)


async def test_an_engine_that_is_back_while_it_leaves_joins_afterwards() -> None:
    logs: list[_SlowToLeave] = []

    def link_of(broker: MemoryBroker, clock: ScaledClock) -> SimpleNamespace:
        link = broker.client(clock, name="worker")
        logs.append(_SlowToLeave(link.log))
        return SimpleNamespace(log=logs[0], commands=link.commands)

    source = ToldEngines(target(A))
    async with following(source, link_of=link_of, vanished_seconds=0.1) as worker:
        await until_serving(worker, A)
        source.tell()
        await asyncio.wait_for(logs[0].leaving.wait(), 5)
        source.tell(target(A))
        await eventually(lambda: len(worker.log.of(InstanceJoined, A)) == 2 and worker.serves(A))

        fleet = [event for event in worker.log.events if isinstance(event, InstanceJoined | InstanceLeft)]
        assert [type(event) for event in fleet] == [InstanceJoined, InstanceLeft, InstanceJoined]
        assert worker.lacks(A) == {}


async def test_another_engine_in_its_place_inherits_nothing_although_the_events_go_on() -> None:
    """The publisher has no replay socket: to the reader it is one unbroken stream."""
    cache = ScriptedCache()
    async with FakePublisher(replay=False) as publisher:
        source = ToldEngines(target(A, publisher, identity="uid-1"))
        async with following(source) as worker:
            await eventually(lambda: worker.serves(A))
            await publisher.publish(cache.store(prompt(1)))
            await eventually(lambda: blocks_held(worker, A) == 1)
            source.tell(target(A, publisher, identity="uid-2"))
            await eventually(lambda: len(worker.log.of(InstanceJoined, A)) > 1 and worker.serves(A))

            first, *_, last = worker.log.of(InstanceJoined, A)
            (left,) = worker.log.of(InstanceLeft, A)
            assert left.epoch < last.epoch
            assert left.epoch >= first.epoch
            assert blocks_held(worker, A) == 0
            assert worker.last_report(A).epoch == last.epoch  # type: ignore[union-attr]


async def test_a_handover_is_not_for_the_engine_that_took_the_place_meanwhile(tmp_path: Path) -> None:
    broker, state = MemoryBroker(POOL), {"state_directory": str(tmp_path), "pausing": True}
    async with FakePublisher() as publisher:
        await publisher.publish(ScriptedCache().store(prompt(1)))
        for identity in ("uid-1", "uid-1", "uid-2"):
            source = ToldEngines(target(A, publisher, identity=identity))
            async with following(source, broker=broker, **state) as worker:  # type: ignore[arg-type]
                reports = len(worker.log.of(InstanceReported, A))
                await eventually(lambda: len(worker.log.of(InstanceReported, A)) > reports)  # noqa: B023
                await eventually(lambda: worker.last_report(A).blocks == 1)  # type: ignore[union-attr]
                joins = len(worker.log.of(InstanceJoined, A))
            assert joins == (2 if identity == "uid-2" else 1)


async def test_engines_that_hang_contradict_or_cannot_be_opened_leave_the_others_alone() -> None:
    engines = {"hanging": ToldEngine(hangs=True), "away": ToldEngine(away=True), "odd": ToldEngine(block_tokens=7)}
    failures = Failures({"broken"})
    async with FakePublisher() as good, FakePublisher() as other:
        bad = [target(name, other) for name in (*engines, "broken")]
        source = ToldEngines(*bad, target(A, good))
        async with following(source, engines=engines, failures=failures) as worker:
            await until_serving(worker, A)
            await good.publish(ScriptedCache().store(prompt(1)))
            await until_serving(worker, A, blocks=1)
            await eventually(lambda: worker.lacks("away") and worker.lacks("broken"))
            await eventually(lambda: "following of odd" in worker.board.lacks)
            ready, lacks = worker.board.ready, worker.board.lacks
            failures.instances.clear()
            engines["odd"].becomes(block_tokens=BLOCK)
            await until_serving(worker, "broken", "odd")
            await eventually(lambda: not worker.lacks("broken"))

            assert ready
            assert "--block-tokens does not fit" in lacks["following of odd"]
            assert "no such socket" in lacks["following of broken"]
            assert not worker.log.of(InstanceLeft, A)
            assert len(worker.log.of(InstanceJoined, A)) == 1


async def test_a_worker_of_one_engine_ends_with_its_contradiction_as_its_operator_should_see() -> None:
    async with FakePublisher() as publisher:
        engines = {A: ToldEngine(block_tokens=7)}
        async with following(ToldEngines(target(A, publisher)), engines=engines, alone=True) as worker:
            with pytest.raises(SettingsError, match="does not fit"):
                await asyncio.wait_for(worker.task, 10)


async def test_a_source_that_fails_changes_nothing_and_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_worker.engine_fleet.SOURCE_RESTART_SECONDS", 0.1)
    failing, other = ToldEngines(target(A)), ToldEngines(target(B), name="other")
    async with following(failing, other) as worker:
        await until_serving(worker, A, B)
        failing.failure = ZeroDivisionError("a bug")
        failing.tell(target(A))
        await asyncio.sleep(0.3)
        failing.failure = None
        failing.tell()
        await eventually(lambda: worker.log.of(InstanceLeft, A))
        failing.problem = "the server does not answer"
        await eventually(lambda: worker.board.lacks.get("told") == "the server does not answer")
        ready = worker.board.ready
        failing.problem = ""
        await eventually(lambda: "told" not in worker.board.lacks)

        assert ready
        assert worker.serves(B)
        assert not worker.log.of(InstanceLeft, B)


async def test_an_engine_listed_twice_is_one_instance() -> None:
    first, second = target(A), target(B, url="http://a:1")
    async with following(ToldEngines(first), ToldEngines(second, name="other")) as worker:
        await until_serving(worker, A)
        await eventually(lambda: "targets" in worker.board.lacks)

        assert worker.log.of(InstanceJoined, B) == []
        assert worker.board.lacks["targets"] == "b at http://a:1 is listed besides a at http://a:1"


async def test_when_the_worker_stops_for_good_all_leave_and_paused_none_does() -> None:
    broker = MemoryBroker(POOL)
    for pausing in (True, False):
        async with following(ToldEngines(target(A), target(B)), broker=broker, pausing=pausing) as worker:
            joins = 1 if pausing else 2
            await eventually(lambda: all(len(worker.log.of(InstanceJoined, name)) == joins for name in (A, B)))  # noqa: B023
            await until_serving(worker, A, B)
        assert [len(worker.log.of(InstanceLeft, name)) for name in (A, B)] == ([0, 0] if pausing else [1, 1])
        if pausing:
            assert worker.last_report(A).back_within == 12.0  # type: ignore[union-attr]


async def test_metrics_say_how_the_engines_do() -> None:
    source = ToldEngines(target(A), target(B), target("c", ready=False))
    async with following(source, engines={B: ToldEngine(away=True)}) as worker:
        await until_serving(worker, A)

        def counts() -> dict[str, float]:
            (metric,) = telemetry.WORKER_ENGINES.collect()
            samples = metric.samples
            return {sample.labels["status"]: sample.value for sample in samples if sample.labels["pool"] == POOL}

        await eventually(lambda: counts() == {"serving": 1, "not_serving": 1, "withheld": 1, "failed": 0})


async def test_an_engine_that_contradicts_the_settings_is_not_tried_again_at_once() -> None:
    engine = ToldEngine(block_tokens=7)
    async with (
        FakePublisher() as publisher,
        following(ToldEngines(target(A, publisher)), engines={A: engine}) as worker,
    ):
        await eventually(lambda: worker.lacks(A))
        asked = engine.asked
        await asyncio.sleep(0.5)

        assert engine.asked - asked < 5


@in_virtual_time
async def test_an_engine_that_cannot_be_followed_is_tried_ever_less_often() -> None:
    tried = _Counted({A})
    async with following(ToldEngines(target(A)), failures=Failures(tried)) as worker:
        await asyncio.sleep(60.0)
        in_the_first_minute = tried.asked
        await asyncio.sleep(600.0)

        assert "no such socket" in worker.board.lacks[f"following of {A}"]
    assert 4 <= in_the_first_minute <= 12  # after 1, 2, 4, 8, 16 and 30 s, each up to a quarter shorter
    assert 15 <= tried.asked - in_the_first_minute <= 45


class _Counted(set[str]):
    asked = 0

    @override
    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)


async def test_a_source_that_lies_sends_the_worker_nowhere_else() -> None:
    """The worker would send its --engine-api-key to whatever a source names."""
    inside = target(A, url="http://10.0.0.5:8000")
    elsewhere = target(B, url="http://169.254.169.254:80")
    listening = target("c", url="http://10.0.0.6:8000", kv_endpoint="tcp://10.9.9.9:5557")
    other_name = target("d", url="http://10.0.0.7:8000")
    source = ToldEngines(inside, elsewhere, listening, other_name)
    async with following(source, discover_urls=("http://10.0.0.*:8000", "d=http://10.0.0.8:8000")) as worker:
        await eventually(lambda: worker.serves(A))
        problem = worker.board.lacks["targets"]

        assert set(worker.engines) == {A}
        assert "http://169.254.169.254:80 is not among --discover-urls (and 2 more)" in problem


async def test_engines_that_settings_name_need_no_leave() -> None:
    async with following(ListedEngines([target(A)]), discover_urls=("http://10.0.0.*:8000",)) as worker:
        await eventually(lambda: worker.serves(A))
