"""Answers `cmd.fleet`; gauges and warnings about instances."""

from collections import Counter
from typing import get_args

import structlog

from pointsman.contracts.commands import FleetDescribed, InstanceDescribed
from pointsman.contracts.fleet import Role
from pointsman.policies.policy_set import PolicySet
from pointsman.ports import UnconfirmedWrites
from pointsman.primitives import EngineSeconds, InstanceId, PoolName, Tokens
from pointsman.runtime import telemetry
from pointsman.state.fleet import Instance, Knowledge, Status
from pointsman.state.instance_status import status_reason
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE, Stage

log = structlog.get_logger()


def describe_fleet(
    state: State,
    policies: PolicySet,
    unconfirmed: UnconfirmedWrites,
    *,
    pool: PoolName,
    scheduler: str,
    checkpoints_overdue: str,
) -> FleetDescribed:
    return FleetDescribed(
        instances=[_describe(state, instance) for instance in state.fleet.instances],
        pool=pool,
        policy=policies.routing.name,
        admission=policies.admission.name,
        ordering=policies.ordering.name,
        scheduler=scheduler,
        term=state.term,
        as_of=state.sequence,
        speed=state.settings.speed,
        unconfirmed_writes=unconfirmed.count,
        unconfirmed_seconds=round(float(unconfirmed.wait_seconds), 3),
        checkpoints_overdue=checkpoints_overdue,
    )


def _describe(state: State, instance: Instance) -> InstanceDescribed:
    queue = state.workload.queues.get(instance.id, EMPTY_QUEUE)
    return InstanceDescribed(
        instance=instance.id,
        url=instance.url,
        epoch=instance.epoch,
        status=instance.status,
        knowledge=instance.knowledge,
        pending=len(queue.pending),
        in_prefill=len(queue.prefill),
        decoding=len(queue.decoding),
        cached_blocks=state.index.blocks(instance.id),
        digest=state.index.digest(instance.id),
        doubt=status_reason(state, instance) or foreign_keys(instance, state.settings.block_tokens) or instance.doubt,
        correction=round(state.latency.correction(instance.id), 3),
        role=instance.role,
        becomes=instance.becomes,
        knowledge_reason=instance.knowledge_reason,
        knowledge_since=instance.known_since,
        prediction_error=round(error, 3)
        if (error := state.latency.prediction_error(instance.id)) is not None
        else -1.0,
    )


def drain_warning(state: State, instance: InstanceId, hold_seconds: EngineSeconds) -> str:
    """What nobody serves while `instance` drains, what then happens to requests, and how to undo it; or ""."""
    fleet, drained = state.fleet, state.fleet[instance]
    served = {model for name in fleet.ready for model in (*fleet[name].adapters, *fleet[name].aliases)}
    orphans = sorted({*drained.adapters, *drained.aliases} - served)
    lacking = fleet.unserved or (f"no instance takes requests for {', '.join(orphans)}" if orphans else "")
    if not lacking:
        return ""
    hold = hold_seconds / state.settings.speed
    then = f"requests wait up to {hold:g} s (--hold-seconds) and then get 503" if hold else "requests get 503 at once"
    return f"{lacking} now; {then}; undo with: pointsman drain {instance} --undo"


def foreign_keys(instance: Instance, pool_block_tokens: Tokens) -> str:
    """Explains keys of another block size, which never match; empty if they agree."""
    own, pool = instance.block_tokens, pool_block_tokens
    if own == pool:
        return ""
    return f"its keys stand for {own} tokens, those of the pool for {pool}: start its worker with --block-tokens {pool}"


class FleetWarnings:
    def __init__(self) -> None:
        self._unschedulable: dict[InstanceId, str] = {}

    def check(self, state: State, instance: InstanceId) -> None:
        """Call after a join or leave; either may change which model the pool serves."""
        known = state.fleet.get(instance)
        problem = foreign_keys(known, state.settings.block_tokens) if known is not None else ""
        if problem:
            log.error("cache_keys_mismatch", instance=instance, problem=problem)
        before, self._unschedulable = self._unschedulable, {i.id: i.unschedulable for i in state.fleet.instances}
        for other, reason in self._unschedulable.items():
            if reason and reason != before.get(other, ""):
                log.error("instance_unschedulable", instance=other, problem=reason)
            elif before.get(other) and not reason:
                log.info("instance_schedulable", instance=other, model=state.fleet.model)


GAUGES = (
    telemetry.ENGINE_PENDING,
    telemetry.ENGINE_PREFILL,
    telemetry.ENGINE_DECODING,
    telemetry.ENGINE_KV_CACHE_USAGE,
    telemetry.ENGINE_CACHED_BLOCKS,
    telemetry.ENGINE_PREDICTION_ERROR,
    telemetry.ENGINE_EJECTED,
)
"""Of each engine, in the order of their values."""


class _EngineGauges:
    """Sets what changed: in a large pool most gauges do not, and to set them all takes longer than a decision."""

    def __init__(self, pool: PoolName, engine: InstanceId) -> None:
        self._gauges = [gauge.labels(pool, engine) for gauge in GAUGES]
        self._gauges += [telemetry.ENGINE_CACHE_KNOWLEDGE.labels(pool, engine, knowledge) for knowledge in Knowledge]
        self._values: tuple[float | None, ...] = (None,) * len(self._gauges)

    def show(self, values: tuple[float, ...]) -> None:
        if values == self._values:
            return
        for gauge, before, value in zip(self._gauges, self._values, values, strict=True):
            if before != value:
                gauge.set(value)
        self._values = values


class FleetGauges:
    """Gauges of an engine go when it leaves, its counters later (`EngineSeries`)."""

    def __init__(self, pool: PoolName, policies: PolicySet) -> None:
        self._pool = pool
        self._policies = policies
        self._shown: dict[InstanceId, _EngineGauges] = {}
        self._model: str | None = None

    def show(self, state: State) -> None:
        fleet, sizes = state.fleet, Counter(instance.status for instance in state.fleet.instances)
        for gone in self._shown.keys() - {instance.id for instance in fleet.instances}:
            self._remove(gone)
        for known in fleet.instances:
            self._show_one(state, known)
        for status in Status:
            telemetry.ENGINES.labels(self._pool, status).set(sizes[status])
        roles = Counter(instance.role for instance in fleet.instances if instance.status is Status.READY)
        for role in get_args(Role):
            telemetry.ENGINE_ROLES.labels(self._pool, role).set(roles[role])
        held = sum(request.stage is Stage.ARRIVED for request in state.workload.requests.values())
        telemetry.HELD_REQUESTS.labels(self._pool).set(held)
        telemetry.TTFT_UPPER_COVERAGE.labels(self._pool).set(state.ttft_intervals.coverage or 0.0)
        if fleet.model != self._model:
            self._show_pool(fleet.model)

    def _show_pool(self, model: str) -> None:
        policies = (self._policies.routing.name, self._policies.admission.name, self._policies.ordering.name)
        if self._model is not None:
            telemetry.POOL_INFO.remove(self._pool, self._model, *policies)
        telemetry.POOL_INFO.labels(self._pool, model, *policies).set(1)
        self._model = model

    def _show_one(self, state: State, instance: Instance) -> None:
        name, queue = instance.id, state.workload.queues.get(instance.id, EMPTY_QUEUE)
        values = (
            len(queue.pending),
            len(queue.prefill),
            len(queue.decoding),
            instance.kv_usage,
            state.index.blocks(name),
            state.latency.prediction_error(name) or 0.0,
            instance.ejected or instance.half_open,
            *(instance.knowledge is knowledge for knowledge in Knowledge),
        )
        shown = self._shown.get(name)
        if shown is None:
            shown = self._shown[name] = _EngineGauges(self._pool, name)
        shown.show(values)

    def _remove(self, instance: InstanceId) -> None:
        del self._shown[instance]
        for gauge in (*GAUGES, telemetry.ENGINE_CACHE_KNOWLEDGE):
            gauge.remove_by_labels({"pool": self._pool, "engine": instance})
