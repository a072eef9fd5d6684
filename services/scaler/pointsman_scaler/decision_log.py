"""What the scaler writes to the log. In: decisions. Out: ScaleDecided that came back through the log, ScaleApplied, and
whether the log is about to drop the newest decision. Does not decide."""

import structlog

from pointsman.contracts.codec import LogEvent, UnwritableError
from pointsman.contracts.decisions import ScaleApplied, ScaleDecided
from pointsman.ports import Clock, EventLog, LogUnavailableError
from pointsman.primitives import Sequence, WallSeconds
from pointsman.runtime.leadership import Leadership
from pointsman.runtime.log_follower import LogFollower
from pointsman_scaler.trouble import Trouble

log = structlog.get_logger()

READ_BACK_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
LOG_CHECK_WALL_SECONDS: WallSeconds = WallSeconds(5.0)


class DecisionLog:
    def __init__(
        self, event_log: EventLog, follower: LogFollower, leadership: Leadership, clock: Clock, trouble: Trouble
    ) -> None:
        self._log = event_log
        self._follower = follower
        self._leadership = leadership
        self._clock = clock
        self._trouble = trouble
        self._decided_at: Sequence = 0
        self._checked_at = clock.wall()

    def note(self, event: LogEvent) -> None:
        """After the follower applied it."""
        state = self._follower.state
        if isinstance(event, ScaleDecided) and event is state.scaling.decided:
            self._decided_at = state.sequence

    async def may_drop_newest(self) -> bool:
        """Whether the newest decision is in the older half of a log that drops entries. Rarely queried."""
        if self._clock.wall() - self._checked_at < LOG_CHECK_WALL_SECONDS:
            return False
        self._checked_at = self._clock.wall()
        try:
            extent = await self._log.extent()
        except LogUnavailableError:
            return False
        return extent.has_in_oldest(1 / 2, self._decided_at)

    async def write(self, decision: ScaleDecided) -> bool:
        """Append a decision; returns whether it came back through the log."""
        log.info("scale_decided", current=decision.current, wanted=decision.wanted, reason=decision.reason)
        if not self._leadership.holds or not await self.append(decision):
            return False
        deadline = self._clock.wall() + READ_BACK_WALL_SECONDS
        while self._follower.state.scaling.number < decision.number:
            if self._clock.wall() > deadline:
                return False
            await self._clock.sleep_wall(WallSeconds(0.01))
        return True

    async def append(self, event: ScaleDecided | ScaleApplied) -> bool:
        try:
            await self._log.append(event)
        except LogUnavailableError as error:
            self._trouble.note(f"the log does not answer: {error}")
            return False
        except UnwritableError as error:
            self._trouble.note(str(error))
            return False
        return True
