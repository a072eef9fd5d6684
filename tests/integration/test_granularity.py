"""Keys coarser than engine blocks, and engines whose blocks differ, in one fleet: the index holds what the engines hold,
counted in whole keys, and every predicted hit is the reported one, but for the part of a key that smaller blocks add.
And pools whose keys differ behind one ingress, which is told of none and has each right."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.block_keys import KeyChain, unpack_keys
from pointsman.contracts.cache import BlocksStored
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceProbed
from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.ports import LogEntry
from pointsman.primitives import BlockKey, InstanceId, PoolName, Tokens
from pointsman_engine_sim.server import EngineServer
from pointsman_ingress.lifecycle import EQUAL, compared
from pointsman_ingress.settings import IngressSettings
from pointsman_lab.memory.log import MemoryBroker
from tests.support.engine_sim import running_engine
from tests.support.memory_pool import MemoryPool
from tests.support.quiet_run import AGREEING_MIN, MODEL, SPEED, send_conversations, until_held
from tests.support.services import running_ingress
from tests.support.split_fleet import EnginePlace, start_worker
from tests.support.waiting import eventually

ENGINE_TOKENS = 4096
"""Small caches, so that engines evict."""

REQUESTS = 50


@pytest.mark.parametrize(("block_tokens", "sizes"), [(64, (16, 64)), (128, (16, 32))])
async def test_engines_with_other_blocks_than_the_keys_and_each_other_serve_one_pool(
    block_tokens: Tokens, sizes: tuple[Tokens, Tokens]
) -> None:
    told = {"speed": SPEED, "block_tokens": block_tokens}
    pool = MemoryPool(clock=ScaledClock(SPEED), usual={**told, "policy": "round_robin"})
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                running_engine(
                    speed=SPEED, block_size=size, num_gpu_blocks_override=ENGINE_TOKENS // size, max_model_len=4096
                )
            )
            for size in sizes
        ]
        named = {InstanceId(f"engine-{n}"): pair for n, pair in enumerate(zip(engines, sizes, strict=True), 1)}
        scheduler = await stack.enter_async_context(pool.scheduler())
        for name, (engine, _) in named.items():
            await start_worker(stack, pool, name, _place_of(engine), told)
        await eventually(lambda: set(scheduler.state.fleet.ready) == set(named))
        url = await stack.enter_async_context(pool.ingress(speed=SPEED, tokenizer="builtin"))

        await send_conversations(url, REQUESTS)

        chain = KeyChain(secret=IngressSettings().secret.encode(), model=MODEL, block_tokens=block_tokens)
        state = await until_held(pool.client, chain, named)
        events = await pool.events()

    assert [state.fleet[name].engine_block_tokens for name in named] == list(sizes)
    ends = [event for event in events if isinstance(event, RequestFinished)]
    outcomes = Counter(
        compared(end.predicted_cached_tokens, end.cached_tokens, granularity=block_tokens) for end in ends
    )
    assert len(ends) == REQUESTS
    assert {end.instance for end in ends} == set(named)
    assert outcomes[EQUAL] >= AGREEING_MIN * REQUESTS, outcomes
    assert sum(end.cached_tokens > 0 for end in ends) > REQUESTS / 2
    assert any(type(event).__name__ == "BlocksRemoved" for event in events), "the caches are small enough to evict"


@dataclass(frozen=True)
class _Kind:
    """What a pool is like."""

    model: str
    block_tokens: Tokens
    engine_block_tokens: Tokens


KINDS = {
    PoolName("chat"): _Kind("chat-model", block_tokens=32, engine_block_tokens=16),
    PoolName("code"): _Kind("code-model", block_tokens=128, engine_block_tokens=64),
}


async def test_pools_whose_keys_stand_for_different_blocks_share_an_ingress_that_was_told_of_neither() -> None:
    prompt = list(range(1000, 1300))
    clock = ScaledClock(SPEED)
    pools = {name: MemoryPool(MemoryBroker(name), clock) for name in KINDS}
    predicted: dict[PoolName, list[Tokens]] = {}
    async with AsyncExitStack() as stack:
        for pool in pools.values():
            await _start_pool(stack, pool)
        links = {name: pool.broker.client(clock, name="ingress-1") for name, pool in pools.items()}
        url = await stack.enter_async_context(
            running_ingress(links, clock, pools=tuple(pools), probe=True, speed=SPEED, tokenizer="builtin")
        )
        client = await stack.enter_async_context(aiohttp.ClientSession())
        for name, pool in pools.items():
            await _until(pool, InstanceProbed)
            body = {"model": KINDS[name].model, "prompt": prompt, "max_tokens": 1, "stream": True}
            predicted[name] = [await _predicted_hit(client, f"{url}/v1/completions", body) for _ in range(2)]
            await _until(pool, BlocksStored, holding=_expected(name, prompt)[-1])
    logs = {name: await pool.events() for name, pool in pools.items()}

    for name, kind in KINDS.items():
        arrived = [event for event in logs[name] if isinstance(event, RequestArrived)]
        assert [unpack_keys(event.keys) for event in arrived] == [_expected(name, prompt)] * 2
        assert predicted[name] == [0, len(prompt) // kind.block_tokens * kind.block_tokens]
        assert [event.parity for event in logs[name] if isinstance(event, InstanceProbed)] == [True]


async def _predicted_hit(client: aiohttp.ClientSession, url: str, body: Mapping[str, object]) -> Tokens:
    async with client.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return int(answer.headers["x-pointsman-cached-tokens"])


def _expected(pool: PoolName, prompt: list[int]) -> list[BlockKey]:
    kind = KINDS[pool]
    chain = KeyChain(secret=IngressSettings().secret.encode(), model=kind.model, block_tokens=kind.block_tokens)
    return chain.extend(chain.root(), prompt)


async def _start_pool(stack: AsyncExitStack, pool: MemoryPool) -> None:
    name = pool.broker.pool
    kind = KINDS[name]
    told: dict[str, Any] = {"pool": name, "speed": SPEED, "block_tokens": kind.block_tokens}
    await stack.enter_async_context(pool.scheduler(policy="min_ttft", **told))
    engine = await stack.enter_async_context(
        running_engine(speed=SPEED, model=kind.model, block_size=kind.engine_block_tokens)
    )
    await start_worker(stack, pool, f"{name}-1", _place_of(engine), told)


def _place_of(engine: EngineServer) -> EnginePlace:
    return EnginePlace(engine.url, engine.events_endpoint or "", engine.replay_endpoint or "")


async def _until(pool: MemoryPool, kind: type[LogEvent], *, holding: BlockKey | None = None) -> None:
    """Wait for such an event, of a worker that derived this key from its engine's events where one is given."""
    async with asyncio.timeout(10):
        async for entry in pool.client.log.read(1):
            event = entry.event if isinstance(entry, LogEntry) else None
            runs = event.runs if isinstance(event, BlocksStored) else []
            if isinstance(event, kind) and (holding is None or any(holding in unpack_keys(run.keys) for run in runs)):
                return
