"""Requests that the state has inside an engine which keeps reporting that it runs nothing: their ends never reached the
log.

They use up the window of the instance. An engine is believed only if it reported load before in this epoch. vLLM
updates its counters after each step, so a request in its first step gets twice its predicted prefill.
"""

from collections.abc import Iterator

from pointsman.primitives import Seconds
from pointsman.state.fleet import Instance
from pointsman.state.state import State
from pointsman.state.workload import Request, Stage

PREFILLS_WAITED = 2.0
PREFILL_SECONDS_MAX: Seconds = 120.0
"""Engine seconds. A longer step than this no engine makes before it counts what it does."""


def stranded(state: State, now: Seconds, *, idle_after: Seconds) -> Iterator[Request]:
    """Granted requests at instances that have been idle for longer than `idle_after` (engine seconds) since the grant."""
    for instance in state.fleet.instances:
        queue = state.workload.queues.get(instance.id)
        if queue is None or not _reports_idle(instance, now, idle_after):
            continue
        factor = state.latency.correction(instance.id)
        for request in [*queue.prefill.values(), *queue.decoding.values()]:
            waited = now - max(instance.idle_since, request.granted_at)
            due = 0.0 if _has_first_token(request) else PREFILLS_WAITED * request.engine_seconds * factor
            due = min(due, PREFILL_SECONDS_MAX)
            if waited > idle_after + due:
                yield request


def _reports_idle(instance: Instance, now: Seconds, idle_after: Seconds) -> bool:
    """Whether its newest report is fresh, and all of late said that nothing runs or waits there."""
    fresh = now - instance.heard_at < idle_after
    return fresh and instance.counts_load and instance.serving and 0.0 < instance.idle_since < now - idle_after


def _has_first_token(request: Request) -> bool:
    return request.stage is Stage.DECODING and request.streaming
