"""Pending requests of the pool by class and tenant, the newest last: who fills the queue. And which classes are in use."""

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.contracts.tenants import Priority
from pointsman.primitives import EngineSeconds, RequestId, Tenant
from pointsman.state.priority_classes import CLASS_REMEMBERED_SECONDS, RANK
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage


class PendingRequests(Tracker):
    """Tenants without pending requests have no entry."""

    def __init__(self) -> None:
        self._seen: dict[Priority, EngineSeconds] = {}
        self.classes: dict[Priority, dict[Tenant, dict[RequestId, Request]]] = {name: {} for name in RANK}

    def has_below(self, priority: Priority) -> bool:
        if priority == "batch":
            return False
        return bool(self.classes["batch"]) or (priority == "interactive" and bool(self.classes["standard"]))

    def expects_above(self, priority: Priority, now: EngineSeconds) -> bool:
        """Whether a higher class has sent requests lately."""
        if len(self._seen) < 2:
            return False
        rank = RANK[priority]
        return any(RANK[name] > rank and now - at < CLASS_REMEMBERED_SECONDS for name, at in self._seen.items())

    @override
    def arrived(self, request: Request, at: EngineSeconds) -> None:
        self._seen[request.priority] = at

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        tenants = self.classes[request.priority]
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
        if request.stage is Stage.PENDING:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        tenants = self.classes[request.priority]
        pending = tenants[request.tenant]
        if len(pending) == 1:
            del tenants[request.tenant]
        else:
            del pending[request.id]
