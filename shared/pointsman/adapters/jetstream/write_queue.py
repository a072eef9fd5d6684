"""State of the producer: queued and unconfirmed writes, confirmations, losses."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from pointsman.contracts.codec import LogEvent, UnwritableError, encode
from pointsman.ports import Fence, OnStored
from pointsman.primitives import PoolName, Seconds

IN_FLIGHT_SECONDS = 0.5


def next_allowance(now: int, *, tries: int, ahead: int, seconds: Seconds, most: int) -> int:
    """Bound on writes in flight after a confirmation. So many that the server has work for IN_FLIGHT_SECONDS: more would
    wait there, before those of other writers. A repeated write's `seconds` say nothing about the server's pace."""
    if tries > 1:
        return min(most, 2 * now)
    return max(1, min(most, int(ahead * IN_FLIGHT_SECONDS / max(seconds, 1e-6))))


@dataclass(eq=False, slots=True)
class Write:
    number: int
    event: LogEvent
    subject: str
    message_id: str
    done: asyncio.Future[int] | None
    fence: Fence | None
    on_stored: OnStored | None = None
    payload: bytes = b""
    unwritable: str = ""
    put_at: Seconds = 0.0
    first_sent_at: Seconds = 0.0
    sent_at: Seconds = 0.0
    tries: int = 0
    ahead: int = 0
    """Writes under way when it was sent first, itself included."""
    refusals: int = 0

    def __post_init__(self) -> None:
        try:
            self.payload = encode(self.event)
        except UnwritableError as error:
            self.unwritable = str(error)


@dataclass(slots=True)
class Writer:
    """`session` makes message ids unique; `number` is that of the last write."""

    pool: PoolName
    name: str
    session: str
    leader_subject: str
    inbox: str
    number: int = 0


@dataclass(slots=True)
class WriteQueue:
    """Oldest first. `open`: the stream is available; `allowance`: bound on writes in flight."""

    waiting: deque[Write] = field(default_factory=deque)
    sent: dict[int, Write] = field(default_factory=dict)
    bytes: int = 0
    open: bool = False
    allowance: int = 1
    flushers: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def oldest(self) -> Write | None:
        return next(iter(self.sent.values()), None) or (self.waiting[0] if self.waiting else None)

    @property
    def count(self) -> int:
        return len(self.sent) + len(self.waiting)


@dataclass(slots=True)
class Confirmations:
    """Loop times. `confirmed_number`: the write confirmed last; `awaited_since`: the first write was handed over after
    the server had answered the last one; `stalled`: reported as such."""

    confirmed_at: Seconds = 0.0
    confirmed_number: int = 0
    connected_at: Seconds = 0.0
    awaited_since: Seconds | None = None
    latency: Seconds = 0.0
    stalled: bool = False


@dataclass(slots=True)
class Losses:
    count: int = 0
    reason: str = ""
