"""Why an instance takes no requests, or one at a time. Functions over `StateParts`."""

from pointsman.primitives import InstanceId, WallSeconds, engine_seconds
from pointsman.state.fleet import Instance
from pointsman.state.parts import StateParts

TRIAL_OPEN_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
"""How long a failed trial of a half-open instance blocks the next trial while unattributed."""


def status_reason(parts: StateParts, instance: Instance) -> str:
    """In words; empty: it takes them."""
    if instance.unschedulable:
        return instance.unschedulable
    if instance.suspected:
        return "its worker is silent"
    if not instance.serving:
        return "its engine does not answer or cannot be followed: its worker's /readyz and log say why"
    if instance.becomes:
        return f"its role becomes {instance.becomes} once it is idle"
    if instance.draining:
        return "it leaves once it is idle" if instance.leaving else "it takes no new requests"
    return ejection_reason(parts, instance)


def ejection_reason(parts: StateParts, instance: Instance) -> str:
    record = parts.outliers.record(instance.id)
    if instance.ejected:
        return f"ejected for {record.until - record.ejected_at:g} s, {record.why}"
    return f"half-open, takes one request at a time: {record.why}" if instance.half_open else ""


def has_trial_request(parts: StateParts, instance: InstanceId) -> bool:
    """Whether a half-open instance has a request granted since, or an unattributed failure."""
    first = parts.outliers.record(instance).trials_from
    queue = parts.workload.queues.get(instance)
    if queue is not None and any(
        parts.grant_place(r) >= first for r in (*queue.prefill.values(), *queue.decoding.values())
    ):
        return True
    return parts.outliers.is_open(
        instance, first=first, since=parts.now - engine_seconds(TRIAL_OPEN_WALL_SECONDS, parts.settings.speed)
    )
