"""A prefix fetched from another engine, all of the system at work: scheduler, workers, ingress and simulated engines in one
process over the in-memory log, engines and clients over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from pointsman.contracts.decisions import RequestGranted, RequestPlaced
from pointsman.contracts.requests import PrefillFinished, PrefixFetchEnded, RequestCancelled, RequestFinished
from pointsman.primitives import InstanceId
from pointsman.simulation.replay import verify
from pointsman_engine_sim.server import EngineServer
from tests.support.split_fleet import SplitFleet, simulated_split_fleet
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"
BLOCKS = 200
SPEED = 3.0
"""Slow, so that what the machine adds to a fetch is little against computing the prefix, 1.6 s of the engine."""
A, B = InstanceId("a"), InstanceId("b")

pytestmark = pytest.mark.asyncio(loop_scope="module")

Fleet = tuple[SplitFleet, dict[str, EngineServer]]


def prefix(number: int) -> list[int]:
    return [number, *(token % 500 for token in range(64 * BLOCKS - 1))]


def body(number: int, last: int, *, stream: bool = True) -> dict[str, Any]:
    return {"model": "pointsman-sim", "prompt": [*prefix(number), last], "max_tokens": 4, "stream": stream}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    """`a` holds the prefixes 1 to 6, and is drained: all go to `b`."""
    async with simulated_split_fleet({"a": "both", "b": "both"}, fetches=True, speed=SPEED) as (opened, engines):
        for number in range(1, 7):
            async with opened.http.post(engines["a"].url + COMPLETIONS, json=body(number, 7)) as answer:
                await answer.read()
        await eventually(lambda: opened.scheduler.state.index.blocks(A) >= 6 * BLOCKS)
        await opened.drain("a")
        yield opened, engines


async def fetch_of(fleet: SplitFleet, request: str) -> PrefixFetchEnded:
    return next(event for event in await fleet.life_of(request) if isinstance(event, PrefixFetchEnded))


async def test_the_prefix_comes_from_where_it_is_and_is_not_computed_again(fleet: Fleet) -> None:
    whole, engines = fleet
    headers, answer = await whole.ask(COMPLETIONS, "first", body(1, 8, stream=False))
    async with whole.http.post(engines["a"].url + COMPLETIONS, json=body(1, 8, stream=False)) as direct:
        expected = await direct.json()
    life = await whole.life_of("first")
    placed = next(event for event in life if isinstance(event, RequestPlaced))
    fetched = next(event for event in life if isinstance(event, PrefixFetchEnded))
    finished = next(event for event in life if isinstance(event, RequestFinished))

    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert (headers["x-pointsman-instance"], headers["x-pointsman-cached-tokens"]) == ("b", str(64 * BLOCKS))
    assert (placed.instance, placed.fetch_from, placed.fetched_tokens) == (B, A, 64 * BLOCKS)
    assert (fetched.source, fetched.tokens, fetched.failure) == (A, 64 * BLOCKS, "")
    assert finished.cached_tokens == 64 * BLOCKS
    assert engines["a"].model.cache.blocks_held == engines["b"].model.cache.blocks_held == 0
    kinds = [type(event) for event in life]
    assert kinds.index(RequestGranted) < kinds.index(PrefixFetchEnded) < kinds.index(RequestFinished)


async def test_those_that_share_it_wait_and_then_hit(fleet: Fleet) -> None:
    whole, _ = fleet
    await asyncio.gather(*(whole.ask(COMPLETIONS, f"shared-{n}", body(2, 10 + n)) for n in range(3)))
    lives = [await whole.life_of(f"shared-{n}") for n in range(3)]
    fetches = [event for life in lives for event in life if isinstance(event, PrefixFetchEnded)]

    assert len(fetches) == 1
    assert all(e.cached_tokens == 64 * BLOCKS for life in lives for e in life if isinstance(e, RequestFinished))


async def test_a_source_that_has_evicted_it_meanwhile_computes_it(fleet: Fleet) -> None:
    whole, engines = fleet
    model = engines["a"].model
    computed = model.counts.prefix_cache_hits
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model, "_cached_prefix", lambda _: ())
        await whole.ask(COMPLETIONS, "evicted", body(3, 8))

    assert (await fetch_of(whole, "evicted")).failure == ""
    assert model.counts.prefix_cache_hits == computed


async def test_a_client_that_leaves_ends_the_transfer(fleet: Fleet) -> None:
    whole, engines = fleet
    workload, transfers = whole.scheduler.state.workload, whole.scheduler.state.transfers
    asked = asyncio.create_task(whole.ask(COMPLETIONS, "gone", body(4, 8)))
    await eventually(lambda: bool(transfers.under_way))
    asked.cancel()
    await eventually(lambda: not workload.requests)

    assert transfers.under_way == {}
    assert isinstance((await whole.life_of("gone"))[-1], RequestCancelled)
    await eventually(lambda: engines["a"].model.idle and engines["b"].model.idle)


async def test_every_decision_on_fetches_is_made_again_from_the_log(fleet: Fleet) -> None:
    whole, _ = fleet
    await eventually(lambda: not whole.scheduler.state.workload.requests)

    verdict = verify(await whole.pool.entries())

    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])
    assert verdict.identical == verdict.decisions > 10


@pytest.mark.parametrize(
    ("engine", "why"), [("a", "the source: its status was 500"), ("b", "the target: its status was 500")]
)
async def test_without_the_fetch_the_prompt_is_computed(fleet: Fleet, engine: str, why: str) -> None:
    whole, engines = fleet
    transfers = whole.scheduler.state.transfers
    transfers.forget(A)  # the pair does not rest
    number = {"a": 5, "b": 6}[engine]
    submit = engines[engine].model.submit
    engines[engine].model.submit = once(_refuse, submit)  # type: ignore[method-assign]
    await whole.ask(COMPLETIONS, f"refused-by-{engine}", body(number, 8))
    life = await whole.life_of(f"refused-by-{engine}")
    finished = next(event for event in life if isinstance(event, RequestFinished))

    assert next(event for event in life if isinstance(event, PrefixFetchEnded)).failure == why
    assert (finished.instance, finished.cached_tokens) == (B, 0)
    assert sum(isinstance(event, PrefillFinished) for event in life) == 1
    assert transfers.rests(A, B, whole.pool.clock.now())


def once(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([first])
    return lambda *args, **kwargs: next(calls, then)(*args, **kwargs)


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError("the engine has a defect")
