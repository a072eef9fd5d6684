"""Requests that come while there is no engine to ask: they wait, for a bounded time and number, then are told when to ask."""

import asyncio

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman_ingress.placement import hold_queue
from tests.support.events import joined, reported
from tests.support.ingress_world import COMPLETIONS, ONE, TOKENS, TWO, IngressBench, drop, world_with
from tests.support.waiting import eventually


async def asked(world: IngressBench, model: str = "m", **fields: str) -> tuple[int, str, str]:
    """The status, the code of an error, and when to ask again."""
    async with world.post(COMPLETIONS, {**TOKENS, "model": model, **fields}) as answer:
        error = (await answer.json()).get("error") or {}
        return answer.status, error.get("code", ""), answer.headers.get("retry-after", "")


async def join(world: IngressBench) -> None:
    await world.log.append(joined(ONE, at=ScaledClock().now(), url=world.one.url, max_model_len=1000))


async def held(world: IngressBench, count: int) -> None:
    """Wait until so many requests wait in the ingress."""

    async def are_held() -> bool:
        async with world.client.get(f"{world.admin_url}/metrics") as page:
            return f"pointsman_ingress_held_requests {float(count)}" in await page.text()

    await eventually(are_held, what=f"{count} held requests")


async def test_before_any_engine_has_joined_requests_wait_for_the_first() -> None:
    async with world_with(engines_join=False) as world:
        asking = asyncio.create_task(asked(world))
        await held(world, 1)
        await join(world)

        assert (await asking)[0] == 200
        await held(world, 0)


async def test_an_ingress_that_has_not_read_the_log_yet_answers_once_it_has() -> None:
    async with world_with(log_answers=False) as world:
        known, unknown = asyncio.create_task(asked(world)), asyncio.create_task(asked(world, "another"))
        await held(world, 2)
        world.broker.reconnect()

        assert (await known)[0] == 200
        assert (await unknown)[:2] == (404, "model_not_found")


async def test_a_model_that_is_not_there_is_refused_at_once() -> None:
    async with world_with() as world:
        assert (await asked(world, "another"))[:2] == (404, "model_not_found")


async def test_who_has_waited_in_vain_is_told_when_to_ask_again_and_leaves_no_trace() -> None:
    async with world_with(engines_join=False, hold_seconds=0.2) as world:
        assert await asked(world) == (503, "no_engines", "5")
        assert await world.events() == []


async def test_no_more_requests_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_queue, "HELD_REQUESTS_MAX", 2)
    async with world_with(engines_join=False) as world:
        waiting = [asyncio.create_task(asked(world)) for _ in range(2)]
        await held(world, 2)
        one_too_many = await asked(world)
        await join(world)

        assert one_too_many == (503, "no_engines", "5")
        assert [status for status, *_ in await asyncio.gather(*waiting)] == [200, 200]


async def test_without_keys_a_client_has_the_places_of_its_address_whatever_it_calls_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hold_queue, "HELD_REQUESTS_SHARE", 2)
    async with world_with(engines_join=False) as world:
        waiting = [asyncio.create_task(asked(world, user=name)) for name in ("a", "b")]
        await held(world, 2)
        one_too_many = await asked(world, user="c")
        await join(world)

        assert one_too_many == (503, "no_engines", "5")
        assert [status for status, *_ in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_client_that_hangs_up_while_it_is_held_gives_its_place_back() -> None:
    async with world_with(engines_join=False) as world:
        asking = asyncio.create_task(asked(world))
        await held(world, 1)
        asking.cancel()

        await held(world, 0)
        assert await world.events() == []


@pytest.mark.parametrize("comes", ["an engine", "a scheduler"])
async def test_with_neither_scheduler_nor_engine_requests_wait_for_either(comes: str) -> None:
    async with world_with(scheduler_timeout_seconds=0.05) as world:
        await world.scheduler.__aexit__(None, None, None)
        await drop(world, TWO, stays=ONE)
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now(), serving=False))
        await eventually(lambda: not world.board.whole)
        asking = asyncio.create_task(asked(world))
        await held(world, 1)
        if comes == "an engine":
            await world.log.append(reported(ONE, 0, [], at=ScaledClock().now()))
        else:
            await world.scheduler.__aenter__()

        assert (await asking)[0] == 200


async def test_with_neither_scheduler_nor_engine_for_long_the_client_is_told_so() -> None:
    async with world_with(scheduler_timeout_seconds=0.05, hold_seconds=0.3) as world:
        await world.scheduler.__aexit__(None, None, None)
        await drop(world, TWO, stays=ONE)
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now(), serving=False))
        await eventually(lambda: not world.board.whole)

        assert await asked(world) == (503, "no_place", "5")
