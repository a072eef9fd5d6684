"""The requests that this ingress has at engines or that wait for a place: how busy each engine is, and where the log says
that the requests are.

Load is told here and nowhere else: whoever must choose an engine without a scheduler asks for the `least_busy`. It is a
bound from below. What this ingress has sent it knows at once; what others have, a worker tells about once a second, and what
it told long ago counts for nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from pointsman.contracts.commands import RouteGranted
from pointsman.contracts.decisions import RequestGranted, RequestHandedOver
from pointsman.ports import Clock, EventLog
from pointsman.primitives import InstanceId, RequestId, Term
from pointsman.state.fleet import NO_DEMAND, Demand, Instance
from pointsman_ingress.fleet_view import FleetView


class UnderWay:
    """Of one pool."""

    def __init__(self, *, fleet: FleetView, events: EventLog, clock: Clock) -> None:
        self._fleet = fleet
        self._events = events
        self._clock = clock
        self._grants: dict[RequestId, RouteGranted] = {}
        self._waiting: Counter[RequestId] = Counter()
        self._in_flight: Counter[InstanceId] = Counter()
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
        """The reachable instance that can serve the request and has the fewest, the first by name among equals."""
        candidates = [i for i in self._fleet.reachable if i.id not in excluded and i.can_serve(demand)]
        return min(candidates, key=lambda instance: (self._load(instance), instance.id), default=None)

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

    def _load(self, instance: Instance) -> int:
        reported = instance.running + instance.waiting if self._fleet.fresh(instance) else 0
        return max(self._in_flight[instance.id], reported)

    def _elected(self, term: Term) -> None:
        """The new leader may not know of what an earlier one granted and had no time to write."""
        for grant in self._grants.values():
            if 0 < grant.term < term:
                self.tell(grant)
