"""Reads one engine's KV events: connects the sockets with Continuity and decodes its output."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from pointsman.adapters.clocks import loop_seconds
from pointsman.adapters.kv_events.codec import decode_batch
from pointsman.adapters.kv_events.continuity import Continuity, RawBatch
from pointsman.adapters.kv_events.events import Cursor, EngineItem
from pointsman.adapters.kv_events.sockets import EngineSockets, KvEndpoint, ReplayError, ReplaySocket, ZmqSockets
from pointsman.adapters.turns import Turn
from pointsman.primitives import Seconds

CONNECT_SECONDS_MAX = 5.0
MESSAGES_PER_TURN_MAX = 16
TURN_SECONDS_MAX = 0.002
"""Then whatever else the process follows has a turn: a replay of 10,000 batches takes seconds."""


class KvEventReader:
    """Events of one data-parallel rank; iterate `items` once."""

    def __init__(
        self,
        endpoint: KvEndpoint,
        *,
        idle_check_seconds: Seconds = 2.0,
        sockets: Callable[[KvEndpoint], EngineSockets] = ZmqSockets,
    ) -> None:
        """`idle_check_seconds`: silence before a replay request."""
        self._endpoint = endpoint
        self._idle_check_seconds = idle_check_seconds
        self._open_sockets = sockets
        self._continuity = Continuity(replays=self.replays)

    @property
    def replays(self) -> bool:
        return bool(self._endpoint.replay)

    @property
    def certain(self) -> bool:
        return self._continuity.certain

    @property
    def catching_up(self) -> bool:
        return self._continuity.catching_up

    @property
    def cursor(self) -> Cursor | None:
        return self._continuity.cursor

    async def items(self, after: Cursor | None = None) -> AsyncGenerator[EngineItem, None]:
        """EngineAttached, or EngineResumed if the engine still has the batch `after`; then batches in order with gaps
        and restarts. Use `aclosing` to close the sockets."""
        sockets, continuity = self._open_sockets(self._endpoint), self._continuity
        live = sockets.live
        try:
            await live.connected(CONNECT_SECONDS_MAX)
            continuity.start(after)
            turn = Turn(MESSAGES_PER_TURN_MAX, TURN_SECONDS_MAX)
            async for item in self._settled(sockets.replay, turn):
                yield item
            silent = False
            while True:
                await turn.take_message()
                if live.interrupted() and continuity.interrupted():
                    live.discard()
                continuity.check(silent=silent, now=loop_seconds())
                async for item in self._settled(sockets.replay, turn):
                    yield item
                frames = live.receive()
                if frames is not None:
                    continuity.received(frames)
                    async for item in self._settled(sockets.replay, turn):
                        yield item
                silent = frames is None and not await live.arrival(self._idle_check_seconds)
        finally:
            sockets.close()

    async def _settled(self, replay: ReplaySocket | None, turn: Turn) -> AsyncGenerator[EngineItem, None]:
        continuity = self._continuity
        while True:
            for item in self._ready():
                yield item
            start = continuity.replay_request(loop_seconds())
            if start is None:
                break
            assert replay is not None
            try:
                async with aclosing(replay.batches(start)) as batches:
                    async for sequence, payload in batches:
                        await turn.take_message()
                        wanted = continuity.replayed(sequence, payload)
                        for item in self._ready():
                            yield item
                        if not wanted:
                            break
            except ReplayError:
                continuity.answer_failed()
            else:
                continuity.answer_ended()
        for item in self._ready():
            yield item

    def _ready(self) -> Iterator[EngineItem]:
        while (item := self._continuity.next_item()) is not None:
            yield decode_batch(item.sequence, item.payload) if isinstance(item, RawBatch) else item
