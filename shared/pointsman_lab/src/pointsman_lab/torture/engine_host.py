"""The host of an engine, and its worker's connections: a probe, and sockets that lose batches, break and answer with
holes."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from random import Random

from typing_extensions import override

from pointsman.adapters.http_engine import EngineFacts, EngineLoad, EngineUnreachableError, FurtherNames
from pointsman.adapters.kv_events.sockets import (
    REPLAY_FRAME_SECONDS,
    EngineSockets,
    LiveSocket,
    ReplayError,
    ReplaySocket,
)
from pointsman.contracts.fleet import Role
from pointsman.primitives import EngineSeconds, InstanceId, Sequence, Tokens
from pointsman_lab.torture.engines import ANSWER_SECONDS, MAX_MODEL_LEN, MODEL, FailureMode, Lies, RunningEngine
from pointsman_lab.torture.loop import MOMENT_SECONDS, VirtualLoop

RECONNECT_SECONDS_MAX = 1.0
PROBE_SECONDS_MAX = 2.0
QUEUE_MAX = 100_000
"""Batches on their way: vLLM's default."""


class EngineHost:
    def __init__(
        self,
        instance: InstanceId,
        role: Role,
        loop: VirtualLoop,
        chance: Random,
        *,
        replays: bool = True,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.replays = replays
        self.names = FurtherNames(adapters=adapters)
        self.lies = Lies()
        self.failure_mode: FailureMode = ""
        self.well_since: EngineSeconds = 0.0
        self.last_failure_mode: FailureMode = ""
        self.instance = instance
        self.role = role
        self.url = f"http://{instance}:8000"
        self.loop = loop
        self.chance = chance
        self.running: RunningEngine | None = None
        self.paused = False
        self.worker_cut = False
        self.replay_failures = 0.0
        self.sockets: list[MemorySockets] = []

    def began(self, running: RunningEngine) -> None:
        self.running = running
        self.reconnect()

    def misbehave(self, failure_mode: FailureMode) -> None:
        """The engine fails requests until changed; its health and load look normal."""
        if failure_mode == "" != self.failure_mode:
            self.well_since, self.last_failure_mode = self.loop.time(), self.failure_mode
        self.failure_mode = failure_mode
        if self.running is not None:
            self.running.misbehave(failure_mode)

    def died(self) -> None:
        self.running = None
        for sockets in self.sockets:
            sockets.live.break_off()

    def reconnect(self) -> None:
        self.loop.outside(self.chance.uniform(0.0, RECONNECT_SECONDS_MAX), self._handshake, self.running)

    def _handshake(self, running: RunningEngine | None) -> None:
        if running is not self.running or running is None or self.worker_cut:
            return
        for sockets in self.sockets:
            running.publisher.subscriber = sockets.live.carry
            sockets.live.shake_hands()


class HostProbe:
    def __init__(self, host: EngineHost, block_size: Tokens) -> None:
        self._host = host
        self._block_size = block_size

    async def describe(self) -> EngineFacts:
        running, lies = await self._running(), self._host.lies
        return EngineFacts(
            model=lies.model or MODEL,
            max_model_len=lies.max_model_len or MAX_MODEL_LEN,
            version="simulated",
            block_tokens=self._block_size,
            kv_capacity_tokens=running.model.cache.blocks_max * self._block_size,
            further_names=self._names,
        )

    async def load(self) -> EngineLoad:
        counts, facts = (await self._running()).model.counts, await self.describe()
        load = EngineLoad(
            waiting=counts.waiting,
            running=counts.running,
            kv_usage=counts.kv_usage,
            further_names=facts.further_names,
            model=facts.model,
            max_model_len=facts.max_model_len,
        )
        if self._host.lies.idle:
            return replace(load, waiting=0, running=0, kv_usage=0.0)
        return replace(load, waiting=10**6, running=10**6, kv_usage=1.0) if self._host.lies.busy else load

    @property
    def _names(self) -> FurtherNames:
        return replace(self._host.names, aliases=self._host.lies.aliases)

    async def _running(self) -> RunningEngine:
        host = self._host
        await asyncio.sleep(host.chance.expovariate(1 / ANSWER_SECONDS))
        if host.paused or host.worker_cut:
            await asyncio.sleep(PROBE_SECONDS_MAX)
            raise EngineUnreachableError(f"{host.url} does not answer")
        if host.running is None:
            raise EngineUnreachableError(f"nothing listens on {host.url}", refused=True)
        return host.running


class MemorySockets(EngineSockets):
    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.live: MemoryLiveSocket = MemoryLiveSocket(host)
        self.replay = MemoryReplaySocket(host) if host.replays else None
        host.sockets = [self]
        if host.running is not None:
            host.reconnect()

    @override
    def close(self) -> None:
        if self in self._host.sockets:
            self._host.sockets.remove(self)


class MemoryLiveSocket(LiveSocket):
    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._arrived: deque[list[bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._handshake = asyncio.Event()
        self._interrupted = False
        self._last_at: EngineSeconds = 0.0

    def carry(self, frames: list[bytes]) -> None:
        self._in_order(self._arrive, frames)

    def break_off(self) -> None:
        self._in_order(self._interrupt)

    def shake_hands(self) -> None:
        self._interrupt()
        self._handshake.set()

    @override
    async def connected(self, seconds: EngineSeconds) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._handshake.wait()
        self.interrupted()

    @override
    def interrupted(self) -> bool:
        interrupted, self._interrupted = self._interrupted, False
        return interrupted

    @override
    async def arrival(self, seconds: EngineSeconds) -> bool:
        if not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._waiter
        return bool(self._arrived)

    @override
    def receive(self) -> list[bytes] | None:
        return self._arrived.popleft() if self._arrived else None

    @override
    def discard(self) -> None:
        self._arrived.clear()

    def _in_order(self, reach: Callable[..., None], *arguments: object) -> None:
        loop = self._host.loop
        now = loop.time()
        self._last_at = max(self._last_at + MOMENT_SECONDS, now + self._host.chance.expovariate(1 / ANSWER_SECONDS))
        loop.outside(self._last_at - now, reach, *arguments)

    def _interrupt(self) -> None:
        self._interrupted = True

    def _arrive(self, frames: list[bytes]) -> None:
        if not self._host.worker_cut and len(self._arrived) < QUEUE_MAX:
            self._arrived.append(frames)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)


class MemoryReplaySocket(ReplaySocket):
    def __init__(self, host: EngineHost) -> None:
        self._host = host

    @override
    async def batches(self, start: Sequence) -> AsyncGenerator[tuple[Sequence, bytes], None]:
        host, chance = self._host, self._host.chance
        await asyncio.sleep(chance.expovariate(1 / ANSWER_SECONDS))
        running = host.running
        if running is None or host.paused or host.worker_cut:
            await asyncio.sleep(REPLAY_FRAME_SECONDS)
            raise ReplayError("no answer in time")
        answer = [batch for batch in running.publisher.buffer if batch[0] >= start]
        trouble = chance.random() < host.replay_failures
        broken_at = chance.randrange(len(answer) + 1) if trouble else -1
        breaks_off = chance.random() < 0.5
        for position, batch in enumerate(answer):
            if position % 16 == 0:
                await asyncio.sleep(chance.expovariate(1 / ANSWER_SECONDS))
            if position == broken_at:
                if breaks_off:
                    raise ReplayError("no answer in time")
                continue
            yield batch
