"""The recorder. In: every log entry. Out: each of them once, in SQL. After a crash, and when the database has lost what it
had stored, reading resumes at the highest archived sequence; if that entry differs now, the log went back, and a new
history begins. While the database is away the queue fills and reading waits."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog

from pointsman.adapters.backoff import Backoff
from pointsman.contracts.codec import short_reason
from pointsman.ports import Clock, EventLog, LogEntry, LogExtent, LogReset
from pointsman.primitives import Sequence, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_extent import await_extent
from pointsman.runtime.telemetry import RECORDER_ARCHIVED_SEQUENCE
from pointsman_recorder.archive import STEP_SECONDS_MAX, Archive, Batch, Branch
from pointsman_recorder.database_errors import (
    DATABASE_ERRORS,
    RefusedError,
    SetBackError,
    UnusableDatabaseError,
    reason_of,
)

log = structlog.get_logger()
T = TypeVar("T")
ARCHIVE_PART = "archive"
QUEUE_BATCHES_MAX = 4
QUEUE_BYTES_MAX = 32 * 1024**2
BATCH_BYTES_MAX = 16 * 1024**2
"""Of payloads, and one more: an event in memory takes about twice as much, and the rows of a batch as much again."""
RETRY_SECONDS_MIN: WallSeconds = WallSeconds(0.1)
RETRY_SECONDS_MAX: WallSeconds = WallSeconds(5.0)
FINISH_SECONDS_MAX = 2.0
SUBJECT_LENGTH_MAX = 255
NUL_ESCAPE = b"\\u0000"
"""PostgreSQL cannot parse JSON with NUL, so the view of all requests would fail."""
ESCAPED_BACKSLASH = b"\\\\"
"""Behind one, the same letters are text of six characters."""


@dataclass(frozen=True, slots=True)
class _Read:
    branch: Branch
    entry: LogEntry


@dataclass(frozen=True, slots=True)
class _Opened:
    branch: Branch
    first: Sequence
    after: Branch | None = None
    after_sequence: Sequence = 0
    reason: str = ""


_Item = _Read | _Opened


class Recorder:
    def __init__(
        self,
        event_log: EventLog,
        archive: Archive,
        clock: Clock,
        board: HealthBoard,
        *,
        batch_events: int,
        batch_seconds: WallSeconds,
    ) -> None:
        self._log = event_log
        self._archive = archive
        self._clock = clock
        self._board = board
        self._batch_events = batch_events
        self._batch_seconds = batch_seconds
        self._queue: asyncio.Queue[_Item | None] = asyncio.Queue(QUEUE_BATCHES_MAX * batch_events)
        self._queued_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._finished = asyncio.Event()
        self.archived_sequence: Sequence = 0
        self._stored: Branch | None = None
        """As far as the archive should have it."""
        self._numbers: dict[str, int] = {}  # of the newest history of each stream
        self._collecting = asyncio.timeout(None)
        self._resumed = asyncio.Event()
        board.missing(ARCHIVE_PART, "not opened yet")

    async def collect(self) -> None:
        while True:
            await self._persistently(self._archive.prepare)
            branch = await self._resume_point()
            log.info("recording", log=branch.log, after_sequence=branch.last)
            self._resumed.set()
            await self._collect(branch)
            self._drop_queued()

    async def archive(self) -> None:
        finished = False
        while not finished:
            items, finished = await self._next_items()
            if items:
                await self._store_or_resume(items)
        self._finished.set()

    async def finish(self) -> None:
        """Store what is collected, within FINISH_SECONDS_MAX; the rest stays in the log."""
        try:
            async with asyncio.timeout(FINISH_SECONDS_MAX):
                await self._queue.put(None)
                await self._finished.wait()
        except TimeoutError:
            log.warning("archive_flush_timeout", entries=self._queue.qsize(), note="the next start goes on from SQL")

    def _archived(self, sequence: Sequence) -> None:
        self.archived_sequence = sequence
        RECORDER_ARCHIVED_SEQUENCE.labels(self._board.pool).set(sequence)

    async def _resume_point(self) -> Branch:
        extent = await self._extent()
        self._numbers = await self._persistently(self._archive.newest_numbers)
        known = await self._persistently(partial(self._archive.latest_branch, extent.identity))
        branch = known or self._next_branch(extent.identity)
        if known is None:
            await self._queue.put(_Opened(branch, first=1))
        self._stored, self._archive.followed = known, known.log if known else ""
        self._archived(branch.last)
        return branch

    async def _collect(self, branch: Branch) -> None:
        """Until the archive is set back. Asks the database nothing: such a step must not be interrupted."""
        try:
            async with asyncio.timeout(None) as self._collecting:
                while True:
                    branch = await self._follow(branch)
        except TimeoutError:
            if not self._collecting.expired():
                raise

    async def _follow(self, branch: Branch) -> Branch:
        """Collect `branch`. Returns the next branch to follow, from its start."""
        last = branch.last
        async for found in self._log.read(max(1, last)):
            if isinstance(found, LogReset):
                branch = await self._after_reset(branch, last, found)
                last = found.first_sequence - 1
            elif found.sequence > last:
                await self._has_room.wait()
                self._count_queued(len(found.payload))
                await self._queue.put(_Read(branch, found))
                last = found.sequence
            elif branch.tail not in (None, found.payload):
                forked = self._next_branch(branch.identity)
                reason = f"the log went on differently after entry {last - 1}"
                await self._open(_Opened(forked, first=1, after=branch, after_sequence=last, reason=reason))
                return forked
        raise AssertionError("reading the log ended, which it never does")

    async def _after_reset(self, branch: Branch, last: Sequence, reset: LogReset) -> Branch:
        """Missing entries leave a gap in the history; reused sequences start a new one."""
        identity = (await self._extent()).identity
        first = reset.first_sequence
        same = identity == branch.identity and first > last
        following = replace(branch, last=last, tail=None) if same else self._next_branch(identity)
        if not same or first > last + 1:
            await self._open(_Opened(following, first, after=branch, after_sequence=last, reason=reset.reason))
        return following

    def _next_branch(self, identity: str) -> Branch:
        self._numbers[identity] = self._numbers.get(identity, 0) + 1
        return Branch(identity, self._numbers[identity])

    async def _open(self, opened: _Opened) -> None:
        log.warning("archive_gap", log=opened.branch.log, at_sequence=opened.first, reason=opened.reason)
        await self._queue.put(opened)

    async def _extent(self) -> LogExtent:
        return await await_extent(self._log, self._clock, self._board, ARCHIVE_PART)

    async def _next_items(self) -> tuple[list[_Item], bool]:
        first = await self._queue.get()
        if first is not None and self._queue.qsize() + 1 < self._batch_events:
            await self._clock.sleep_wall(self._batch_seconds)
        items: list[_Item] = []
        item, size = first, 0
        while item is not None:
            items.append(item)
            if isinstance(item, _Read):
                size += len(item.entry.payload)
                self._count_queued(-len(item.entry.payload))
            if len(items) == self._batch_events or size > BATCH_BYTES_MAX or self._queue.empty():
                return items, False
            item = self._queue.get_nowait()
        return items, True

    def _count_queued(self, more: int) -> None:
        self._queued_bytes += more
        if self._queued_bytes > QUEUE_BYTES_MAX:
            self._has_room.clear()
        else:
            self._has_room.set()

    def _drop_queued(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
        self._count_queued(-self._queued_bytes)

    async def _store_or_resume(self, items: list[_Item]) -> None:
        """If the archive was set back, all that is read by now is read again, behind what it still has."""
        try:
            await self._store(items)
        except SetBackError as error:
            log.warning("archive_set_back", reason=str(error), note="what is missing is read from the log again")
            self._resumed.clear()
            self._collecting.reschedule(0.0)
            await self._resumed.wait()

    async def _store(self, items: list[_Item]) -> None:
        """In halves if that takes too long. An entry that the database rejects becomes a dead letter. Raises SetBackError."""
        middle = len(items) // 2
        try:
            raised = (TimeoutError,) if middle else ()
            await self._persistently(partial(self._archive.store, _batch_of(items), self._stored), raised)
        except (RefusedError, TimeoutError) as error:
            for part in (items[:middle], items[middle:]) if middle else ():
                await self._store(part)
            if not middle:
                batch = Batch()
                if isinstance(items[0], _Read):
                    _add_dead(batch, items[0], f"the database refused it: {error}")
                await self._persistently(partial(self._archive.store, batch, self._stored))
        last = items[-1]
        self._stored = last.branch
        if isinstance(last, _Read):
            self._stored = replace(last.branch, last=last.entry.sequence, tail=None)
            self._archived(last.entry.sequence)

    async def _persistently(self, step: Callable[[], Awaitable[T]], raised: tuple[type[Exception], ...] = ()) -> T:
        """Retry a database step until it succeeds; not ready meanwhile. Raises RefusedError, SetBackError, and `raised`."""
        backoff = Backoff(RETRY_SECONDS_MIN, RETRY_SECONDS_MAX)
        while True:
            try:
                done = await self._watched(step)
            except (*DATABASE_ERRORS, UnusableDatabaseError) as error:
                reason, wait = reason_of(error), backoff.next_wait()
                self._board.missing(ARCHIVE_PART, reason)
                log.warning("archive_unavailable", reason=reason, retry_seconds=wait)
                await self._clock.sleep_wall(wait)
                if isinstance(error, raised):
                    raise
            else:
                self._board.restored(ARCHIVE_PART)
                return done

    async def _watched(self, step: Callable[[], Awaitable[T]]) -> T:
        """Not ready once it takes too long: a step on a hanging disk does not end."""
        hangs = f"the database has not answered for {STEP_SECONDS_MAX:g} s"
        late = asyncio.get_running_loop().call_later(STEP_SECONDS_MAX, self._board.missing, ARCHIVE_PART, hangs)
        try:
            return await step()
        finally:
            late.cancel()


def _batch_of(items: list[_Item]) -> Batch:
    batch = Batch()
    for item in items:
        if isinstance(item, _Opened):
            _add_opened(batch, item)
        elif item.entry.event is None:
            _add_dead(batch, item, item.entry.problem)
        elif NUL_ESCAPE in item.entry.payload.replace(ESCAPED_BACKSLASH, b""):
            _add_dead(batch, item, "it has a NUL character, which SQL keeps in no text")
        else:
            _add_event(batch, item)
    return batch


def _add_opened(batch: Batch, opened: _Opened) -> None:
    branch = opened.branch
    batch.logs.append({"log": branch.log, "identity": branch.identity, "branch": branch.number})
    if opened.after is not None:
        batch.gaps.append(
            {
                "log": branch.log,
                "sequence": opened.first,
                "after_log": opened.after.log,
                "after_sequence": opened.after_sequence,
                "reason": opened.reason,
            }
        )


def _add_event(batch: Batch, read: _Read) -> None:
    event = read.entry.event
    assert event is not None
    batch.events.append(
        {
            "log": read.branch.log,
            "sequence": read.entry.sequence,
            "at": event.at,
            "type": type(event).__name__,
            "subject": read.entry.subject,
            "instance": getattr(event, "instance", "") or None,
            "request": getattr(event, "request", None),
            "payload": read.entry.payload.decode(),
        }
    )


def _add_dead(batch: Batch, read: _Read, problem: str) -> None:
    batch.dead_letters.append(
        {
            "log": read.branch.log,
            "sequence": read.entry.sequence,
            "subject": read.entry.subject[:SUBJECT_LENGTH_MAX].replace("\x00", ""),
            "payload": read.entry.payload,
            "problem": short_reason(problem),
        }
    )
