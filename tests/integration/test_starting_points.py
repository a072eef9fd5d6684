"""Where the rebalancer and the scaler begin: at a checkpoint, after which they fold only the rest, and plan and decide as
ones that folded everything. Over the log in memory and over a real nats-server.

The log: a quiet pool of two engines, then a crowd on engine a, which holds most of every prompt; b holds less of it. The
three checkpoints are of the quiet time, of its end, and of the crowd. The last is too young for either service, the second
for the scaler, whose policy looks back 60 s.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.providers.static import StaticProvider
from pointsman.contracts.decisions import Settings
from pointsman.policies.policy_set import policy_set, rebalancing_policy, scaling_policy
from pointsman.policies.rebalancing import MigrationPlan
from pointsman.policies.scaling.base import PoolSize, ScaleTarget
from pointsman.ports import CheckpointLabel, Checkpoints, EventLog, Link, LogEntry, LogReset
from pointsman.primitives import EngineSeconds, PoolName, Sequence
from pointsman.runtime.checkpoint_fingerprint import checkpoint_form, entry_digest
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman.simulation.replay.folding import fold
from pointsman.state.checkpoint import encode_parts
from pointsman.state.no_index import NoIndex
from pointsman.state.state import PoolSettings, State
from pointsman_lab.memory.stores import MemoryCheckpoints
from pointsman_rebalancer.service import RebalancerService
from pointsman_rebalancer.settings import RebalancerSettings
from pointsman_scaler.service import ScalerService
from pointsman_scaler.settings import ScalerSettings
from tests.support.events import finished, first_token, joined, route, stored
from tests.support.log_worlds import LogWorld, MemoryWorld
from tests.support.logged_leader import LoggedLeader
from tests.support.waiting import eventually

NOW: EngineSeconds = 175.0
BLOCKS = 100
STICKY: Settings = {"imbalance_tokens_max": 1_000_000}
POLICIES = policy_set(routing="sticky_least_loaded", admission="none", settings=STICKY)
REBALANCING, SCALING = rebalancing_policy("global"), scaling_policy("slo_attainment", {"outcomes_min": 5})


class At(ScaledClock):
    @override
    def now(self) -> EngineSeconds:
        return NOW


class CountingLog:
    """Counts what is read of a log."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.sequences: list[Sequence] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def read(self, *arguments: Any, **options: Any) -> AsyncIterator[LogEntry | LogReset]:
        async for entry in self._log.read(*arguments, **options):
            if isinstance(entry, LogEntry):
                self.sequences.append(entry.sequence)
            yield entry


@dataclass
class Pool(LoggedLeader):
    """`passed`: how long the log was by then."""

    passed: dict[str, Sequence] = field(default_factory=dict)

    def run(self) -> "Pool":
        self.lead(POLICIES, at=0.0)
        for engine in ("a", "b"):
            self.happens(joined(engine, at=0.0))
        for second in range(1, 145):
            self._serve(float(second))
            if second in (100, 144):
                self.passed["quiet" if second == 100 else "end of quiet"] = len(self.log)
        for number in range(12):
            self._crowd(number, at=150.0 + 2 * number)
            if number == 10:
                self.passed["crowd"] = len(self.log)
        return self

    def _serve(self, now: EngineSeconds) -> None:
        name = f"q{now:g}"
        self.decides(self.dispatcher.route(route(name, [round(now) + 1_000_000], arrived_at=now), now))
        instance = self.state.workload.requests[name].instance  # type: ignore[index]
        self.happens(first_token(name, instance, at=now + 0.1, prefill=0.1))
        self.happens(finished(name, instance, at=now + 0.2))

    def _crowd(self, number: int, *, at: EngineSeconds) -> None:
        keys = [1000 * number + block + 1 for block in range(BLOCKS)]
        for engine, held in (("a", 12), ("b", 8)):
            known = self.state.fleet[engine]  # type: ignore[index]
            self.happens(stored(engine, known.sequence + 1, keys[:held], at=at))
        self.decides(self.dispatcher.route(route(f"c{number}", keys, arrived_at=at, slo_ttft=30.0), at))


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool().run()


@asynccontextmanager
async def filled(world: LogWorld, pool: Pool) -> AsyncIterator[Link]:
    """A client of a log with these entries and checkpoints."""
    async with world.client() as link:
        for entry in pool.log:
            assert entry.event is not None
            assert await link.log.append(entry.event) == entry.sequence
        stored_log = [entry async for entry in _first(link.log, len(pool.log))]
        extent = await link.log.extent()
        for as_of in pool.passed.values():
            state = fold(pool.log[:as_of], settings=PoolSettings(), trackers=POLICIES.trackers())
            form = checkpoint_form(State(PoolSettings(), POLICIES.trackers()))
            digest = entry_digest(stored_log[as_of - 1])
            label = CheckpointLabel(identity=extent.identity, as_of=as_of, entry=digest, form=form)
            head, indexes = encode_parts(state)
            await link.checkpoints.save(label, head + indexes, head_bytes=len(head))
        yield link


async def _first(log: EventLog, count: int) -> AsyncIterator[LogEntry]:
    async for entry in log.read(1):
        assert isinstance(entry, LogEntry)
        yield entry
        if entry.sequence == count:
            return


@dataclass
class Started:
    """What a service has read, and what it came to."""

    read: list[Sequence]
    outcome: MigrationPlan | ScaleTarget
    logged: list[str]


async def rebalancer(link: Link, world: LogWorld, checkpoints: Checkpoints) -> Started:
    log = CountingLog(link.log)
    service = RebalancerService(
        link=replace(link, log=log, checkpoints=checkpoints),
        clock=At(),
        board=HealthBoard(),
        settings=RebalancerSettings(pool=world.pool),
        policy=REBALANCING,
        name="rebalancer",
    )
    logged = await _read_all(service, log, (await link.log.extent()).last)
    return Started(log.sequences, REBALANCING.plan(service.state, NOW), logged)


async def scaler(link: Link, world: LogWorld, checkpoints: Checkpoints) -> Started:
    log = CountingLog(link.log)
    service = ScalerService(
        link=replace(link, log=log, checkpoints=checkpoints),
        provider=StaticProvider(),
        policy=SCALING,
        clock=At(),
        board=HealthBoard(),
        settings=ScalerSettings(pool=world.pool),
        name="scaler",
    )
    logged = await _read_all(service, log, (await link.log.extent()).last)
    return Started(log.sequences, SCALING.scale_target(service.state, PoolSize(ready=2, wanted=2), NOW), logged)


async def _read_all(service: RebalancerService | ScalerService, log: CountingLog, last: Sequence) -> list[str]:
    with capture_logs() as logged:
        async with Supervisor() as supervisor:
            supervisor.start(service.run(), name="fold")
            with suppress(TimeoutError):
                await eventually(lambda: bool(log.sequences) and log.sequences[-1] == last)
            assert service.state.sequence == last
    return [line["event"] for line in logged]


@pytest.mark.parametrize(("start", "begins_at"), [(rebalancer, "end of quiet"), (scaler, "quiet")])
async def test_it_folds_only_what_came_after_a_checkpoint_and_comes_to_the_same(
    start: Any, begins_at: str, world: LogWorld, pool: Pool
) -> None:
    async with filled(world, pool) as link:
        found = await start(link, world, link.checkpoints)
        whole = await start(link, world, MemoryCheckpoints(lambda: True))

    elected, as_of, last = 1, pool.passed[begins_at], len(pool.log)
    assert found.read == [elected, *range(as_of, last + 1)]
    assert whole.read == [*range(1, last + 1)]
    assert "checkpoint_restored" in found.logged
    assert "log_folded_whole" in whole.logged
    assert found.outcome == whole.outcome
    assert "first token" in str(whole.outcome) or "on time" in str(whole.outcome)


async def test_a_plan_counts_the_hits_that_placements_recorded(pool: Pool) -> None:
    """Those of a State with an index, as nothing was stored since."""
    with_index = fold(pool.log, settings=PoolSettings())
    without = State(PoolSettings(), index=False)
    for entry in pool.log:
        without.apply_entry(entry)

    plan = REBALANCING.plan(with_index, NOW)
    assert len(plan.migrations) > 2
    assert REBALANCING.plan(without, NOW) == plan
    without.index = NoIndex()
    assert REBALANCING.plan(without, NOW) != plan


@pytest.mark.parametrize("spoilt", ["another fold", "other settings", "damaged", "too young"])
@pytest.mark.parametrize("start", [rebalancer, scaler])
async def test_without_a_checkpoint_that_fits_it_folds_the_log_and_says_so(start: Any, spoilt: str, pool: Pool) -> None:
    world = MemoryWorld(PoolName("unfit"))
    async with filled(world, pool) as link:
        store = link.checkpoints
        assert isinstance(store, MemoryCheckpoints)
        for label, content in list(store._kept.items()):
            head_bytes = store._head_bytes[label]
            del store._kept[label]
            if spoilt == "too young" and label.as_of != pool.passed["crowd"]:
                continue
            if spoilt == "another fold":
                label = replace(label, form="5" + label.form[1:])
            elif spoilt == "damaged":
                content = content[:100]
            elif spoilt == "other settings":
                state = fold(pool.log[: label.as_of], settings=PoolSettings(block_tokens=16))
                head, rest = encode_parts(state)
                content, head_bytes = head + rest, len(head)
            await store.save(label, content, head_bytes=head_bytes)
        found = await start(link, world, store)
        whole = await start(link, world, MemoryCheckpoints(lambda: True))

    assert found.read == whole.read == [*range(1, len(pool.log) + 1)]
    assert {"checkpoint_skipped", "log_folded_whole"} <= set(found.logged)
    assert found.outcome == whole.outcome


async def test_a_checkpoint_of_an_older_release_is_read_whole_and_without_its_index(pool: Pool) -> None:
    world = MemoryWorld(PoolName("older"))
    async with filled(world, pool) as link:
        assert isinstance(link.checkpoints, MemoryCheckpoints)
        link.checkpoints._head_bytes.clear()
        found = await rebalancer(link, world, link.checkpoints)
        whole = await rebalancer(link, world, MemoryCheckpoints(lambda: True))

    assert found.read[1] == pool.passed["end of quiet"]
    assert found.outcome == whole.outcome
