"""Follows the log in services that need only loads and queues. In: a checkpoint's head, log entries. Out: a State without
an index, and readiness once it has caught up."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing

from pointsman.contracts.codec import LogEvent
from pointsman.ports import Checkpoints, Clock, EventLog, LogEntry
from pointsman.primitives import EngineSeconds, Sequence, WallSeconds
from pointsman.runtime.containment import DeadLetterWatch, contained
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.recovery import LoadsOnly, LogBrokenError, Recovery, RestoredState
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.base import Tracker

PART = "fold"
ENTRY_WALL_SECONDS: WallSeconds = WallSeconds(5.0)


class LogFollower:
    def __init__(
        self,
        event_log: EventLog,
        checkpoints: Checkpoints,
        *,
        clock: Clock,
        board: HealthBoard,
        settings: PoolSettings,
        on_event: Callable[[LogEvent], None] = lambda _event: None,
        trackers: Callable[[], Iterable[Tracker]] = tuple,
        history: EngineSeconds = 0.0,
    ) -> None:
        """`on_event`: called after each applied event, and with the election in force where a checkpoint begins after
        it. `trackers`: creates those of a new State. They and `on_event` get at least the last `history` of the log."""
        loads = LoadsOnly(
            settings=settings,
            trackers=trackers,
            history=max([history, *(tracker.history_s for tracker in trackers())]),
        )
        self._on_event = on_event
        self._log = event_log
        self._board = board
        self._end: Sequence | None = None
        self._dead_letters = DeadLetterWatch(board.pool)
        self._recovery = Recovery(
            event_log=event_log,
            checkpoints=checkpoints,
            clock=clock,
            board=board,
            part=PART,
            empty_state=loads.empty_state,
            loads=loads,
        )
        self.first_sequence: Sequence = 1
        """Of the state; above 1 the log has lost earlier entries, and no checkpoint has them."""
        self.state: State = loads.empty_state()

    @property
    def caught_up(self) -> bool:
        """Whether it has read all that was stored when it began."""
        return self._end is not None and self.state.sequence >= self._end

    async def run(self) -> None:
        """Never returns."""
        reason = "folding the log"
        while True:
            self._end = None
            self._board.missing(PART, reason)
            start = await self._recovery.begin()
            await self._begin(start)
            try:
                async for entry in self._recovery.entries(start):
                    self._take_in(entry)
                    self._note_progress()
            except LogBrokenError as error:
                reason = str(error)

    async def _begin(self, start: RestoredState) -> None:
        self.state, self.first_sequence = start.state, 1
        elected = start.state.elected
        if start.label is not None and elected >= start.extent.first:
            entry = await entry_at(self._log, elected)
            if entry is not None and entry.event is not None:
                self._tell(entry.event)
        self._end = start.end
        self._note_progress()

    def _note_progress(self) -> None:
        if self.caught_up:
            self._board.restored(PART)

    def _take_in(self, entry: LogEntry) -> None:
        if not self.state.sequence:
            self.first_sequence = entry.sequence
        self.state.apply_entry(entry)
        if entry.event is not None:
            self._tell(entry.event)
        self._dead_letters.look(self.state.dead_letters)

    def _tell(self, event: LogEvent) -> None:
        with contained("log_entry"):
            self._on_event(event)


async def entry_at(event_log: EventLog, sequence: Sequence) -> LogEntry | None:
    """None if the log has it no longer, or does not answer within ENTRY_WALL_SECONDS."""
    try:
        async with asyncio.timeout(float(ENTRY_WALL_SECONDS)):
            async with aclosing(event_log.read(sequence)) as entries:  # type: ignore[type-var]
                async for entry in entries:
                    return entry if isinstance(entry, LogEntry) and entry.sequence == sequence else None
    except TimeoutError:
        pass
    return None
