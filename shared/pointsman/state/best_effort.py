"""What *best-effort* requests (late even alone) may take of the pool, and whose turn it is.

A prefill is not interrupted, so a long prompt holds its engine for seconds. Best-effort requests get the engines that
others do not need:

- *Load*: how many engines prefill other requests, on exponential average over LOAD_SECONDS.
- *Spare*: how many engines others leave: LOAD_MAX of the ready ones, less the load.
- *Turn*: the right to start although other requests are pending. It is the oldest request's of the tenant that was served
  least, and it comes when the credit is 0. Where nothing else is pending, no turn is needed: a request may start while
  best-effort requests hold fewer engines than are spare.
- *Credit*: engine-seconds, at most 0. Each start takes the request's prefill seconds from it; it grows back at the rate.
- *Rate*: in engines, which is engine-seconds a second: what is spare, but at least LEAST_SHARE of the load, and of one engine.

So a request behind `pending_seconds` of best-effort work has its turn after at most (`pending_seconds` - credit) / rate
seconds, and starts when its engine has finished what it has. Limits: counts engines as equal; knows no model or adapter."""

from collections import Counter
from collections.abc import Callable, Iterable
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
USUAL_LOAD_SECONDS: EngineSeconds = 300.0
TENANTS_REMEMBERED_MAX = 1_000


class BestEffort(Tracker):
    """Queries change nothing: between events the load and the rate count as constant."""

    def __init__(self, fleet: Fleet, *, repriced: bool = True) -> None:
        """`repriced`: False before fold version 8; work that a grant changed did not leave the sum of the pending."""
        self._fleet = fleet
        self._repriced = repriced
        self._work: dict[RequestId, EngineSeconds] = {}
        """Of those pending, as it was placed."""
        self._pending: dict[Tenant, dict[RequestId, Request]] = {}
        self._served: dict[Tenant, EngineSeconds] = {}
        self._inside: dict[RequestId, tuple[InstanceId, bool]] = {}
        """Requests in prefill: where, and whether best effort."""
        self._requests_inside: Counter[tuple[InstanceId, bool]] = Counter()
        self._engines = {False: 0, True: 0}
        """Engines that prefill others, and those that prefill best-effort requests."""
        self._load = 0.0
        self._usual = 0.0
        self._seen: EngineSeconds = 0.0
        self._credit: EngineSeconds = 0.0
        self._due: EngineSeconds = 0.0
        """When the credit reached 0."""
        self._at: EngineSeconds = 0.0
        self._pending_seconds: EngineSeconds = 0.0

    @property
    def waits(self) -> bool:
        return bool(self._pending)

    def may_start(self, more: int = 1) -> bool:
        """Whether so many more may hold an engine where nothing else is pending."""
        return self._engines[True] + more <= self._spare(self._load) or not any(self._engines.values())

    def turn(
        self, now: EngineSeconds, waits: Callable[[Request], bool] | None = None
    ) -> tuple[Request, EngineSeconds] | None:
        """The request whose turn it is, and since when. `waits`: whether another reason holds one up, so that it is the
        next tenant's turn."""
        since = self._due_at()
        if not self._pending or now < since:
            return None
        firsts = [next(iter(requests.values())) for requests in self._pending.values()]
        able = firsts if waits is None else [request for request in firsts if not waits(request)]
        if not able:
            return None
        request = self.first(able)
        return request, max(since, request.placed_at)

    def first(self, requests: Iterable[Request]) -> Request:
        return min(requests, key=lambda request: (self._served[request.tenant], request.tenant, request.placed_at))

    def wait(self, now: EngineSeconds) -> EngineSeconds:
        """Seconds until it is the turn of a request that comes now; 0 if it may start where nothing else is pending."""
        if self.may_start(1 + sum(map(len, self._pending.values()))):
            return 0.0
        credit = self._credit + self._rate(self._load) * (now - self._at)
        usual = self._usual / (1 - exp(-self._seen / USUAL_LOAD_SECONDS)) if self._seen else 0.0
        return max(0.0, self._pending_seconds - credit) / self._rate(usual)

    def _due_at(self) -> EngineSeconds:
        return self._at - self._credit / self._rate(self._load) if self._credit < 0 else self._due

    def _spare(self, load: float) -> float:
        return LOAD_MAX * len(self._fleet.ready) - load

    def _rate(self, load: float) -> float:
        return max(LEAST_SHARE, LEAST_SHARE * load, self._spare(load))

    def _advance(self, at: EngineSeconds) -> None:
        passed = at - self._at
        if passed <= 0:
            return
        if self._credit < 0:
            self._due = self._due_at()
            self._credit = min(0.0, self._credit + self._rate(self._load) * passed)
        self._load += (self._engines[False] - self._load) * (1 - exp(-passed / LOAD_SECONDS))
        self._usual += (self._engines[False] - self._usual) * (1 - exp(-passed / USUAL_LOAD_SECONDS))
        self._seen += passed
        self._at = at

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        if not request.best_effort:
            return
        self._advance(at)
        tenant = request.tenant
        if tenant not in self._pending:
            least = min((self._served[other] for other in self._pending), default=0.0)
            self._served[tenant] = max(self._served.pop(tenant, 0.0), least)
            self._pending[tenant] = {}
        self._pending[tenant][request.id] = request
        self._work[request.id] = request.prefill_seconds
        self._pending_seconds += request.prefill_seconds
        if len(self._served) > TENANTS_REMEMBERED_MAX:
            idle = next((known for known in self._served if known not in self._pending), None)
            if idle is not None:
                del self._served[idle]

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        self._advance(at)
        if request.best_effort:
            self._take_pending(request)
            self._served[request.tenant] += request.prefill_seconds
            self._credit -= request.prefill_seconds
        where = self._inside[request.id] = (request.instance, request.best_effort)
        self._requests_inside[where] += 1
        if self._requests_inside[where] == 1:
            self._engines[request.best_effort] += 1

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        if request.best_effort and request.stage is Stage.PENDING:
            self._take_pending(request)
        self._leave(request.id, at)

    @override
    def handed_over(self, request: Request, at: EngineSeconds) -> None:
        self._leave(request.id, at)

    @override
    def first_token(self, request: Request, at: EngineSeconds) -> None:
        self._leave(request.id, at)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        self.unplaced(request, at)

    def _take_pending(self, request: Request) -> None:
        waiting = self._pending[request.tenant]
        del waiting[request.id]
        if not waiting:
            del self._pending[request.tenant]
        placed = self._work.pop(request.id)
        work = placed if self._repriced else request.prefill_seconds
        # Exactly 0 if none is pending, whatever the rounding.
        self._pending_seconds = max(0.0, self._pending_seconds - work) if self._pending else 0.0

    def _leave(self, request: RequestId, at: EngineSeconds) -> None:
        where = self._inside.pop(request, None)
        if where is None:
            return
        self._advance(at)
        self._requests_inside[where] -= 1
        if not self._requests_inside[where]:
            del self._requests_inside[where]
            self._engines[where[1]] -= 1
