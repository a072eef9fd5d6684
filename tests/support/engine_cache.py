"""The cache of a real engine as Pointsman sees it: its KV events, translated, in a test's own process."""

import asyncio
import time
from collections.abc import AsyncIterator, Set
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from pointsman.adapters.kv_events.events import EngineAttached, EngineBatch, EngineRestarted
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import KvEndpoint
from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import BlockKey, Tokens
from pointsman_lab.background import background
from pointsman_worker.translator import BlockTranslator

EVENTS_SECONDS_MAX = 15.0
QUIET_SECONDS = 0.2


@dataclass
class EngineCache:
    """What one engine holds, in keys of `chain`."""

    chain: KeyChain
    engine_block_tokens: Tokens
    translator: BlockTranslator
    attached: asyncio.Event
    batches: int = 0
    cleared: int = 0

    @property
    def held(self) -> frozenset[BlockKey]:
        return frozenset(self.translator.keys.parents)

    async def holds(self, keys: Set[BlockKey]) -> frozenset[BlockKey]:
        """All that is held, as soon as `keys` are and nothing more comes; or after EVENTS_SECONDS_MAX as it is."""
        deadline = time.monotonic() + EVENTS_SECONDS_MAX
        while time.monotonic() < deadline:
            seen = self.batches
            await asyncio.sleep(QUIET_SECONDS)
            if keys <= self.held and seen == self.batches:
                break
        return self.held


@asynccontextmanager
async def followed(kv: str, replay: str, *, chain: KeyChain, engine_block_tokens: Tokens) -> AsyncIterator[EngineCache]:
    """Follow an engine's events while the context is open."""
    cache = EngineCache(chain, engine_block_tokens, BlockTranslator(chain, engine_block_tokens), asyncio.Event())

    async def follow() -> None:
        async with aclosing(KvEventReader(KvEndpoint(kv, replay)).items()) as items:
            async for item in items:
                if isinstance(item, EngineAttached | EngineRestarted):
                    cache.translator = BlockTranslator(chain, engine_block_tokens)
                    cache.attached.set()
                elif isinstance(item, EngineBatch):
                    cache.batches += 1
                    for event in item.events:
                        cache.translator.apply(event)

    async with background(follow()):
        await asyncio.wait_for(cache.attached.wait(), EVENTS_SECONDS_MAX)
        yield cache
