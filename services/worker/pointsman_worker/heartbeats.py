"""Tells each report to the leader, outside the log. It goes into the log, too, when the leader wants it or does not answer:
there is none, it is of an earlier release, or it does not hear us."""

import asyncio
from dataclasses import dataclass, field

import structlog

from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import HeartbeatNoted, NoteHeartbeat
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.subjects import heartbeat_subject
from pointsman.ports import Commands, CommandTimeoutError, NoResponderError
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_worker.session import SessionState

log = structlog.get_logger()

NAME_PART = "name"
ANSWER_WALL_SECONDS: WallSeconds = WallSeconds(0.5)
"""With the report that follows, well below the time after which an instance is suspected."""
REPLACED_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
"""For so long the epoch that replaces this one may be our own, from before our clock was set back."""


@dataclass(eq=False)
class Heartbeats:
    commands: Commands
    state: SessionState
    board: HealthBoard
    _replaced_by: str = field(default="", init=False)
    _replaced_since: WallSeconds | None = field(default=None, init=False)
    _untold: InstanceReported | None = field(default=None, init=False)
    _due: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def tell(self, report: InstanceReported) -> None:
        """Replaces one that is not sent yet."""
        self._untold = report
        self._due.set()

    async def run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            if self._untold is not None and await self._is_wanted(self._untold):
                self.state.log_report()

    async def _is_wanted(self, report: InstanceReported) -> bool:
        subject = heartbeat_subject(PoolName(self.state.settings.pool), report.instance)
        answer: AnyCommand | None
        try:
            answer = await self.commands.request(subject, NoteHeartbeat(report=report), timeout=ANSWER_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError):
            answer = None
        if not isinstance(answer, HeartbeatNoted):
            self.state.leaders_flush = 0.0
            return True
        self.state.leaders_flush = answer.flush
        self._note_name(report, answer.replaced_by)
        return answer.log

    def _note_name(self, report: InstanceReported, replaced_by: str) -> None:
        session = self.state.session
        if session is None or session.epoch != report.epoch:
            return
        now = self.state.clock.wall()
        self._replaced_since = (self._replaced_since or now) if replaced_by else None
        lasts = self._replaced_since is not None and now - self._replaced_since >= REPLACED_WALL_SECONDS
        if replaced_by == self._replaced_by or (replaced_by and not lasts):
            return
        self._replaced_by = replaced_by
        if not replaced_by:
            self.board.restored(NAME_PART)
            return
        log.error("instance_name_taken", instance=report.instance, url=replaced_by)
        reason = (
            f"another worker has joined as {report.instance} since, for {replaced_by}: nothing is placed at this engine"
        )
        self.board.missing(NAME_PART, f"{reason}. Give one of them another --instance, or stop it")
