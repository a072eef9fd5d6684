"""Finds where a fold starts: the newest checkpoint of the same fold (`CheckpointLabel.form`) and log, at an unchanged
entry; else the oldest entry. If the log is truncated, unreadable checkpoints are retried."""

from collections.abc import AsyncIterator, Callable
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
    LogMissingError,
    LogReset,
    LogUnavailableError,
    StoreUnavailableError,
)
from pointsman.primitives import Sequence, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.checkpoint_fingerprint import checkpoint_form, entry_digest, fold_version
from pointsman.runtime.health import HealthBoard
from pointsman.state.checkpoint import UnreadableStateError, decode_state
from pointsman.state.state import State

log = structlog.get_logger()

RETRY_WALL_SECONDS: WallSeconds = WallSeconds(0.1)
CHECKPOINT_WAIT_WALL_SECONDS: WallSeconds = WallSeconds(30.0)


class LogBrokenError(Exception):
    """The log does not continue what was folded."""


class _RetryLookUpError(Exception):
    """A checkpoint may be readable later."""


@dataclass(frozen=True, slots=True)
class StartPoint:
    """`label`: the checkpoint it came from."""

    state: State
    extent: LogExtent
    label: CheckpointLabel | None

    @property
    def end(self) -> Sequence:
        return self.extent.last


class Recovery:
    def __init__(
        self,
        *,
        event_log: EventLog,
        checkpoints: Checkpoints,
        clock: Clock,
        board: HealthBoard,
        part: str,
        empty_state: Callable[[], State],
    ) -> None:
        self._log = event_log
        self._checkpoints = checkpoints
        self._clock = clock
        self._board = board
        self._part = part
        self._empty_state = empty_state
        self._unfit: set[CheckpointLabel] = set()
        self._others: dict[str, set[CheckpointLabel]] = {}
        """Of other folds, newest first, by why."""
        self.form = checkpoint_form(empty_state())

    async def begin(self) -> StartPoint:
        extent, found = await self._extent_and_checkpoint()
        if found is not None:
            label, state = found
            log.info("checkpoint_restored", as_of=label.as_of, entries_behind=extent.last - label.as_of)
            return StartPoint(state, extent, label)
        if extent.first > 1:
            log.warning("log_truncated", first=extent.first, lost="what was known before, until workers report again")
        self._tell_of_others(extent)
        return StartPoint(self._empty_state(), extent, None)

    def _tell_of_others(self, extent: LogExtent) -> None:
        """Checkpoints of this log that are of another fold: the start takes as long as the log is."""
        if not self._others:
            return
        reason = next(iter(self._others))
        telemetry.LOG_FOLDED_WHOLE.labels(self._board.pool, reason).inc()
        log.warning(
            "log_folded_whole",
            reason=reason,
            entries=extent.last - extent.first + 1,
            checkpoints=len(self._others[reason]),
            form=self.form,
        )

    async def entries(self, beginning: StartPoint) -> AsyncIterator[LogEntry]:
        """Yields entries after `beginning.state`, without end. Raises LogBrokenError."""
        label = beginning.label
        async with aclosing(self._log.read(label.as_of if label else beginning.extent.first)) as reading:  # type: ignore[type-var]
            async for entry in reading:
                if isinstance(entry, LogReset):
                    # A log that seemed whole and is not: only then was it begun without waiting for a checkpoint.
                    seemed_complete = beginning.extent.first <= 1 < entry.first_sequence
                    if beginning.state.sequence or seemed_complete:
                        raise LogBrokenError(entry.reason)
                    log.warning("log_truncated", first=entry.first_sequence, lost=entry.reason)
                elif label is not None and entry.sequence == label.as_of:
                    self._verify(label, entry)
                else:
                    yield entry

    def _verify(self, label: CheckpointLabel, entry: LogEntry) -> None:
        if entry_digest(entry) != label.entry:
            self._unfit.add(label)
            broken = f"the log went on differently before the checkpoint at {label.as_of}"
            raise LogBrokenError(broken)

    async def _extent_and_checkpoint(self) -> tuple[LogExtent, tuple[CheckpointLabel, State] | None]:
        deadline = self._clock.wall() + CHECKPOINT_WAIT_WALL_SECONDS
        while True:
            extent = await self._extent()
            try:
                return extent, await self._newest_fitting(extent)
            except _RetryLookUpError as error:
                log.warning("checkpoints_unavailable", problem=str(error))
                if extent.first <= 1 or self._clock.wall() > deadline:
                    return extent, None
                self._board.missing(self._part, f"no checkpoint can be read: {error}")
            await self._clock.sleep_wall(RETRY_WALL_SECONDS)

    async def _newest_fitting(self, extent: LogExtent) -> tuple[CheckpointLabel, State] | None:
        """Raises _RetryLookUpError."""
        replaced = ""
        self._others = {}
        try:
            for label in await self._checkpoints.labels():
                problem = self._unfitness(label, extent)
                content = None if problem else await self._checkpoints.load(label)
                state = self._decoded(label, content) if content is not None else None
                if state is not None:
                    return label, state
                if (not problem and content is None) or self._is_newer_than(extent, label):
                    replaced = "a newer one was taken meanwhile"
                log.info("checkpoint_skipped", as_of=label.as_of, problem=problem or "it could not be read")
        except StoreUnavailableError as error:
            raise _RetryLookUpError(str(error)) from error
        if replaced:
            raise _RetryLookUpError(replaced)
        return None

    def _is_newer_than(self, extent: LogExtent, label: CheckpointLabel) -> bool:
        same = (label.form, label.identity) == (self.form, extent.identity)
        return same and label not in self._unfit and label.as_of > extent.last

    def _unfitness(self, label: CheckpointLabel, extent: LogExtent) -> str:
        if label in self._unfit:
            return "the log went on differently before it"
        if label.identity != extent.identity:
            return "it is of another log"
        if label.form != self.form:
            reason = self._other_fold(label.form)
            self._others.setdefault(reason, set()).add(label)
            return f"it is of another fold: {reason}"
        if not extent.first <= label.as_of <= extent.last:
            return f"the log holds entries {extent.first} to {extent.last}"
        return ""

    def _other_fold(self, form: str) -> str:
        theirs, ours = fold_version(form), fold_version(self.form)
        if theirs is None:
            return "an earlier release"
        return "other policies or settings" if theirs == ours else "another fold version"

    def _decoded(self, label: CheckpointLabel, content: bytes) -> State | None:
        try:
            return decode_state(content)
        except UnreadableStateError as error:
            self._others.setdefault("unreadable", set()).add(label)
            log.warning("checkpoint_unreadable", as_of=label.as_of, problem=str(error))
            return None

    async def _extent(self) -> LogExtent:
        while True:
            try:
                return await self._log.extent()
            except (LogUnavailableError, LogMissingError) as error:
                self._board.missing(self._part, f"the log does not answer: {error}")
                await self._clock.sleep_wall(RETRY_WALL_SECONDS)
