"""Finds granted requests that their engine has lost: it keeps reporting that it is idle, after it reported load in this
epoch. A request in its first step gets twice its predicted prefill, since vLLM updates its counters after each step."""

from collections.abc import Iterator

from pointsman.primitives import EngineSeconds
from pointsman.state.fleet import Instance
from pointsman.state.state import State
from pointsman.state.workload import Request, Stage

PREFILLS_WAITED = 2.0
PREFILL_SECONDS_MAX: EngineSeconds = 120.0


def stranded(state: State, now: EngineSeconds, *, idle_after: EngineSeconds) -> Iterator[Request]:
    """`idle_after`: engine seconds."""
    for instance in state.fleet.instances:
        queue = state.workload.queues.get(instance.id)
        if queue is None or not _reports_idle(instance, now, idle_after):
            continue
        factor = state.latency.correction(instance.id)
        for request in [*queue.prefill.values(), *queue.decoding.values()]:
            if request.fetching:
                continue  # not sent yet
            waited = now - max(instance.idle_since, request.granted_at)
            due = 0.0 if _has_first_token(request) else PREFILLS_WAITED * request.engine_seconds * factor
            due = min(due, PREFILL_SECONDS_MAX)
            if waited > idle_after + due:
                yield request


def _reports_idle(instance: Instance, now: EngineSeconds, idle_after: EngineSeconds) -> bool:
    fresh = now - instance.heard_at < idle_after
    return fresh and instance.counts_load and instance.serving and 0.0 < instance.idle_since < now - idle_after


def _has_first_token(request: Request) -> bool:
    return request.stage is Stage.DECODING and request.streaming
