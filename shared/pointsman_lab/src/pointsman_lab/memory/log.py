"""In-memory event log under the contract suite of `adapters.jetstream`. A `MemoryBroker` is the server, each `client` a
process. Deterministic: writes are stored within the call. Faults are methods of the broker and a `fault` for each
write."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.codec import LogEvent, UnwritableError, encode
from pointsman.contracts.decisions import LeaderElected, WritesLost
from pointsman.contracts.subjects import SUBJECT_ROOT, leader_subject, message_id, subject_of
from pointsman.ports import (
    NONE_UNCONFIRMED,
    Clock,
    ElectionLostError,
    EventLog,
    Fence,
    Link,
    LogEntry,
    LogExtent,
    LogReset,
    LogUnavailableError,
    OnStored,
    UnconfirmedWrites,
)
from pointsman.primitives import PoolName, Sequence, WallSeconds
from pointsman_lab.memory.commands import CommandBus, MemoryCommands
from pointsman_lab.memory.stores import MemoryCheckpoints, MemoryKeyValueStore, MemoryLease

WINDOW_MAX = 16_384
MESSAGE_IDS_MAX = 100_000
BYTES_MAX = 1024**3

Fault = Literal["none", "lose", "duplicate"]
"""Fate of a write: stored, lost, or stored twice (as after the duplicate window)."""


@dataclass(frozen=True, slots=True)
class _Stored:
    subject: str
    payload: bytes


class MemoryBroker:
    def __init__(self, pool: PoolName, *, fault: Callable[[LogEvent], Fault] = lambda _event: "none") -> None:
        self.pool = pool
        self.fault = fault
        self.available = True
        self.bytes_max = BYTES_MAX
        self._bytes = 0
        self._epoch = 1
        self._first: Sequence = 1
        self._entries: deque[_Stored] = deque()
        self._ids: OrderedDict[str, Sequence] = OrderedDict()
        self._elections: list[Sequence] = []
        self.lease = MemoryLease(lambda: self.available)
        self.scaler_lease = MemoryLease(lambda: self.available)
        self.access = MemoryKeyValueStore(lambda: self.available)
        self.checkpoints = MemoryCheckpoints(lambda: self.available)
        self._clients: list[_Writes] = []
        self._commands = CommandBus(lambda: self.available)
        self._waiters: dict[asyncio.Future[None], None] = {}

    def client(
        self, clock: Clock, *, name: str, listener: LogListener | None = None, window_max: int = WINDOW_MAX
    ) -> Link:
        """One process's log and commands. `window_max`: writes held while the broker is unavailable."""
        listener = listener or LogListener()
        writes = _Writes(self, clock, name, listener, window_max)
        self._clients.append(writes)
        return Link(
            MemoryLog(self, writes, listener),
            MemoryCommands(self._commands, listener),
            self.lease,
            self.checkpoints,
            self.scaler_lease,
            self.access,
        )

    @property
    def extent(self) -> LogExtent:
        return LogExtent(f"memory-{self._epoch}", self._first, self._first + len(self._entries) - 1)

    def disconnect(self) -> None:
        self.available = False

    def reconnect(self) -> None:
        self.available = True
        for writes in self._clients:
            writes.resume()
        self._wake()

    def drop_before(self, sequence: Sequence) -> None:
        """Retention drops the oldest entries."""
        while self._entries and self._first < sequence:
            self._drop_oldest()
        self._wake()

    def lose_after(self, sequence: Sequence) -> None:
        """A power cut: the tail is lost and its sequences are reused."""
        while self.extent.last > sequence:
            self._bytes -= len(self._entries.pop().payload)
        self._ids = OrderedDict((key, at) for key, at in self._ids.items() if at <= sequence)
        self._elections = [at for at in self._elections if at <= sequence]
        self._wake()

    def recreate(self) -> None:
        self._epoch += 1
        self._first = 1
        self._bytes = 0
        self._entries.clear()
        self._ids.clear()
        self._elections.clear()
        self._wake()

    def store_raw(self, subject: str, payload: bytes) -> Sequence:
        """Store anything, as any client of the server could."""
        self._entries.append(_Stored(subject, payload))
        if subject == leader_subject(self.pool):
            self._elections.append(self.extent.last)
        self._bytes += len(payload)
        while self._bytes > self.bytes_max:
            self._drop_oldest()
        self._wake()
        return self.extent.last

    def store(self, event: LogEvent, writer: str = "") -> Sequence:
        """Store unless the message id is known from this writer."""
        identity = message_id(event)
        if identity is not None:
            identity = f"{writer}.{identity}"
        if identity is not None and identity in self._ids:
            return self._ids[identity]
        sequence = self.store_raw(subject_of(self.pool, event), encode(event))
        if identity is not None:
            self._ids[identity] = sequence
            if len(self._ids) > MESSAGE_IDS_MAX:
                self._ids.popitem(last=False)
        return sequence

    def elect(self, event: LeaderElected, after: Sequence) -> Sequence:
        """Store if the newest remaining election is at `after`. Raises ElectionLostError."""
        if self._elected != after:
            raise ElectionLostError(f"the last election is at {self._elected}, not {after}")
        return self.store(event)

    def may_write(self, fence: Fence) -> bool:
        """Whether a leader may write; otherwise breaks the fence. An election that retention dropped proves nothing."""
        if not fence.broken and self._elected not in (0, fence.elected):
            fence.broken = f"another leader was elected at {self._elected}"
        return not fence.broken

    @property
    def _elected(self) -> Sequence:
        """Sequence of the newest remaining LeaderElected, or 0."""
        return self._elections[-1] if self._elections and self._elections[-1] >= self._first else 0

    def at(self, sequence: Sequence) -> _Stored | None:
        index = sequence - self._first
        return self._entries[index] if 0 <= index < len(self._entries) else None

    async def changed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    def _drop_oldest(self) -> None:
        self._bytes -= len(self._entries.popleft().payload)
        self._first += 1

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Continuity:
    """Of one process: whether the log still has what it has read. Its fence breaks where not."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._read: tuple[Sequence, _Stored | None] = (0, None)
        self.fence: Fence | None = None

    def note(self, found: LogEntry | LogReset) -> None:
        if isinstance(found, LogReset):
            self._read = (0, None)
        elif found.sequence > self._read[0]:
            self._read = (found.sequence, self._broker.at(found.sequence))

    def check(self) -> None:
        """After a reconnection, before anything is written."""
        sequence, stored = self._read
        if self.fence is not None and sequence >= self._broker.extent.first and self._broker.at(sequence) != stored:
            self.fence.broken = self.fence.broken or f"the log has lost entry {sequence}, which was read"


class _Writes:
    def __init__(self, broker: MemoryBroker, clock: Clock, name: str, listener: LogListener, window_max: int) -> None:
        self._broker = broker
        self._clock = clock
        self._name = name
        self._session = f"{name} {id(self)}"
        self._listener = listener
        self._window_max = window_max
        self._held: deque[tuple[LogEvent, Fence | None, OnStored | None]] = deque()
        self._held_since = 0.0
        self._lost = 0
        self._lost_reason = ""
        self.continuity = Continuity(broker)
        self.idle = asyncio.Event()
        self.idle.set()

    def put(self, event: LogEvent, fence: Fence | None = None, on_stored: OnStored | None = None) -> None:
        if self._broker.available:
            self._write_or_lose(event, fence, on_stored)
            self.mark_loss()
        elif len(self._held) < self._window_max:
            self._held_since = self._held_since if self._held else asyncio.get_running_loop().time()
            self._held.append((event, fence, on_stored))
            self.idle.clear()
        else:
            self._lose("too many writes wait for their confirmation")

    @property
    def load(self) -> float:
        return len(self._held) / self._window_max

    @property
    def unconfirmed(self) -> UnconfirmedWrites:
        if not self._held:
            return NONE_UNCONFIRMED
        return UnconfirmedWrites(len(self._held), WallSeconds(asyncio.get_running_loop().time() - self._held_since))

    def write(self, event: LogEvent, fence: Fence | None = None, on_stored: OnStored | None = None) -> Sequence | None:
        """Returns None if lost by a fault or by the fence. Raises UnwritableError."""
        if fence is not None and not self._broker.may_write(fence):
            return None
        fault = self._broker.fault(event)
        if fault == "lose":
            self._lose("lost by a fault")
            return None
        sequence = self._broker.store(event, self._session)
        if fault == "duplicate":
            self._broker.store_raw(subject_of(self._broker.pool, event), encode(event))
        self._listener.appended(type(event).__name__)
        if on_stored is not None:
            on_stored(sequence)
        return sequence

    def resume(self) -> None:
        self.continuity.check()
        while self._held:
            self._write_or_lose(*self._held.popleft())
        self.mark_loss()
        self.idle.set()

    def mark_loss(self) -> None:
        """Append a WritesLost event."""
        count, self._lost = self._lost, 0
        if count:
            self._broker.store(
                WritesLost(at=self._clock.now(), writer=self._name, count=count, reason=self._lost_reason)
            )

    def _write_or_lose(self, event: LogEvent, fence: Fence | None, on_stored: OnStored | None) -> None:
        try:
            self.write(event, fence, on_stored)
        except UnwritableError as error:
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self._lost += 1
        self._lost_reason = reason
        self._listener.lost(1, reason)


class MemoryLog(EventLog):
    def __init__(self, broker: MemoryBroker, writes: _Writes, listener: LogListener) -> None:
        self._broker = broker
        self._writes = writes
        self._listener = listener

    @override
    async def append(self, event: LogEvent) -> Sequence:
        sequence = self._writes.write(event) if self._broker.available else None
        if sequence is None:
            raise LogUnavailableError("the write was not confirmed")
        return sequence

    @override
    def append_soon(self, event: LogEvent, fence: Fence | None = None, on_stored: OnStored | None = None) -> None:
        self._writes.put(event, fence, on_stored)

    @property
    @override
    def write_load(self) -> float:
        return self._writes.load

    @property
    @override
    def unconfirmed(self) -> UnconfirmedWrites:
        return self._writes.unconfirmed

    @override
    async def elect(self, event: LeaderElected, *, after: Sequence) -> Fence:
        if not self._broker.available:
            raise LogUnavailableError("the broker is away")
        try:
            fence = Fence(self._broker.elect(event, after))
        except UnwritableError as error:
            raise LogUnavailableError(str(error)) from error
        self._writes.continuity.fence = fence
        return fence

    @override
    async def flush(self, timeout: WallSeconds) -> bool:
        try:
            async with asyncio.timeout(float(timeout)):
                await self._writes.idle.wait()
        except TimeoutError:
            return False
        return True

    @override
    async def extent(self) -> LogExtent:
        if not self._broker.available:
            raise LogUnavailableError("the broker is away")
        return self._broker.extent

    @override
    async def read(
        self, start: Sequence = 1, *, kinds: tuple[str, ...] = (), at_end: Callable[[], None] = lambda: None
    ) -> AsyncIterator[LogEntry | LogReset]:
        reader = _Reader(self._broker, start, kinds)
        while True:
            found = reader.next() if self._broker.available else None
            if found is None:
                if self._broker.available:
                    at_end()
                await self._broker.changed()
                continue
            if isinstance(found, LogReset):
                self._listener.reset(found.reason)
            elif found.event is None:
                self._listener.undecodable(found.subject, found.problem)
            self._writes.continuity.note(found)
            yield found


class _Reader:
    def __init__(self, broker: MemoryBroker, start: Sequence, kinds: tuple[str, ...]) -> None:
        self._broker = broker
        self._position = start - 1
        self._identity: str | None = None
        self._last: _Stored | None = None
        self._prefixes = tuple(f"{SUBJECT_ROOT}.{broker.pool}.{kind}" for kind in kinds)

    def next(self) -> LogEntry | LogReset | None:
        extent = self._broker.extent
        broken = self._broken(extent)
        self._identity = extent.identity
        if broken:
            self._position, self._last = extent.first - 1, None
            return LogReset(extent.first, broken)
        while (stored := self._broker.at(self._position + 1)) is not None:
            self._position += 1
            self._last = stored
            if self._wanted(stored.subject):
                return LogEntry.read(self._position, stored.subject, stored.payload)
        return None

    def _broken(self, extent: LogExtent) -> str:
        if self._identity not in (None, extent.identity):
            return "the log was recreated"
        if extent.last < self._position:
            return f"the log ends at {extent.last}, but {self._position} was read"
        if extent.first > self._position + 1:
            return f"entries {self._position + 1} to {extent.first - 1} were dropped before they were read"
        if self._last is not None and self._broker.at(self._position) not in (None, self._last):
            return f"the log went on differently after entry {self._position}"
        return ""

    def _wanted(self, subject: str) -> bool:
        return not self._prefixes or any(subject == p or subject.startswith(p + ".") for p in self._prefixes)
