"""A simulated engine (`pointsman-engine-sim` without sockets), and the contents of its cache. Its KV events go to
`MemoryPublisher`, which the worker reads through its own `KvEventReader` (sockets: `engine_host`)."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, cast

import aiohttp
from typing_extensions import override

from pointsman.adapters.kv_events.continuity import SEQUENCE_BYTES
from pointsman.adapters.tokenizer import Tokenizer
from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import BlockKey, EngineSeconds, Sequence, Tokens
from pointsman.runtime.health import Receive, Scope, Send, send_whole
from pointsman.simulation.block_cache import (
    BlockHash,
    BlocksEvicted,
    CacheChange,
    CacheReset,
    PromptIdentity,
    RunCached,
)
from pointsman.simulation.engine_model import EngineModel
from pointsman.simulation.engine_types import EngineSettings
from pointsman.state.engine_profiles import PROFILES
from pointsman_engine_sim.app import EngineApp
from pointsman_engine_sim.engine import LiveEngine
from pointsman_engine_sim.generation import ServedModel
from pointsman_engine_sim.kv_events import EventEncoder
from pointsman_engine_sim.kv_transfer import KvTransfer
from pointsman_engine_sim.metrics import EngineMetrics
from pointsman_engine_sim.wording import Wording
from pointsman_lab.torture.clocks import EngineClock, SkewedClock
from pointsman_lab.torture.http import Session
from pointsman_lab.torture.loop import VirtualLoop

MODEL = "pointsman-sim"
PROFILE = "qwen2.5-7b-910b4"
MAX_MODEL_LEN = 4096
ANSWER_SECONDS = 0.0005
TRANSFER_SECONDS_PER_TOKEN = 1e-5
HOLD_SECONDS: EngineSeconds = 20.0
SLOWNESS = 10.0
PIECES_BEFORE_RESET_MAX = 3

FailureMode = Literal["", "errors", "resets", "hang", "slow"]
"""Failures with normal health and load. `errors`: answers 500. `resets`: closes connections within answers. `hang`:
never answers. `slow`: SLOWNESS times slower. Empty: none."""

FAILURE_MODES: tuple[FailureMode, ...] = ("errors", "resets", "hang", "slow")


class Truth:
    """Cache contents in pool keys, folded from the engine's own changes by plain code."""

    def __init__(self, chain: KeyChain, block_size: Tokens) -> None:
        self._chain = chain
        self._block_size = block_size
        self._tokens: dict[BlockHash, tuple[BlockHash | None, tuple[int, ...]]] = {}
        self._identity: dict[BlockHash, PromptIdentity] = {}
        self._keys: set[BlockKey] | None = None

    def apply(self, change: CacheChange) -> None:
        self._keys = None
        if isinstance(change, RunCached):
            parent, size = change.parent, self._block_size
            for position, block in enumerate(change.hashes):
                self._tokens[block] = (parent, tuple(change.tokens[position * size : (position + 1) * size]))
                self._identity[block] = change.identity
                parent = block
        elif isinstance(change, BlocksEvicted):
            for block in change.hashes:
                del self._tokens[block]
        else:
            assert isinstance(change, CacheReset)
            self._tokens.clear()

    def keys(self) -> set[BlockKey]:
        if self._keys is None:
            self._keys = self._chained()
        return self._keys

    def _chained(self) -> set[BlockKey]:
        per_key = self._chain.block_tokens // self._block_size
        found = set()
        for block in self._tokens:
            path = self._path(block)
            if len(path) % per_key == 0:
                tokens = [token for part in path for token in self._tokens[part][1]]
                identity = self._identity[block]
                root = self._chain.root(lora=identity.lora, cache_salt=identity.cache_salt)
                found.add(self._chain.extend(root, tokens)[-1])
        return found

    def _path(self, block: BlockHash) -> list[BlockHash]:
        path: list[BlockHash] = []
        at: BlockHash | None = block
        while at is not None:
            path.append(at)
            at = self._tokens[at][0]
        return path[::-1]


@dataclass(slots=True)
class Lies:
    """False reports of an engine. `events`: share of batches with other blocks."""

    idle: bool = False
    busy: bool = False
    cached_tokens: bool = False
    events: float = 0.0
    max_model_len: Tokens = 0
    model: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        return self != Lies()


class MemoryPublisher:
    def __init__(
        self,
        loop: VirtualLoop,
        chance: Random,
        clock: SkewedClock,
        truth: Truth,
        *,
        block_size: Tokens,
        buffer_steps: int,
    ) -> None:
        self._loop = loop
        self._chance = chance
        self._clock = clock
        self._truth = truth
        self._encoder = EventEncoder(block_size=block_size)
        self._sequence = 0
        self.buffer: deque[tuple[Sequence, bytes]] = deque(maxlen=buffer_steps)
        self.dropping = 0.0
        self.lies = Lies()
        self.subscriber: Callable[[list[bytes]], None] | None = None

    def publish(self, changes: Iterable[CacheChange]) -> None:
        changes = list(changes)
        for change in changes:
            self._truth.apply(change)
        if self.lies.events and self._chance.random() < self.lies.events:
            changes = self._falsified(changes)
        sequence, payload = self._sequence, self._encoder.payload(changes, self._clock.unix)
        self._sequence += 1
        self.buffer.append((sequence, payload))
        if self.subscriber is not None and self._chance.random() >= self.dropping:
            self.subscriber([b"", sequence.to_bytes(SEQUENCE_BYTES, "big"), payload])

    def _falsified(self, changes: list[CacheChange]) -> list[CacheChange]:
        reported: list[CacheChange] = []
        for change in changes:
            if isinstance(change, RunCached) and self._chance.random() < 0.5:
                tokens = [token % 3000 + 1000 for token in change.tokens]
                reported.append(RunCached(change.parent, change.hashes, tokens, change.identity))
            elif isinstance(change, CacheReset):
                reported.append(change)
        return reported


@dataclass(slots=True)
class EngineShape:
    block_size: Tokens
    blocks: int
    buffer_steps: int
    batched_tokens: Tokens


class RunningEngine:
    def __init__(
        self,
        loop: VirtualLoop,
        chance: Random,
        clock: SkewedClock,
        shape: EngineShape,
        chain: KeyChain,
        *,
        seed: int,
        url: str,
        to_others: Session | None,
        adapters: tuple[str, ...] = (),
        lies: Lies | None = None,
        failure_mode: FailureMode = "",
    ) -> None:
        """`to_others`: session to the other engines, for prefill/decode transfers."""
        self.truth = Truth(chain, shape.block_size)
        self.publisher = MemoryPublisher(
            loop, chance, clock, self.truth, block_size=shape.block_size, buffer_steps=shape.buffer_steps
        )
        self.publisher.lies = lies or Lies()
        self.model = EngineModel(
            PROFILES[PROFILE],
            EngineSettings(
                block_size=shape.block_size,
                num_gpu_blocks=shape.blocks,
                max_num_batched_tokens=shape.batched_tokens,
                max_num_seqs=64,
                seed=seed,
            ),
        )
        metrics = EngineMetrics(self.model, model_name=MODEL)
        tokenizer, wording = vocabulary()
        steady = self._steady = EngineClock(loop, speed=clock.speed)
        self.engine = LiveEngine(self.model, clock=steady, wording=wording, publisher=self.publisher, timings=metrics)
        served = ServedModel(
            name=MODEL,
            max_model_len=min(MAX_MODEL_LEN, shape.blocks * shape.block_size),
            adapters=dict.fromkeys(adapters, "somewhere"),
        )
        transfer: KvTransfer | None = None
        if to_others is not None:
            transfer = KvTransfer(
                clock=steady,
                release_kv=self.engine.release_kv,
                block_size=shape.block_size,
                seconds_per_token=TRANSFER_SECONDS_PER_TOKEN,
                hold_seconds=HOLD_SECONDS,
                session=cast(aiohttp.ClientSession, to_others),
            )
            transfer.url = url
        self.app = BadApp(self.engine, tokenizer=tokenizer, metrics=metrics, served=served, transfer=transfer)
        self.app.lies = self.publisher.lies
        self.app.chance = chance
        self.misbehave(failure_mode)

    def misbehave(self, failure_mode: FailureMode) -> None:
        self.app.failure_mode = failure_mode
        self._steady.slow_down(SLOWNESS if failure_mode == "slow" else 1.0)


class BadApp(EngineApp):
    """The engine's server with injected failures and wrong `cached_tokens`."""

    lies = Lies()
    failure_mode: FailureMode = ""
    chance = Random()

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/")
        failure_mode = self.failure_mode if generates else ""
        if failure_mode == "errors":
            await send_whole(send, 500, b'{"error":{"message":"CUDA error","code":500}}', "application/json")
        elif failure_mode == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
        elif failure_mode == "resets":
            with contextlib.suppress(_ResetError):
                await super().__call__(scope, receive, self._reset(send))
        else:
            await super().__call__(scope, receive, send)

    def _reset(self, send: Send) -> Send:
        left = self.chance.randrange(PIECES_BEFORE_RESET_MAX)

        async def send_some(message: MutableMapping[str, Any]) -> None:
            nonlocal left
            if not left or not message.get("more_body", True):
                raise _ResetError
            left -= 1
            await send(message)

        return send_some

    @override
    def _usage(self, answer: Any) -> dict[str, object]:
        if self.lies.cached_tokens:
            answer.generation.cached_tokens = 0 if answer.generation.cached_tokens else answer.prompt_tokens
        return super()._usage(answer)


class _ResetError(Exception):
    pass


_vocabulary: list[tuple[Tokenizer, Wording]] = []


def vocabulary() -> tuple[Tokenizer, Wording]:
    if not _vocabulary:
        tokenizer = Tokenizer.builtin()
        _vocabulary.append((tokenizer, Wording(tokenizer)))
    return _vocabulary[0]
