"""State of the producer: queued and unconfirmed writes, confirmations, losses."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from pointsman.contracts.codec import LogEvent, UnwritableError, encode
from pointsman.ports import Fence, OnStored
from pointsman.primitives import EngineSeconds, PoolName


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
    first_sent_at: EngineSeconds = 0.0
    sent_at: EngineSeconds = 0.0
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


@dataclass(slots=True)
class Confirmations:
    """Loop times. `confirmed_number`: the write confirmed last; `stalled`: reported as such."""

    confirmed_at: EngineSeconds = 0.0
    confirmed_number: int = 0
    connected_at: EngineSeconds = 0.0
    stalled: bool = False


@dataclass(slots=True)
class Losses:
    count: int = 0
    reason: str = ""
