"""Where a request goes: the scheduler says so, or, when no scheduler answers, least load does.

The same `RouteRequest` is sent again every two seconds for as long as the request waits. The scheduler takes the
repetition as "still here", and an answer that was lost is given again.

A scheduler that holds a request back is silent about that request, so silence is judged by asking for something it
must always answer: its view of the fleet. Only when that fails too, for `silence_max` in all, does the ingress place
requests itself. It then goes on asking, one request at a time, until somebody answers again.

Leaders change. Whoever waits asks again as soon as the log tells of a new one, what a leader of an earlier term still
answers is void, and the new leader is told where those requests are that another one granted: it may not know.
"""

import asyncio
from collections import Counter

import msgspec
import structlog

from pointsman.chassis.health import HealthBoard
from pointsman.chassis.telemetry import DEGRADED_ROUTES
from pointsman.contracts import subjects
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    DescribeFleet,
    HandOverRequest,
    RouteGranted,
    RouteRejected,
    RouteRequest,
)
from pointsman.contracts.decisions import RequestGranted, RequestHandedOver
from pointsman.ports import Clock, Commands, CommandTimeoutError, EventLog, NoResponderError
from pointsman.primitives import InstanceId, PoolName, RequestId, Seconds, Term
from pointsman.state.fleet import Knowledge
from pointsman_ingress.fleet_view import FleetView
from pointsman_ingress.rebinding import Rebinding

log = structlog.get_logger()

REPEAT_WALL_SECONDS: Seconds = 2.0
"""How often a waiting request says that it is still there."""

SIGN_OF_LIFE_WALL_SECONDS: Seconds = 1.0
"""How long a scheduler may take to show that it lives."""

NOBODY_PAUSE_WALL_SECONDS: Seconds = 0.05
NOBODY_PAUSE_WALL_SECONDS_MAX: Seconds = 0.5
"""Pauses before asking again where nobody serves the command; they double."""

ALONE_WALL_SECONDS: Seconds = 0.5
"""How often one request asks all the same while the others are placed without a scheduler."""

HAND_OVER_WALL_SECONDS: Seconds = 0.5
"""How long the leader may take to say where a prefilled request goes on."""

HAND_OVER_TRIES = 2
UNKNOWN_REQUEST = "unknown_request"
"""What a leader says of a prefill that it does not know."""

CANCEL_WALL_SECONDS: Seconds = 1.0
"""How long a cancellation waits for its answer."""


class NoPlaceError(Exception):
    """Without a scheduler and without an engine there is nowhere to go."""


class Router:
    """Asks the scheduler, counts what is in flight, and places by itself when it must."""

    def __init__(
        self,
        *,
        commands: Commands,
        events: EventLog,
        fleet: FleetView,
        pool: PoolName,
        clock: Clock,
        board: HealthBoard,
        silence_max: Seconds,
    ) -> None:
        """`silence_max`: wall seconds without a sign of a scheduler until requests are placed without it."""
        self._commands = commands
        self._events = events
        self._fleet = fleet
        self._clock = clock
        self._board = board
        self._silence_max = silence_max
        self._route_subject = subjects.route_subject(pool)
        self._hand_over_subject = subjects.handover_subject(pool)
        self._cancel_subject = subjects.cancel_subject(pool)
        self._fleet_subject = subjects.fleet_view_subject(pool)
        self._silent_since: Seconds | None = None
        self._heard_at = clock.wall()
        self._asked_at = clock.wall()
        self._asking = 0
        self._term = Term(0)
        self._waits: dict[asyncio.Timeout, None] = {}
        self._served: dict[RequestId, RouteGranted] = {}
        self.in_flight: Counter[InstanceId] = Counter()
        self.rebinding = Rebinding(commands=commands, pool=pool, clock=clock, newest_term=lambda: self._term)
        fleet.on_election(self._elected)

    async def route(self, request: RouteRequest) -> RouteGranted | RouteRejected:
        """Wait for a place, however long it takes; the caller bounds the wait by cancelling. Raises NoPlaceError."""
        asked, pause = False, NOBODY_PAUSE_WALL_SECONDS
        while not (self._given_up and (asked or self._asked_lately)):
            asked = True
            try:
                answer = await self._ask(request)
            except NoResponderError:
                self._silent(since=self._clock.wall())
                if not self._given_up:
                    await self._clock.sleep_wall(pause)
                    pause = min(2 * pause, NOBODY_PAUSE_WALL_SECONDS_MAX)
                continue
            except CommandTimeoutError:
                await self._look_for_life()
                await self._clock.sleep_wall(NOBODY_PAUSE_WALL_SECONDS)
                continue
            except TimeoutError:
                continue  # another leads now
            self._heard()
            if isinstance(answer, RouteGranted | RouteRejected):
                if answer.term >= self._term or answer.term == 0:
                    self._term = max(self._term, answer.term)
                    return answer
                log.warning("answer_of_deposed_leader", request=request.request, term=answer.term, newest=self._term)
                await self._clock.sleep_wall(NOBODY_PAUSE_WALL_SECONDS)
                continue
            log.error("route_answer_unexpected", type=type(answer).__name__)
        return self._place_alone(request)

    async def look_out(self) -> None:
        """While no scheduler answers, ask for one even if no request comes that would, for ever: who reads on /ready
        that this ingress lacks a scheduler may send it none."""
        while True:
            await self._clock.sleep_wall(SIGN_OF_LIFE_WALL_SECONDS)
            if self._silent_since is not None:
                try:
                    await self._describe()
                except (NoResponderError, CommandTimeoutError):
                    continue
                self._heard()

    async def _describe(self) -> None:
        """The one question that a scheduler must always answer. Raises NoResponderError, CommandTimeoutError."""
        await self._commands.request(self._fleet_subject, DescribeFleet(), timeout=SIGN_OF_LIFE_WALL_SECONDS)

    async def _ask(self, request: RouteRequest) -> AnyCommand:
        """Raises NoResponderError, CommandTimeoutError, and TimeoutError when a new leader has to be asked."""
        self._asking += 1
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits[wait] = None
                return await self._commands.request(self._route_subject, request, timeout=REPEAT_WALL_SECONDS)
        finally:
            self._waits.pop(wait, None)
            self._asking -= 1
            self._asked_at = self._clock.wall()

    def begins(self, grant: RouteGranted) -> None:
        """The request goes to its engine now."""
        self.in_flight[grant.instance] += 1
        self._served[grant.request] = grant

    def ends(self, grant: RouteGranted) -> None:
        """The engine has nothing to do with it any more."""
        self.in_flight[grant.instance] -= 1
        self._served.pop(grant.request, None)

    def _elected(self, term: Term) -> None:
        self._term = max(self._term, term) if term else term
        waits, self._waits = self._waits, {}
        for wait in waits:
            wait.reschedule(0.0)
        for grant in self._served.values():
            if 0 < grant.term < term:
                self._say_where(grant)

    async def hand_over(self, grant: RouteGranted, prefill: Seconds) -> RouteGranted | RouteRejected:
        """Where a request goes on whose prefill is over, `prefill` seconds after it was sent: where the leader says, or
        where it was planned if no leader answers in time."""
        command = HandOverRequest(
            request=grant.request, attempt=grant.attempt, instance=grant.instance, prefill=prefill
        )
        for _ in range(HAND_OVER_TRIES):
            try:
                answer = await self._commands.request(self._hand_over_subject, command, timeout=HAND_OVER_WALL_SECONDS)
            except NoResponderError:
                break
            except CommandTimeoutError:
                continue
            if isinstance(answer, RouteRejected) and answer.reason == UNKNOWN_REQUEST:
                break
            if isinstance(answer, RouteGranted | RouteRejected) and answer.term >= self._term:
                return answer
        log.warning("hand_over_unanswered", request=grant.request, decode=grant.decode)
        planned = msgspec.structs.replace(
            grant,
            instance=grant.decode,
            url=grant.decode_url,
            prefilled_by=grant.instance,
            decode=InstanceId(""),
            decode_url="",
        )
        self._say_where(planned)
        return planned

    async def withdraw(self, request: RequestId, reason: str) -> bool:
        """Tell the scheduler that nobody waits any more. True when it writes the request's end; False when the end
        is the caller's to write. A scheduler that is too slow to answer ends the request all the same: it misses
        the repetitions."""
        command = CancelRequest(request=request, reason=reason)
        try:
            answer = await self._commands.request(self._cancel_subject, command, timeout=CANCEL_WALL_SECONDS)
        except NoResponderError:
            return False
        except CommandTimeoutError:
            return True
        return isinstance(answer, CancelAnswered) and answer.ended

    @property
    def _given_up(self) -> bool:
        """Whether the scheduler has been silent for so long that requests are placed without it."""
        return self._silent_since is not None and self._clock.wall() - self._silent_since >= self._silence_max

    @property
    def _asked_lately(self) -> bool:
        """Whether another request asks in vain just now, or has; this one need not then."""
        return self._asking > 0 or self._clock.wall() - self._asked_at < ALONE_WALL_SECONDS

    async def _look_for_life(self) -> None:
        """After a request without an answer: is it held back, or is nobody there?"""
        heard_at = self._heard_at
        if self._clock.wall() - heard_at < REPEAT_WALL_SECONDS:
            return
        try:
            await self._describe()
        except (NoResponderError, CommandTimeoutError):
            if self._heard_at == heard_at:
                self._silent(since=heard_at)
        else:
            self._heard()

    def _heard(self) -> None:
        self._heard_at = self._clock.wall()
        if self._silent_since is not None:
            self._silent_since = None
            self._board.restored("scheduler")
            log.info("scheduler_answers")

    def _silent(self, *, since: Seconds) -> None:
        if self._silent_since is None:
            self._silent_since = since
            self._board.missing("scheduler", "no scheduler answers; requests are placed by least load")
            log.warning("scheduler_silent", silence_max=self._silence_max)

    def _place_alone(self, request: RouteRequest) -> RouteGranted:
        """The least busy engine. The log is told, so that a scheduler that returns counts the request where it is."""
        load = self.in_flight.__getitem__
        instance = self._fleet.least(load, adapter=request.adapter, excluded=request.excluded)
        if instance is None:
            msg = "no scheduler answers, and no engine is known that could be asked"
            raise NoPlaceError(msg)
        DEGRADED_ROUTES.inc()
        grant = RouteGranted(
            request=request.request,
            attempt=request.attempt,
            instance=instance.id,
            url=instance.url,
            hit_tokens=0,
            predicted_ttft=0.0,
            knowledge=Knowledge.BLIND,
            dp_rank=instance.dp_rank,
        )
        self._say_where(grant)
        return grant

    def _say_where(self, grant: RouteGranted) -> None:
        """Tell the log where a request is, for a leader that does not know."""
        now, request, attempt, instance = self._clock.now(), grant.request, grant.attempt, grant.instance
        self._events.append_soon(
            RequestHandedOver(at=now, request=request, source=grant.prefilled_by, instance=instance, attempt=attempt)
            if grant.prefilled_by
            else RequestGranted(
                at=now, request=request, instance=instance, attempt=attempt, decode=grant.decode, rebind=grant.rebind
            )
        )
