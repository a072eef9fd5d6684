"""When a leader refuses requests that it does not know: its log does not take its writes as fast as they come, or commands
wait for it longer than they may. In: how near unconfirmed writes are to being lost, how long each command waited. Out: a
refusal before anything is decided or written, so that what was accepted goes on. The log counts the refused."""

from dataclasses import dataclass

import structlog

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRejected, RouteRequest
from pointsman.contracts.decisions import RequestsRefused
from pointsman.contracts.reasons import RejectReason
from pointsman.ports import Clock, EventLog, UnconfirmedWrites
from pointsman.primitives import EngineSeconds, Term, WallSeconds, engine_seconds
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard
from pointsman.state.workload import Workload
from pointsman_scheduler.waiters import rejection

log = structlog.get_logger()

LOG_LOAD_PART = "log load"
SLOWED, REFUSING, CALM = 0.25, 0.5, 0.1
"""Shares of the log's window of unconfirmed writes: from where plans of moves are refused, from where new requests are, and
below which that is over."""
REQUESTS_PART = "request load"
WAIT_MAX: WallSeconds = WallSeconds(1.0)
"""Half of the time after which an ingress asks again, and doubles the load."""
WAIT_CALM: WallSeconds = WallSeconds(0.25)
STANDING_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
"""A queue that is gone before is a burst, or what waited for a new leader."""
RETRY_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
TOLD_WALL_SECONDS: WallSeconds = WallSeconds(10.0)

_DETAILS = {
    RejectReason.LOG_OVERLOADED: "the log does not take decisions as fast as they are made",
    RejectReason.SCHEDULER_OVERLOADED: "requests come faster than the scheduler decides",
}


@dataclass(slots=True)
class _Refused:
    """Not told to the log yet."""

    count: int
    since: EngineSeconds
    told_at: WallSeconds


class Overload:
    def __init__(self, event_log: EventLog, clock: Clock, board: HealthBoard, name: str) -> None:
        self._log = event_log
        self._clock = clock
        self._board = board
        self._name = name
        self._load_gauge = telemetry.LOG_WRITE_LOAD.labels(board.pool)
        self._waits = telemetry.REQUEST_WAIT.labels(board.pool)
        self._counters = {reason: telemetry.SCHEDULER_REFUSED.labels(board.pool, reason.value) for reason in _DETAILS}
        self._refused: dict[RejectReason, _Refused] = {}
        self._slowed = False
        self._late = False
        self._wait = WallSeconds(0.0)
        self._waited_at = WallSeconds(0.0)
        self._standing_since: WallSeconds | None = None

    @property
    def log_busy(self) -> bool:
        return self._log.write_load >= SLOWED

    @property
    def unconfirmed(self) -> UnconfirmedWrites:
        return self._log.unconfirmed

    def reason(self, command: RouteRequest, workload: Workload, waited: WallSeconds) -> RejectReason | None:
        """Why this request, unknown so far, is turned away. Call for each, in their order."""
        late = self._is_late(waited)
        if self._log.write_load >= REFUSING:
            reason = RejectReason.LOG_OVERLOADED
        elif late:
            reason = RejectReason.SCHEDULER_OVERLOADED
        else:
            return None
        known = command.request in workload.requests or workload.end_of(command.request) is not None
        return None if known else reason

    def _is_late(self, waited: WallSeconds) -> bool:
        """Of a queue that does not empty; as CoDel (RFC 8289), but by age, since a wait below the limit does no harm."""
        now = self._clock.wall()
        self._waits.observe(float(waited))
        self._wait = max(self._wait, waited)
        if waited < WAIT_CALM or now - self._waited_at > STANDING_WALL_SECONDS:
            self._standing_since = None
        self._waited_at = now
        if waited < WAIT_MAX:
            return False
        if self._standing_since is None:
            self._standing_since = now
        return now - self._standing_since >= STANDING_WALL_SECONDS

    def refusal(self, command: RouteRequest, reason: RejectReason, term: Term) -> RouteRejected:
        refused = self._refused.get(reason)
        if refused is None:
            refused = self._refused[reason] = _Refused(0, self._clock.now(), self._clock.wall())
        refused.count += 1
        self._counters[reason].inc()
        retry_after = engine_seconds(RETRY_WALL_SECONDS, self._clock.speed)
        return rejection(command.request, command.attempt, reason, _DETAILS[reason], retry_after, term=term)

    def look(self, *, leads: bool) -> list[LogEvent]:
        """Call regularly. Returns what the log is to be told, once this scheduler `leads` (again)."""
        self._look_at_log()
        self._look_at_commands()
        return self._told() if leads else []

    def _look_at_log(self) -> None:
        load = self._log.write_load
        self._load_gauge.set(load)
        if load >= SLOWED:
            refusing = "new requests get 503" if load >= REFUSING else f"from {REFUSING:.0%} on new requests get 503"
            self._board.degraded(
                LOG_LOAD_PART, f"the log is behind: {load:.0%} of the window of unconfirmed writes is used; {refusing}"
            )
            if not self._slowed:
                log.warning("log_behind", load=round(load, 2))
            self._slowed = True
        elif self._slowed and load < CALM:
            self._slowed = False
            self._board.restored(LOG_LOAD_PART)
            log.info("log_keeps_up", load=round(load, 2))

    def _look_at_commands(self) -> None:
        wait, self._wait = self._wait, WallSeconds(0.0)
        if wait >= WAIT_MAX:
            self._board.degraded(
                REQUESTS_PART, f"requests wait {wait:.1f} s for a decision; from {WAIT_MAX:.0f} s on new ones get 503"
            )
            if not self._late:
                log.warning("decisions_behind", wait=round(float(wait), 2))
            self._late = True
        elif self._late and wait < WAIT_CALM:
            self._late = False
            self._board.restored(REQUESTS_PART)
            log.info("decisions_keep_up")

    def _told(self) -> list[LogEvent]:
        return [self._tell(reason) for reason in list(self._refused) if self._is_due(reason)]

    def _is_due(self, reason: RejectReason) -> bool:
        over = reason is RejectReason.LOG_OVERLOADED and self._log.write_load < REFUSING
        over = over or (reason is RejectReason.SCHEDULER_OVERLOADED and self._standing_since is None)
        return over or self._clock.wall() - self._refused[reason].told_at >= TOLD_WALL_SECONDS

    def _tell(self, reason: RejectReason) -> RequestsRefused:
        refused = self._refused.pop(reason)
        log.warning("requests_refused", count=refused.count, reason=reason.value)
        return RequestsRefused(
            at=self._clock.now(),
            scheduler=self._name,
            count=refused.count,
            since=refused.since,
            reason=reason.value,
        )
