"""A prefix fetched from one real engine by another (NIXL on the CPU), for a request that waits for it or as a copy ahead of
need: the second hits it without having computed it, and its answer is that of the first."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.requests import PrefixCopyEnded, PrefixFetchEnded, RequestFinished
from pointsman.primitives import InstanceId
from pointsman.simulation.replay import verify
from pointsman.state import prefix_copies
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome
from tests.support.split_fleet import EnginePlace, SplitFleet, split_fleet
from tests.support.vllm import BLOCK_TOKENS, RunningEngine
from tests.support.waiting import eventually
from tests.vllm.test_split import FETCHED, nixl_engines

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HOT_AFTER = 3
TEXT = "The history of the lighthouse at the mouth of the river begins with a storm. " * 60

Pair = tuple[SplitFleet, RunningEngine, RunningEngine]


@pytest.fixture(scope="module")
def engines(
    vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningEngine, RunningEngine]]:
    with nixl_engines(vllm_home, tmp_path_factory.mktemp("fetch"), roles=("kv_both", "kv_both")) as (first, second):
        yield first, second


@pytest.fixture
async def fleet(engines: tuple[RunningEngine, RunningEngine], vllm_home: EngineHome) -> AsyncIterator[Pair]:
    """Requests go to the second engine, since the first is drained: it has what was asked of it before."""
    first, second = engines
    told = {"fetches": True, "engine_model": "smollm2-135m-cpu", "kv_transfer_gb_per_s": 1.0}
    places = {
        name: EnginePlace(engine.url, engine.kv, engine.replay, told)
        for name, engine in (("first", first), ("second", second))
    }
    async with split_fleet(places, block_tokens=BLOCK_TOKENS, tokenizer=str(vllm_home.model)) as opened:
        yield opened, first, second


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_second_engine_hits_what_the_first_has_computed(
    fleet: Pair, unlike_any_other: str, path: str
) -> None:
    whole, first, second = fleet
    text = unlike_any_other + TEXT
    asked: dict[str, Any] = {"model": SERVED_MODEL, "max_tokens": 10, "temperature": 0}
    asked |= {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    alone = await asyncio.to_thread(first.ask, path, asked)
    index = whole.scheduler.state.index
    await eventually(lambda: index.blocks(InstanceId("first")) * BLOCK_TOKENS >= 900, seconds=20.0)
    await whole.drain("first")
    fetched = second.metric(FETCHED)

    headers, answer = await whole.ask(path, "r", asked)
    life = await whole.life_of("r")
    placed = next(event for event in life if isinstance(event, RequestPlaced))
    ended = next((event for event in life if isinstance(event, PrefixFetchEnded)), None)
    finished = next(event for event in life if isinstance(event, RequestFinished))
    verdict = verify(await whole.pool.entries())

    assert headers["x-pointsman-instance"] == "second"
    assert answer["choices"][0] == alone["choices"][0]
    assert ended is not None
    assert (placed.fetch_from, ended.failure) == ("first", "")
    assert finished.cached_tokens >= ended.tokens > 900
    assert second.metric(FETCHED) - fetched >= ended.tokens
    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])


async def test_a_hot_prefix_is_copied_before_the_second_engine_is_asked_for_it(
    fleet: Pair, unlike_any_other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_copies, "ARRIVALS_MIN", HOT_AFTER)
    monkeypatch.setattr(prefix_copies, "FADE_SECONDS", 600.0)  # an engine on a CPU takes seconds for each
    whole, first, second = fleet
    text = unlike_any_other + TEXT
    asked: dict[str, Any] = {"model": SERVED_MODEL, "max_tokens": 10, "temperature": 0}
    last = asked | {"prompt": f"{text} The last day:"}
    alone = await asyncio.to_thread(first.ask, COMPLETIONS, last)
    index = whole.scheduler.state.index
    await eventually(lambda: index.blocks(InstanceId("first")) * BLOCK_TOKENS >= 900, seconds=20.0)
    fetched = second.metric(FETCHED)
    for number in range(HOT_AFTER + 1):  # what fades is less than one
        await whole.ask(COMPLETIONS, f"r{number}", asked | {"prompt": f"{text} Day {number}:", "stream": True})
    copies: list[PrefixCopyEnded] = []

    async def copied() -> bool:
        copies[:] = [entry.event for entry in await whole.pool.entries() if isinstance(entry.event, PrefixCopyEnded)]
        return bool(copies)

    await eventually(copied, seconds=20.0)
    copy = copies[0]
    await whole.drain("first")
    headers, answer = await whole.ask(COMPLETIONS, "after", last)
    finished = next(event for event in await whole.life_of("after") if isinstance(event, RequestFinished))
    verdict = verify(await whole.pool.entries())

    assert (copy.source, copy.instance, copy.failure) == ("first", "second", "")
    assert copy.tokens == 512  # whole levels of what is counted
    assert headers["x-pointsman-instance"] == "second"
    assert answer["choices"][0] == alone["choices"][0]
    assert finished.cached_tokens >= copy.tokens
    assert second.metric(FETCHED) - fetched >= copy.tokens
    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])
