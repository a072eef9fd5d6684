"""The engines of a simulation: joins, departures, failures, and the cache events and reports of their workers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from operator import xor
from typing import Any

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheSnapshot, Run, Tier
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceDraining, InstanceJoined, InstanceLeft, InstanceReported, TierDigest
from pointsman.policies.seeded_random import uniform
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, RequestId
from pointsman.simulation.block_cache import BlocksEvicted, CacheChange, CacheReset, RunCached
from pointsman.simulation.engine_model import EngineModel
from pointsman.simulation.engine_types import EngineSettings
from pointsman.simulation.scenario import Failure
from pointsman.simulation.simulated_pool import SimulatedPool
from pointsman.state.workload import UNGRANTED, Stage

NOTICE_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """`wake` invalidates wake-ups for a step that was cut."""

    id: InstanceId
    epoch: Epoch
    model: EngineModel
    alive: bool = True
    sequence: int = 0
    wake: int = 0
    parents: dict[BlockKey, BlockKey] = field(default_factory=dict)
    host: dict[BlockKey, None] = field(default_factory=dict)
    """Keys in its host tier."""
    gaps: list[tuple[EngineSeconds, int]] = field(default_factory=list)
    """Steps that decoded: their length, and how many in a row had it."""

    def tbt_p90(self, since: int) -> EngineSeconds | None:
        """Of an answer that took all of `gaps` from number `since` on."""
        gaps = sorted(self.gaps[since:])
        left = math.ceil(0.9 * sum(times for _, times in gaps))
        for seconds, times in gaps:
            left -= times
            if left <= 0:
                return seconds
        return None

    def report(self, now: EngineSeconds, *, serving: bool) -> InstanceReported:
        digest, host = reduce(xor, self.parents, 0), reduce(xor, self.host, 0)
        return InstanceReported(
            at=now, instance=self.id, epoch=self.epoch, serving=serving, waiting=0, running=0, kv_usage=0.0,
            sequence=self.sequence, blocks=len(self.parents), digest=digest,
            tiers=[TierDigest("host", len(self.host), host)] if self.model.host is not None else [],
        )  # fmt: skip

    def snapshot(self, now: EngineSeconds) -> list[LogEvent]:
        self.sequence += 1
        snapshot = CacheSnapshot(
            at=now, instance=self.id, epoch=self.epoch, sequence=self.sequence, runs=_runs(self.parents)
        )
        return [snapshot, self._stored([Run(pack_keys(self.host))], "host", now)] if self.host else [snapshot]

    def events(self, changes: list[CacheChange], now: EngineSeconds) -> list[LogEvent]:
        events: list[LogEvent] = []
        for change in changes:
            match change:
                case RunCached():
                    parent = BlockKey(change.parent or 0)
                    run = Run(pack_keys(map(BlockKey, change.hashes)), parent)
                    events.append(self._stored([run], change.tier, now))
                    if change.tier == "host":
                        self.host.update(dict.fromkeys(map(BlockKey, change.hashes)))
                        continue
                    for block in change.hashes:
                        self.parents[BlockKey(block)] = parent
                        parent = BlockKey(block)
                case BlocksEvicted():
                    held: dict[BlockKey, Any] = self.host if change.tier == "host" else self.parents
                    for block in change.hashes:
                        held.pop(BlockKey(block), None)
                    events.append(self._removed(pack_keys(map(BlockKey, change.hashes)), change.tier, now))
                case CacheReset():
                    self.parents.clear()
        return events

    def _stored(self, runs: list[Run], tier: Tier, now: EngineSeconds) -> BlocksStored:
        self.sequence += 1
        return BlocksStored(at=now, instance=self.id, epoch=self.epoch, sequence=self.sequence, runs=runs, tier=tier)

    def _removed(self, keys: bytes, tier: Tier, now: EngineSeconds) -> BlocksRemoved:
        self.sequence += 1
        return BlocksRemoved(at=now, instance=self.id, epoch=self.epoch, sequence=self.sequence, keys=keys, tier=tier)


class SimulatedFleet:
    def __init__(
        self,
        pool: SimulatedPool,
        *,
        carry_out: Callable[[list[LogEvent], EngineSeconds], None],
        lose: Callable[[RequestId, SimulatedEngine, EngineSeconds, bool], None],
    ) -> None:
        """`carry_out` gets decisions caused by a change of the fleet, `lose` each request of a failing engine, and
        whether it may be retried."""
        self.engines: dict[InstanceId, SimulatedEngine] = {}
        self._pool = pool
        self._carry_out = carry_out
        self._lose = lose
        self._ready = 0
        self._events = count()

    def join(self, number: int, now: EngineSeconds) -> None:
        pool, scenario = self._pool, self._pool.scenario
        capacity = scenario.kv_capacity_tokens or pool.profile.kv_capacity_tokens
        name = pool.mirror.name_of(number)
        before = self.engines.get(name)
        epoch = Epoch(before.epoch + 1 if before else 1)
        settings = EngineSettings(
            block_size=scenario.block_tokens,
            num_gpu_blocks=capacity // scenario.block_tokens,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            max_num_seqs=min(scenario.running_max, scenario.max_num_batched_tokens),
            eviction=scenario.eviction,
            seed=scenario.seed,
            host_blocks=scenario.host_cache_tokens // scenario.block_tokens,
            host_gb_per_s=scenario.host_gb_per_s,
        )
        model = EngineModel(pool.mirror.profile_of(scenario, number), settings)
        self.engines[name] = SimulatedEngine(name, epoch, model)
        joined = InstanceJoined(
            at=now, instance=name, epoch=epoch, url="", model="", block_tokens=scenario.block_tokens,
            engine_block_tokens=scenario.block_tokens, kv_capacity_tokens=capacity, max_model_len=capacity,
            prefill=pool.profile.prefill_cost, role=scenario.role(number),
            decode=pool.profile.decode_cost if scenario.splits else None,
            transfer_tokens_per_s=pool.transfer_tokens_per_s if scenario.splits else scenario.transfer_tokens_per_s,
            role_switching=scenario.role_switching,
            fetches=scenario.transfer_tokens_per_s > 0,
        )  # fmt: skip
        pool.apply(joined, now)
        if scenario.role_switching:
            pool.apply(self.engines[name].report(now, serving=True), now)
        self._relocate_pending(now)

    def scale(self, wanted: int, now: EngineSeconds) -> None:
        ready = [engine for engine in self.engines.values() if engine.id in self._pool.state.fleet.ready]
        for number in range(len(self.engines), len(self.engines) + max(0, wanted - len(ready))):
            self.join(number, now)
        for engine in reversed(ready[wanted:]):
            self._pool.apply(InstanceDraining(at=now, instance=engine.id, epoch=engine.epoch), now)
            self._pool.agenda.at(now, lambda at, e=engine: self._leave_when_idle(e, at))  # type: ignore[misc]
        self._relocate_pending(now)

    def fail(self, failure: Failure, now: EngineSeconds) -> SimulatedEngine:
        pool = self._pool
        engine = self.engines[pool.mirror.name_of(failure.instance)]
        engine.alive = False
        engine.wake += 1
        # Losing one request may grant another to the dead engine, so list them first.
        inside = [(r.id, r.stage) for r in pool.state.workload.requests.values() if r.instance == engine.id]
        for request_id, stage in inside:
            if stage not in UNGRANTED:
                self._lose(request_id, engine, now, stage is not Stage.DECODING)
        pool.agenda.at(now + NOTICE_SECONDS, lambda at: self._notice(engine, at))
        if failure.back_at is not None:
            pool.agenda.at(failure.back_at, lambda at: self.join(failure.instance, at))
        return engine

    def deliver(self, engine: SimulatedEngine, changes: list[CacheChange], now: EngineSeconds) -> None:
        """Write the cache events of a step, delayed or lost as in the scenario."""
        pool, scenario = self._pool, self._pool.scenario
        if not scenario.tiers_known:
            changes = [change for change in changes if isinstance(change, CacheReset) or change.tier == "device"]
        for event in engine.events(changes, now):
            if scenario.event_loss and uniform(scenario.seed, "loss", str(next(self._events))) < scenario.event_loss:
                continue
            if scenario.event_delay_s:
                pool.agenda.at(now + scenario.event_delay_s, lambda at, e=event: pool.apply(e, at))  # type: ignore[misc]
            else:
                pool.apply(event, now)

    def report(self, now: EngineSeconds) -> None:
        """Every worker reports; a snapshot repairs a differing index."""
        for engine in self.engines.values():
            if engine.alive and engine.id in self._pool.state.fleet:
                self._pool.apply(engine.report(now, serving=True), now)
                if self._pool.state.fleet[engine.id].doubt:
                    for event in engine.snapshot(now):
                        self._pool.apply(event, now)

    def _leave_when_idle(self, engine: SimulatedEngine, now: EngineSeconds) -> None:
        queue = self._pool.state.workload.queues.get(engine.id)
        if engine.alive and queue is not None and queue.requests:
            self._pool.agenda.at(now + NOTICE_SECONDS, lambda at: self._leave_when_idle(engine, at))
            return
        self._pool.apply(InstanceLeft(at=now, instance=engine.id, epoch=engine.epoch, reason="drained"), now)
        engine.alive = False
        self._note_size(now)

    def _notice(self, engine: SimulatedEngine, now: EngineSeconds) -> None:
        if self.engines[engine.id] is engine:
            self._pool.apply(engine.report(now, serving=False), now)
            self._relocate_pending(now)

    def _relocate_pending(self, now: EngineSeconds) -> None:
        self._carry_out(self._pool.dispatcher.relocate_pending(now), now)
        self._note_size(now)

    def _note_size(self, now: EngineSeconds) -> None:
        ready = len(self._pool.state.fleet.ready)
        if ready != self._ready:
            self._ready = ready
            self._pool.outcome.instance_changes.append((now, ready))


def _runs(parents: Mapping[BlockKey, BlockKey]) -> list[Run]:
    """A run ends where the next key does not follow the last one."""
    runs: list[tuple[BlockKey, list[BlockKey]]] = []
    last: BlockKey | None = None
    for key, parent in parents.items():
        if parent == last:
            runs[-1][1].append(key)
        else:
            runs.append((parent, [key]))
        last = key
    return [Run(pack_keys(keys), parent) for parent, keys in runs]
