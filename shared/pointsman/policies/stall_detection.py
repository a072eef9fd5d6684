"""Stalls: an engine that is busy decoding finishes no prefill, and a queue estimate does not show it.

Source: DualMap: an instance that has finished no prefill for T = 3 s although it has requests gets the elapsed time
added to its queue estimate. Bias: a prefill that the cost model expects to take longer is no stall before it is
overdue. Limit: the first token of requests that are not streamed is not seen.
"""

from pointsman.primitives import Seconds
from pointsman.state.workload import InstanceQueue

STALL_SECONDS = 3.0
"""T of the paper, in engine time."""

ABORT_STALL_SECONDS = 10.0
"""Engine seconds for which an engine counts as stalled after a request was taken out of it (`rebalancing.redispatch`),
unless it gives a first token."""


def stalled_seconds(queue: InstanceQueue, now: Seconds, *, after: Seconds = STALL_SECONDS) -> Seconds:
    """How long the instance has finished no prefill although it should have; 0 while that is at most `after`."""
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


def _overdue_since(queue: InstanceQueue, now: Seconds) -> Seconds:
    """When the engine began the prefill that should be over by now; `now` where none is overdue."""
    watched = next((request for request in queue.prefill.values() if request.streaming), None)
    if watched is None or now <= watched.granted_at + watched.engine_seconds:
        return now
    return queue.working_since
