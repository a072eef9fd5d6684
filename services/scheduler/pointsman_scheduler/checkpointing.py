"""Takes checkpoints of a fold in log order, in its own process: encoding a State blocks for too long. Due after so many
events or seconds, or if the newest lies in the older half of the log. Of several processes one folds: another that finds
a newer checkpoint than its own drops its State, and resumes once no more come."""

import gc
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from pointsman.ports import (
    CheckpointLabel,
    Checkpoints,
    Clock,
    EventLog,
    LogEntry,
    LogExtent,
    LogUnavailableError,
    StoreUnavailableError,
)
from pointsman.primitives import Sequence, WallSeconds
from pointsman.runtime.checkpoint_fingerprint import entry_digest
from pointsman.runtime.containment import DeadLetterWatch
from pointsman.runtime.recovery import LogBrokenError, Recovery, RestoredState
from pointsman.state.checkpoint import encode_parts
from pointsman.state.state import State

log = structlog.get_logger()

EXTENT_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
SAVE_RETRY_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
REST_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
RENEWED_WITHIN, DROPPED_SOON = 1 / 2, 1 / 4
"""Oldest shares of the log. A checkpoint in the first is replaced. One in the second shows that nobody does so: the log is about
to drop its entry."""
OVERDUE_SHARE = 1.5
"""Of the cadence: more than the largest spread, so that who rests does not resume while another folds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """`spread` (at least 1, drawn per process) stretches both bounds, so that one of several processes is first."""

    seconds: WallSeconds
    events: int = 200_000
    spread: float = 1.0


class Checkpointer:
    def __init__(
        self,
        *,
        event_log: EventLog,
        checkpoints: Checkpoints,
        following: Recovery,
        clock: Clock,
        cadence: Cadence,
    ) -> None:
        self._log = event_log
        self._checkpoints = checkpoints
        self._following = following
        self._clock = clock
        self._cadence = cadence
        self._dead_letters = DeadLetterWatch(pool="")
        self._extent = LogExtent("", 1, 0)
        self._extent_at = WallSeconds(0.0)
        self._end: Sequence = 0
        self._saved: Sequence = 0
        self._attempted: Sequence = 0
        """Of the last try, which may have been stored though it failed."""
        self._saved_at = WallSeconds(0.0)
        self._passed_over: frozenset[CheckpointLabel] = frozenset()
        self._not_before = WallSeconds(0.0)

    async def run(self) -> None:
        while True:
            try:
                await self._fold(await self._following.begin())
            except LogBrokenError as error:
                log.warning("checkpoints_restarted", reason=str(error))
                continue
            gc.collect()  # a State has cycles
            log.info("checkpointer_rests", newest=self._saved)
            await self._until_overdue()
            log.info("checkpointer_resumes", newest=self._saved)

    async def _fold(self, beginning: RestoredState) -> None:
        """Returns once another process saves checkpoints. Raises LogBrokenError."""
        state = beginning.state
        self._end = beginning.end
        self._extent, self._extent_at = beginning.extent, self._clock.wall()
        self._saved, self._saved_at = state.sequence, self._clock.wall()
        self._passed_over = beginning.passed_over
        async with aclosing(self._following.entries(beginning)) as entries:  # type: ignore[type-var]
            async for entry in entries:
                state.apply_entry(entry)
                self._dead_letters.look(state.dead_letters)
                await self._look_at_log()
                if self._is_due(state) and not await self._save(state, entry):
                    return

    async def _until_overdue(self) -> None:
        while True:
            await self._clock.sleep_wall(REST_WALL_SECONDS)
            await self._look_at_log()
            try:
                newest = await self._newest()
            except StoreUnavailableError:
                continue
            if newest != self._saved:  # of a log that was recreated: 0
                self._saved, self._saved_at = newest, self._clock.wall()
            if not newest or self._is_overdue():
                return

    def _is_overdue(self) -> bool:
        """Whether nobody saves any more: later than `_is_due` of any process."""
        cadence, extent = self._cadence, self._extent
        if extent.has_in_oldest(DROPPED_SOON, self._saved):
            return True
        waited = self._clock.wall() - self._saved_at
        return waited > OVERDUE_SHARE * cadence.seconds or extent.last - self._saved > OVERDUE_SHARE * cadence.events

    def _is_due(self, state: State) -> bool:
        wall = self._clock.wall()
        if wall < self._not_before:
            return False
        cadence = self._cadence
        if state.sequence - self._saved >= cadence.events * cadence.spread:
            return True
        if state.sequence < self._end:
            return False
        if wall - self._saved_at >= cadence.seconds * cadence.spread:
            return True
        return self._extent.has_in_oldest(RENEWED_WITHIN, self._saved)

    async def _look_at_log(self) -> None:
        if self._clock.wall() - self._extent_at < EXTENT_WALL_SECONDS:
            return
        self._extent_at = self._clock.wall()
        try:
            self._extent = await self._log.extent()
        except LogUnavailableError as error:
            log.warning("log_extent_unknown", problem=str(error))

    async def _save(self, state: State, entry: LogEntry) -> bool:
        """False if another process has saved a newer one."""
        try:
            newest = await self._newest()
            if newest > max(self._saved, self._attempted):
                self._saved, self._saved_at = newest, self._clock.wall()
                return False
            await self._take(state, entry)
        except StoreUnavailableError as error:
            self._not_before = self._clock.wall() + SAVE_RETRY_WALL_SECONDS
            log.warning("checkpoint_not_saved", problem=str(error))
        return True

    async def _take(self, state: State, entry: LogEntry) -> None:
        """Raises StoreUnavailableError."""
        started = self._clock.wall()
        head, indexes = encode_parts(state)
        content = head + indexes
        encoded = self._clock.wall()
        label = CheckpointLabel(
            identity=self._extent.identity,
            as_of=state.sequence,
            entry=entry_digest(entry),
            form=self._following.form,
        )
        self._attempted = state.sequence
        await self._checkpoints.save(label, content, head_bytes=len(head), log_begins=self._extent.first)
        self._saved, self._saved_at = state.sequence, self._clock.wall()
        log.info(
            "checkpoint_taken",
            as_of=state.sequence,
            bytes=len(content),
            head_bytes=len(head),
            encode_seconds=round(float(encoded - started), 3),
            save_seconds=round(float(self._saved_at - encoded), 3),
        )

    async def _newest(self) -> Sequence:
        """0 without one. Raises StoreUnavailableError."""
        known = [label.as_of for label in await self._labels() if label not in self._passed_over]
        return max(known, default=0)

    async def _labels(self) -> list[CheckpointLabel]:
        """Raises StoreUnavailableError."""
        return await checkpoints_of(self._checkpoints, self._following.form, self._extent.identity)


async def checkpoints_of(checkpoints: Checkpoints, form: str, identity: str) -> list[CheckpointLabel]:
    """Raises StoreUnavailableError."""
    return [label for label in await checkpoints.labels() if (label.form, label.identity) == (form, identity)]
