"""Anthropic's own client against the ingress: what it asks for arrives, what it is told it understands. Engines are simulated
ones, which answer as vLLM does, or fail as a test says."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic import Anthropic

from pointsman.adapters.clocks import ScaledClock
from tests.support.client_libraries import anthropic_of
from tests.support.engine_sim import running_engine as simulated_engine
from tests.support.events import reported
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import ONE, TWO, IngressBench, eventually_listed, world_with

LONG = "Every block of this prompt has a key of its own. " * 20
HELLO: Any = [{"role": "user", "content": LONG}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    async with simulated_engine(model="m") as engine, world_with(tokenizer="builtin") as opened:
        await opened.grants({ONE: engine.url})
        busy = msgspec.structs.replace(reported(TWO, 0, [], at=ScaledClock().now()), running=5, aliases=["known"])
        await opened.log.append(busy)
        await eventually_listed(opened, "known")
        yield opened


async def test_the_synchronous_client_gets_messages_and_streams(world: IngressBench) -> None:
    def ask() -> tuple[Any, Any, str]:
        with Anthropic(base_url=world.url, api_key="sk-1") as client:
            whole = client.messages.create(model="m", max_tokens=5, messages=HELLO)
            with client.messages.stream(model="m", max_tokens=5, messages=HELLO) as stream:
                text = "".join(stream.text_stream)
                return whole, stream.get_final_message(), text

    whole, streamed, text = await asyncio.to_thread(ask)
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.content[0].text
    assert streamed.content[0].text == text != ""
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 5


async def test_the_second_message_comes_from_the_cache_and_both_say_what_did(world: IngressBench) -> None:
    async with anthropic_of(world) as client:
        first = await client.messages.create(model="m", max_tokens=5, messages=HELLO)
        second = await client.messages.create(model="m", max_tokens=5, messages=HELLO)

    assert first.usage.cache_read_input_tokens == 0
    cached = second.usage.cache_read_input_tokens
    assert cached is not None
    assert cached > 100
    assert second.usage.input_tokens + cached == first.usage.input_tokens == world.scheduler.asked[0].prompt_tokens


async def test_a_conversation_with_tools_is_counted_as_it_is_placed(world: IngressBench) -> None:
    turns: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
    ]
    asks: Any = {"model": "m", "messages": turns, "system": "Be brief.", "tools": [WEATHER]}
    async with anthropic_of(world) as client:
        counted = await client.messages.count_tokens(**asks)
        answer = await client.messages.create(max_tokens=5, **asks)

    placed = world.scheduler.asked[0]
    assert (placed.exact, placed.prompt_tokens) == (True, counted.input_tokens)
    assert answer.usage.input_tokens == counted.input_tokens


@pytest.mark.parametrize(
    ("asks", "exception"),
    [
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"max_tokens": 5000}, anthropic.BadRequestError),
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"messages": [{"role": "user", "content": "x" * 9_000_000}]}, anthropic.APIStatusError),
    ],
)
async def test_what_cannot_be_served_is_an_exception_that_says_why(
    world: IngressBench, asks: dict[str, Any], exception: type[anthropic.APIStatusError]
) -> None:
    told: Any = {"model": "m", "max_tokens": 5, "messages": HELLO} | asks
    async with anthropic_of(world) as client:
        with pytest.raises(exception) as raised:
            await client.messages.create(**told)

    body: Any = raised.value.body
    assert body["type"] == "error"
    assert body["error"]["message"] in str(raised.value)


@pytest.mark.parametrize(
    ("rejection", "exception"),
    [((429, "slo_ttft", 2.5), anthropic.RateLimitError), ((503, "no_instance", 0.2), anthropic.InternalServerError)],
)
async def test_a_rejection_is_an_exception_with_the_time_to_wait(
    world: IngressBench, rejection: tuple[int, str, float], exception: type[anthropic.APIStatusError]
) -> None:
    world.scheduler.rejection = rejection
    async with anthropic_of(world) as client:
        with pytest.raises(exception) as raised:
            await client.messages.create(model="m", max_tokens=5, messages=HELLO)

    assert int(raised.value.response.headers["retry-after"]) >= 1


async def test_a_stream_that_breaks_off_is_an_exception(world: IngressBench) -> None:
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    head = {
        "type": "message_start",
        "message": {
            "id": "x",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": "m",
            "usage": {"input_tokens": 1, "output_tokens": 0},
        },
    }
    await world.grants({ONE: world.one.url})
    world.one.script.append(Behaviour.BREAKS_OFF)
    world.one.first_piece = b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())  # type: ignore[attr-defined]
        for event in (head, start)
    )
    async with anthropic_of(world) as client:
        with pytest.raises(anthropic.APIStatusError) as raised:
            async with client.messages.stream(model="m", max_tokens=5, messages=HELLO) as stream:
                await stream.until_done()

    assert "broke off" in str(raised.value)


async def test_a_wrong_key_is_an_authentication_error() -> None:
    async with simulated_engine(model="m") as engine, world_with(keys={"sk-1": "alice"}, tokenizer="builtin") as world:
        await world.grants({ONE: engine.url})
        async with anthropic_of(world, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="m", max_tokens=5, messages=HELLO)
        for shown in ({}, {"api_key": None, "auth_token": "sk-1"}):
            async with anthropic_of(world, **shown) as client:
                assert (await client.messages.create(model="m", max_tokens=5, messages=HELLO)).content

    assert {asked.tenant for asked in world.scheduler.asked} == {"alice"}
