"""Writes to the stream. In: events, in order. Out: each stored once without blocking the caller, or a WritesLost event.

A write is kept until confirmed; after a timeout or disconnect all are resent from the oldest, with the same message ids
(nats-py's asynchronous publishing never resolves after a disconnect: measured). It is lost when the window overflows,
after repeated refusals, or before the server forgets its id. A refused write is stored after its successors.

A leader's write is fenced: with one replica by the server, which compares the last LeaderElected; with several only by
this process, since the server cannot do so for concurrent writes (measured)."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pointsman.adapters.backoff import Backoff
from pointsman.adapters.jetstream.connection import (
    ApiError,
    Connection,
    Message,
    NotConnectedError,
    UnsendableError,
    status_of,
)
from pointsman.adapters.jetstream.direct_stream import EXPECTED_LAST, WRONG_LAST_SEQUENCE
from pointsman.adapters.jetstream.write_queue import (
    Confirmations,
    Losses,
    Write,
    WriteQueue,
    Writer,
    next_allowance,
)
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.codec import LogEvent, UnwritableError
from pointsman.contracts.decisions import WritesLost
from pointsman.contracts.subjects import leader_subject, message_id, subject_of
from pointsman.ports import (
    NONE_UNCONFIRMED,
    Clock,
    Fence,
    LogUnavailableError,
    OnStored,
    UnconfirmedWrites,
)
from pointsman.primitives import PoolName, Seconds, Sequence, WallSeconds

MESSAGE_ID_HEADER = "Nats-Msg-Id"
EXPECTED_SUBJECT_HEADER = "Nats-Expected-Last-Subject-Sequence-Subject"
DUPLICATE_IN_PROCESS = 10158
"""An earlier try is being replicated: answered to a repetition while there is no quorum (seen with three servers)."""
NO_STORAGE = frozenset({10002, 10023, 10028, 10047, 10077})
"""An account at its limit, insufficient resources, memory or storage, a store that failed: the write may pass later."""
NONE_LEFT = "wrong last sequence: 0"
REFUSALS_MAX = 5
IN_FLIGHT_MAX = 1024
UNCONFIRMED_SECONDS_MAX = 100.0
"""Below DUPLICATE_SECONDS of the stream."""
IN_PROCESS_SECONDS_MAX = 30.0
"""Longer than an election among nats-servers, 4 to 9 s."""
STALLED_SECONDS = 3.0
"""Unconfirmed for this long and since resent: the log is stuck. A full disk fails publishes only."""
STALL_FORGOTTEN_SECONDS = 30.0
"""Who repeats a write does so sooner."""
SILENCE_LATENCIES = 4.0
"""Of a slow server, more than `ack_seconds_max`: resending what it works on helps nobody."""
SILENCE_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSettings:
    events_max: int = 16_384
    bytes_max: int = 64 * 1024**2
    ack_seconds_max: Seconds = 1.0
    """Silence of the server before everything in flight is resent."""
    marks_losses: bool = True
    """Whether a WritesLost follows lost events."""


class _Ack(msgspec.Struct):
    seq: int = 0
    error: ApiError | None = None


_acks = msgspec.json.Decoder(_Ack)


class WriteWindow:
    """Opened by `resume`, closed by a disconnect."""

    def __init__(
        self,
        connection: Connection,
        pool: PoolName,
        clock: Clock,
        listener: LogListener,
        *,
        writer: str,
        settings: WindowSettings,
        inbox: str,
        on_no_stream: Callable[[], None],
        on_confirmed: OnStored,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._listener = listener
        self._settings = settings
        self._on_no_stream = on_no_stream
        self._on_confirmed = on_confirmed
        session = secrets.token_hex(11)
        self._writer = Writer(pool, writer, session, leader_subject(pool), f"{inbox}.")
        self._queue = WriteQueue()
        self._confirmations = Confirmations()
        self._losses = Losses()
        self._backoff = Backoff()
        self._timer: asyncio.TimerHandle | None = None
        self.server_fences = False

    async def open(self) -> None:
        await self._connection.subscribe(self._writer.inbox + "*", self._on_ack)
        self._connection.on_change(self._on_change)

    def put(
        self,
        event: LogEvent,
        done: asyncio.Future[int] | None = None,
        *,
        fence: Fence | None = None,
        on_stored: OnStored | None = None,
    ) -> int:
        """A full window loses it. Returns a number for `withdraw`; `done` receives the result."""
        self._writer.number += 1
        # The server forgets by id alone, whoever wrote it: without our session, others could use up our ids.
        identity = f"{self._writer.session}.{message_id(event) or self._writer.number}"
        write = Write(
            self._writer.number, event, subject_of(self._writer.pool, event), identity, done, fence, on_stored
        )
        write.put_at = asyncio.get_running_loop().time()
        self._queue.bytes += len(write.payload)
        if write.unwritable:
            self._lose(write, write.unwritable, permanent=True)
            return write.number
        if self._confirmations.awaited_since is None:
            self._confirmations.awaited_since = write.put_at
        if self._queue.count >= self._settings.events_max or self._queue.bytes > self._settings.bytes_max:
            self._lose(write, "too many writes wait for their confirmation")
        elif self._queue.open and not self._queue.waiting and len(self._queue.sent) < self._queue.allowance:
            self._send(write)
        else:
            self._queue.waiting.append(write)
        return write.number

    @property
    def load(self) -> float:
        queue, settings = self._queue, self._settings
        oldest = queue.oldest
        if oldest is None:
            return 0.0
        waited = asyncio.get_running_loop().time() - oldest.put_at
        return max(
            queue.count / settings.events_max,
            queue.bytes / settings.bytes_max,
            waited / UNCONFIRMED_SECONDS_MAX,
        )

    @property
    def unconfirmed(self) -> UnconfirmedWrites:
        oldest, awaited_since = self._queue.oldest, self._confirmations.awaited_since
        if oldest is None:
            return NONE_UNCONFIRMED
        since = oldest.put_at if awaited_since is None else min(oldest.put_at, awaited_since)
        return UnconfirmedWrites(self._queue.count, WallSeconds(asyncio.get_running_loop().time() - since))

    def withdraw(self, number: int) -> None:
        """Do not resend this write. It may have been stored."""
        write = self._queue.sent.pop(number, None) or next((w for w in self._queue.waiting if w.number == number), None)
        if write is None:
            return
        if write in self._queue.waiting:
            self._queue.waiting.remove(write)
        self._settle(write)
        self._pump()

    def resume(self) -> None:
        self._queue.open = self._connection.connected
        self._pump()

    async def flushed(self, timeout: Seconds) -> bool:
        if not self._queue.count:
            return True
        flusher = asyncio.get_running_loop().create_future()
        self._queue.flushers.append(flusher)
        done, _ = await asyncio.wait([flusher], timeout=timeout)
        return bool(done)

    def close(self) -> None:
        """Drop unconfirmed writes, without a WritesLost event."""
        self._queue.open = False
        if self._timer is not None:
            self._timer.cancel()
        self._queue.waiting.extendleft(reversed(self._queue.sent.values()))
        self._queue.sent.clear()
        reason = "the process ended before the write was confirmed"
        dropped = sum(self._give_up(write, reason) for write in self._queue.waiting)
        self._queue.waiting.clear()
        if dropped:
            self._listener.dropped(dropped, reason)

    def _pump(self) -> None:
        while self._queue.open and self._queue.waiting and len(self._queue.sent) < self._queue.allowance:
            self._send(self._queue.waiting.popleft())

    def _send(self, write: Write) -> None:
        if write.fence is not None and write.fence.broken:
            self._drop_fenced(write)
            return
        now = asyncio.get_running_loop().time()
        if write.first_sent_at and now - write.first_sent_at > UNCONFIRMED_SECONDS_MAX:
            self._lose(write, f"not confirmed within {UNCONFIRMED_SECONDS_MAX:g} s")
            return
        last_progress_at = max(write.first_sent_at, self._confirmations.connected_at, self._confirmations.confirmed_at)
        if write.first_sent_at and now - last_progress_at > STALLED_SECONDS:
            self._report_stalled()
        try:
            self._connection.publish(
                write.subject,
                write.payload,
                reply=f"{self._writer.inbox}{write.number}",
                headers=self._headers(write),
            )
        except NotConnectedError:
            self._queue.open = False
            self._queue.waiting.appendleft(write)
            return
        except UnsendableError as error:
            self._lose(write, str(error), permanent=True)
            return
        write.sent_at = now
        write.first_sent_at = write.first_sent_at or now
        write.tries += 1
        self._queue.sent[write.number] = write
        write.ahead = len(self._queue.sent)
        if self._timer is None:
            self._watch()

    def _headers(self, write: Write) -> dict[str, str]:
        headers = {MESSAGE_ID_HEADER: write.message_id}
        if write.fence is not None and write.fence.elected and self.server_fences:
            headers[EXPECTED_LAST] = str(write.fence.elected)
            headers[EXPECTED_SUBJECT_HEADER] = self._writer.leader_subject
        return headers

    def _on_ack(self, message: Message) -> None:
        ack = None if status_of(message) else _acks.decode(message.data)  # first: what is no answer confirms no write
        write = self._queue.sent.pop(int(message.subject[len(self._writer.inbox) :]), None)
        if write is None:
            return  # an answer to an earlier try of a write that has been sent again or given up
        if ack is None:
            self._queue.sent[write.number] = write
            self._stall()
            self._on_no_stream()
            return
        if ack.error is not None and write.fence is not None and ack.error.err_code == WRONG_LAST_SEQUENCE:
            self._fenced(write, write.fence, ack.error.description)
        elif ack.error is not None and self._is_in_process(write, ack.error):
            self._queue.sent[write.number] = write
            self._stall()
        elif ack.error is not None and ack.error.err_code in NO_STORAGE:
            self._queue.sent[write.number] = write
            self._report_stalled(f"the nats-server has no room for the log: {ack.error.description}")
            self._stall()
        elif ack.error is not None:
            self._refused(write, ack.error.description)
        else:
            self._confirm(write, ack.seq)

    def _confirm(self, write: Write, sequence: Sequence) -> None:
        now = asyncio.get_running_loop().time()
        self._confirmations.confirmed_at = now
        self._confirmations.awaited_since = None
        self._confirmations.confirmed_number = write.number
        self._confirmations.latency = now - write.sent_at
        self._queue.allowance = next_allowance(
            self._queue.allowance,
            tries=write.tries,
            ahead=write.ahead,
            seconds=now - write.sent_at,
            most=IN_FLIGHT_MAX,
        )
        self._backoff.reset()
        self._listener.appended(type(write.event).__name__)
        self._report_flowing()
        self._on_confirmed(sequence)
        if write.done is not None and not write.done.done():
            write.done.set_result(sequence)
        if write.on_stored is not None:
            write.on_stored(sequence)
        if self._queue.waiting:
            self._pump()
        if self._losses.count and self._settings.marks_losses:
            self._mark_loss()  # before this write is settled: who flushes waits for the mark, too
        self._settle(write)

    def _report_stalled(
        self, reason: str = f"the log has not confirmed a write for {STALLED_SECONDS:g} s; is its disk full?"
    ) -> None:
        if not self._confirmations.stalled:
            self._confirmations.stalled = True
            self._listener.stalled(reason)

    def _report_flowing(self) -> None:
        if self._confirmations.stalled:
            self._confirmations.stalled = False
            self._listener.flowing()

    def _is_in_process(self, write: Write, error: ApiError) -> bool:
        waited = asyncio.get_running_loop().time() - write.first_sent_at
        return error.err_code == DUPLICATE_IN_PROCESS and waited < IN_PROCESS_SECONDS_MAX

    def _drop_fenced(self, write: Write) -> None:
        self._settle(write)
        if not self._queue.count:  # a follower may write nothing for long
            self._confirmations.awaited_since = None
            self._report_flowing()

    def _mark_loss(self) -> None:
        count, self._losses.count = self._losses.count, 0
        self.put(WritesLost(at=self._clock.now(), writer=self._writer.name, count=count, reason=self._losses.reason))

    def _fenced(self, write: Write, fence: Fence, reason: str) -> None:
        """Another leader was elected: drop writes with this fence. If retention dropped our own LeaderElected, the
        server has nothing to compare: write again without."""
        if reason == NONE_LEFT and not fence.broken:
            fence.elected = 0
            self._queue.sent[write.number] = write
            self._requeue_sent()
            self._pump()
            return
        if not fence.broken:
            fence.broken = f"another leader was elected ({reason})"
            self._listener.trouble("write fenced", fence.broken)
        self._drop_fenced(write)
        self._pump()

    def _refused(self, write: Write, reason: str) -> None:
        write.refusals += 1
        self._confirmations.awaited_since = None
        self._listener.trouble("write refused", reason)
        if write.refusals >= REFUSALS_MAX:
            self._lose(write, reason)
            self._pump()
        else:
            self._queue.sent[write.number] = write
            self._stall()

    def _lose(self, write: Write, reason: str, *, permanent: bool = False) -> None:
        """`permanent`: no repetition can be stored."""
        if self._give_up(write, reason, permanent=permanent):
            self._listener.lost(1, reason)

    def _give_up(self, write: Write, reason: str, *, permanent: bool = False) -> bool:
        """Whether it is lost without its writer's knowledge, and was not yet counted."""
        self._settle(write)
        if write.done is not None:
            if not write.done.done():
                write.done.set_exception(UnwritableError(reason) if permanent else LogUnavailableError(reason))
            return False
        self._losses.reason = reason
        if isinstance(write.event, WritesLost):
            self._losses.count += write.event.count
            return False
        self._losses.count += 1
        return True

    def _settle(self, write: Write) -> None:
        self._queue.bytes -= len(write.payload)
        if self._queue.flushers and not self._queue.count:
            for flusher in self._queue.flushers:
                if not flusher.done():
                    flusher.set_result(None)
            self._queue.flushers.clear()
        if self._confirmations.stalled and not self._queue.count:
            asyncio.get_running_loop().call_later(STALL_FORGOTTEN_SECONDS, self._forget_stall, self._writer.number)

    def _forget_stall(self, number: int) -> None:
        """All writes were lost or withdrawn, so no confirmation can end it; `number`: of the last one."""
        if number == self._writer.number:
            self._confirmations.awaited_since = None
            self._report_flowing()

    def _on_change(self, connected: bool) -> None:
        if connected:
            self._confirmations.connected_at = asyncio.get_running_loop().time()
        else:
            self._queue.open = False
            self._requeue_sent()

    def _stall(self) -> None:
        self._queue.open = False
        self._requeue_sent()
        asyncio.get_running_loop().call_later(float(self._backoff.next_wait()), self.resume)

    def _requeue_sent(self) -> None:
        for number in sorted(self._queue.sent, reverse=True):
            self._queue.waiting.appendleft(self._queue.sent[number])
        self._queue.sent.clear()
        self._queue.allowance = 1

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._settings.ack_seconds_max / 4, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._queue.sent:
            return
        now = asyncio.get_running_loop().time()
        oldest = next(iter(self._queue.sent.values()))
        overtaken = self._confirmations.confirmed_number > oldest.number
        last_progress_at = oldest.sent_at if overtaken else max(oldest.sent_at, self._confirmations.confirmed_at)
        silence_max = max(
            self._settings.ack_seconds_max,
            min(SILENCE_LATENCIES * self._confirmations.latency, SILENCE_SECONDS_MAX),
        )
        if now - last_progress_at > silence_max:
            self._listener.trouble("write not confirmed", f"sending again {len(self._queue.sent)} from the oldest on")
            self._requeue_sent()
            self._pump()
        if self._queue.sent and self._timer is None:
            self._watch()
