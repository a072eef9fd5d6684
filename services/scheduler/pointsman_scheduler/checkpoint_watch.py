"""Tells that no checkpoints are made for this scheduler: their process may be killed at each, lack a right or room, for days,
until the log drops its beginning and a start knows nothing of what was before. In: the log's extent and the newest
checkpoint. Out: a gauge, and a degraded part of `/readyz`. Looks are counted, not time: an idle log needs no checkpoint."""

import structlog

from pointsman.ports import (
    Checkpoints,
    Clock,
    EventLog,
    LogExtent,
    LogUnavailableError,
    StoreUnavailableError,
)
from pointsman.primitives import Sequence, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard
from pointsman_scheduler.checkpointing import DROPPED_SOON, checkpoints_of

log = structlog.get_logger()

CHECKPOINTS_PART = "checkpoints"
LOOK_WALL_SECONDS: WallSeconds = WallSeconds(30.0)
INTERVALS_MAX = 5
"""More than another scheduler's process needs to take over from one that has ended."""


class CheckpointWatch:
    def __init__(
        self,
        *,
        event_log: EventLog,
        checkpoints: Checkpoints,
        clock: Clock,
        board: HealthBoard,
        form: str,
        every: WallSeconds,
    ) -> None:
        """`form`: of checkpoints that this scheduler can use. `every`: how often one is to be taken."""
        self._log = event_log
        self._checkpoints = checkpoints
        self._clock = clock
        self._board = board
        self._form = form
        self._looks_max = INTERVALS_MAX * max(1.0, float(every) / float(LOOK_WALL_SECONDS))
        self._newest: Sequence = 0
        self._last: Sequence = 0
        self._looks = 0
        """Since the last new checkpoint, without those between which the log has stood still."""
        self._age = telemetry.CHECKPOINT_AGE.labels(board.pool)
        self._overdue = False

    async def run(self) -> None:
        while True:
            await self.look()
            await self._clock.sleep_wall(LOOK_WALL_SECONDS)

    async def look(self) -> None:
        try:
            extent = await self._log.extent()
        except LogUnavailableError:
            return  # another part says so
        try:
            labels = await checkpoints_of(self._checkpoints, self._form, extent.identity)
            newest = max((label.as_of for label in labels if label.as_of <= extent.last), default=0)
        except StoreUnavailableError:
            newest = self._newest
        if newest > self._newest:
            self._looks = 0
        elif extent.last > self._last:
            self._looks += 1
        self._newest, self._last = newest, extent.last
        self._tell(extent)

    def _tell(self, extent: LogExtent) -> None:
        age = extent.last - max(self._newest, extent.first - 1)  # the log may have dropped its entry
        self._age.set(age)
        dropped_soon = extent.has_in_oldest(DROPPED_SOON, self._newest)
        if self._looks >= self._looks_max or (self._looks >= INTERVALS_MAX and dropped_soon):
            self._board.degraded(CHECKPOINTS_PART, f"the log has gone on by {age} entries without a new one")
            if not self._overdue:
                log.warning("checkpoints_overdue", newest=self._newest, entries_behind=age)
            self._overdue = True
        elif self._overdue and not self._looks:
            self._overdue = False
            self._board.restored(CHECKPOINTS_PART)
            log.info("checkpoints_taken_again", newest=self._newest)
