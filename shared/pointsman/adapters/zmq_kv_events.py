"""vLLM's KV events, read off ZMQ: what one engine's cache stored and removed, in order and without holes.

Owns the wire form (three PUB frames, the replay socket, msgpack in its two shapes) and continuity: batches carry
a sequence, what is missing is asked from the replay socket, and what cannot be had is said as an `EngineGap`.
It knows nothing about pool keys or the log; engine hashes pass through untouched.

PUB/SUB gives no promise: a slow joiner misses the beginning, a full buffer drops silently, and an engine that
restarts begins again at sequence 0. One question to the replay socket settles all three: "everything from the
last batch I saw on". If that batch comes back byte for byte, the engine is still the same one and what follows it
was missed; if it is another, or there is none, the engine is a new one; if the answer begins later, the rest has
left the engine's buffer. It is asked after a hole, after a reconnect, and whenever the engine is silent for a
while, because the last batch before a silence may be the one that was dropped.

Without a replay socket none of this can be told: `certain` is then false for good, a lost connection is a gap, and a
sequence that was passed already is a repetition, a late arrival or a new engine, as its payload tells.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from typing_extensions import override

from pointsman.primitives import Seconds, Sequence

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""A larger ZMQ frame closes the connection; a larger payload does not decode."""
EVENTS_PER_BATCH_MAX = 65_536
BLOCKS_PER_EVENT_MAX = 1_048_576
TOKENS_PER_EVENT_MAX = 16_777_216
"""Of one prompt, so far beyond any model's length; decoded, so many take 640 MB for a moment."""
HASH_BYTES_MAX = 64

RECEIVE_QUEUE_MAX = 100_000
"""Batches that wait inside ZMQ for us; as many as vLLM's publisher keeps on its side."""
REPLAY_ATTEMPTS_MAX = 3
REPLAY_FRAME_SECONDS = 2.0
"""Longest wait for the next frame of a replay; vLLM looks at its replay socket every 0.1 s."""
REPLAY_SECONDS_MAX = 30.0
REPLAY_BATCHES_MAX = 1_000_000
UNPROVEN_RESTS_MAX = 2
"""After a reconnect, how often a replay socket may fail before what comes live is taken for a new engine's."""
REPLAY_REST_SECONDS = 15.0
"""How long a replay socket that did not answer is left alone, so that live batches do not wait for it."""
CONNECT_SECONDS_MAX = 5.0
RECENT_BATCHES_MAX = 4_096
"""Without a replay socket: batches whose fingerprints are kept, to tell a repetition from a new engine."""
MESSAGES_PER_TURN_MAX = 16
"""Messages taken before other tasks of the process get their turn."""
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000

SEQUENCE_BYTES = 8
FINGERPRINT_BYTES = 16
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

EngineHash = int | bytes
"""How the engine names a block. Opaque, and of no meaning outside this engine."""

_Hash = int | Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES_MAX)]
_Hashes = Annotated[list[_Hash], msgspec.Meta(max_length=BLOCKS_PER_EVENT_MAX)]
_Tokens = Annotated[list[int], msgspec.Meta(max_length=TOKENS_PER_EVENT_MAX)]


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """Consecutive blocks became resident after `parent_block_hash` (None: they start a prompt).

    Field order is the engine's, because older engines send fields by position. `extra_keys` has one entry a block:
    what besides tokens went into its hash (LoRA name, multimodal identifiers, cache salt).
    """

    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: _Tokens
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    """One copy of each of these blocks was evicted."""

    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    """The prefix cache was reset."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EngineAttached:
    """Reading begins. `exact`: what follows is everything since the engine's start."""

    exact: bool
    dp_rank: int = 0


class Cursor(msgspec.Struct, frozen=True):
    """The last batch that was read of an engine: its sequence, and a digest of its payload, which no other engine's has."""

    sequence: Sequence
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class EngineResumed:
    """Reading goes on after a batch that an earlier reader took: it is the same engine, and has all that came after."""

    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class EngineRestarted:
    """The engine behind the endpoint is a new one, its cache began empty. `exact` as in EngineAttached."""

    exact: bool
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """One message. `undecodable` of its events were lost to us, for the reason in `problem`; `unknown` ones are of
    a type that we do not know and need not (`problem` names the last)."""

    sequence: Sequence
    timestamp: Seconds
    events: tuple[EngineEvent, ...]
    dp_rank: int = 0
    undecodable: int = 0
    unknown: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class EngineGap:
    """`missed` batches are gone for good; 0: perhaps some, nobody knows how many. What comes next may build on blocks we
    never heard of."""

    missed: int
    reason: str
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class EngineReplayed:
    """`recovered` batches had been missed and were got back; they came just before this."""

    recovered: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class EngineNoise:
    """A message that is none of vLLM's."""

    reason: str
    dp_rank: int = 0


EngineItem = EngineAttached | EngineResumed | EngineRestarted | EngineBatch | EngineGap | EngineReplayed | EngineNoise


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where one engine (one data-parallel rank of it) publishes. `replay` may be empty: then nothing missed can be
    had again."""

    publish: str
    replay: str = ""
    dp_rank: int = 0

    @property
    def publish_address(self) -> str:
        return dialled(self.publish)

    @property
    def replay_address(self) -> str:
        return dialled(self.replay)


def dialled(endpoint: str) -> str:
    """The address to dial for an endpoint as the engine's own configuration writes it: `*` means this machine."""
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:"):
        if endpoint.startswith(wildcard):
            return "tcp://127.0.0.1:" + endpoint.removeprefix(wildcard)
    return endpoint


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Where a data-parallel rank publishes, of an engine that was told `endpoint`: each on the next port. Raises ValueError
    for an endpoint without one: vLLM has no ranks there."""
    if not endpoint or dp_rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        msg = f"{endpoint!r} has no port, so rank {dp_rank} has no endpoint: engines with ranks publish on tcp://"
        raise ValueError(msg)
    return f"{address}:{int(port) + dp_rank}"


class ReplayError(Exception):
    """The replay socket did not answer as it should, within its bounds."""


class LiveSocket(Protocol):
    """The subscription, and whether the connection under it is still the one it was."""

    async def connected(self, seconds: Seconds) -> None:
        """Wait for the first connection, at most `seconds`; it is no interruption."""
        ...

    def interrupted(self) -> bool:
        """Whether the connection broke or came up since the last call."""
        ...

    async def arrival(self, seconds: Seconds) -> bool:
        """Wait until something can be received, at most `seconds`."""
        ...

    def receive(self) -> list[bytes] | None:
        """The next message, if one is here."""
        ...

    def discard(self) -> None:
        """Drop what is here: it may be from before a reconnect, and the replay has it."""
        ...


class ReplaySocket(Protocol):
    """Asks one engine for past batches."""

    def batches(self, start: Sequence) -> AsyncGenerator[tuple[Sequence, bytes], None]:
        """Batches from `start` on that the engine still has. Raises ReplayError."""
        ...


class EngineSockets(Protocol):
    """The two connections to one engine. `replay` is None where it has no such socket."""

    live: LiveSocket
    replay: ReplaySocket | None

    def close(self) -> None: ...


class _ReplaySocket(ReplaySocket):
    """Asks one engine for past batches. Each question has its own connection: late answers cannot meet a new one."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._context = context
        self._address = address

    @override
    async def batches(self, start: Sequence) -> AsyncGenerator[tuple[Sequence, bytes], None]:
        deadline = _now() + REPLAY_SECONDS_MAX
        socket = self._context.socket(zmq.DEALER)
        try:
            _bound(socket)
            socket.connect(self._address)
            await socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            for _ in range(REPLAY_BATCHES_MAX):
                sequence, payload = await self._next(socket, deadline)
                if sequence == END_OF_REPLAY:
                    return
                yield int.from_bytes(sequence, "big"), payload
            msg = f"more than {REPLAY_BATCHES_MAX} batches"
            raise ReplayError(msg)
        finally:
            socket.close(linger=0)

    async def _next(self, socket: zmq.asyncio.Socket, deadline: float) -> tuple[bytes, bytes]:
        """Sequence and payload stand last; what precedes them (delimiter, topic) differs between versions."""
        seconds = min(REPLAY_FRAME_SECONDS, deadline - _now())
        if seconds <= 0 or not await socket.poll(int(seconds * 1000)):
            msg = "no answer in time"
            raise ReplayError(msg)
        frames = await socket.recv_multipart()
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
            msg = f"an answer of {len(frames)} frames without a sequence"
            raise ReplayError(msg)
        return frames[-2], frames[-1]


class _LiveSocket(LiveSocket):
    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = context.socket(zmq.SUB)
        _bound(self._socket)
        for option, value in (
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1_000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.subscribe(b"")
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(events)
        self._queue: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._connections: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self._socket.connect(address)

    @override
    async def connected(self, seconds: Seconds) -> None:
        await self._monitor.poll(int(seconds * 1000))
        self.interrupted()

    @override
    def interrupted(self) -> bool:
        interrupted = False
        with contextlib.suppress(zmq.Again):
            while True:
                self._connections.recv_multipart(zmq.NOBLOCK)
                interrupted = True
        return interrupted

    @override
    async def arrival(self, seconds: Seconds) -> bool:
        return bool(await self._socket.poll(int(seconds * 1000)))

    @override
    def receive(self) -> list[bytes] | None:
        try:
            return self._queue.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    @override
    def discard(self) -> None:
        for _ in range(RECEIVE_QUEUE_MAX):
            if self.receive() is None:
                return

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class _ZmqSockets(EngineSockets):
    """Both sockets, with the context that they live in."""

    def __init__(self, endpoint: KvEndpoint) -> None:
        self._context = zmq.asyncio.Context()
        self.live = _LiveSocket(self._context, endpoint.publish_address)
        self.replay = _ReplaySocket(self._context, endpoint.replay_address) if endpoint.replay else None

    @override
    def close(self) -> None:
        self.live.close()
        self._context.destroy(linger=0)


@dataclass(slots=True)
class _Answer:
    """What one answer of the replay socket turned out to be."""

    known_hole: Sequence | None = None
    """Where the answer before this one had a hole: if this one has it too, it is the engine's."""
    hole: Sequence | None = None
    empty: bool = True
    torn: bool = False
    new_engine: bool = False
    recovered: int = 0


class ZmqKvEvents:
    """One engine's events: iterate `items` once.

    With data parallelism each rank has its own cache and endpoint: one of these for each.
    """

    def __init__(
        self,
        endpoint: KvEndpoint,
        *,
        idle_check_seconds: Seconds = 2.0,
        sockets: Callable[[KvEndpoint], EngineSockets] = _ZmqSockets,
    ) -> None:
        """`idle_check_seconds`: after so long a silence the replay socket is asked whether it is one."""
        self._endpoint = endpoint
        self._rank = endpoint.dp_rank
        self._idle_check_seconds = idle_check_seconds
        self._open_sockets = sockets
        self._replay: ReplaySocket | None = None
        self._replay_rests_until = 0.0
        self._replay_gave = False
        self._rests_unproven = 0
        self._expected: Sequence | None = None
        """The sequence that comes next; None while not even the first is known."""
        self._last_fingerprint = b""
        self._recent: dict[Sequence, bytes] = {}
        """Without a replay socket: fingerprints of the newest batches, by sequence, in the order in which they came."""
        self._replay_answers = bool(endpoint.replay)
        """Whether the replay socket answered when it was last asked."""
        self._last_live: Sequence = -1
        self._unproven = False
        """Whether the connection was lost, and not yet shown to lead to the same engine as before."""

    @property
    def replays(self) -> bool:
        """Whether there is a replay socket."""
        return bool(self._endpoint.replay)

    @property
    def certain(self) -> bool:
        """Whether all that was missed up to now has been had again, or will be as soon as it is noticed."""
        return self._replay_answers and not self._unproven

    @property
    def cursor(self) -> Cursor | None:
        """Of the last batch that was given out; None before the first."""
        return Cursor(self._expected - 1, self._last_fingerprint) if self._expected and self._last_fingerprint else None

    async def items(self, after: Cursor | None = None) -> AsyncGenerator[EngineItem, None]:
        """For ever: EngineAttached, then batches in order, with gaps and restarts where they happened. EngineResumed
        instead, and only what came `after` that batch, if the engine still has it.

        Its sockets live as long as the iteration: close it (`aclosing`) to let go of them.
        """
        sockets = self._open_sockets(self._endpoint)
        live, self._replay = sockets.live, sockets.replay
        try:
            await live.connected(CONNECT_SECONDS_MAX)
            resumed = after is not None and await self._still_gives(after)
            if after is not None and resumed:
                self._expected, self._last_fingerprint = after.sequence + 1, after.fingerprint
                yield EngineResumed(self._rank)
            async for item in self._resume() if resumed else self._begin(EngineAttached):
                yield item
            async for item in self._follow(live):
                yield item
        finally:
            sockets.close()

    async def _follow(self, live: LiveSocket) -> AsyncIterator[EngineItem]:
        silent = False
        for turn in itertools.count():
            if turn % MESSAGES_PER_TURN_MAX == 0:
                await asyncio.sleep(0)
            if live.interrupted():
                self._on_interruption(live)
                if self._replay is None:
                    yield EngineGap(0, "the connection was lost, and there is no replay socket", self._rank)
            if (self._unproven or silent) and self._can_replay:
                async for item in self._resume():
                    yield item
            frames = live.receive()
            if frames is not None:
                async for item in self._on_message(frames):
                    yield item
            silent = frames is None and not await live.arrival(self._idle_check_seconds)

    @property
    def _can_replay(self) -> bool:
        return self._replay is not None and _now() >= self._replay_rests_until

    def _on_interruption(self, live: LiveSocket) -> None:
        """It may be another engine from now on. What is queued may be the old one's; the replay has what is worth having,
        and is worth asking again when a connection comes up. Without it what is queued is all that there is."""
        self._last_live = -1
        self._recent.clear()
        self._replay_rests_until = 0.0
        if self._replay is not None:
            self._unproven = True
            live.discard()

    async def _on_message(self, frames: list[bytes]) -> AsyncIterator[EngineItem]:
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
            yield EngineNoise(f"a message of {len(frames)} frames without a sequence", self._rank)
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        if self._unproven:
            if self._rests_unproven < UNPROVEN_RESTS_MAX:
                return  # whose batch this is only the replay can tell, and will give it once more
            self._unproven = False
            self._expected = sequence
            yield EngineRestarted(exact=sequence == 0, dp_rank=self._rank)
        if self._expected is None:
            self._expected = sequence
        if self._replay is None and sequence < self._expected:
            if sequence in self._recent and self._recent[sequence] == _fingerprint(payload):
                return
            if self._arrives_late(sequence):
                yield decode_batch(sequence, payload, dp_rank=self._rank)
                self._remember(sequence, payload)
                return
            self._recent.clear()
            self._expected = sequence
            yield EngineRestarted(exact=sequence == 0, dp_rank=self._rank)
        elif sequence <= self._last_live:
            async for item in self._resume():
                yield item
        self._last_live = sequence
        if sequence > self._expected:
            async for item in self._resume(ahead=True):
                yield item
        if sequence > self._expected:
            yield EngineGap(sequence - self._expected, "not replayed", self._rank)
            self._expected = sequence
        if sequence == self._expected:
            yield self._take(sequence, payload)

    def _arrives_late(self, sequence: Sequence) -> bool:
        """Whether a sequence was passed over as missing a short while ago, on this very connection."""
        return sequence not in self._recent and min(self._recent, default=sequence) < sequence

    def _remember(self, sequence: Sequence, payload: bytes) -> None:
        if self._replay is None:
            self._recent[sequence] = _fingerprint(payload)
            if len(self._recent) > RECENT_BATCHES_MAX:
                del self._recent[next(iter(self._recent))]

    async def _still_gives(self, last: Cursor) -> bool:
        """Whether the engine's oldest batch from there on is that very one."""
        for _ in range(REPLAY_ATTEMPTS_MAX):
            if self._replay is None:
                break
            with contextlib.suppress(ReplayError):
                async with aclosing(self._replay.batches(last.sequence)) as batches:
                    async for sequence, payload in batches:
                        self._replay_gave = True
                        return (sequence, _fingerprint(payload)) == (last.sequence, last.fingerprint)
                return False
        return False

    async def _begin(self, announcement: type[EngineAttached | EngineRestarted]) -> AsyncIterator[EngineItem]:
        """Follow the engine from its first batch, or from the oldest that it still has."""
        self._expected, self._last_fingerprint = None, b""
        self._unproven = False
        for _ in range(REPLAY_ATTEMPTS_MAX):
            if not self._can_replay or self._replay is None:
                break
            try:
                async with aclosing(self._replay.batches(0)) as batches:
                    async for sequence, payload in batches:
                        self._replay_gave = True
                        if self._expected is None:
                            self._expected = sequence
                            yield announcement(exact=sequence == 0, dp_rank=self._rank)
                        if sequence != self._expected:
                            break
                        yield self._take(sequence, payload)
            except ReplayError:
                self._replay_answers = False
                if self._expected is None:
                    continue
            if self._expected is None:
                self._expected, self._replay_answers = 0, True
                yield announcement(exact=True, dp_rank=self._rank)
            else:
                async for item in self._resume():  # the answer may have had a hole
                    yield item
            return
        if self._replay is not None:
            self._rest_replay()
        yield announcement(exact=False, dp_rank=self._rank)

    async def _resume(self, *, ahead: bool = False) -> AsyncIterator[EngineItem]:
        """Ask for everything from the last batch seen on, and go on from what that says.

        Gives what was missed, a gap where the engine has it no more, or the beginning of a new engine. `ahead`: a
        later batch was seen, so an empty answer does not mean a new engine.
        """
        if self._expected is None and self._unproven:  # nothing was ever seen of the engine before
            async for item in self._begin(EngineRestarted):
                yield item
        failures, hole = 0, None
        while self._expected is not None and self._can_replay:
            expected = self._expected
            answer = _Answer(known_hole=hole)
            try:
                async for item in self._read_answer(answer):
                    yield item
            except ReplayError:
                answer.torn, self._replay_answers = True, False
            if answer.recovered:
                yield EngineReplayed(answer.recovered, self._rank)
            if not answer.torn:
                async for item in self._conclude(answer, ahead=ahead):
                    yield item
                return
            hole = answer.hole
            failures = failures + 1 if self._expected == expected else 0
            if failures == REPLAY_ATTEMPTS_MAX:
                self._rest_replay()

    async def _read_answer(self, answer: "_Answer") -> AsyncIterator[EngineItem]:
        """One answer, as far as it is whole. Raises ReplayError."""
        assert self._replay is not None
        assert self._expected is not None
        async with aclosing(self._replay.batches(max(0, self._expected - 1))) as batches:
            async for sequence, payload in batches:
                self._replay_gave = True
                if answer.empty and self._is_new_engine(sequence, payload):
                    answer.new_engine = True
                    return
                if sequence > self._expected:
                    if not answer.empty and self._expected != answer.known_hole:
                        answer.torn, answer.hole = True, self._expected  # lost on its way? once more will tell
                        return
                    yield EngineGap(sequence - self._expected, "left the engine's buffer", self._rank)
                    self._expected = sequence
                answer.empty = False
                if sequence == self._expected:
                    yield self._take(sequence, payload)
                    answer.recovered += 1

    async def _conclude(self, answer: "_Answer", *, ahead: bool) -> AsyncIterator[EngineItem]:
        """What a whole answer says of the engine itself."""
        behind = answer.empty and not ahead and bool(self._expected) and (self._replay_gave or self._unproven)
        self._unproven, self._rests_unproven, self._replay_answers = False, 0, True
        if answer.new_engine or behind:  # behind: it has not come as far as we have seen
            async for item in self._begin(EngineRestarted):
                yield item

    def _is_new_engine(self, sequence: Sequence, payload: bytes) -> bool:
        """Whether the first batch of an answer shows another engine than the one we followed. Where the buffer does
        not reach back to a batch that we have seen, only a connection that was never lost means the same one."""
        assert self._expected is not None
        if sequence == self._expected - 1:
            return _fingerprint(payload) != self._last_fingerprint
        return self._unproven and self._expected > 0

    def _rest_replay(self) -> None:
        self._rests_unproven += self._unproven
        self._replay_rests_until = _now() + REPLAY_REST_SECONDS

    def _take(self, sequence: Sequence, payload: bytes) -> EngineBatch:
        self._expected = sequence + 1
        self._last_fingerprint = _fingerprint(payload)
        self._remember(sequence, payload)
        return decode_batch(sequence, payload, dp_rank=self._rank)


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_PER_BATCH_MAX)]
    data_parallel_rank: int | None = None


class _BatchAsMap(_Batch, array_like=False):
    pass


class _StoredByPosition(BlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedByPosition(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedByPosition(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _AnyMap(msgspec.Struct):
    type: str


_batch = msgspec.msgpack.Decoder(_Batch)
_batch_map = msgspec.msgpack.Decoder(_BatchAsMap)
_event_map: msgspec.msgpack.Decoder[EngineEvent] = msgspec.msgpack.Decoder(
    BlockStored | BlockRemoved | AllBlocksCleared
)
_event_array: msgspec.msgpack.Decoder[EngineEvent] = msgspec.msgpack.Decoder(
    _StoredByPosition | _RemovedByPosition | _ClearedByPosition
)
_any_map = msgspec.msgpack.Decoder(_AnyMap)
_any_array = msgspec.msgpack.Decoder(list[Any])
_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode_batch(sequence: Sequence, payload: bytes, *, dp_rank: int = 0) -> EngineBatch:
    """What a payload says; what of it does not decode is counted in the batch, never raised."""
    try:
        if len(payload) > MESSAGE_BYTES_MAX:
            return EngineBatch(sequence, 0.0, (), dp_rank, undecodable=1, problem=f"{len(payload)} bytes are too many")
        batch = (_batch_map if _is_map(payload) else _batch).decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return EngineBatch(sequence, 0.0, (), dp_rank, undecodable=1, problem=str(error))
    events: list[EngineEvent] = []
    undecodable = unknown = 0
    problem = ""
    for raw in batch.events:
        try:
            events.append((_event_map if _is_map(raw) else _event_array).decode(raw))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            kind = _type_of(raw)
            if kind is None or kind in _KNOWN_TYPES:
                undecodable += 1
                problem = f"{kind}: {error}"
            else:
                unknown += 1
                problem = problem or f"unknown type {kind}"
    return EngineBatch(sequence, batch.ts, tuple(events), dp_rank, undecodable, unknown, problem)


def _is_map(encoded: bytes | msgspec.Raw) -> bool:
    """Whether a msgpack value begins as a map (fixmap, map 16, map 32)."""
    with memoryview(encoded) as view:
        return len(view) > 0 and (0x80 <= view[0] <= 0x8F or view[0] in (0xDE, 0xDF))


def _type_of(raw: msgspec.Raw) -> str | None:
    """The tag of an event that did not decode, where it has one at all."""
    try:
        if _is_map(raw):
            return _any_map.decode(raw).type
        tag = _any_array.decode(raw)[:1]
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return tag[0] if tag and isinstance(tag[0], str) else None


def _fingerprint(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=FINGERPRINT_BYTES).digest()


def _now() -> Seconds:
    """Monotonic seconds, of the loop that this runs on."""
    return asyncio.get_running_loop().time()


def _bound(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
