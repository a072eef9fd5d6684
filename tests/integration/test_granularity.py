"""Keys coarser than engine blocks, and engines whose blocks differ, in one fleet: the index holds what the engines hold,
counted in whole keys, and every predicted hit is the reported one, but for the part of a key that smaller blocks add."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.chassis.health import HealthBoard
from pointsman.chassis.log_link import open_link
from pointsman.contracts.block_keys import KeyChain
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId, Tokens
from pointsman.tooling.discovery import find_fleet
from pointsman_ingress.life import EQUAL, compared
from tests.support.engine_sim import running_engine
from tests.support.quiet_run import AGREEING_MIN, MODEL, SPEED, folded, send_conversations, until_held
from tests.support.up import pointsman_up

ENGINE_TOKENS = 4096
"""Small caches, so that engines evict."""

REQUESTS = 50


@pytest.mark.parametrize(("block_tokens", "sizes"), [(64, (16, 64)), (128, (16, 32))])
async def test_engines_with_other_blocks_than_the_keys_and_each_other_serve_one_pool(
    tmp_path: Path, block_tokens: Tokens, sizes: tuple[Tokens, Tokens]
) -> None:
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                running_engine(
                    speed=SPEED, block_size=size, num_gpu_blocks_override=ENGINE_TOKENS // size, max_model_len=4096
                )
            )
            for size in sizes
        ]
        addresses = [f"{e.url}#kv={e.events_endpoint}&replay={e.replay_endpoint}" for e in engines]
        told = ("--engine", ",".join(addresses), "--policy", "round_robin", "--speed", str(SPEED))
        up = stack.enter_context(pointsman_up(tmp_path, *told, "--block-tokens", str(block_tokens)))
        await asyncio.to_thread(up.wait_for, "Try it")
        fleet = find_fleet(data=up.data)
        settings = fleet.settings()
        link = await stack.enter_async_context(open_link(settings, ScaledClock(SPEED), HealthBoard(), name="test"))

        await send_conversations(fleet.ingress, REQUESTS)

        chain = KeyChain(secret=settings.secret.encode(), model=MODEL, block_tokens=block_tokens)
        named = {InstanceId(f"engine-{n}"): pair for n, pair in enumerate(zip(engines, sizes, strict=True), 1)}
        state = await until_held(link, chain, named)
        _, events = await folded(link, block_tokens)

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
