"""Load per engine, and the heartbeat `cmd.follow`, which names a pool's requests to the leader every second. The leader
ends requests without a heartbeat; its answer lists redispatched and lost ones. First tokens are told, too, while the log takes
no writes: they make room in engines."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import takewhile

import structlog

from pointsman.contracts.commands import FollowAnswered, FollowRequests, RouteGranted, SentRequest
from pointsman.contracts.decisions import RequestGranted, RequestHandedOver
from pointsman.contracts.subjects import command_subject
from pointsman.ports import Clock, Commands, CommandTimeoutError, EventLog, NoResponderError
from pointsman.primitives import EngineSeconds, InstanceId, PoolName, RequestId, Tenant, Term, WallSeconds
from pointsman.runtime.telemetry import REQUESTS_REDISPATCHED
from pointsman.state.fleet import NO_DEMAND, Demand, Instance
from pointsman_ingress.placement.fleet_view import FleetView

log = structlog.get_logger()

AVOIDED_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
AVOIDED_WALL_SECONDS_MAX: WallSeconds = WallSeconds(25.0)  # per consecutive failure, and maximum
HEARTBEAT_WALL_SECONDS: WallSeconds = WallSeconds(1.0)  # interval and timeout
NAMED_AT_ONCE_MAX = 1_000
FIRST_TOKENS_MAX = 16_384
"""Told in each heartbeat, at most; as many writes wait for the log."""
NOBODY = Tenant("")


@dataclass(slots=True, eq=False)
class InFlightRequest:
    grant: RouteGranted
    clock: Clock
    redispatched_to: RouteGranted | None = None
    on_lost: Callable[[], None] | None = None  # None once answered
    interrupt: asyncio.Timeout | None = None  # aborts the wait; None: not redispatchable

    def redispatch(self, new_grant: RouteGranted) -> None:
        if self.interrupt is None or self.redispatched_to is not None:
            return
        if self.grant.attempt == new_grant.attempt and self.grant.instance != new_grant.instance:
            self.redispatched_to = new_grant
            self.interrupt.reschedule(0.0)

    def answered(self) -> None:
        """Cancels a concurrent redispatch."""
        if self.interrupt is not None:
            self.redispatched_to = None
            self.interrupt.reschedule(None)
            self.interrupt = None


@dataclass(slots=True)
class _Failures:
    """Consecutive failures of one engine, avoided until `until` (wall)."""

    count: int = 0
    until: WallSeconds = WallSeconds(0.0)


class InFlightRequests:
    """The only source of per-engine load in the ingress."""

    def __init__(self, *, fleet: FleetView, events: EventLog, clock: Clock) -> None:
        self._fleet = fleet
        self._events = events
        self._clock = clock
        self._at_engines: dict[RequestId, InFlightRequest] = {}
        self._waiting: Counter[RequestId] = Counter()
        self._per_engine: Counter[InstanceId] = Counter()
        self._failures: dict[InstanceId, _Failures] = {}
        self._first_tokens: dict[RequestId, tuple[WallSeconds, SentRequest]] = {}
        """The log may not have confirmed them; longest ago first."""
        fleet.on_election(self._on_election)

    @contextmanager
    def waiting_for_place(self, request: RequestId) -> Iterator[None]:
        self._waiting[request] += 1
        try:
            yield
        finally:
            self._waiting[request] -= 1
            if not self._waiting[request]:
                del self._waiting[request]

    @asynccontextmanager
    async def at_engine(
        self, grant: RouteGranted, clock: Clock, *, redispatchable: bool = False
    ) -> AsyncIterator[InFlightRequest]:
        """A redispatch before `answered` ends a `redispatchable` context and sets `redispatched_to`."""
        request = InFlightRequest(grant, clock)
        self._per_engine[grant.instance] += 1
        self._at_engines[grant.request] = request
        try:
            if redispatchable:
                async with asyncio.timeout(None) as request.interrupt:
                    yield request
            else:
                yield request
        except TimeoutError:
            if request.redispatched_to is None:
                raise
            REQUESTS_REDISPATCHED.labels(self._fleet.pool).inc()
            log.info(
                "request_redispatched",
                request=grant.request,
                source=grant.instance,
                instance=request.redispatched_to.instance,
            )
        finally:
            self._per_engine[grant.instance] -= 1
            if not self._per_engine[grant.instance]:
                del self._per_engine[grant.instance]
            self._at_engines.pop(grant.request, None)

    def least_busy(self, demand: Demand = NO_DEMAND, *, excluded: Collection[InstanceId] = ()) -> Instance | None:
        """Ejected or recently failed instances come last: an engine that fails fast looks idle."""
        candidates = [i for i in self._fleet.reachable if i.id not in excluded and i.can_serve(demand)]
        return min(candidates, key=lambda i: (self._avoided(i), self.load(i), i.id), default=None)

    def load(self, instance: Instance) -> int:
        reported = instance.running + instance.waiting if self._fleet.fresh(instance) else 0
        return max(self._per_engine[instance.id], reported)

    def failed(self, instance: InstanceId) -> None:
        failures = self._failures.setdefault(instance, _Failures())
        failures.count += 1
        seconds = min(AVOIDED_WALL_SECONDS_MAX, AVOIDED_WALL_SECONDS * failures.count)
        failures.until = self._clock.wall() + seconds

    def answered(self, instance: InstanceId) -> None:
        self._failures.pop(instance, None)

    def forget_departed(self, present: Collection[Instance]) -> None:
        for gone in self._failures.keys() - {instance.id for instance in present}:
            del self._failures[gone]

    def log_grant(self, grant: RouteGranted, now: EngineSeconds, *, tenant: Tenant = NOBODY, adapter: str = "") -> None:
        """`tenant`, `adapter`: if no scheduler saw the request."""
        request, attempt, instance = grant.request, grant.attempt, grant.instance
        self._events.append_soon(
            RequestHandedOver(at=now, request=request, source=grant.prefilled_by, instance=instance, attempt=attempt)
            if grant.prefilled_by
            else RequestGranted(
                at=now,
                request=request,
                instance=instance,
                attempt=attempt,
                decode=grant.decode,
                rebind=grant.rebind,
                tenant=tenant,
                adapter=adapter,
            )
        )

    def first_token(self, grant: RouteGranted) -> None:
        """Call once it is handed to the log."""
        self._first_tokens[grant.request] = (self._clock.wall(), _sent(grant))
        if len(self._first_tokens) > FIRST_TOKENS_MAX:
            del self._first_tokens[next(iter(self._first_tokens))]

    def heartbeats(self, ingress: str) -> Iterator[FollowRequests]:
        """At least one: the leader learns the ingress's clock before its first request."""
        sent = [_sent(request.grant) for request in self._at_engines.values()]
        waiting, answered = list(self._waiting), self._unconfirmed_first_tokens()
        for start in range(0, max(1, len(sent), len(waiting), len(answered)), NAMED_AT_ONCE_MAX):
            part = slice(start, start + NAMED_AT_ONCE_MAX)
            yield FollowRequests(
                requests=sent[part],
                waiting=waiting[part],
                answered=answered[part],
                ingress=ingress,
                sent_at=self._clock.now(),
            )

    def _unconfirmed_first_tokens(self) -> list[SentRequest]:
        """None while the log confirms in time, from which the leader learns more of them."""
        waits = self._events.unconfirmed.wait_seconds
        kept_since = self._clock.wall() - waits - HEARTBEAT_WALL_SECONDS
        for request, _ in list(takewhile(lambda kept: kept[1][0] < kept_since, self._first_tokens.items())):
            del self._first_tokens[request]
        return [sent for _, sent in self._first_tokens.values()] if waits >= HEARTBEAT_WALL_SECONDS else []

    def on_heartbeat_answer(self, answer: FollowAnswered) -> None:
        for grant in answer.rebound:
            if (request := self._at_engines.get(grant.request)) is not None and self._fleet.agrees(grant):
                request.redispatch(grant)
        for lost in answer.given_up:
            request = self._at_engines.get(lost)
            if request is not None and request.on_lost is not None:
                request.on_lost()

    def _avoided(self, instance: Instance) -> bool:
        failures = self._failures.get(instance.id)
        if self._fleet.ejection_active(instance) or (failures is not None and self._clock.wall() < failures.until):
            return True
        unproven = failures is not None or instance.half_open or instance.ejected
        return unproven and self._per_engine[instance.id] > 0

    def _on_election(self, term: Term) -> None:
        """The previous leader may have stopped before logging its last grants."""
        for request in self._at_engines.values():
            if 0 < request.grant.term < term:
                self.log_grant(request.grant, request.clock.now())


def _sent(grant: RouteGranted) -> SentRequest:
    return SentRequest(request=grant.request, attempt=grant.attempt, instance=grant.instance)


async def send_heartbeats(
    in_flight: InFlightRequests,
    commands: Commands,
    pool: PoolName,
    clock: Clock,
    newest_term: Callable[[], Term],
    ingress: str,
) -> None:
    """Runs without end. Ignores answers from terms before `newest_term`."""
    subject = command_subject(pool, "follow")

    async def send(command: FollowRequests) -> None:
        try:
            answer = await commands.request(subject, command, timeout=HEARTBEAT_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError):
            return
        if isinstance(answer, FollowAnswered) and answer.term >= max(1, newest_term()):
            in_flight.on_heartbeat_answer(answer)

    while True:
        pause = clock.sleep_wall(HEARTBEAT_WALL_SECONDS)
        await asyncio.gather(pause, *map(send, in_flight.heartbeats(ingress)))
