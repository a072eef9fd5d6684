"""What we need from the world, as Protocols. `adapters` holds the ways to get it; `main.py` of a service chooses.

Bounds are part of a port: every wait takes a timeout, every window has a named limit.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pointsman.contracts.codec import AnyCommand, LogEvent, UndecodableError, decode_event
from pointsman.contracts.decisions import LeaderElected
from pointsman.primitives import InstanceId, Seconds, Sequence, Term, WallSeconds


class LogUnavailableError(Exception):
    """The log did not confirm a write within its bounds. The write may or may not have been stored."""


class LogMissingError(Exception):
    """There is no log for this pool."""


class ElectionLostError(Exception):
    """Another LeaderElected came first."""


class LeaseTakenError(Exception):
    """The lease was written by another process since it was read."""


class StoreUnavailableError(Exception):
    """The lease or the checkpoints could not be read or written within their bounds. A write may have been stored."""


class ProviderError(Exception):
    """Instances could not be listed, started or stopped; the message says why. What was begun may have been done."""


class NoResponderError(Exception):
    """No service answers this command at the moment."""


class CommandTimeoutError(Exception):
    """No answer in time. The command may or may not have had its effect."""


class LogEntry(msgspec.Struct, frozen=True):
    """One stored message. `event` is None where it does not decode; `problem` then says why."""

    sequence: Sequence
    subject: str
    payload: bytes
    event: LogEvent | None
    problem: str = ""

    @classmethod
    def read(cls, sequence: Sequence, subject: str, payload: bytes) -> "LogEntry":
        """The entry for a message as it is stored."""
        try:
            return cls(sequence, subject, payload, decode_event(payload, subject))
        except UndecodableError as error:
            return cls(sequence, subject, payload, None, str(error))


@dataclass(frozen=True, slots=True)
class LogReset:
    """What was read so far no longer leads to what comes next: start from nothing at `first_sequence`.

    Happens when the log was recreated, lost its tail in a power cut, or dropped what was not read in time.
    """

    first_sequence: Sequence
    reason: str


@dataclass(frozen=True, slots=True)
class LogExtent:
    """`identity` changes when the stream is recreated; `last` is 0 while nothing was stored."""

    identity: str
    first: Sequence
    last: Sequence


@dataclass(slots=True)
class Fence:
    """A leader's right to write decisions: it stands until another LeaderElected follows its own in the log.

    `broken` says why it stands no more; what is then still to be written under it is dropped.
    """

    elected: Sequence
    """Where its LeaderElected is in the log."""
    broken: str = ""


class EventLog(Protocol):
    """A pool's log: durable, ordered, read from any position.

    A message id (see `contracts.subjects.message_id`) makes a repeated append one event.
    """

    async def append(self, event: LogEvent) -> Sequence:
        """Store one event and return its sequence; retried with the same message id within a bound.

        Raises LogUnavailableError.
        """
        ...

    def append_soon(self, event: LogEvent, fence: Fence | None = None) -> None:
        """Store one event off the caller's path, in the order of the calls. Never waits, never raises.

        At most `window_max` events wait for their confirmation; one that is finally lost is counted and a
        WritesLost event follows as soon as the log can be written again. With a `fence`, the event is dropped once
        that is broken, and a server that can tell refuses it and so breaks it.
        """
        ...

    async def elect(self, event: LeaderElected, *, after: Sequence) -> Fence:
        """Store a LeaderElected if the newest in the log is the one at `after` (0: there is none, or none is left).

        So each has exactly one successor. Raises ElectionLostError, LogUnavailableError.
        """
        ...

    async def flush(self, timeout: WallSeconds) -> bool:
        """Wait until nothing is unconfirmed. False when `timeout` (wall seconds) ran out first."""
        ...

    async def extent(self) -> LogExtent:
        """What is stored now. Raises LogUnavailableError or LogMissingError."""
        ...

    def read(
        self, start: Sequence = 1, *, kinds: tuple[str, ...] = (), at_end: Callable[[], None] = lambda: None
    ) -> AsyncIterator[LogEntry | LogReset]:
        """Everything from sequence `start` on, without end, in order and without holes.

        `kinds` limits the reading to subjects `pm.<pool>.<kind>...` (for instance `("fleet", "kv.engine-1")`);
        contiguity is then checked by the consumer's own count. Survives disconnects. Where continuity is
        lost a LogReset comes first and reading goes on from the oldest entry that is left. `at_end` is called
        whenever the reader has taken everything that there is at that moment.
        """
        ...


CommandHandler = Callable[[AnyCommand, "Reply"], Awaitable[None]]
"""Takes a command and a way to answer it, now or later."""


class Reply(Protocol):
    async def __call__(self, answer: AnyCommand | bytes) -> None: ...


class Commands(Protocol):
    """Request and reply between services, not logged."""

    async def request(self, subject: str, command: AnyCommand, *, timeout: WallSeconds) -> AnyCommand:
        """Ask and wait at most `timeout` wall seconds. Raises NoResponderError, CommandTimeoutError."""
        ...

    async def request_bytes(self, subject: str, payload: bytes, *, timeout: WallSeconds) -> bytes:
        """The same for answers that are no command (the fleet view)."""
        ...

    def serve(self, subject: str, handler: CommandHandler) -> AbstractAsyncContextManager[None]:
        """Answer commands on `subject` while the context is open. What does not decode is counted, logged
        and left unanswered."""
        ...

    @property
    def connected(self) -> bool: ...


class Clock(Protocol):
    """Time. `now` is engine time: seconds since the Unix epoch that pass `speed` times faster than the wall's
    (anchored at a fixed day, so that every process of a fleet agrees). SLOs, latencies and all event times
    are engine time; timeouts and heartbeats between our own processes are wall time."""

    @property
    def speed(self) -> float: ...

    def now(self) -> Seconds:
        """Engine seconds since the Unix epoch."""
        ...

    def wall(self) -> WallSeconds:
        """Wall seconds of a monotonic clock, for timeouts between our own processes."""
        ...

    async def sleep(self, seconds: Seconds) -> None:
        """Sleep for engine seconds."""
        ...

    async def sleep_wall(self, seconds: WallSeconds) -> None:
        """Sleep for wall seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Tenure:
    """What is written in the lease. `holder` is empty where it was given back; `revision` grows with each write."""

    holder: str
    term: Term
    revision: int


class Lease(Protocol):
    """One record that says who leads: compared and set, and nothing else.

    When a holder counts as gone is not decided here but by who watches, on a clock of its own
    (`runtime.leadership`): the record carries no time.
    """

    async def look(self) -> Tenure | None:
        """The record; None where there is none, or none any more. Raises StoreUnavailableError."""
        ...

    async def put(self, holder: str, term: Term, *, after: int) -> Tenure:
        """Write the record if its revision is still `after` (0: there is none).

        Raises LeaseTakenError, StoreUnavailableError.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLabel:
    """What a checkpoint is of: the log by identity, folded up to `as_of`, in a `form` that says how to read it.

    `entry` is a digest of the log entry at `as_of`: a log that was cut and went on differently has another there.
    """

    identity: str
    as_of: Sequence
    entry: str
    form: str


class Checkpoints(Protocol):
    """Where states of the fold are kept, each whole or not at all: the newest two, and some that are older."""

    async def save(self, label: CheckpointLabel, content: bytes, *, log_begins: Sequence = 1) -> None:
        """Keep this one, in place of one that is needed least. `log_begins`: the first entry that the log still has.

        Raises StoreUnavailableError.
        """
        ...

    async def labels(self) -> list[CheckpointLabel]:
        """What there is, the highest `as_of` first. Raises StoreUnavailableError."""
        ...

    async def load(self, label: CheckpointLabel) -> bytes | None:
        """The content, proven whole; None if it is not there any more or is damaged. Raises StoreUnavailableError."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """What connects a process with its pool."""

    log: EventLog
    commands: Commands
    lease: Lease
    checkpoints: Checkpoints
    scaler_lease: Lease


@dataclass(frozen=True, slots=True)
class ProvidedInstance:
    """An instance that a provider runs, whether or not its engine answers yet. `age`: wall seconds since its start."""

    instance: InstanceId
    age: Seconds


class InstanceProvider(Protocol):
    """Where engines come from. Every call may be repeated, and made by two at once: what is done already is not done
    again. Each raises ProviderError."""

    @property
    def name(self) -> str: ...

    async def running(self) -> list[ProvidedInstance]:
        """The instances that this provider has started and that still run."""
        ...

    async def grow(self, total: int) -> None:
        """See to it that at least `total` of them run. Returns once they were started, which says nothing of answering."""
        ...

    async def stop(self, instance: InstanceId) -> None:
        """End one of them within a bound: first its worker, then its engine. No-op for one that is gone."""
        ...

    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        """Which of those that run may be stopped next; all, where the provider can choose freely."""
        ...
