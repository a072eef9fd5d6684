"""Answers `cmd.fleet`; gauges and warnings about instances."""

from collections import Counter
from typing import get_args

import structlog

from pointsman.contracts.commands import FleetDescribed, InstanceDescribed
from pointsman.contracts.fleet import Role
from pointsman.policies.policy_set import PolicySet
from pointsman.primitives import InstanceId, PoolName, Tokens
from pointsman.runtime import telemetry
from pointsman.state.fleet import Instance, Knowledge, Status
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE, Stage

log = structlog.get_logger()


def describe_fleet(state: State, policies: PolicySet, *, pool: PoolName, scheduler: str) -> FleetDescribed:
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
        doubt=instance.unschedulable
        or state.ejection_reason(instance)
        or foreign_keys(instance, state.settings.block_tokens)
        or instance.doubt,
        correction=round(state.latency.correction(instance.id), 3),
        role=instance.role,
        becomes=instance.becomes,
        knowledge_reason=instance.knowledge_reason,
        knowledge_since=instance.known_since,
        prediction_error=round(error, 3)
        if (error := state.latency.prediction_error(instance.id)) is not None
        else -1.0,
    )


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


class FleetGauges:
    """Gauges of an engine go when it leaves, its counters later (`EngineSeries`)."""

    def __init__(self, pool: PoolName, policies: PolicySet) -> None:
        self._pool = pool
        self._policies = policies
        self._shown: set[InstanceId] = set()
        self._model: str | None = None

    def show(self, state: State) -> None:
        fleet, sizes = state.fleet, Counter(instance.status for instance in state.fleet.instances)
        for instance in self._shown - {instance.id for instance in fleet.instances}:
            self._remove(instance)
        for known in fleet.instances:
            self._show_one(state, known)
        self._shown = {instance.id for instance in fleet.instances}
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
        pool, queue = self._pool, state.workload.queues.get(instance.id, EMPTY_QUEUE)
        telemetry.ENGINE_PENDING.labels(pool, instance.id).set(len(queue.pending))
        telemetry.ENGINE_PREFILL.labels(pool, instance.id).set(len(queue.prefill))
        telemetry.ENGINE_DECODING.labels(pool, instance.id).set(len(queue.decoding))
        telemetry.ENGINE_KV_CACHE_USAGE.labels(pool, instance.id).set(instance.kv_usage)
        telemetry.ENGINE_CACHED_BLOCKS.labels(pool, instance.id).set(state.index.blocks(instance.id))
        prediction_error = state.latency.prediction_error(instance.id) or 0.0
        telemetry.ENGINE_PREDICTION_ERROR.labels(pool, instance.id).set(prediction_error)
        telemetry.ENGINE_EJECTED.labels(pool, instance.id).set(instance.ejected or instance.half_open)
        for knowledge in Knowledge:
            telemetry.ENGINE_CACHE_KNOWLEDGE.labels(pool, instance.id, knowledge).set(instance.knowledge is knowledge)

    def _remove(self, instance: InstanceId) -> None:
        for gauge in (
            telemetry.ENGINE_PENDING,
            telemetry.ENGINE_PREFILL,
            telemetry.ENGINE_DECODING,
            telemetry.ENGINE_KV_CACHE_USAGE,
            telemetry.ENGINE_CACHED_BLOCKS,
            telemetry.ENGINE_PREDICTION_ERROR,
            telemetry.ENGINE_EJECTED,
            telemetry.ENGINE_CACHE_KNOWLEDGE,
        ):
            gauge.remove_by_labels({"pool": self._pool, "engine": instance})
