"""Where a request goes: the scheduler says so, or, when no scheduler answers, least load does.

The same `RouteRequest` is sent again every two seconds for as long as the request waits. The scheduler takes the
repetition as "still here", and an answer that was lost is given again.

Only when the scheduler has been silent for too long (`silence`) does the ingress place requests itself. It then goes on
asking, one request at a time, until somebody answers again. Where no engine is there either, requests wait for one
(`holding`).

Leaders change. Whoever waits asks again as soon as the log tells of a new one, and what a leader of an earlier term still
answers is void.
"""

import asyncio

import msgspec
import structlog

from pointsman.contracts import subjects
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    HandOverRequest,
    RouteGranted,
    RouteRejected,
    RouteRequest,
)
from pointsman.contracts.reasons import CancelCause, RejectReason
from pointsman.ports import Clock, Commands, CommandTimeoutError, NoResponderError
from pointsman.primitives import InstanceId, PoolName, RequestId, Seconds, Term
from pointsman.runtime.telemetry import FALLBACK_PLACEMENTS
from pointsman.state.engine_profiles import prefill_seconds
from pointsman.state.fleet import Instance, Knowledge
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.holding import Hold
from pointsman_ingress.placement.in_flight import InFlightRequests
from pointsman_ingress.placement.scheduler_liveness import SchedulerLiveness

log = structlog.get_logger()

REPEAT_WALL_SECONDS: Seconds = 2.0
"""How often a waiting request says that it is still there."""

NOBODY_PAUSE_WALL_SECONDS: Seconds = 0.05
NOBODY_PAUSE_WALL_SECONDS_MAX: Seconds = 0.5
"""Pauses before asking again where nobody serves the command; they double."""

ALONE_WALL_SECONDS: Seconds = 0.5
"""How often one request asks all the same while the others are placed without a scheduler."""

HAND_OVER_WALL_SECONDS: Seconds = 0.5
"""How long the leader may take to say where a prefilled request goes on."""

HAND_OVER_TRIES = 2
CANCEL_WALL_SECONDS: Seconds = 1.0
"""How long a cancellation waits for its answer."""


class NoPlaceError(Exception):
    """Without a scheduler and without an engine there is nowhere to go."""


class Router:
    """Asks the scheduler of one pool, and places by itself when it must."""

    def __init__(
        self,
        *,
        commands: Commands,
        fleet: FleetView,
        under_way: InFlightRequests,
        silence: SchedulerLiveness,
        pool: PoolName,
        clock: Clock,
        hold: Hold,
    ) -> None:
        self._commands = commands
        self._under_way = under_way
        self._silence = silence
        self._clock = clock
        self._hold = hold
        self._route_subject = subjects.route_subject(pool)
        self._hand_over_subject = subjects.handover_subject(pool)
        self._cancel_subject = subjects.cancel_subject(pool)
        self._asked_at = clock.wall()
        self._asking = 0
        self._term = Term(0)
        self._waits: dict[asyncio.Timeout, None] = {}
        fleet.on_election(self._elected)

    async def route(self, request: RouteRequest) -> RouteGranted | RouteRejected:
        """Wait for a place, however long it takes; the caller bounds the wait by cancelling. Raises NoPlaceError."""
        with self._under_way.asking(request.request):
            return await self._route(request)

    async def _route(self, request: RouteRequest) -> RouteGranted | RouteRejected:
        began = self._clock.now()

        def look() -> Instance | bool | None:
            return self._under_way.least_busy(request, excluded=request.excluded) or not self._silence.too_long or None

        while (answer := await self._ask_leader(request, began)) is None:
            found = look() if request.excluded else await self._hold.until(look)
            if isinstance(found, Instance):
                return self._place_alone(request, found)
            if found is None:
                msg = "no scheduler answers, and no engine is known that could be asked"
                raise NoPlaceError(msg)
        return answer

    async def _ask_leader(self, request: RouteRequest, began: Seconds) -> RouteGranted | RouteRejected | None:
        """What a leader says; None where the request is to be placed without one."""
        asked, pause = False, NOBODY_PAUSE_WALL_SECONDS
        while not (self._silence.too_long and (asked or self._asked_lately)):
            held_up = self._clock.now() - began if asked else 0.0
            asked, asked_at = True, self._clock.wall()
            try:
                answer = await self._ask(msgspec.structs.replace(request, held_up=held_up))
            except NoResponderError:
                self._silence.nobody_there()
                if not self._silence.too_long:
                    await self._clock.sleep_wall(pause)
                    pause = min(2 * pause, NOBODY_PAUSE_WALL_SECONDS_MAX)
                continue
            except CommandTimeoutError:
                await self._silence.listen(asked_at)
                await self._clock.sleep_wall(NOBODY_PAUSE_WALL_SECONDS)
                continue
            except TimeoutError:
                continue  # another leads now
            self._silence.heard()
            if isinstance(answer, RouteGranted | RouteRejected):
                if answer.term >= self._term or answer.term == 0:
                    self._term = max(self._term, answer.term)
                    return answer
                log.warning("answer_of_deposed_leader", request=request.request, term=answer.term, newest=self._term)
                await self._clock.sleep_wall(NOBODY_PAUSE_WALL_SECONDS)
                continue
            log.error("route_answer_unexpected", type=type(answer).__name__)
        return None

    async def hand_over(self, grant: RouteGranted, prefill: Seconds) -> RouteGranted | RouteRejected:
        """Where a request goes on whose prefill is over, `prefill` seconds after it was sent: where the leader says, or
        where it was planned if no leader answers in time."""
        with self._under_way.asking(grant.request):
            return await self._hand_over(grant, prefill)

    async def _hand_over(self, grant: RouteGranted, prefill: Seconds) -> RouteGranted | RouteRejected:
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
            if isinstance(answer, RouteRejected) and answer.reason == RejectReason.UNKNOWN_REQUEST:
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
        self._under_way.tell(planned)
        return planned

    async def withdraw(self, request: RequestId, cause: CancelCause) -> bool:
        """Tell the scheduler that nobody waits any more. True when it writes the request's end; False when the end
        is the caller's to write. A scheduler that is too slow to answer ends the request all the same: it misses
        the repetitions."""
        command = CancelRequest(request=request, reason=cause.value)
        try:
            answer = await self._commands.request(self._cancel_subject, command, timeout=CANCEL_WALL_SECONDS)
        except NoResponderError:
            return False
        except CommandTimeoutError:
            return True
        return isinstance(answer, CancelAnswered) and answer.ended

    @property
    def newest_term(self) -> Term:
        """What a leader of an earlier one says is void."""
        return self._term

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

    @property
    def _asked_lately(self) -> bool:
        """Whether another request asks in vain just now, or has; this one need not then."""
        return self._asking > 0 or self._clock.wall() - self._asked_at < ALONE_WALL_SECONDS

    def _elected(self, term: Term) -> None:
        self._term = max(self._term, term) if term else term
        waits, self._waits = self._waits, {}
        for wait in waits:
            wait.reschedule(0.0)

    def _place_alone(self, request: RouteRequest, instance: Instance) -> RouteGranted:
        """The log is told, so that a scheduler that returns counts the request where it is."""
        FALLBACK_PLACEMENTS.inc()
        grant = RouteGranted(
            request=request.request,
            attempt=request.attempt,
            instance=instance.id,
            url=instance.url,
            hit_tokens=0,
            predicted_ttft=0.0,
            knowledge=Knowledge.BLIND,
            dp_rank=instance.dp_rank,
            expected_seconds=self._expected_alone(instance, request),
        )
        self._under_way.tell(grant)
        return grant

    def _expected_alone(self, instance: Instance, request: RouteRequest) -> Seconds:
        """By the engine's own cost model: the whole prompt, for nobody knows what of it is cached, behind as many like it as
        the engine has."""
        prefill = prefill_seconds(instance.cost, request.prompt_tokens, 0)
        return prefill * (1 + self._under_way.load(instance))
