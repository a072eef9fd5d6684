"""Follows a running fleet's log by itself: it asks no scheduler for anything. It begins at a checkpoint that leaves some
history to show, or at the log's beginning; a reset of the log begins again with an empty State."""

import asyncio
from contextlib import aclosing

import structlog
from typing_extensions import override

from pointsman.contracts.decisions import LeaderElected
from pointsman.ports import (
    CheckpointLabel,
    Clock,
    Link,
    LogEntry,
    LogExtent,
    LogReset,
    StoreUnavailableError,
)
from pointsman.primitives import PoolName
from pointsman.runtime.checkpoint_fingerprint import entry_digest
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import LOG_PART, NATS_PART
from pointsman.runtime.log_extent import await_extent
from pointsman.runtime.log_follower import entry_at
from pointsman.simulation.replay.folding import recorded_pool_settings
from pointsman.state.state import PoolSettings, State
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.console.log.source import LogSource
from pointsman_cli.console.views import Health
from pointsman_cli.history.checkpoint import restored

log = structlog.get_logger()

PART = "fold"
HISTORY_ENTRIES_MAX = 300_000
"""The fold begins at most so many entries before the end of the log, where checkpoints allow it."""
TURN_WALL_SECONDS = 0.005
"""Folding gives way to viewers this often while it catches up."""
SETTINGS_ENTRIES_MAX = 10_000
"""Of a log without a checkpoint, to find the leader that tells the pool's settings."""
SILENT_WALL_SECONDS = 10.0
"""Workers report once a second. If no entry comes for so long, the log takes no writes, or all writers stand still."""


class LiveLog(LogSource):
    def __init__(
        self,
        link: Link,
        *,
        clock: Clock,
        board: HealthBoard,
        pool: PoolName,
        settings: PoolSettings,
        origin: str,
    ) -> None:
        """`settings`: until a leader has told the log its own."""
        super().__init__(pool=pool, board=board)
        self.origin = origin
        self._log = link.log
        self._checkpoints = link.checkpoints
        self._clock = clock
        self._settings = settings
        self._health: Health = "starting"
        self._turn_ends = 0.0
        self._read_at = 0.0

    @property
    @override
    def health(self) -> Health:
        return "disconnected" if self._health == "live" and NATS_PART in self.board.lacks else self._health

    @property
    @override
    def silent_seconds(self) -> int:
        if self.health != "live" or not self.observer.state.fleet.instances:
            return 0
        silent = float(self._clock.wall()) - self._read_at
        return int(silent) if silent >= SILENT_WALL_SECONDS else 0

    @override
    async def run(self) -> None:
        """Never returns."""
        self.board.missing(PART, "reading the log")
        self._health = "catching up"
        extent = await self._extent()
        self.board.restored(LOG_PART)  # a reader's connection does not tell
        state = await self._from_checkpoint(extent)
        if state is None and extent.first > 1:
            self.notes = [f"the log begins at entry {extent.first:,}; what was known before is missing"]
        self.until = extent.last
        observer = self.begin(state) if state is not None else None
        start = extent.first if state is None else state.sequence + 1
        waiting: list[LogEntry] = []
        async with aclosing(self._log.read(start, at_end=self._at_end)) as entries:  # type: ignore[type-var]
            async for entry in entries:
                self._read_at = float(self._clock.wall())
                if isinstance(entry, LogReset):
                    log.warning("console_starts_again", reason=entry.reason)
                    observer, waiting = None, []
                    await self._reset(entry)
                elif observer is not None:
                    self.take(observer, entry)
                else:
                    waiting.append(entry)
                    if isinstance(entry.event, LeaderElected) or self._knows_enough(waiting):
                        observer, waiting = self._begun(waiting), []
                await self._give_way()

    async def _reset(self, reset: LogReset) -> None:
        self.notes = [f"the log starts again at entry {reset.first_sequence:,}: {reset.reason}"]
        self.observer, self._health, self.first = Observer(State(self._settings)), "catching up", 0
        self.board.missing(PART, reset.reason)
        self.until = (await self._extent()).last

    def _knows_enough(self, waiting: list[LogEntry]) -> bool:
        """Without a leader's election."""
        return len(waiting) >= SETTINGS_ENTRIES_MAX or 0 < self.until <= waiting[-1].sequence

    def _begun(self, waiting: list[LogEntry]) -> Observer:
        event = waiting[-1].event
        settings = self._settings
        if isinstance(event, LeaderElected):
            try:
                settings = recorded_pool_settings(event.pool)
            except ValueError as error:
                log.warning("settings_unusable", problem=str(error))
        observer = self.begin(State(settings))
        for entry in waiting:
            self.take(observer, entry)
        return observer

    def _at_end(self) -> None:
        if self._health != "live":
            self._health = "live"
            self.board.restored(PART)
            self.board.restored(LOG_PART)  # a reader keeps no stream, so nobody else says that it is there

    async def _give_way(self) -> None:
        now = float(self._clock.wall())
        if now > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = float(self._clock.wall()) + TURN_WALL_SECONDS

    async def _extent(self) -> LogExtent:
        return await await_extent(self._log, self._clock, self.board, PART)

    async def _from_checkpoint(self, extent: LogExtent) -> State | None:
        """Of a log that is too long to be folded from its beginning, or has lost it."""
        if extent.first <= 1 and extent.last <= HISTORY_ENTRIES_MAX:
            return None
        try:
            for label in _by_history(await self._checkpoints.labels(), extent):
                content = await self._checkpoints.load(label)
                known = await asyncio.to_thread(restored, content, label.form) if content is not None else None
                if known is not None and await self._is_of_this_log(label, known.state):
                    log.info("checkpoint_restored", as_of=label.as_of, entries_behind=extent.last - label.as_of)
                    return known.state
        except StoreUnavailableError as error:
            log.warning("checkpoints_unavailable", problem=str(error))
        return None

    async def _is_of_this_log(self, label: CheckpointLabel, state: State) -> bool:
        entry = await entry_at(self._log, label.as_of)
        return entry is not None and entry_digest(entry) == label.entry and state.sequence == label.as_of


def _by_history(labels: list[CheckpointLabel], extent: LogExtent) -> list[CheckpointLabel]:
    """The oldest within HISTORY_ENTRIES_MAX first, then newer ones, then those before, newest first."""
    fitting = [
        label for label in labels if label.identity == extent.identity and extent.first <= label.as_of <= extent.last
    ]
    since = extent.last - HISTORY_ENTRIES_MAX
    within = sorted((label for label in fitting if label.as_of >= since), key=lambda label: label.as_of)
    before = sorted((label for label in fitting if label.as_of < since), key=lambda label: -label.as_of)
    return within + before
