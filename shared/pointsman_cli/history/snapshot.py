"""A State as plain data."""

from typing import Any

from pointsman.primitives import EngineSeconds
from pointsman.state.fleet import Instance
from pointsman.state.instance_status import ejection_reason
from pointsman.state.queue_figures import queue_figures
from pointsman.state.slower_tiers import TIERS
from pointsman.state.state import State
from pointsman.state.workload import Request, Stage
from pointsman_cli.terminal import wall_time


def describe(state: State, *, now: EngineSeconds | None = None) -> dict[str, Any]:
    now = state.last_at if now is None else now
    requests = state.workload.requests.values()
    return {
        "as_of": state.sequence,
        "at": now,
        "wall_time": wall_time(now, state.settings.speed).isoformat(timespec="milliseconds"),
        "quiet_seconds": max(0.0, now - state.last_at),
        "term": state.term,
        "speed": state.settings.speed,
        "block_tokens": state.settings.block_tokens,
        "writes_lost": state.writes_lost,
        "instances": [_instance(state, instance, now) for instance in state.fleet.instances],
        "departed_with_requests": [
            name for name, queue in state.workload.queues.items() if queue.requests and name not in state.fleet
        ],
        "unregistered": sorted(state.unregistered),
        "requests": {str(stage): sum(request.stage is stage for request in requests) for stage in Stage},
        "placements": state.placements,
        "prefixes_counted": len(state.hotness),
        "prefixes_hot": state.hotness.extended,
        "queues": [_request(request, now) for request in requests],
    }


def _instance(state: State, instance: Instance, now: EngineSeconds) -> dict[str, Any]:
    return {
        "instance": instance.id,
        "url": instance.url,
        "epoch": instance.epoch,
        "status": str(instance.status),
        "knowledge": str(instance.knowledge),
        "doubt": instance.doubt,
        "unschedulable": instance.unschedulable,
        "ejection": ejection_reason(state, instance),
        "knowledge_reason": instance.knowledge_reason,
        "suspected": instance.suspected,
        "silent_seconds": now - instance.heard_at,
        **queue_figures(state, instance.id, now),
        "blocks": state.index.blocks(instance.id),
        "digest": f"{state.index.digest(instance.id):016x}",
        "slower_tiers": {tier: blocks for tier in TIERS if (blocks := state.slower.blocks(tier, instance.id))},
        "promised_blocks": state.promises.blocks(instance.id),
        "cache_sequence": instance.sequence,
        "kv_usage": instance.kv_usage,
        "engine_running": instance.running,
        "engine_waiting": instance.waiting,
        "correction": state.latency.correction(instance.id),
    }


def _request(request: Request, now: EngineSeconds) -> dict[str, Any]:
    return {
        "request": request.id,
        "stage": str(request.stage),
        "instance": request.instance,
        "tenant": request.tenant,
        "age_seconds": now - request.arrived_at,
        "left_seconds": request.deadline - now,
        "prompt_tokens": request.prompt_tokens,
        "uncached_tokens": request.uncached_tokens,
        "hit_blocks": request.hit_blocks,
        "predicted_ttft": request.predicted_ttft,
        "attempt": request.attempt,
    }
