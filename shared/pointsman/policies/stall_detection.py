"""Detects engines that finish no prefill, which queue estimates do not show. Source: DualMap: the stalled time counts
as queue time after T = 3 s. A prefill that is expected to take longer does not count before it is overdue. Limit: first
tokens of non-streamed requests are not seen."""

from pointsman.primitives import EngineSeconds
from pointsman.state.workload import InstanceQueue

STALL_SECONDS = 3.0

ABORT_STALL_SECONDS = 10.0
"""Engine seconds: how long an abort in an engine counts as a stall, without a first token."""


def stalled_seconds(queue: InstanceQueue, now: EngineSeconds, *, after: EngineSeconds = STALL_SECONDS) -> EngineSeconds:
    """Returns how long the instance has finished no prefill although one was due; 0 up to `after`."""
    if queue.prefill:
        since = _overdue_since(queue, now)
    elif queue.pending:
        since = max(queue.working_since, next(iter(queue.pending.values())).placed_at)
    else:
        since = now
    if queue.aborted_at and now - queue.aborted_at <= ABORT_STALL_SECONDS:
        since = min(since, queue.aborted_since)
    elapsed = now - since
    return elapsed if elapsed > after else 0.0


def _overdue_since(queue: InstanceQueue, now: EngineSeconds) -> EngineSeconds:
    watched = next((request for request in queue.prefill.values() if request.streaming), None)
    if watched is None or now <= watched.granted_at + watched.engine_seconds:
        return now
    return queue.working_since
