"""Figures of the requests pending at an instance, for pages and JSON output. In: a State. Out: plain numbers by their names in
JSON."""

from typing import Any

from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE


def queue_figures(state: State, instance: InstanceId, now: EngineSeconds) -> dict[str, Any]:
    queue = state.workload.queues.get(instance, EMPTY_QUEUE)
    return {
        "pending": len(queue.pending),
        "in_prefill": len(queue.prefill),
        "decoding": len(queue.decoding),
        "pending_tokens": queue.pending_tokens,
        "prefill_tokens": queue.prefill_tokens,
        "queue_seconds": state.queue_seconds(instance, now),
    }
