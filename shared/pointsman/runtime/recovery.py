"""Finds where a fold starts: the newest checkpoint of the same fold (`CheckpointLabel.form`) and log, at an unchanged
entry; else the oldest entry. If the log is truncated or long, unreadable checkpoints are retried. Who needs only loads and
queues reads the head of a checkpoint (`LoadsOnly`)."""

from collections.abc import AsyncIterator, Callable, Iterable
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
    LogReset,
    StoreUnavailableError,
)
from pointsman.primitives import EngineSeconds, Sequence, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.checkpoint_fingerprint import checkpoint_form, entry_digest, fold_version
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_extent import await_extent
from pointsman.runtime.telemetry import UnusableCheckpoints
from pointsman.state.checkpoint import UnreadableStateError, decode_head, decode_state
from pointsman.state.state import FOLD_VERSION, PoolSettings, State
from pointsman.state.trackers.base import Tracker

log = structlog.get_logger()

RETRY_WALL_SECONDS: WallSeconds = WallSeconds(0.1)
CHECKPOINT_WAIT_WALL_SECONDS: WallSeconds = WallSeconds(30.0)
AHEAD_WALL_SECONDS_MAX: WallSeconds = WallSeconds(5.0)
"""If the log then still lacks a checkpoint's entries, it went back: it was restored, or has lost its tail."""
SHORT_LOG_ENTRIES = 50_000
"""Folded within seconds, sooner than a store that is away answers again."""
UNREADABLE = "it could not be read"
OTHER_SETTINGS: UnusableCheckpoints = "other policies or settings"


class LogBrokenError(Exception):
    """The log does not continue what was folded."""


class _RetryLookUpError(Exception):
    """A checkpoint may be readable later."""


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What a fold of the log goes on from. `label`: the checkpoint it came from; None: it is empty. `passed_over`: others that
    were looked at and not used: unreadable, of another fold, or beyond the end of a log that lost its tail."""

    state: State
    extent: LogExtent
    label: CheckpointLabel | None
    passed_over: frozenset[CheckpointLabel]

    @property
    def end(self) -> Sequence:
        return self.extent.end


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsOnly:
    """For a State without an index, of any scheduler's checkpoint. `trackers`: created in place of the scheduler's; they
    get the last `history` engine seconds of the log."""

    settings: PoolSettings
    trackers: Callable[[], Iterable[Tracker]] = tuple
    history: EngineSeconds = 0.0

    def empty_state(self) -> State:
        return State(self.settings, self.trackers(), index=False)

    def take_over(self, state: State) -> None:
        if state.knows_keys:
            state.drop_index()
        trackers = tuple(self.trackers())
        for tracker in trackers:
            tracker.resumed(state.last_at)
        state.use_trackers(trackers)


@dataclass(frozen=True, slots=True)
class _Look:
    """`problem`: why a fold does not begin with this checkpoint."""

    state: State | None = None
    problem: str = ""
    gone: bool = False


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
        loads: LoadsOnly | None = None,
    ) -> None:
        self._log = event_log
        self._checkpoints = checkpoints
        self._clock = clock
        self._board = board
        self._part = part
        self._empty_state = empty_state
        self._loads = loads
        self._unfit: set[CheckpointLabel] = set()
        self._passed_over: set[CheckpointLabel] = set()
        self._ahead: dict[CheckpointLabel, WallSeconds] = {}
        """Since when the log is known to lack their entries."""
        self._others: dict[UnusableCheckpoints, set[CheckpointLabel]] = {}
        """Of other folds, newest first, by why; only `unavailable` if none could be read in time."""
        self.form = checkpoint_form(empty_state())
        telemetry.LOG_FOLDED_WHOLE.show_zeros(pool=board.pool)

    async def begin(self) -> RestoredState:
        extent, found = await self._extent_and_checkpoint()
        if found is not None:
            label, state = found
            log.info("checkpoint_restored", as_of=label.as_of, entries_behind=extent.last - label.as_of)
            return RestoredState(state, extent, label, frozenset(self._passed_over - {label}))
        if extent.first > 1:
            log.warning("log_truncated", first=extent.first, lost="what was known before, until workers report again")
        self._tell_why_whole(extent)
        return RestoredState(self._empty_state(), extent, None, frozenset(self._passed_over))

    def _tell_why_whole(self, extent: LogExtent) -> None:
        """The start takes as long as the log is. Loudly if there are, or may be, checkpoints of this log."""
        if not self._others:
            log.info("log_folded_whole", reason="no checkpoint of it fits", entries=extent.entries)
            return
        reason = next(iter(self._others))
        telemetry.LOG_FOLDED_WHOLE.labels(self._board.pool, reason).inc()
        log.warning(
            "log_folded_whole",
            reason=reason,
            entries=extent.entries,
            checkpoints=len(self._others[reason]),
            form=self.form,
        )

    async def entries(self, beginning: RestoredState) -> AsyncIterator[LogEntry]:
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
            raise LogBrokenError(f"the log went on differently before the checkpoint at {label.as_of}")

    async def _extent_and_checkpoint(self) -> tuple[LogExtent, tuple[CheckpointLabel, State] | None]:
        deadline = self._clock.wall() + CHECKPOINT_WAIT_WALL_SECONDS
        while True:
            extent = await await_extent(self._log, self._clock, self._board, self._part)
            try:
                return extent, await self._newest_fitting(extent)
            except _RetryLookUpError as error:
                log.warning("checkpoints_unavailable", problem=str(error))
                is_soon_folded = extent.first <= 1 and extent.entries <= SHORT_LOG_ENTRIES
                if is_soon_folded or self._clock.wall() > deadline:
                    self._others = {"unavailable": set()}
                    return extent, None
                self._board.missing(self._part, f"no checkpoint can be read: {error}")
            await self._clock.sleep_wall(RETRY_WALL_SECONDS)

    async def _newest_fitting(self, extent: LogExtent) -> tuple[CheckpointLabel, State] | None:
        """Raises _RetryLookUpError."""
        replaced, young = "", None
        self._others, self._passed_over = {}, set()
        try:
            for label in await self._checkpoints.labels():
                problem = self._unfitness(label, extent)
                look = _Look(problem=problem) if problem else await self._look_at(label)
                if look.state is not None and not look.problem:
                    return label, look.state
                young = young if look.state is None else (label, look.state)
                if look.gone:
                    replaced = "a newer one was taken meanwhile"
                elif self._is_newer_than(extent, label):
                    replaced = f"one is of entry {label.as_of}, the log ended at {extent.last}"
                self._passed_over.add(label)
                log.info("checkpoint_skipped", as_of=label.as_of, problem=look.problem)
        except StoreUnavailableError as error:
            raise _RetryLookUpError(str(error)) from error
        if replaced:
            raise _RetryLookUpError(replaced)
        return young if extent.first > 1 else None

    async def _look_at(self, label: CheckpointLabel) -> "_Look":
        """Raises StoreUnavailableError."""
        loads = self._loads
        try:
            head = None if loads is None else await self._checkpoints.load_head(label)
            content = await self._checkpoints.load(label) if head is None else b""
            if content is None:
                return _Look(problem=UNREADABLE, gone=True)
            state = decode_state(content) if head is None else decode_head(head)
        except UnreadableStateError as error:
            self._others.setdefault("unreadable", set()).add(label)
            log.warning("checkpoint_unreadable", as_of=label.as_of, problem=str(error))
            return _Look(problem=UNREADABLE)
        if loads is None:
            return _Look(state)
        if state.settings != loads.settings:
            self._others.setdefault(OTHER_SETTINGS, set()).add(label)
            return _Look(problem="it was written with other settings of the pool")
        loads.take_over(state)
        is_young = state.last_at > self._clock.now() - loads.history
        return _Look(state, f"what happened in the {loads.history:g} s before it is needed too" if is_young else "")

    def _is_newer_than(self, extent: LogExtent, label: CheckpointLabel) -> bool:
        same = self._has_form(label) and label.identity == extent.identity
        if not same or label in self._unfit or label.as_of <= extent.last:
            return False
        now = self._clock.wall()
        return now - self._ahead.setdefault(label, now) < AHEAD_WALL_SECONDS_MAX

    def _unfitness(self, label: CheckpointLabel, extent: LogExtent) -> str:
        if label in self._unfit:
            return "the log went on differently before it"
        if label.identity != extent.identity:
            return "it is of another log"
        if not self._has_form(label):
            reason = self._other_fold(label.form)
            self._others.setdefault(reason, set()).add(label)
            return f"it is of another fold: {reason}"
        if not extent.first <= label.as_of <= extent.last:
            return f"the log holds entries {extent.first} to {extent.last}"
        return ""

    def _has_form(self, label: CheckpointLabel) -> bool:
        return label.form == self.form if self._loads is None else fold_version(label.form) == FOLD_VERSION

    def _other_fold(self, form: str) -> UnusableCheckpoints:
        theirs, ours = fold_version(form), fold_version(self.form)
        if theirs is None:
            return "an earlier release"
        return OTHER_SETTINGS if theirs == ours else "another fold version"
