"""Estimates the load of recent requests on a pool of another size."""

from collections.abc import Iterable

from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, plain_sum
from pointsman.state.state import State
from pointsman.state.trackers.service_window import Prefill

MEASURED_SECONDS_MIN: EngineSeconds = 10.0
"""Work is divided by at least so much: what came within a moment is no rate."""


def prefill_demand(state: State, prefills: Iterable[Prefill]) -> EngineSeconds:
    """Seconds of work of these placed prompts, corrected."""
    return plain_sum(state.latency.expected_seconds(p.instance, p.seconds, p.uncached_tokens) for p in prefills)


def least_worked(state: State, prefills: Iterable[Prefill]) -> InstanceId:
    work = dict.fromkeys(state.fleet.ready, 0.0)
    for prefill in prefills:
        if prefill.instance in work:
            work[prefill.instance] += prefill.seconds
    return min(work, key=lambda instance: (work[instance], instance))


def attainment_without(state: State, prefills: Iterable[Prefill], gone: InstanceId) -> float:
    """Share on time without one instance: requests are run again in order, those of the missing one by prefix to
    the shortest queue, the first of a prefix uncached. Errs towards keeping the instance."""
    free = {instance: 0.0 for instance in state.fleet.ready if instance != gone}
    homes: dict[BlockKey, InstanceId] = {}
    total = on_time = 0
    for prefill in prefills:
        total += 1
        if not free:
            continue
        here, work, tokens = prefill.instance, prefill.seconds, prefill.uncached_tokens
        if here not in free:
            known = homes.get(prefill.prefix) if prefill.prefix is not None else None
            here = _shortest(free) if known is None or _too_late(free[known], prefill) else known
            if here != known:
                tokens = prefill.prompt_tokens
                work = state.latency.prefill_seconds(state.fleet[here], tokens, 0)
                if prefill.prefix is not None:
                    homes[prefill.prefix] = here
        free[here] = max(prefill.at, free[here]) + state.latency.expected_seconds(here, work, tokens)
        on_time += free[here] - prefill.arrived_at <= prefill.slo_ttft
    return on_time / total if total else 1.0


def _shortest(free: dict[InstanceId, EngineSeconds]) -> InstanceId:
    return min(free, key=lambda instance: (free[instance], instance))


def _too_late(free_at: EngineSeconds, prefill: Prefill) -> bool:
    return free_at - prefill.arrived_at > prefill.slo_ttft / 2
