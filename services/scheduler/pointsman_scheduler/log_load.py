"""The load of the log as a signal to the leader. In: how near its unconfirmed writes are to being lost. Out: plans refused
from SLOWED on, new requests from REFUSING on, before anything is decided or written about them, so that what was accepted
keeps its room in the window. Refused requests are counted in the log."""

import structlog

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRejected, RouteRequest
from pointsman.contracts.decisions import RequestsRefused
from pointsman.contracts.reasons import RejectReason, reject_answer
from pointsman.ports import Clock, EventLog
from pointsman.primitives import EngineSeconds, Term, WallSeconds, engine_seconds
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard
from pointsman.state.workload import Workload

log = structlog.get_logger()

LOG_LOAD_PART = "log load"
SLOWED = 0.25
REFUSING = 0.5
CALM = 0.1
RETRY_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
TOLD_WALL_SECONDS: WallSeconds = WallSeconds(10.0)


class LogLoad:
    def __init__(self, event_log: EventLog, clock: Clock, board: HealthBoard, name: str) -> None:
        self._log = event_log
        self._clock = clock
        self._board = board
        self._name = name
        self._gauge = telemetry.LOG_WRITE_LOAD.labels(board.pool)
        self._counter = telemetry.LOG_REFUSED.labels(board.pool)
        self._refused = 0
        self._since: EngineSeconds = 0.0
        self._told_at = WallSeconds(0.0)
        self._slowed = False

    @property
    def is_busy(self) -> bool:
        return self._log.write_load >= SLOWED

    def refuses(self, command: RouteRequest, workload: Workload) -> bool:
        """Whether this request, unknown so far, is turned away."""
        if self._log.write_load < REFUSING:
            return False
        return command.request not in workload.requests and workload.end_of(command.request) is None

    def refusal(self, command: RouteRequest, term: Term) -> RouteRejected:
        if not self._refused:
            self._since = self._clock.now()
            self._told_at = self._clock.wall()
        self._refused += 1
        self._counter.inc()
        return RouteRejected(
            request=command.request,
            attempt=command.attempt,
            status=reject_answer(RejectReason.LOG_OVERLOADED).status,
            reason=RejectReason.LOG_OVERLOADED.value,
            detail="the log does not take decisions as fast as they are made",
            retry_after=engine_seconds(RETRY_WALL_SECONDS, self._clock.speed),
            term=term,
        )

    def look(self, *, leads: bool) -> list[LogEvent]:
        """Call regularly. Returns what the log is to be told, once this scheduler `leads` (again)."""
        load = self._log.write_load
        self._gauge.set(load)
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
        over = load < REFUSING or self._clock.wall() - self._told_at >= TOLD_WALL_SECONDS
        return self._told() if self._refused and over and leads else []

    def _told(self) -> list[LogEvent]:
        count, self._refused = self._refused, 0
        log.warning("requests_refused", count=count, reason=RejectReason.LOG_OVERLOADED.value)
        return [
            RequestsRefused(
                at=self._clock.now(),
                scheduler=self._name,
                count=count,
                since=self._since,
                reason=RejectReason.LOG_OVERLOADED.value,
            )
        ]
