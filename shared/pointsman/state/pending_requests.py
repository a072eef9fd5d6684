"""Pending requests of the pool by class and tenant, the newest last: who fills the queue. And which classes are in use."""

from collections.abc import Iterator

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, RequestId, Tenant
from pointsman.state.priority_classes import BEST_EFFORT, CLASS_REMEMBERED_SECONDS, RANK, QueueClass
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage


class PendingRequests(Tracker):
    """Tenants without pending requests have no entry."""

    def __init__(self) -> None:
        self._seen: dict[QueueClass, EngineSeconds] = {}
        self.classes: dict[QueueClass, dict[Tenant, dict[RequestId, Request]]] = {name: {} for name in RANK}

    def has_below(self, priority: QueueClass) -> bool:
        rank = RANK[priority]
        return any(RANK[name] < rank for name, tenants in self.classes.items() if tenants)

    def expects_above(self, priority: QueueClass, now: EngineSeconds) -> bool:
        """Whether a higher class has sent requests lately."""
        if len(self._seen) < 2 and priority != BEST_EFFORT:
            return False
        rank = RANK[priority]
        return any(RANK[name] > rank and now - at < CLASS_REMEMBERED_SECONDS for name, at in self._seen.items())

    def oldest(self, tenant: Tenant, priority: QueueClass) -> Iterator[Request]:
        """The tenant's first in this class, and in each above it."""
        rank = RANK[priority]
        for name, tenants in self.classes.items():
            if tenant in tenants and RANK[name] >= rank:
                yield next(iter(tenants[tenant].values()))

    @override
    def arrived(self, request: Request, at: EngineSeconds) -> None:
        self._seen[request.priority] = at

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        tenants = self.classes[request.queue_class]
        pending = tenants.get(request.tenant)
        if pending is None:
            tenants[request.tenant] = {request.id: request}
        else:
            pending[request.id] = request

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        self._remove(request)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        if request.stage is Stage.PENDING:
            self._remove(request)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        self.unplaced(request, at)

    def _remove(self, request: Request) -> None:
        tenants = self.classes[request.queue_class]
        pending = tenants[request.tenant]
        if len(pending) == 1:
            del tenants[request.tenant]
        else:
            del pending[request.id]
