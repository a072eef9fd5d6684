"""Protocols of the outside world: log, commands, clock, lease, key-value store, checkpoints and instance provider.
`adapters` implements them; `main.py` of a service chooses. Every wait takes a timeout, every window has a named limit."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pointsman.contracts.codec import AnyCommand, LogEvent, UndecodableError, decode_event
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.fleet import ANY_RANK
from pointsman.primitives import EngineSeconds, InstanceId, Rank, Seconds, Sequence, Term, WallSeconds, wall_time_of


class LogUnavailableError(Exception):
    """A write was not confirmed in time, though it may have been stored; or the log cannot be read now."""


class LogMissingError(LogUnavailableError): ...


class ElectionLostError(Exception):
    """Another LeaderElected came first."""


class LeaseTakenError(Exception):
    """Another process wrote the lease since it was read."""


class ValueChangedError(Exception):
    """Another process wrote the value since it was read."""


class StoreUnavailableError(Exception):
    """Lease, value or checkpoints could not be read or written in time. A write may have been stored."""


class ProviderError(Exception):
    """Instances could not be listed, started or stopped. The operation may have taken effect."""


class ProviderUnreachableError(ProviderError):
    """Whoever starts instances does not answer. It may later."""


class NoResponderError(Exception): ...


class ForbiddenError(NoResponderError):
    """The credentials do not allow the subject."""


class CommandRefusedError(NoResponderError):
    """Whoever serves the subject cannot read the command (CommandRefused). Nothing was done."""


class CommandUnsendableError(NoResponderError):
    """A value of it exceeds its bounds. Nothing was sent, and it is no use to try again."""


class CommandTooLargeError(CommandUnsendableError):
    """The message bus takes no command of this size."""


class CommandTimeoutError(Exception):
    """The command may have had its effect."""


class LogEntry(msgspec.Struct, frozen=True):
    """One stored message. `event` is None if it does not decode; `problem` has the reason."""

    sequence: Sequence
    subject: str
    payload: bytes
    event: LogEvent | None
    problem: str = ""

    @classmethod
    def read(cls, sequence: Sequence, subject: str, payload: bytes) -> "LogEntry":
        try:
            return cls(sequence, subject, payload, decode_event(payload, subject))
        except UndecodableError as error:
            return cls(sequence, subject, payload, None, str(error))

    @classmethod
    def foreign(cls, sequence: Sequence, subject: str) -> "LogEntry":
        """A message that no writer of this log put there. Without its payload, so that nobody ever decodes it."""
        return cls(sequence, subject, b"", None, "not of this pool")


@dataclass(frozen=True, slots=True)
class LogReset:
    """The log is discontinuous here: discard all state and start at `first_sequence`. Sent when the log was recreated,
    lost its tail in a power cut, or dropped unread entries."""

    first_sequence: Sequence
    reason: str


@dataclass(frozen=True, slots=True)
class LogExtent:
    """`identity` changes when the stream is recreated; `last` is 0 for a log that was always empty, and the last entry that
    there was, before `first`, for one whose entries have all expired. `bytes_max` is 0 if there is no limit.
    `copies_behind`: servers whose copy lacks the newest entries, or that are away."""

    identity: str
    first: Sequence
    last: Sequence
    bytes: int = 0
    bytes_max: int = 0
    copies_behind: int = 0

    @property
    def end(self) -> Sequence:
        """The last entry that can be read, or 0."""
        return self.last if self.first <= self.last else 0

    @property
    def entries(self) -> int:
        return max(0, self.last - self.first + 1)

    def has_in_oldest(self, share: float, sequence: Sequence) -> bool:
        """Whether the entry is in that share of the log. Never in a log that has dropped nothing yet."""
        return self.first > 1 and sequence - self.first < share * (self.last - self.first)


@dataclass(slots=True)
class Fence:
    """A leader's right to write decisions, valid until the next LeaderElected, or until the log has lost what the leader
    has read. Once `broken` has a reason, unwritten events are dropped."""

    elected: Sequence
    """Sequence of its LeaderElected."""
    broken: str = ""


OnStored = Callable[[Sequence], None]


@dataclass(frozen=True, slots=True)
class UnconfirmedWrites:
    """Of one process. `wait_seconds`: since the oldest was handed over, or, once the log confirms none, since it should
    have confirmed the first; it goes on growing when the oldest are lost. 0 without any."""

    count: int = 0
    wait_seconds: WallSeconds = WallSeconds(0.0)


NONE_UNCONFIRMED = UnconfirmedWrites()


class EventLog(Protocol):
    """A pool's log: durable, ordered, readable from any position. Appends of one process with equal message ids
    (`contracts.subjects.message_id`) are one event."""

    async def append(self, event: LogEvent) -> Sequence:
        """Store one event; retries a bounded number of times. Raises LogUnavailableError, or UnwritableError if it can
        never be stored."""
        ...

    def append_soon(self, event: LogEvent, fence: Fence | None = None, on_stored: OnStored | None = None) -> None:
        """Store one event in the background, in call order. Never waits, never raises. Bounded by `window_max`
        unconfirmed events. A lost event is counted and followed by WritesLost. With a `fence`, the event is dropped
        once the fence is broken; a server that supports it rejects the event and breaks the fence. `on_stored`: takes
        its sequence once confirmed, not if it is lost; must not raise."""
        ...

    @property
    def write_load(self) -> float:
        """How near the writes of this process are to being lost: the largest share, in events, bytes or time without a
        confirmation, of what the window allows. From 1 on they are lost."""
        return 0.0

    @property
    def unconfirmed(self) -> UnconfirmedWrites:
        return NONE_UNCONFIRMED

    async def elect(self, event: LeaderElected, *, after: Sequence) -> Fence:
        """Store a LeaderElected if the newest one is at `after` (0: there is none). After each reconnection, and before
        anything is written, the fence is broken if the log no longer has the last entry that was read. Raises
        ElectionLostError, LogUnavailableError."""
        ...

    async def flush(self, timeout: WallSeconds) -> bool:
        """Wait until everything is confirmed. False on timeout."""
        ...

    async def extent(self) -> LogExtent:
        """Raises LogUnavailableError."""
        ...

    def read(
        self, start: Sequence = 1, *, kinds: tuple[str, ...] = (), at_end: Callable[[], None] = lambda: None
    ) -> AsyncIterator[LogEntry | LogReset]:
        """All entries from `start` on, in order, without gaps and without end. Survives disconnects. `kinds` restricts
        subjects to `pm.<pool>.<kind>...`, for instance `("fleet", "kv.engine-1")`. A LogReset precedes entries where
        continuity is lost. `at_end` is called whenever no further entry is available."""
        ...


CommandHandler = Callable[[AnyCommand, "Reply"], Awaitable[None]]
PayloadHandler = Callable[[bytes, "Reply"], Awaitable[None]]


class Reply(Protocol):
    @property
    def subject(self) -> str:
        """Of the command; attests its sender where the subject names one (`contracts.subjects.actor_of`)."""
        ...

    @property
    def waited(self) -> WallSeconds:
        """Of the command, between its arrival in this process and its turn."""
        ...

    async def __call__(self, answer: AnyCommand | bytes) -> None:
        """Sends without waiting."""
        ...


class Commands(Protocol):
    async def request(self, subject: str, command: AnyCommand, *, timeout: WallSeconds) -> AnyCommand:
        """Raises NoResponderError, CommandRefusedError, CommandUnsendableError, CommandTimeoutError."""
        ...

    async def request_bytes(self, subject: str, payload: bytes, *, timeout: WallSeconds) -> bytes: ...

    def serve(self, subject: str, handler: CommandHandler) -> AbstractAsyncContextManager[None]:
        """Answer commands on `subject` while the context is open. Its last token may be `*`. A command that does not
        decode is counted, logged, and comes as the CommandRefused with which to answer it (`refusal_of`)."""
        ...

    def serve_payloads(
        self, subject: str, handler: PayloadHandler, *, queue: str = ""
    ) -> AbstractAsyncContextManager[None]:
        """The same with undecoded commands. Of all who serve a subject in one `queue`, one gets each command."""
        ...

    @property
    def connected(self) -> bool: ...


class Clock(Protocol):
    """Two clocks. Engine time passes `speed` times faster than wall time: SLOs, latencies and event times use it.
    Timeouts and heartbeats between our processes use wall time."""

    @property
    def speed(self) -> float: ...

    def now(self) -> EngineSeconds:
        """Seconds since the Unix epoch, anchored at a fixed day, so that all processes of a fleet agree."""
        ...

    def wall(self) -> WallSeconds:
        """Monotonic."""
        ...

    async def sleep(self, seconds: EngineSeconds) -> None: ...

    async def sleep_wall(self, seconds: WallSeconds) -> None: ...


def unix_now(clock: Clock) -> Seconds:
    return wall_time_of(clock.now(), clock.speed)


@dataclass(frozen=True, slots=True)
class Tenure:
    """The lease record. `holder` is empty after a release; `revision` grows with each write."""

    holder: str
    term: Term
    revision: int


class Lease(Protocol):
    """One compare-and-set record of the leader. It carries no time: `runtime.leadership` decides when a holder has
    expired."""

    async def look(self) -> Tenure | None:
        """None if there is no record. Raises StoreUnavailableError."""
        ...

    async def put(self, holder: str, term: Term, *, after: int) -> Tenure:
        """Write if the revision is still `after` (0: no record). Raises LeaseTakenError, StoreUnavailableError."""
        ...


@dataclass(frozen=True, slots=True)
class StoredValue:
    """`revision` grows with each write to the store."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class ValuesRead:
    """`whole`: these are all values; others that were known are gone. `exists`: whether there is a store at all.
    `unread`: why nothing was read for a while, or ""."""

    values: list[StoredValue]
    whole: bool
    exists: bool = True
    unread: str = ""


class KeyValueStore(Protocol):
    """The newest value of each key; a few thousand small values that change rarely. Readers need no write access."""

    async def get(self, key: str) -> StoredValue | None:
        """Raises StoreUnavailableError."""
        ...

    async def put(self, key: str, value: bytes, *, after: int) -> int:
        """Write if the key's revision is still `after` (0: no value). Returns the new revision. Makes the store if it is
        missing. Raises ValueChangedError, StoreUnavailableError."""
        ...

    async def read(self, keys: str = "") -> ValuesRead:
        """All values. `keys`: of that one, or of those that begin so if it ends with a dot; empty: all. Raises
        StoreUnavailableError."""
        ...

    def follow(self, keys: str = "") -> AsyncIterator[ValuesRead]:
        """As `read`, then the changes, within about a second, without end. Survives disconnects; after the store was
        recreated all values come again. Of a key that is written twice the older value may not come. A store that does
        not answer for some seconds is told once as `unread`; the next read comes even if nothing has changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLabel:
    """Identifies a checkpoint: log `identity`, folded up to `as_of`, encoded as `form`. `entry`: digest of the log
    entry at `as_of`, which differs if the log was truncated and rewritten."""

    identity: str
    as_of: Sequence
    entry: str
    form: str


class Checkpoints(Protocol):
    """Stored states, each whole or not at all: the newest two and some older ones. All methods raise
    StoreUnavailableError."""

    async def save(
        self, label: CheckpointLabel, content: bytes, *, head_bytes: int = 0, log_begins: Sequence = 1
    ) -> None:
        """Store one, in place of the least needed one. `head_bytes`: of its beginning, for `load_head`. `log_begins`: first
        entry that the log still has."""
        ...

    async def labels(self) -> list[CheckpointLabel]:
        """Highest `as_of` first."""
        ...

    async def load(self, label: CheckpointLabel) -> bytes | None:
        """None if it is missing or damaged."""
        ...

    async def load_head(self, label: CheckpointLabel) -> bytes | None:
        """Its first `head_bytes`, without reading the rest. None if they are missing or damaged, or it has no head."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    log: EventLog
    commands: Commands
    lease: Lease
    checkpoints: Checkpoints
    scaler_lease: Lease
    access: KeyValueStore
    """API keys and tenants of the deployment, of all pools."""


@dataclass(frozen=True, slots=True)
class ProvidedInstance:
    """A running instance, whether or not its engine answers. `age`: wall seconds since its start. `problem`: what keeps it
    from starting, as far as the provider knows."""

    instance: InstanceId
    age: Seconds
    problem: str = ""


class InstanceProvider(Protocol):
    """Starts and stops engines. Calls are idempotent and may be concurrent. All raise ProviderError."""

    name: str

    @property
    def manages(self) -> bool:
        """Whether it starts and stops instances; else people or an autoscaler do, and `grow` and `stop` are not called."""
        return True

    async def running(self) -> list[ProvidedInstance]: ...

    async def grow(self, total: int) -> None:
        """Start instances until at least `total` run. Does not wait until their engines answer. Raises ProviderError
        after that, too, if earlier ones have ended by themselves."""
        ...

    async def stop(self, instance: InstanceId) -> None: ...

    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        """Those that `stop` can take away now."""
        return running


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTarget:
    """An engine to follow, one rank of it; `adapters.discovery.targets` makes valid ones. Empty text: the worker's own
    setting. `advertised_url`: where the ingress reaches it, if not at `url`. The endpoints are this rank's. `dp_rank`
    None: the worker's setting. `identity` changes when another process takes the instance's place (a pod's UID, a
    container's id); empty: the source cannot tell. `ready`: what the source says; an engine that is not keeps its known
    cache."""

    instance: InstanceId
    url: str
    advertised_url: str = ""
    kv_endpoint: str = ""
    kv_replay_endpoint: str = ""
    dp_rank: int | None = None
    role: str = ""
    engine_model: str = ""
    identity: str = ""
    ready: bool = True

    @property
    def rank(self) -> Rank:
        """ANY_RANK if it is all there is of the engine."""
        return ANY_RANK if self.dp_rank is None else self.dp_rank


class EngineDiscovery(Protocol):
    """Which engines a worker follows."""

    name: str
    """As the operator wrote it."""
    problem: str
    """Why the source, or part of what it says, cannot be used now; empty if it can."""

    def targets(self) -> AsyncGenerator[list[EngineTarget], None]:
        """Yields the complete list at once, then whenever it changes. While the source cannot be read it yields
        nothing, so that the last list stays. Raises nothing that comes from the source."""
        ...
