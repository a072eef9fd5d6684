"""What we need from the world, as Protocols. `adapters` holds the ways to get it; `main.py` of a service chooses.

Bounds are part of a port: every wait takes a timeout, every window has a named limit.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.primitives import Seconds, Sequence


class LogUnavailableError(Exception):
    """The log did not confirm a write within its bounds. The write may or may not have been stored."""


class LogMissingError(Exception):
    """There is no log for this pool."""


class NoResponderError(Exception):
    """Nobody serves this command at the moment."""


class CommandTimeoutError(Exception):
    """No answer in time. The command may or may not have had its effect."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One stored message. `event` is None where it does not decode; `problem` then says why."""

    sequence: Sequence
    subject: str
    payload: bytes
    event: LogEvent | None
    problem: str = ""


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


class EventLog(Protocol):
    """A pool's log: durable, ordered, read from any position.

    A message id (see `contracts.subjects.message_id`) makes a repeated append one event.
    """

    async def append(self, event: LogEvent) -> Sequence:
        """Store one event and return its sequence; retried with the same message id within a bound.

        Raises LogUnavailableError.
        """
        ...

    def append_soon(self, event: LogEvent) -> None:
        """Store one event off the caller's path, in the order of the calls. Never waits, never raises.

        At most `window_max` events wait for their confirmation; one that is finally lost is counted and a
        WritesLost event follows as soon as the log can be written again.
        """
        ...

    async def flush(self, timeout: Seconds) -> bool:
        """Wait until nothing is unconfirmed. False when `timeout` (wall seconds) ran out first."""
        ...

    async def extent(self) -> LogExtent:
        """What is stored now. Raises LogUnavailableError or LogMissingError."""
        ...

    def read(self, start: Sequence = 1, *, kinds: tuple[str, ...] = ()) -> AsyncIterator[LogEntry | LogReset]:
        """Everything from sequence `start` on, for ever, in order and without holes.

        `kinds` limits the reading to subjects `pm.<pool>.<kind>...` (for instance `("fleet", "kv.engine-1")`);
        contiguity is then checked by the consumer's own count. Survives disconnects. Where continuity is
        lost a LogReset comes first and reading goes on from the oldest entry that is left.
        """
        ...


CommandHandler = Callable[[AnyCommand, "Reply"], Awaitable[None]]
"""Takes a command and a way to answer it, now or later."""


class Reply(Protocol):
    async def __call__(self, answer: AnyCommand | bytes) -> None: ...


class Commands(Protocol):
    """Request and reply between services, not logged."""

    async def request(self, subject: str, command: AnyCommand, *, timeout: Seconds) -> AnyCommand:
        """Ask and wait at most `timeout` wall seconds. Raises NoResponderError, CommandTimeoutError."""
        ...

    async def request_bytes(self, subject: str, payload: bytes, *, timeout: Seconds) -> bytes:
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

    def wall(self) -> Seconds:
        """Wall seconds of a monotonic clock, for timeouts between our own processes."""
        ...

    async def sleep(self, seconds: Seconds) -> None:
        """Sleep for engine seconds."""
        ...

    async def sleep_wall(self, seconds: Seconds) -> None:
        """Sleep for wall seconds."""
        ...
