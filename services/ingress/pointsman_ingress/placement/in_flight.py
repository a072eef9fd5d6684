"""The requests that this ingress has at engines or that wait for a place: how busy each engine is, and where the log says
that the requests are.

Load is told here and nowhere else: whoever must choose an engine without a scheduler asks for the `least_busy`. It is a
bound from below. What this ingress has sent it knows at once; what others have, a worker tells about once a second, and what
it told long ago counts for nothing.

An engine that failed a request of ours lately comes last in that choice: an engine that fails at once looks idle. It stays last
for a time that grows with its failures in a row, then is tried by one request at a time until one is answered. The leader
decides about ejection for everybody (`InstanceEjected`); this is what an ingress knows by itself, for when nobody leads.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pointsman.contracts.commands import RouteGranted
from pointsman.contracts.decisions import RequestGranted, RequestHandedOver
from pointsman.ports import Clock, EventLog
from pointsman.primitives import InstanceId, RequestId, Seconds, Term
from pointsman.state.fleet import NO_DEMAND, Demand, Instance
from pointsman_ingress.placement.fleet_view import FleetView

AVOIDED_WALL_SECONDS: Seconds = 5.0
AVOIDED_WALL_SECONDS_MAX: Seconds = 25.0
"""How long an engine is avoided for each failure in a row, and at most."""


@dataclass(slots=True)
class _Failures:
    """Of one engine, in a row. It is avoided until the wall time `until`."""

    count: int = 0
    until: Seconds = 0.0


class InFlightRequests:
    """Of one pool."""

    def __init__(self, *, fleet: FleetView, events: EventLog, clock: Clock) -> None:
        self._fleet = fleet
        self._events = events
        self._clock = clock
        self._grants: dict[RequestId, RouteGranted] = {}
        self._waiting: Counter[RequestId] = Counter()
        self._in_flight: Counter[InstanceId] = Counter()
        self._unanswered: dict[RequestId, Callable[[], None]] = {}
        self._failures: dict[InstanceId, _Failures] = {}
        fleet.on_election(self._elected)

    @contextmanager
    def at_engine(self, grant: RouteGranted) -> Iterator[None]:
        """While the request is at the engine that the grant names."""
        self._in_flight[grant.instance] += 1
        self._grants[grant.request] = grant
        try:
            yield
        finally:
            self._in_flight[grant.instance] -= 1
            self._grants.pop(grant.request, None)

    @contextmanager
    def unanswered(self, request: RequestId, give_up: Callable[[], None]) -> Iterator[None]:
        """While its engine has sent nothing. `give_up` is called where the leader knows that it never will."""
        self._unanswered[request] = give_up
        try:
            yield
        finally:
            self._unanswered.pop(request, None)

    def lost(self, request: RequestId) -> None:
        """The leader says that its engine has not got it any more; a no-op for one that is answered."""
        give_up = self._unanswered.get(request)
        if give_up is not None:
            give_up()

    @contextmanager
    def asking(self, request: RequestId) -> Iterator[None]:
        """While the request waits for a place."""
        self._waiting[request] += 1
        try:
            yield
        finally:
            self._waiting[request] -= 1
            if not self._waiting[request]:
                del self._waiting[request]

    @property
    def grants(self) -> list[RouteGranted]:
        """Where each request is that is at an engine."""
        return list(self._grants.values())

    @property
    def waiting(self) -> list[RequestId]:
        """Requests that wait for a place."""
        return list(self._waiting)

    def least_busy(self, demand: Demand = NO_DEMAND, *, excluded: Collection[InstanceId] = ()) -> Instance | None:
        """The reachable instance that can serve the request and has the fewest, the first by name among equals. One that is
        ejected or failed lately only where all are."""
        candidates = [i for i in self._fleet.reachable if i.id not in excluded and i.can_serve(demand)]
        return min(candidates, key=lambda i: (self._avoided(i), self.load(i), i.id), default=None)

    def failed(self, instance: InstanceId) -> None:
        """It failed a request that was sent there."""
        failures = self._failures.setdefault(instance, _Failures())
        failures.count += 1
        seconds = min(AVOIDED_WALL_SECONDS_MAX, AVOIDED_WALL_SECONDS * failures.count)
        failures.until = self._clock.wall() + seconds

    def answered(self, instance: InstanceId) -> None:
        """It has answered one."""
        self._failures.pop(instance, None)

    def tell(self, grant: RouteGranted) -> None:
        """Tell the log where a request is, for a leader that does not know."""
        now, request, attempt, instance = self._clock.now(), grant.request, grant.attempt, grant.instance
        self._events.append_soon(
            RequestHandedOver(at=now, request=request, source=grant.prefilled_by, instance=instance, attempt=attempt)
            if grant.prefilled_by
            else RequestGranted(
                at=now, request=request, instance=instance, attempt=attempt, decode=grant.decode, rebind=grant.rebind
            )
        )

    def load(self, instance: Instance) -> int:
        """Requests that it has, as far as is known here."""
        reported = instance.running + instance.waiting if self._fleet.fresh(instance) else 0
        return max(self._in_flight[instance.id], reported)

    def _avoided(self, instance: Instance) -> bool:
        failures = self._failures.get(instance.id)
        if self._fleet.is_out(instance) or (failures is not None and self._clock.wall() < failures.until):
            return True
        doubtful = failures is not None or instance.half_open or instance.ejected
        return doubtful and self._in_flight[instance.id] > 0

    def _elected(self, term: Term) -> None:
        """The new leader may not know of what an earlier one granted and had no time to write."""
        for grant in self._grants.values():
            if 0 < grant.term < term:
                self.tell(grant)
