"""The only task that appends to the log. While the log is unavailable, changes gather in the translator. A report, to the
leader or to the log, follows the changes before it, so its digest matches the log."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from pointsman.adapters.backoff import Backoff
from pointsman.contracts.codec import LogEvent, UnwritableError
from pointsman.contracts.fleet import InstanceLeft
from pointsman.ports import EventLog, LogUnavailableError
from pointsman.primitives import EngineSeconds, Epoch, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_worker.event_sequencer import CacheEvents
from pointsman_worker.fleet_events import FleetEvents
from pointsman_worker.heartbeats import Heartbeats
from pointsman_worker.saved_session import SessionStore
from pointsman_worker.session import CacheSession, SessionState
from pointsman_worker.tiers import STORE

log = structlog.get_logger()

CACHE_EVENTS_PART = "cache events"
SNAPSHOT_SECONDS_MAX = 5.0
APPEND_RETRY_SECONDS: WallSeconds = WallSeconds(0.2)
APPEND_RETRY_SECONDS_MAX: WallSeconds = WallSeconds(2.0)
LOG_CHECK_SECONDS: WallSeconds = WallSeconds(5.0)
EPOCH_SECONDS_MIN: WallSeconds = WallSeconds(1.0)
"""Between two joins; an engine can end its epoch with each batch."""


@dataclass(eq=False)
class LogWriter:
    event_log: EventLog
    state: SessionState
    fleet_events: FleetEvents
    session_store: SessionStore
    board: HealthBoard
    heartbeats: Heartbeats
    _log_checked_at: WallSeconds = field(default=WallSeconds(0.0), init=False)
    _joins_at: WallSeconds = field(default=WallSeconds(0.0), init=False)
    _snapshots: list[asyncio.Future[None]] = field(default_factory=list, init=False)
    _leaving: str = field(default="", init=False)
    _back_within: WallSeconds | None = field(default=None, init=False)

    def leave(self, reason: str, *, back_within: WallSeconds | None = None) -> None:
        """Ends `run` with InstanceLeft, or with a handover for a successor that is `back_within`."""
        self._leaving, self._back_within = reason, back_within
        self.state.write_now()

    async def run(self) -> None:
        state = self.state
        while not self._leaving:
            await self._until_due()
            state.wake.clear()
            state.hurry.clear()
            state.expire()
            session = state.session
            reporting = state.clock.wall() >= state.report_at
            if reporting:
                state.report_at = state.clock.wall() + state.settings.report_seconds
            if session is None or not await self._write(session, reporting=reporting):
                continue
            if state.report_wanted:
                state.report_wanted = False
                await self._report(session)
            elif reporting:
                self.heartbeats.tell(self.fleet_events.reported(session))
            if reporting:
                await self._check_log(session)
        await self._end()

    @property
    def snapshots_waiting(self) -> int:
        return len(self._snapshots)

    async def snapshot(self) -> str:
        """Returns an empty string, or why no snapshot is in the log."""
        written = asyncio.get_running_loop().create_future()
        self._snapshots.append(written)
        self.state.write_now()
        try:
            async with asyncio.timeout(SNAPSHOT_SECONDS_MAX):
                await written
        except TimeoutError:
            return "the log did not confirm in time"
        finally:
            with contextlib.suppress(ValueError):
                self._snapshots.remove(written)
        return ""

    async def _until_due(self) -> None:
        state = self.state
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, float(state.report_at - state.clock.wall()))):
                await state.wake.wait()
                async with asyncio.timeout(state.flush_seconds):
                    await state.hurry.wait()

    async def _write(self, session: CacheSession, *, reporting: bool) -> bool:
        """Returns False if the session ended. It joins only when requests may be placed there, and not soon after another."""
        if not session.joined_at:
            state = self.state
            if state.withheld:
                return False
            if state.clock.wall() < self._joins_at:
                state.report_at = self._joins_at
                return False
            if not await self._append(self.fleet_events.joined(session), session):
                return False
            state.joined_epoch = session.epoch
            self._joins_at = state.clock.wall() + EPOCH_SECONDS_MIN
            if state.session is not session:  # it would take changes that the next epoch has to write
                return False
        snapshots, self._snapshots = self._snapshots, []
        due = deque(self._due_events(session, snapshot=bool(snapshots), gaps=reporting))
        while due:
            if not await self._append(due[0], session):
                self._snapshots = snapshots + self._snapshots
                if session.translator is not None:
                    session.translator.tell_again(due)
                return False
            due.popleft()
        for written in snapshots:
            if not written.done():
                written.set_result(None)
        return True

    def _due_events(self, session: CacheSession, *, snapshot: bool, gaps: bool) -> Iterator[CacheEvents]:
        if session.translator is None or (self.state.catching_up and not snapshot):
            return
        at = self.state.clock.now()
        if session.missed_reason and gaps:
            yield session.sequencer.gap(at, session.missed, session.missed_reason)
            session.missed, session.missed_reason = 0, ""
        translator, sequencer = session.translator, session.sequencer
        if snapshot or session.snapshot_due or translator.snapshot_is_smaller:
            session.snapshot_due = False
            if translator.store is not None:  # a snapshot replaces what the engine holds, not what the store does
                yield from sequencer.changes(at, translator.store.keys.take_changes(), STORE)
            if translator.device.keys.cleared:  # all contents are known since, which a snapshot does not say
                session.cache, session.detail = "empty", ""
                yield sequencer.cleared(at)
            yield from sequencer.snapshot(at, translator.device.keys.take_snapshot())
            for tier, blocks in translator.slower.items():
                yield from sequencer.stored(at, blocks.keys.take_snapshot(), tier)
            return
        changes = translator.device.keys.take_changes()
        if changes.cleared:
            session.cache, session.detail = "empty", ""
        yield from sequencer.changes(at, changes)
        for tier, blocks in translator.slower.items():
            yield from sequencer.changes(at, blocks.keys.take_changes(), tier)

    async def _report(self, session: CacheSession, *, back_within: EngineSeconds = 0.0) -> None:
        """Not retried: the next heartbeat replaces it."""
        report = self.fleet_events.reported(session, back_within=back_within)
        try:
            self.state.position.confirm(await self.event_log.append(report))
        except LogUnavailableError:
            pass
        except UnwritableError as error:
            self._note_unwritable(error)

    async def _check_log(self, session: CacheSession) -> None:
        state = self.state
        if not state.position.went_back and state.clock.wall() - self._log_checked_at < LOG_CHECK_SECONDS:
            return
        self._log_checked_at = state.clock.wall()
        try:
            extent = await self.event_log.extent()
        except LogUnavailableError:
            return
        session.log_identity = session.log_identity or extent.identity
        same = extent.identity == session.log_identity and not state.position.went_back
        retained = extent.first <= session.joined_at and state.position.written <= extent.last
        if state.session is session and not (same and retained):
            log.warning("log_recreated", identity=extent.identity, first=extent.first, last=extent.last)
            state.rejoin(session)

    async def _append(self, event: LogEvent, session: CacheSession) -> bool:
        """Retries without bound: a missing event is a gap. Returns False if the session ended, also because no retry
        can help: a new epoch joins, and its snapshot takes the place of the event."""
        state, backoff = self.state, Backoff(APPEND_RETRY_SECONDS, APPEND_RETRY_SECONDS_MAX)
        while state.session is session:
            try:
                sequence = await self.event_log.append(event)
            except LogUnavailableError as error:
                self.board.missing(CACHE_EVENTS_PART, str(error))
                if not backoff.attempts:
                    log.warning("log_unavailable", reason=str(error))
                await state.clock.sleep_wall(backoff.next_wait())
            except UnwritableError as error:
                self._note_unwritable(error)
                await state.clock.sleep_wall(APPEND_RETRY_SECONDS_MAX)
                if state.session is session:
                    state.rejoin(session)
            else:
                state.position.confirm(sequence)
                self.board.restored(CACHE_EVENTS_PART)
                session.joined_at = session.joined_at or sequence
                return True
        return False

    def _note_unwritable(self, error: UnwritableError) -> None:
        self.board.missing(CACHE_EVENTS_PART, str(error))
        log.error("event_unwritable", instance=self.state.instance, reason=str(error))

    async def _end(self) -> None:
        session = self.state.session
        if self._back_within is not None:
            if session is not None and session.joined_at:
                await self._pause(session, self._back_within)
            return
        if session is not None and session.joined_at:
            await self._write(session, reporting=True)
        if self.state.joined_epoch:
            await self._leave()

    async def _pause(self, session: CacheSession, back_within: WallSeconds) -> None:
        if not await self._write(session, reporting=True):
            return
        await self._report(session, back_within=float(back_within) * self.state.clock.speed)
        while session.translator is not None and session.translator.changed and not self.state.catching_up:
            if not await self._write(session, reporting=True):
                break
        self.session_store.save(session)

    async def _leave(self) -> None:
        """Retried until the caller gives up."""
        state = self.state
        left = InstanceLeft(
            at=state.clock.now(), instance=state.instance, epoch=state.joined_epoch, reason=self._leaving
        )
        backoff = Backoff(APPEND_RETRY_SECONDS, APPEND_RETRY_SECONDS_MAX)
        while True:
            try:
                await self.event_log.append(left)
            except LogUnavailableError:
                await state.clock.sleep_wall(backoff.next_wait())
            except UnwritableError as error:
                self._note_unwritable(error)
                return
            else:
                state.joined_epoch = Epoch(0)
                return
