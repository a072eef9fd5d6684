"""Reads the stream. In: a start sequence. Out: entries without gaps, or LogReset if continuity is lost. A pull consumer
of our own: nats-py's ordered consumer can skip silently and pauses 10 to 20 s after a server restart (measured).
Sequences (filtered: consumer counts) must be dense. A failed or silent consumer is replaced; the new one's first
message must equal the last one read, by sequence and time stamp. The log's extent is checked with every new consumer
and every ten seconds. New entries come one by one, or in batches to readers that can wait: then server and reader wake
once for many; the first after a silence still comes by itself."""

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from pointsman.adapters.backoff import Backoff
from pointsman.adapters.jetstream.connection import Connection, Message, NotConnectedError, Subscription, status_of
from pointsman.adapters.jetstream.stream import NANOSECONDS, Stream
from pointsman.adapters.jetstream.stream_reader import StreamReader
from pointsman.adapters.log_listener import LogListener
from pointsman.adapters.turns import TURN_SECONDS_MAX, Turn
from pointsman.ports import LogEntry, LogExtent, LogReset, LogUnavailableError
from pointsman.primitives import Seconds, Sequence

PULL_MESSAGES = 500
PULL_BYTES = 16 * 1024**2
READ_AHEAD_MAX = 3 * PULL_MESSAGES
BUFFERED_MAX = 2 * READ_AHEAD_MAX
PULL_EXPIRES_SECONDS = 30.0
HEARTBEAT_SECONDS = 0.5
TICK_SECONDS = 0.25
ENTRIES_A_TURN = 64
"""Then whatever else the process does has a turn, also while there is more to read."""
QUIET_TICKS_MAX = 5
"""Counted in ticks, not time: a stalled event loop of our own is not the consumer's fault."""
AUDIT_TICKS = 40
HEARTBEAT = "100"
NO_MESSAGES = "404"
PULL_ENDED = (NO_MESSAGES, "408", "409")
PENDING_HEADER = "Nats-Pending-Messages"
CONSUMER_GONE = ("deleted", "shutdown", "leadership", "push based")
"""Words in a 409 status that mean the consumer, not only one pull, has ended."""
DELIVERED_PREFIX = "$JS.ACK."


def _pull_for(messages: int) -> bytes:
    """Waits for them."""
    waits = {
        "expires": int(PULL_EXPIRES_SECONDS * NANOSECONDS),
        "idle_heartbeat": int(HEARTBEAT_SECONDS * NANOSECONDS),
    }
    return json.dumps({"batch": messages, "max_bytes": PULL_BYTES, **waits}).encode()


_pull, _pull_first = _pull_for(PULL_MESSAGES), _pull_for(1)
_pull_batch = json.dumps({"batch": PULL_MESSAGES, "max_bytes": PULL_BYTES, "no_wait": True}).encode()
"""The server ends it with a status: 404 when there is no further message."""


class _Place(NamedTuple):
    sequence: Sequence
    delivery: int
    stamp: str
    pending: int


@dataclass(slots=True)
class _Progress:
    """`position`: all entries up to here were read or filtered out; `complete_to`: none of ours is missing up to here
    (filtered reading skips sequences); `stamp`: of the message at `position`; `extent`: of the last check."""

    position: Sequence
    complete_to: Sequence
    stamp: str | None = None
    hole_at: Sequence | None = None
    identity: str | None = None
    extent: LogExtent = field(default=LogExtent("", 1, 0))


@dataclass(slots=True)
class _Pull:
    """The current consumer. `overlapping`: its first message must be the last one read; `credit`: messages requested
    and not delivered; `pending`: messages left on the server."""

    buffer: deque[Message] = field(default_factory=deque)
    subscription: Subscription | None = None
    consumer: str = ""
    inbox: str = ""
    attached: bool = False
    overlapping: bool = False
    deliveries: int = 0
    pending: int = 0
    credit: int = 0


@dataclass(slots=True)
class _Batch:
    """`next_at`: loop time; `received`: messages of this one; `silent`: the last had none, so the first is awaited."""

    next_at: Seconds = 0.0
    received: int = 0
    silent: bool = False


@dataclass(slots=True)
class _Upkeep:
    ticks: int = 0
    quiet_ticks: int = 0
    audit_due: bool = False
    not_before: Seconds = 0.0
    backoff: Backoff = field(default_factory=Backoff)


class Reader(StreamReader):
    def __init__(
        self,
        connection: Connection,
        stream: Stream,
        listener: LogListener,
        start: Sequence,
        kinds: tuple[str, ...],
        at_end: Callable[[], None],
        every: Seconds = 0.0,
    ) -> None:
        """`every`: wall seconds from one batch of new entries to the next; 0: each as it comes."""
        super().__init__(connection, stream, listener, at_end)
        self._kinds = kinds
        self._every = every
        self._batch = _Batch()
        self._progress = _Progress(start - 1, start - 1)
        self._pull = _Pull()
        self._turn = Turn(ENTRIES_A_TURN, TURN_SECONDS_MAX)
        self._upkeep = _Upkeep()
        self._wakeup: asyncio.Future[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self._forget_changes = connection.on_change(self._on_change)

    @override
    async def close(self) -> None:
        self._forget_changes()
        self._timer.cancel()
        await self._detach()

    @override
    async def _step(self) -> LogEntry | LogReset | None:
        if self._pull.buffer:
            if await self._turn.take_message():
                return None
            return self._take(self._pull.buffer.popleft())
        if not self._pull.attached:
            return await self._try(self._attach)
        if self._upkeep.audit_due:
            return await self._try(self._audit)
        self._request_more()
        if not self._pull.pending and not self._pull.overlapping:
            self._at_end()
        await self._sleep(self._rest)
        return None

    @property
    def _rest(self) -> Seconds | None:
        """Seconds until the next batch; None if messages may come by themselves."""
        if not self._every or self._pull.credit:
            return None
        return self._batch.next_at - asyncio.get_running_loop().time()

    def _take(self, message: Message) -> LogEntry | LogReset | None:
        place = _place_of(message.reply)
        self._request_more()
        if self._pull.overlapping:
            return self._overlap(place)
        self._pull.deliveries += 1
        if place.delivery != self._pull.deliveries or (
            not self._kinds and place.sequence != self._progress.position + 1
        ):
            return self._hole(place)
        self._progress.position = self._progress.complete_to = place.sequence
        self._progress.stamp = place.stamp
        self._pull.pending = place.pending
        return self._entry(place.sequence, message.subject, message.data)

    def _overlap(self, place: _Place) -> LogReset | None:
        self._pull.overlapping = False
        self._pull.deliveries = 1
        self._pull.pending = place.pending
        if (place.delivery, place.sequence, place.stamp) == (1, self._progress.position, self._progress.stamp):
            return None
        return self._restart(
            self._progress.extent.first, f"the log went on differently after entry {self._progress.position}"
        )

    def _hole(self, place: _Place) -> LogReset | None:
        """Read again once, since messages may have been dropped in transit; the second time they are gone."""
        if self._progress.hole_at == self._progress.position:
            return self._restart(
                place.sequence, f"entries {self._progress.position + 1} to {place.sequence - 1} are gone"
            )
        self._progress.hole_at = self._progress.position
        self._listener.trouble("hole while reading", f"entry {place.sequence} came after {self._progress.position}")
        self._abandon_consumer()
        return None

    def _restart(self, first: Sequence, reason: str) -> LogReset:
        self._progress.position = self._progress.complete_to = first - 1
        self._progress.stamp = None
        self._progress.hole_at = None
        self._abandon_consumer()
        return LogReset(first, reason)

    def _abandon_consumer(self) -> None:
        self._pull.attached = False
        self._pull.buffer.clear()

    async def _attach(self) -> LogReset | None:
        """Create a consumer at our position. Raises LogUnavailableError."""
        if not self._connection.connected:
            await self._sleep()
            return None
        await self._sleep(self._upkeep.not_before - asyncio.get_running_loop().time())
        await self._detach()
        self._stream.saw(self._progress.position)
        reset = self._check_extent(await self._stream.extent())
        if reset is not None:
            return reset
        self._pull.consumer = secrets.token_hex(8)
        self._pull.inbox = self._stream.new_inbox()
        self._pull.subscription = await self._connection.subscribe(self._pull.inbox, self._on_message)
        self._pull.overlapping = (
            self._progress.stamp is not None and self._progress.extent.first <= self._progress.position
        )
        start = self._progress.position if self._pull.overlapping else self._progress.position + 1
        self._pull.pending = await self._stream.create_consumer(self._pull.consumer, start, self._kinds)
        if not self._pull.pending:
            self._progress.complete_to = max(
                self._progress.complete_to, self._progress.extent.last if self._kinds else 0
            )
        self._pull.deliveries = self._pull.credit = self._upkeep.quiet_ticks = 0
        self._batch = _Batch()
        self._pull.attached = True
        return None

    async def _detach(self) -> None:
        subscription, self._pull.subscription = self._pull.subscription, None
        if subscription is not None:
            await subscription.close()  # the server forgets the consumer by itself
        self._pull.buffer.clear()

    async def _audit(self) -> LogReset | None:
        """Check that the log continues from our position. Raises LogUnavailableError."""
        self._upkeep.audit_due = False
        self._stream.saw(self._progress.position)
        before = self._progress.extent.last
        extent = await self._stream.extent()
        if (
            self._kinds
            and not self._pull.pending
            and not self._pull.buffer
            and extent.identity == self._progress.identity
        ):
            self._progress.complete_to = max(self._progress.complete_to, before)
        return self._check_extent(extent)

    def _check_extent(self, extent: LogExtent) -> LogReset | None:
        known, self._progress.identity = self._progress.identity, extent.identity
        self._progress.extent = extent
        if known not in (None, extent.identity):
            return self._restart(extent.first, "the log was recreated")
        if extent.last < self._progress.position:
            return self._restart(extent.first, f"the log ends at {extent.last}, but {self._progress.position} was read")
        if extent.first > self._progress.complete_to + 1 and not self._pull.buffer:
            gone = f"entries {self._progress.complete_to + 1} to {extent.first - 1} were dropped before they were read"
            return self._restart(extent.first, gone)
        return None

    async def _try(self, step: Callable[[], Awaitable[LogReset | None]]) -> LogReset | None:
        try:
            return await step()
        except (LogUnavailableError, NotConnectedError) as error:
            self._listener.trouble("reading waits", str(error))
            self._consumer_lost()
            return None

    def _consumer_lost(self) -> None:
        self._pull.attached = False
        self._upkeep.not_before = asyncio.get_running_loop().time() + float(self._upkeep.backoff.next_wait())

    def _request_more(self) -> None:
        if self._every:
            self._request_batch()
            return
        while self._pull.attached and self._pull.credit + len(self._pull.buffer) + PULL_MESSAGES <= READ_AHEAD_MAX:
            if self._pull.credit > PULL_MESSAGES:
                return
            self._request(_pull, PULL_MESSAGES)

    def _request_batch(self) -> None:
        if not self._pull.attached or self._pull.credit or len(self._pull.buffer) > PULL_MESSAGES:
            return
        if asyncio.get_running_loop().time() < self._batch.next_at:
            return
        self._batch.received = 0
        if self._batch.silent:
            self._request(_pull_first, 1)
        else:
            self._request(_pull_batch, PULL_MESSAGES)

    def _request(self, pull: bytes, messages: int) -> None:
        try:
            self._connection.publish(self._stream.next_subject(self._pull.consumer), pull, reply=self._pull.inbox)
        except NotConnectedError:
            self._pull.attached = False
            return
        self._pull.credit += messages

    def _on_message(self, message: Message) -> None:
        self._upkeep.quiet_ticks = 0
        if len(self._pull.buffer) >= BUFFERED_MAX:
            return  # nobody asked for so many: what is missed is read again
        if message.reply.startswith(DELIVERED_PREFIX):
            self._upkeep.backoff.reset()
            self._pull.credit -= 1
            self._pull.buffer.append(message)
            if self._every:
                self._batch_received()
        elif status_of(message) == HEARTBEAT:
            self._upkeep.backoff.reset()
            return
        else:
            self._on_pull_ended(status_of(message), message.headers or {})
        self._wake()

    def _batch_received(self) -> None:
        self._batch.received += 1
        if self._batch.silent:
            self._batch.silent = False
            self._batch.next_at = asyncio.get_running_loop().time() + self._every

    def _on_pull_ended(self, status: str, headers: dict[str, str]) -> None:
        description = headers.get("Description", "")
        if status in PULL_ENDED and not any(word in description.lower() for word in CONSUMER_GONE):
            self._pull.credit = max(0, self._pull.credit - int(headers.get(PENDING_HEADER, PULL_MESSAGES)))
            if status == NO_MESSAGES:
                self._batch.silent = not self._batch.received
                self._batch.next_at = asyncio.get_running_loop().time() + (self._every if self._batch.received else 0.0)
        elif self._pull.attached:
            self._listener.trouble("consumer lost", f"{status} {description}")
            self._consumer_lost()

    def _on_change(self, connected: bool) -> None:
        self._pull.attached = False
        if connected:
            self._upkeep.backoff.reset()
            self._upkeep.not_before = 0.0
            self._wake()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self._upkeep.ticks += 1
        if self._pull.attached and self._pull.credit:
            self._upkeep.quiet_ticks += 1
        if self._upkeep.quiet_ticks > QUIET_TICKS_MAX:
            self._upkeep.quiet_ticks = 0
            self._listener.trouble("consumer lost", f"silent for {QUIET_TICKS_MAX * TICK_SECONDS:g} s")
            self._consumer_lost()
            self._wake()
        if self._upkeep.ticks % AUDIT_TICKS == 0:
            self._upkeep.audit_due = True
            self._wake()

    async def _sleep(self, seconds: Seconds | None = None) -> None:
        if seconds is not None and seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        self._turn.begin()
        self._wakeup = loop.create_future()
        timer = loop.call_later(seconds, self._wake) if seconds is not None else None
        try:
            await self._wakeup
        finally:
            self._wakeup = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


def _place_of(reply: str) -> _Place:
    """`$JS.ACK.<stream>.<consumer>.<tries>.<sequence>.<delivery>.<stamp>.<pending>`, or with a domain
    `$JS.ACK.<domain>.<account>.<stream>...` and one more token at the end."""
    tokens = reply.split(".")
    offset = 0 if len(tokens) == 9 else 2
    return _Place(int(tokens[offset + 5]), int(tokens[offset + 6]), tokens[offset + 7], int(tokens[offset + 8]))
