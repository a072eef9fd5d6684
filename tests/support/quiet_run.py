"""A quiet run against a fleet of simulated engines: requests one after the other, so that what is predicted must come
true, and the plain truth of what engines hold to compare the index with."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from pointsman.contracts.block_keys import KeyChain
from pointsman.ports import Link
from pointsman.primitives import BlockKey, InstanceId, Tokens
from pointsman.state.state import PoolSettings, State
from pointsman_engine_sim.server import EngineServer
from tests.support.engine_sim import EventReader
from tests.support.log_reading import folded

SPEED = 20.0
MODEL = "pointsman-sim"
AGREE_SECONDS_MAX = 15.0
AGREEING_MIN = 0.9
"""Share of predictions that must come true. On a busy machine events may come after the next request was placed; on a quiet
one all come true, and tests/vllm asks for that."""

SETTLE_SECONDS = 0.03
"""Between two requests, for the engine's events."""

PATIENT = {"x-slo-ttft-ms": "600000"}
"""No request is refused because a busy machine kept it waiting: 30 wall seconds."""

Prefix = tuple[int, ...]


@dataclass
class HeldPrefixes:
    """What an engine holds, folded from its events as plainly as can be: each block by all tokens up to its end."""

    block_tokens: Tokens
    prefixes: dict[int, Prefix] = field(default_factory=dict)
    copies: Counter[int] = field(default_factory=Counter)

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "BlockStored":
            before = self.prefixes.get(event["parent_block_hash"], ())
            for number, block in enumerate(event["block_hashes"]):
                start = number * self.block_tokens
                before = (*before, *event["token_ids"][start : start + self.block_tokens])
                self.prefixes[block] = before
                self.copies[block] += 1
        elif event["type"] == "BlockRemoved":
            self.copies.subtract(event["block_hashes"])
        else:
            self.copies.clear()

    def keys(self, chain: KeyChain) -> set[BlockKey]:
        """A key is held while every engine block of its own tokens is."""
        held = {self.prefixes[block] for block, copies in self.copies.items() if copies > 0}
        keys = set()
        for prefix in held:
            rest = len(prefix) % chain.block_tokens
            parts = range(len(prefix), len(prefix) - chain.block_tokens, -self.block_tokens)
            if not rest and all(prefix[:end] in held for end in parts):
                keys.add(chain.extend(chain.root(), prefix)[-1])
        return keys


async def keys_of(engine: EngineServer, block_size: Tokens, chain: KeyChain) -> set[BlockKey]:
    held = HeldPrefixes(block_size)
    async with EventReader(engine) as reader:
        for batch in await reader.replay():
            for event in batch.events:
                held.apply(event)
    return held.keys(chain)


async def send_conversations(url: str, requests: int) -> None:
    """One after the other, each request longer than the one that it follows, not in whole blocks."""
    chance = Random(7)
    stems = [[chance.randrange(300, 4000) for _ in range(chance.randrange(100, 700))] for _ in range(8)]
    async with aiohttp.ClientSession() as session:
        for number in range(requests):
            stem = chance.choice(stems)
            stem += [chance.randrange(300, 4000) for _ in range(chance.randrange(1, 90))]
            body = {
                "model": MODEL,
                "prompt": stem[:2000],
                "max_tokens": chance.randrange(1, 40),
                "stream": number % 2 == 0,
            }
            async with session.post(f"{url}/v1/completions", json=body, headers=PATIENT) as answer:
                content = await answer.text()
            assert answer.status == 200, content
            assert (number % 2 == 1) == ("usage" in content)
            await asyncio.sleep(SETTLE_SECONDS)


async def until_held(link: Link, chain: KeyChain, engines: Mapping[InstanceId, tuple[EngineServer, Tokens]]) -> State:
    """Wait until the index holds exactly what the engines hold. Each engine with its block size."""
    deadline = time.monotonic() + AGREE_SECONDS_MAX
    while True:
        state = await folded(link.log, State(PoolSettings(speed=SPEED, block_tokens=chain.block_tokens)))
        truth = {name: await keys_of(engine, size, chain) for name, (engine, size) in engines.items()}
        index = {name: set(state.index.keys(name)) for name in engines}
        if index == truth:
            return state
        assert time.monotonic() < deadline, {
            name: f"{len(truth[name] - index[name])} missing, {len(index[name] - truth[name])} too many"
            for name in engines
        }
        await asyncio.sleep(0.2)
