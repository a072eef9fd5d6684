"""The fleet as a scheduler knows it: the answer to `cmd.fleet`, gauges, and warnings about instances that do not fit."""

import structlog

from pointsman.contracts.commands import FleetDescribed, InstanceDescribed
from pointsman.policies.policy_set import PolicySet
from pointsman.primitives import InstanceId, PoolName, Tokens
from pointsman.runtime import telemetry
from pointsman.state.fleet import Instance, Knowledge
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE

log = structlog.get_logger()


def describe_fleet(state: State, policies: PolicySet, *, pool: PoolName, scheduler: str) -> FleetDescribed:
    """The fleet as this state knows it."""
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
        knowledge_reason=instance.knowledge_reason,
        knowledge_since=instance.known_since,
        prediction_error=round(error, 3)
        if (error := state.latency.prediction_error(instance.id)) is not None
        else -1.0,
    )


def foreign_keys(instance: Instance, pool_block_tokens: Tokens) -> str:
    """Why no prompt is ever found in this instance's cache: its keys are of another block size. Empty where they are not."""
    own, pool = instance.block_tokens, pool_block_tokens
    if own == pool:
        return ""
    return f"its keys stand for {own} tokens, those of the pool for {pool}: start its worker with --block-tokens {pool}"


class FleetWarnings:
    """Logs what an operator should know of joined instances; each problem once."""

    def __init__(self) -> None:
        self._unschedulable: dict[InstanceId, str] = {}

    def check(self, state: State, instance: InstanceId) -> None:
        """After this instance joined or left. Any of them may change whether the others fit: the first ones decide what
        the pool serves."""
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
    """Keeps the per-instance metrics in step with the state, and removes those of instances that left."""

    def __init__(self) -> None:
        self._shown: set[InstanceId] = set()

    def show(self, state: State) -> None:
        present = {instance.id for instance in state.fleet.instances}
        for instance in self._shown - present:
            self._remove(instance)
        for known in state.fleet.instances:
            self._show_one(state, known)
        self._shown = present

    def _show_one(self, state: State, instance: Instance) -> None:
        queue = state.workload.queues.get(instance.id, EMPTY_QUEUE)
        telemetry.INSTANCE_PENDING.labels(instance.id).set(len(queue.pending))
        telemetry.INSTANCE_PREFILL.labels(instance.id).set(len(queue.prefill))
        telemetry.INSTANCE_DECODING.labels(instance.id).set(len(queue.decoding))
        telemetry.INSTANCE_BLOCKS.labels(instance.id).set(state.index.blocks(instance.id))
        telemetry.INSTANCE_PREDICTION_ERROR.labels(instance.id).set(state.latency.prediction_error(instance.id) or 0.0)
        telemetry.INSTANCE_EJECTED.labels(instance.id).set(instance.ejected or instance.half_open)
        for knowledge in Knowledge:
            telemetry.INSTANCE_CACHE_KNOWLEDGE.labels(instance.id, knowledge).set(instance.knowledge is knowledge)

    def _remove(self, instance: InstanceId) -> None:
        for gauge in (
            telemetry.INSTANCE_PENDING,
            telemetry.INSTANCE_PREFILL,
            telemetry.INSTANCE_DECODING,
            telemetry.INSTANCE_BLOCKS,
            telemetry.INSTANCE_PREDICTION_ERROR,
            telemetry.INSTANCE_EJECTED,
        ):
            gauge.remove(instance)
        for knowledge in Knowledge:
            telemetry.INSTANCE_CACHE_KNOWLEDGE.remove(instance, knowledge)
