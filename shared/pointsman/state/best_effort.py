"""What best-effort requests (late even alone) may take of the pool, and whose turn it is. A prefill is not interrupted, so
a long prompt holds its engine for seconds: such prompts get the engines that others do not need. `load`: engines busy
with other prefills, mean over about LOAD_SECONDS. Best-effort prefills may run on as many engines as `load` leaves of
LOAD_MAX of the pool, and at least get LEAST_SHARE of the work of others: `credit` grows in time at `rate` engines, to at
most 0, and a grant costs its prefill. The next is the oldest of the tenant that was served least."""

from collections import Counter
from collections.abc import Iterable
from math import exp

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tenant
from pointsman.state.fleet import Fleet
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage

LEAST_SHARE = 0.05
LOAD_MAX = 0.95
LOAD_SECONDS: EngineSeconds = 30.0
TENANTS_REMEMBERED_MAX = 1_000


class BestEffort(Tracker):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pending: dict[Tenant, dict[RequestId, Request]] = {}
        self._served: dict[Tenant, EngineSeconds] = {}
        self._prefilling: dict[RequestId, tuple[InstanceId, bool]] = {}
        self._busy: Counter[tuple[InstanceId, bool]] = Counter()
        self._engines = {False: 0, True: 0}
        """Engines that prefill others, and those that prefill best-effort requests."""
        self._load = 0.0
        self._credit: EngineSeconds = 0.0
        self._since: EngineSeconds = 0.0
        self._at: EngineSeconds = 0.0
        self.pending_seconds: EngineSeconds = 0.0

    @property
    def waits(self) -> bool:
        return bool(self._pending)

    @property
    def spare(self) -> float:
        return LOAD_MAX * len(self._fleet.ready) - self._load

    @property
    def rate(self) -> float:
        return max(LEAST_SHARE * self._load, self.spare)

    def has_room(self, now: EngineSeconds, more: int = 1) -> bool:
        self.advance(now)
        return self._engines[True] + more <= self.spare or not any(self._engines.values())

    def due_since(self, now: EngineSeconds) -> EngineSeconds | None:
        """Since when `turn` may go before others; None: not yet."""
        self.advance(now)
        return self._since if self._credit >= 0 else None

    def wait(self, now: EngineSeconds) -> EngineSeconds:
        """Seconds until a request that comes now may go before others."""
        self.advance(now)
        waiting = sum(map(len, self._pending.values()))
        if self.has_room(now, 1 + waiting):
            return 0.0
        rate = self.rate
        return max(0.0, self.pending_seconds - self._credit) / rate if rate else 0.0

    def turn(self) -> Request | None:
        if not self._pending:
            return None
        tenant = min(self._pending, key=lambda tenant: (self._served[tenant], tenant))
        return next(iter(self._pending[tenant].values()))

    def first(self, requests: Iterable[Request]) -> Request:
        return min(requests, key=lambda r: (self._served.get(r.tenant, 0.0), r.tenant, r.placed_at))

    def advance(self, at: EngineSeconds) -> None:
        passed = at - self._at
        if passed <= 0:
            return
        self._load += (self._engines[False] - self._load) * (1 - exp(-passed / LOAD_SECONDS))
        rate = self.rate
        if self._credit < 0:
            credit = self._credit + rate * passed
            if credit >= 0:
                self._since = at
            self._credit = min(0.0, credit)
        self._at = at

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        if not request.best_effort:
            return
        self.advance(at)
        tenant = request.tenant
        if tenant not in self._pending:
            least = min((self._served[other] for other in self._pending), default=0.0)
            self._served[tenant] = max(self._served.pop(tenant, 0.0), least)
            self._pending[tenant] = {}
        self._pending[tenant][request.id] = request
        self.pending_seconds += request.prefill_seconds
        if len(self._served) > TENANTS_REMEMBERED_MAX:
            idle = next((known for known in self._served if known not in self._pending), None)
            if idle is not None:
                del self._served[idle]

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        self.advance(at)
        if request.best_effort:
            self._forget(request)
            self._served[request.tenant] += request.prefill_seconds
            self._credit -= request.prefill_seconds
        self._enter(request.id, (request.instance, request.best_effort))

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        if request.best_effort and request.stage is Stage.PENDING:
            self._forget(request)
        self._leave(request.id, at)

    @override
    def handed_over(self, request: Request, at: EngineSeconds) -> None:
        self._leave(request.id, at)

    @override
    def first_token(self, request: Request, at: EngineSeconds) -> None:
        self._leave(request.id, at)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        if request.best_effort and request.stage is Stage.PENDING:
            self._forget(request)
        self._leave(request.id, at)

    def _forget(self, request: Request) -> None:
        waiting = self._pending[request.tenant]
        del waiting[request.id]
        self.pending_seconds = max(0.0, self.pending_seconds - request.prefill_seconds)
        if not waiting:
            del self._pending[request.tenant]
        if not self._pending:
            self.pending_seconds = 0.0

    def _enter(self, request: RequestId, where: tuple[InstanceId, bool]) -> None:
        self._prefilling[request] = where
        self._busy[where] += 1
        if self._busy[where] == 1:
            self._engines[where[1]] += 1

    def _leave(self, request: RequestId, at: EngineSeconds) -> None:
        where = self._prefilling.pop(request, None)
        if where is None:
            return
        self.advance(at)
        self._busy[where] -= 1
        if not self._busy[where]:
            del self._busy[where]
            self._engines[where[1]] -= 1
