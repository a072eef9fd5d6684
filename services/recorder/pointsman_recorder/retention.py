"""Retention of the archive, by age and size. In: the limits. Out: the oldest entries deleted, the oldest log first, in
batches of at most BATCH_ROWS, each a short transaction on a connection of its own; after each, and after each part of the
file that is given back, the database rests as long as it worked. The newest entry always stays: it is where recording goes on.
The age of an entry is against this machine's date, or against what the log has reached, whichever is earlier: a date that is
wrong for a while deletes nothing for good."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from pointsman.ports import Clock, EventLog, LogUnavailableError
from pointsman.primitives import EngineSeconds, Seconds, WallSeconds, engine_seconds
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard
from pointsman_recorder.archive import Archive
from pointsman_recorder.database_errors import DATABASE_ERRORS, reason_of
from pointsman_recorder.pruning import Head, Pruning

log = structlog.get_logger()
T = TypeVar("T")

RETENTION_PART = "archive retention"
BATCH_ROWS = 1000
LOOK_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
PAUSE_WALL_SECONDS_MIN: WallSeconds = WallSeconds(0.02)
DAY_SECONDS: Seconds = 86_400.0
NEWEST_ROWS = 101
"""Of which the middle time counts, as of a batch, so that no single wrong one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    """0: none."""

    age: Seconds = 0.0
    bytes: int = 0


class Retention:
    def __init__(
        self, archive: Archive, event_log: EventLog, clock: Clock, board: HealthBoard, limits: RetentionLimits
    ) -> None:
        self._archive = archive
        self._pruning = Pruning(archive)
        self._log = event_log
        self._clock = clock
        self._board = board
        self._limits = limits
        self._reached: tuple[EngineSeconds, WallSeconds] = (0.0, clock.wall())
        """Middle time of the newest rows, and when it became that."""
        pool = board.pool
        self._used = telemetry.ARCHIVE_BYTES.labels(pool, "used")
        self._disk = telemetry.ARCHIVE_BYTES.labels(pool, "disk")
        self._oldest = telemetry.ARCHIVE_OLDEST_SECONDS.labels(pool)
        self._pruned = telemetry.ARCHIVE_PRUNED.labels(pool)

    async def run(self) -> None:
        """Runs without end."""
        await self._archive.prepared.wait()
        while True:
            try:
                await self.look()
            except DATABASE_ERRORS as error:
                reason = reason_of(error)
                self._board.degraded(RETENTION_PART, f"nothing is removed: {reason}")
                log.warning("archive_retention_failed", reason=reason)
            await self._clock.sleep_wall(LOOK_WALL_SECONDS)

    async def look(self) -> None:
        """Prune to the limits, then measure. Raises DATABASE_ERRORS."""
        removed, now = 0, await self._now() if self._limits.age else 0.0
        while (head := await self._pruning.head(BATCH_ROWS)) is not None and await self._is_due(head, now):
            gone = await self._with_rest(self._pruning.prune(head))
            removed += gone
            self._pruned.inc(gone)
        if removed:
            log.info("archive_pruned", entries=removed)
        while await self._with_rest(self._pruning.give_back()):
            pass
        await self._measure()

    async def _with_rest(self, step: Awaitable[T]) -> T:
        """Leaves the database to others for as long as the step took."""
        began = self._clock.wall()
        done = await step
        await self._clock.sleep_wall(max(PAUSE_WALL_SECONDS_MIN, self._clock.wall() - began))
        return done

    async def _now(self) -> EngineSeconds:
        """At most what the newest rows say, and what has passed here since they came."""
        times, wall = sorted(await self._pruning.newest_times(NEWEST_ROWS)), self._clock.wall()
        reached = times[len(times) // 2] if times else self._clock.now()
        if reached != self._reached[0]:
            self._reached = reached, wall
        return min(self._clock.now(), reached + engine_seconds(wall - self._reached[1], self._clock.speed))

    async def _is_due(self, head: Head, now: EngineSeconds) -> bool:
        limits = self._limits
        too_old = limits.age > 0 and head.at is not None and head.at < now - limits.age
        return too_old or (limits.bytes > 0 and (await self._pruning.size()).used > limits.bytes)

    async def _measure(self) -> None:
        size = await self._pruning.size()
        self._used.set(size.used)
        self._disk.set(size.disk)
        begins = await self._pruning.begins()
        self._oldest.set(max(0.0, self._clock.now() - begins.at) if begins is not None else 0.0)
        if self._pruning.is_held_back():
            self._board.degraded(
                RETENTION_PART,
                "nothing is removed: a reader holds the write-ahead log back; end it, whatever reads the file",
            )
            return
        try:
            extent = await self._log.extent()
        except LogUnavailableError:
            return
        if begins is not None and begins.identity == extent.identity and begins.sequence > extent.first:
            self._board.degraded(
                RETENTION_PART,
                f"the archive begins at entry {begins.sequence}, the log itself at {extent.first}: raise --archive-days "
                "or --archive-bytes-max, or the archive keeps less than the log",
            )
        else:
            self._board.restored(RETENTION_PART)
