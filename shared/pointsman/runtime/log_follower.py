"""Follows the log in services that do not lead. In: log entries. Out: a State, and readiness once it has caught up."""

from collections.abc import Callable, Iterable

from pointsman.contracts.codec import LogEvent
from pointsman.ports import Clock, EventLog, LogEntry, LogMissingError, LogReset, LogUnavailableError
from pointsman.primitives import Sequence, WallSeconds
from pointsman.runtime.containment import DeadLetterWatch, contained
from pointsman.runtime.health import HealthBoard
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.base import Tracker

PART = "fold"
RETRY_WALL_SECONDS: WallSeconds = WallSeconds(0.1)


async def end_of_log(event_log: EventLog, *, clock: Clock, board: HealthBoard, part: str) -> Sequence:
    while True:
        try:
            return (await event_log.extent()).last
        except (LogUnavailableError, LogMissingError) as error:
            board.missing(part, f"the log does not answer: {error}")
            await clock.sleep_wall(RETRY_WALL_SECONDS)


class LogFollower:
    def __init__(
        self,
        event_log: EventLog,
        *,
        clock: Clock,
        board: HealthBoard,
        settings: PoolSettings,
        on_event: Callable[[LogEvent], None] = lambda _event: None,
        trackers: Callable[[], Iterable[Tracker]] = tuple,
    ) -> None:
        """`on_event`: called after each applied event. `trackers`: creates those of a new State."""
        self._on_event = on_event
        self._log = event_log
        self._clock = clock
        self._board = board
        self._settings = settings
        self._trackers = trackers
        self._end: Sequence | None = None
        self._dead_letters = DeadLetterWatch(board.pool)
        self.first_sequence: Sequence = 1
        """Of the state; above 1 the log has lost earlier entries."""
        self.state = State(settings, trackers())

    @property
    def caught_up(self) -> bool:
        """Whether it has read all that was stored when it began."""
        return self._end is not None and self.state.sequence >= self._end

    async def run(self) -> None:
        """Never returns."""
        await self._measure_backlog("folding the log")
        async for entry in self._log.read(1):
            if isinstance(entry, LogReset):
                self.state = State(self._settings, self._trackers())
                await self._measure_backlog(entry.reason)
            else:
                self._take_in(entry)
                self._note_progress()

    async def _measure_backlog(self, reason: str) -> None:
        self._board.missing(PART, reason)
        self._end = None
        self._end = await end_of_log(self._log, clock=self._clock, board=self._board, part=PART)
        self._note_progress()

    def _note_progress(self) -> None:
        if self.caught_up:
            self._board.restored(PART)

    def _take_in(self, entry: LogEntry) -> None:
        if not self.state.sequence:
            self.first_sequence = entry.sequence
        self.state.apply_entry(entry)
        if entry.event is not None:
            with contained("log_entry"):
                self._on_event(entry.event)
        self._dead_letters.look(self.state.dead_letters)
