"""The bound of all pending requests, `pending_max`, shared among classes and tenants. A tenant may fill the queue as long as
no other wants a place. When it is full, a newcomer takes the place of the newest request
- of a lower class that holds more than its guaranteed CLASS_SHARE, else
- of its own class, from the tenant that holds most by weight, if that leaves the newcomer's tenant with less (max-min
  fairness), else
- of the class that holds most, if its own holds less than its guaranteed share.
Otherwise it is refused. Bias: the newest waits again, not the one with most work. Cost: one pass over the tenants of a
class, only when the queue is full."""

from collections.abc import Callable

from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission import Refusal
from pointsman.policies.dispatch.rejecting import reject
from pointsman.policies.dispatch.turn import Turn
from pointsman.primitives import EngineSeconds, InstanceId, Tenant
from pointsman.state import fold_versions
from pointsman.state.priority_classes import RANK, QueueClass
from pointsman.state.workload import Request

CLASS_SHARE = 0.05
RETRY_SECONDS: EngineSeconds = 1.0

Place = Request | Refusal | None
"""None: the queue is not full. A request: the one that has to make room."""


def place_for(turn: Turn, request: Request) -> Place:
    if len(turn.state.workload.requests) < turn.policies.pending_max:
        return None  # so many cannot be pending
    waiting = sum(len(queue.pending) for queue in turn.state.workload.queues.values())
    if waiting < turn.policies.pending_max:
        return None
    displaced = (
        _displaced_by(turn, request) if turn.state.settings.fold_version >= fold_versions.TENANTS_SHARE_QUEUE else None
    )
    return displaced or Refusal(RejectReason.QUEUE_FULL, f"{waiting} requests wait already", RETRY_SECONDS)


def displace(turn: Turn, displaced: Request, newcomer: Request) -> InstanceId:
    """Reject `displaced`. Returns where it was pending."""
    instance = displaced.instance
    detail = "the queue is full, and a request with a better claim took its place"
    refusal = Refusal(RejectReason.QUEUE_FULL, detail, RETRY_SECONDS)
    reject(turn, displaced, displaced.attempt, displaced.excluded, refusal, [], displaced_by=newcomer.id)
    return instance


def _displaced_by(turn: Turn, newcomer: Request) -> Request | None:
    classes = turn.state.pending.classes
    held = {name: sum(map(len, tenants.values())) for name, tenants in classes.items() if tenants}
    guaranteed = CLASS_SHARE * turn.policies.pending_max
    own = newcomer.priority
    lower = [name for name in held if RANK[name] < RANK[own] and held[name] > guaranteed]
    if lower:
        return _newest(turn, min(lower, key=RANK.__getitem__))
    weighted = _weighted(turn, own)
    most = max(classes[own], key=lambda tenant: weighted(tenant, 0), default=None)
    if most is not None and weighted(newcomer.tenant, 1) < weighted(most, 0):
        return _newest(turn, own)
    if held and held.get(own, 0) < guaranteed:
        return _newest(turn, max(held, key=lambda name: (held[name], -RANK[name])))
    return None


def _newest(turn: Turn, priority: QueueClass) -> Request:
    """Of the tenant that holds most of this class."""
    weighted = _weighted(turn, priority)
    tenants = turn.state.pending.classes[priority]
    pending = tenants[max(tenants, key=lambda tenant: weighted(tenant, 0))]
    return pending[next(reversed(pending))]


def _weighted(turn: Turn, priority: QueueClass) -> Callable[[Tenant, int], float]:
    """Pending requests of a tenant in this class, and so many more, by its weight."""
    tenants, weights = turn.state.pending.classes[priority], turn.state.tenants

    def weighted(tenant: Tenant, more: int) -> float:
        return (len(tenants.get(tenant, ())) + more) / weights.policy_of(tenant).weight

    return weighted
