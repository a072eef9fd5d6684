"""Sends `RouteRequest`s, returns grants and rejections. A queued request repeats its command as a heartbeat and when a
new leader is elected; answers of earlier terms are ignored. Without an answer for `--scheduler-timeout-seconds`, or
where the leader cannot read the command, the least loaded engine is granted."""

from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from pointsman.adapters.backoff import Backoff
from pointsman.adapters.shared_timers import Interruption
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
from pointsman.contracts.reasons import CancelCause, RejectReason
from pointsman.ports import (
    Clock,
    CommandRefusedError,
    Commands,
    CommandTimeoutError,
    CommandUnsendableError,
    NoResponderError,
)
from pointsman.primitives import EngineSeconds, InstanceId, PoolName, RequestId, Term, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.telemetry import FALLBACK_PLACEMENTS
from pointsman.state.fleet import Instance, Knowledge
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.hold_queue import HoldQueue
from pointsman_ingress.placement.in_flight import InFlightRequests

log = structlog.get_logger()

REPEAT_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
RETRY_WALL_SECONDS: WallSeconds = WallSeconds(0.05)
RETRY_WALL_SECONDS_MAX: WallSeconds = WallSeconds(0.5)  # without a responder; doubles
PROBE_WALL_SECONDS: WallSeconds = WallSeconds(0.5)  # by one request while others are placed without it
HAND_OVER_WALL_SECONDS: WallSeconds = WallSeconds(0.5)
HAND_OVER_TRIES = 2
NOT_FOLLOWED = (RejectReason.UNKNOWN_REQUEST, RejectReason.ALREADY_ENDED)
"""The leader never knew the request, or gave it up: after a grant only its ingress ends it otherwise."""
CANCEL_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
CANCEL_TRIES = 3
LIVENESS_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
IDLE_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
"""Without an answer, since nothing was asked. Then the scheduler is asked for its own sake."""


@dataclass(eq=False)
class SchedulerLiveness:
    """A scheduler sends nothing while a request is queued; `cmd.fleet`, which is answered at once, tests it."""

    commands: Commands
    pool: PoolName
    clock: Clock
    board: HealthBoard
    timeout_seconds: WallSeconds
    _unresponsive_since: WallSeconds | None = field(default=None, init=False)
    _refusal: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._answered_at = self.clock.wall()

    @property
    def timed_out(self) -> bool:
        return (
            self._unresponsive_since is not None
            and self.clock.wall() - self._unresponsive_since >= self.timeout_seconds
        )

    def on_answer(self) -> None:
        self._answered_at = self.clock.wall()
        if self._unresponsive_since is not None or self._refusal:
            self._unresponsive_since, self._refusal = None, ""
            self.board.restored("scheduler")
            log.info("scheduler_responsive")

    def no_responder(self) -> None:
        self._set_unresponsive(self.clock.wall())

    def refused(self, problem: str) -> None:
        """A leader of another release: it answers, but places nothing of ours."""
        if problem != self._refusal:
            log.error("scheduler_refuses", problem=problem)
        self._refusal = problem
        self.board.degraded("scheduler", f"{problem}; requests are placed by least load")

    def elected(self) -> None:
        """A new leader may be of another release."""
        if self._refusal:
            self.on_answer()

    async def check(self, sent_at: WallSeconds) -> None:
        """Call after a command sent at `sent_at` timed out."""
        answered_at = self._answered_at
        if answered_at < sent_at and not await self._ping() and self._answered_at == answered_at:
            self._set_unresponsive(answered_at)

    async def watch(self) -> None:
        """Without requests too, so that /readyz and metrics tell whether a scheduler answers. Runs without end."""
        while True:
            await self.clock.sleep_wall(LIVENESS_WALL_SECONDS)
            asked_at = self.clock.wall()
            if self._unresponsive_since is not None:
                await self._ping()
            elif self._is_idle and not await self._ping() and self._answered_at < asked_at:
                self._set_unresponsive(asked_at)

    @property
    def _is_idle(self) -> bool:
        """A leader that refuses our requests answers; that it does must not hide the refusal."""
        return not self._refusal and self.clock.wall() - self._answered_at >= IDLE_WALL_SECONDS

    async def _ping(self) -> bool:
        try:
            await self.commands.request(
                subjects.command_subject(self.pool, "fleet"), DescribeFleet(), timeout=LIVENESS_WALL_SECONDS
            )
        except (NoResponderError, CommandTimeoutError):
            return False
        self.on_answer()
        return True

    def _set_unresponsive(self, since: WallSeconds) -> None:
        if self._unresponsive_since is None:
            self._unresponsive_since = since
            self.board.degraded("scheduler", "no scheduler answers; requests are placed by least load")
            log.warning("scheduler_unresponsive", timeout_seconds=self.timeout_seconds)


@dataclass(eq=False)
class SchedulerClient:
    commands: Commands
    fleet: FleetView
    in_flight: InFlightRequests
    liveness: SchedulerLiveness
    pool: PoolName
    clock: Clock
    hold: HoldQueue
    _open_requests: int = field(default=0, init=False)
    _term: Term = field(default=Term(0), init=False)
    _waits: dict[Interruption, None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._last_request_at = self.clock.wall()
        self.fleet.on_election(self._on_election)

    @property
    def newest_term(self) -> Term:
        return self._term

    async def route(self, request: RouteRequest, clock: Clock, *, owner: str) -> RouteGranted | RouteRejected | None:
        """Waits without bound; the caller cancels. `clock`: of the request. `owner`: whose place it takes if it is
        held. Returns None if there is neither a scheduler nor an engine. Raises CommandUnsendableError."""
        find = partial(self._find, request)
        with self.in_flight.waiting_for_place(request.request):
            began = clock.now()
            while (answer := await self._request_route(request, clock, began)) is None:
                found = find() if request.excluded else await self.hold.until(find, owner=owner)
                if isinstance(found, Instance):
                    return self._place_without_scheduler(request, found, clock.now())
                if found is None:
                    log.warning("no_place", request=request.request)
                    return None
            return answer

    def _find(self, request: RouteRequest) -> Instance | bool | None:
        """An engine, or True if the scheduler answers again."""
        return self.in_flight.least_busy(request, excluded=request.excluded) or not self.liveness.timed_out or None

    async def _request_route(
        self, request: RouteRequest, clock: Clock, began: EngineSeconds
    ) -> RouteGranted | RouteRejected | None:
        sent, backoff = False, Backoff(RETRY_WALL_SECONDS, RETRY_WALL_SECONDS_MAX)
        while not (self.liveness.timed_out and (sent or self._recently_requested)):
            now = clock.now()
            held_up = now - began if sent else 0.0
            sent, sent_at = True, self.clock.wall()
            try:
                answer = await self._send(msgspec.structs.replace(request, held_up=held_up, sent_at=now))
            except CommandUnsendableError:
                raise
            except CommandRefusedError as error:
                self.liveness.refused(str(error))
                await self.clock.sleep_wall(RETRY_WALL_SECONDS)
                return None
            except NoResponderError:
                self.liveness.no_responder()
                if not self.liveness.timed_out:
                    await self.clock.sleep_wall(backoff.next_wait())
                continue
            except CommandTimeoutError:
                await self.liveness.check(sent_at)
                await self.clock.sleep_wall(RETRY_WALL_SECONDS)
                continue
            except TimeoutError:
                continue
            self.liveness.on_answer()
            if not isinstance(answer, RouteGranted | RouteRejected):
                log.error("route_answer_unexpected", type=type(answer).__name__)
            elif self._believes(answer) and answer.attempt >= request.attempt:
                self._term = max(self._term, answer.term)
                return answer
            else:
                log.warning("route_answer_ignored", request=request.request, term=answer.term, newest=self._term)
                await self.clock.sleep_wall(RETRY_WALL_SECONDS)
        return None

    async def _send(self, request: RouteRequest) -> AnyCommand:
        self._open_requests += 1
        wait = Interruption()
        try:
            with wait:
                self._waits[wait] = None
                subject = subjects.command_subject(self.pool, "route")
                return await self.commands.request(subject, request, timeout=REPEAT_WALL_SECONDS)
        finally:
            self._waits.pop(wait, None)
            self._open_requests -= 1
            self._last_request_at = self.clock.wall()

    def _believes(self, answer: RouteGranted | RouteRejected) -> bool:
        """Leaders have terms from 1, and grant instances at the URLs that are in the log."""
        if answer.term < max(1, self._term):
            return False
        return isinstance(answer, RouteRejected) or self.fleet.agrees(answer)

    @property
    def _recently_requested(self) -> bool:
        return self._open_requests > 0 or self.clock.wall() - self._last_request_at < PROBE_WALL_SECONDS

    def _on_election(self, term: Term) -> None:
        self._term = max(self._term, term) if term else term
        self.liveness.elected()
        waits, self._waits = self._waits, {}
        for wait in waits:
            wait.fire()

    def _place_without_scheduler(self, request: RouteRequest, instance: Instance, now: EngineSeconds) -> RouteGranted:
        """Logged, so that the scheduler counts the request when it returns."""
        FALLBACK_PLACEMENTS.labels(self.pool).inc()
        # Assumes that nothing is cached and that queued requests have the same size.
        prefill = instance.cost.seconds(request.prompt_tokens, 0)
        grant = RouteGranted(
            request=request.request,
            attempt=request.attempt,
            instance=instance.id,
            url=instance.url,
            hit_tokens=0,
            predicted_ttft=0.0,
            knowledge=Knowledge.BLIND,
            dp_rank=instance.dp_rank,
            expected_seconds=prefill * (1 + self.in_flight.load(instance)),
        )
        self.in_flight.log_grant(grant, now, tenant=request.tenant, adapter=request.adapter)
        return grant

    async def hand_over(
        self, grant: RouteGranted, clock: Clock, prefill: EngineSeconds
    ) -> RouteGranted | RouteRejected:
        """The planned decode grant if no leader answers, or none follows the request."""
        with self.in_flight.waiting_for_place(grant.request):
            answer = await self._request_hand_over(grant, prefill)
            if answer is not None:
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
            self.in_flight.log_grant(planned, clock.now())
            return planned

    async def _request_hand_over(
        self, grant: RouteGranted, prefill: EngineSeconds
    ) -> RouteGranted | RouteRejected | None:
        command = HandOverRequest(
            request=grant.request, attempt=grant.attempt, instance=grant.instance, prefill=prefill
        )
        subject = subjects.command_subject(self.pool, "handover")
        for _ in range(HAND_OVER_TRIES):
            try:
                answer = await self.commands.request(subject, command, timeout=HAND_OVER_WALL_SECONDS)
            except NoResponderError:
                return None
            except CommandTimeoutError:
                continue
            if isinstance(answer, RouteRejected) and answer.reason in NOT_FOLLOWED:
                return None
            if isinstance(answer, RouteGranted | RouteRejected) and self._believes(answer):
                return answer
        return None

    async def cancel(self, request: RequestId, cause: CancelCause) -> bool:
        """Returns whether the scheduler logs the request's end, otherwise the caller must. Repeated: the first may be lost,
        and the request granted meanwhile. A leader that answers none ends it by itself, as nobody names it any more."""
        command = CancelRequest(request=request, reason=cause.value)
        subject = subjects.command_subject(self.pool, "cancel")
        for tried in range(CANCEL_TRIES):
            try:
                answer = await self.commands.request(subject, command, timeout=CANCEL_WALL_SECONDS)
            except NoResponderError:
                return tried > 0
            except CommandTimeoutError:
                continue
            return isinstance(answer, CancelAnswered) and answer.ended
        return True
