"""The official OpenAI client against the ingress: what it asks for arrives, what it is told it understands, and what it
does by itself, above all asking again, does no harm. Engines answer as vLLM does."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import ResponseErrorEvent

from tests.support.client_libraries import openai_of
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import CHAT, COMPLETIONS, TWO, IngressBench, world_with
from tests.support.waiting import eventually

HELLO: Any = [{"role": "user", "content": "hello"}]
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def chunk(delta: dict[str, Any], *, index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
    return event({**HEAD, "object": "chat.completion.chunk", "choices": [choice]})


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def whole(*choices: dict[str, Any]) -> dict[str, Any]:
    numbered = [{"index": index, "finish_reason": "stop", "logprobs": None, **c} for index, c in enumerate(choices)]
    return {**HEAD, "object": "chat.completion", "choices": numbered, "usage": USAGE}


def said(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


DONE = b"data: [DONE]\n\n"
USAGE_CHUNK = event({**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Good "}),
    chunk({"content": "day"}, finish="stop"),
]


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    async with world_with() as opened:
        yield opened


# Answers


async def test_the_synchronous_client_gets_answers_and_streams(world: IngressBench) -> None:
    world.one.says[CHAT] = whole(said("Good day"))

    def ask() -> tuple[str | None, str, str]:
        with OpenAI(base_url=world.url + "/v1", api_key="sk-1") as client:
            answer = client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
            content = answer.parse().choices[0].message.content
            world.one.says[CHAT] = [*STREAM, DONE]
            with client.chat.completions.create(model="m", messages=HELLO, stream=True) as stream:
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return content, streamed, answer.headers["x-pointsman-instance"]

    assert await asyncio.to_thread(ask) == ("Good day", "Good day", "engine-1")


async def test_a_stream_shows_its_usage_at_the_end_if_it_was_asked_for_and_not_otherwise(world: IngressBench) -> None:
    world.one.says[CHAT] = [*STREAM, USAGE_CHUNK, DONE]
    usages = []
    async with openai_of(world) as client:
        for asks in ({"stream_options": {"include_usage": True}}, {}):
            told: Any = {"model": "m", "messages": HELLO, **asks}
            stream = await client.chat.completions.create(stream=True, **told)
            chunks = [chunk async for chunk in stream]
            assert all(chunk.choices for chunk in chunks[:-1])
            usages.append(chunks[-1].usage)

    assert usages[0] is not None
    assert usages[0].prompt_tokens_details is not None
    assert (usages[0].total_tokens, usages[0].prompt_tokens_details.cached_tokens) == (9, 4)
    assert usages[1] is None


async def test_tools_reach_the_engine_and_its_calls_the_client_whole_and_in_pieces(world: IngressBench) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    world.one.says[CHAT] = whole(
        {"message": {"role": "assistant", "content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    )
    pieces = [{**call, "index": 0, "function": {"name": "weather", "arguments": ""}}]
    pieces += [{"index": 0, "function": {"arguments": part}} for part in ('{"city": ', '"Bern"}')]
    asks: Any = {"model": "m", "messages": HELLO, "tools": [WEATHER], "tool_choice": "auto"}
    async with openai_of(world) as client:
        answer = await client.chat.completions.create(**asks)
        result: Any = {"role": "tool", "tool_call_id": "call-1", "content": "rain"}
        turn = [*HELLO, answer.choices[0].message, result]
        world.one.says[CHAT] = [*(chunk({"tool_calls": [p]}) for p in pieces), chunk({}, finish="tool_calls"), DONE]
        async with client.chat.completions.stream(model="m", messages=turn, tools=[WEATHER]) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message.tool_calls

    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.tool_calls[0].to_dict() == call
    assert streamed is not None
    assert streamed[0].function.arguments == '{"city": "Bern"}'
    first, second = (received.fields for received in world.one.received)
    assert first["tools"] == [WEATHER]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]


async def test_several_choices_and_their_log_probabilities_pass_through(world: IngressBench) -> None:
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    world.one.says[CHAT] = whole(*({**said(text), "logprobs": {"content": [token]}} for text in ("Hi", "Ho")))
    async with openai_of(world) as client:
        answer = await client.chat.completions.create(model="m", messages=HELLO, n=2, logprobs=True, top_logprobs=0)

    assert [choice.message.content for choice in answer.choices] == ["Hi", "Ho"]
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.content is not None
    assert answer.choices[1].logprobs.content[0].logprob == -0.5
    assert world.one.received[0].fields["n"] == 2


async def test_a_client_that_closes_its_stream_stops_the_engine(world: IngressBench) -> None:
    world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
    async with openai_of(world) as client:
        stream = await client.completions.create(model="m", prompt=[1, 2, 3], stream=True)
        async for _ in stream:
            break
        await stream.close()

        await eventually(lambda: world.one.given_up == 1)


# Errors


@pytest.mark.parametrize(
    ("asks", "exception", "code", "param"),
    [
        ({"max_tokens": -1}, openai.BadRequestError, "invalid_request", "max_tokens"),
        ({"max_tokens": 5000}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
    ],
)
async def test_what_cannot_be_served_is_an_exception_that_says_why(
    world: IngressBench, asks: dict[str, Any], exception: type[openai.APIStatusError], code: str, param: str
) -> None:
    told: Any = {"model": "m", "prompt": [1, 2, 3]} | asks
    async with openai_of(world) as client:
        with pytest.raises(exception) as raised:
            await client.completions.create(**told)

    assert (raised.value.code, raised.value.param) == (code, param)
    assert raised.value.request_id == raised.value.response.headers["x-request-id"]


async def test_a_wrong_key_is_an_authentication_error() -> None:
    async with world_with(keys={"sk-1": "alice"}) as world:
        async with openai_of(world, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as raised:
                await client.models.list()
        async with openai_of(world) as client:
            listed = await client.models.list()

    assert raised.value.code == "invalid_api_key"
    assert [model.id for model in listed.data] == ["m"]


@pytest.mark.parametrize(
    ("rejection", "exception"),
    [((429, "slo_ttft", 2.5), openai.RateLimitError), ((503, "no_instance", 0.2), openai.InternalServerError)],
)
async def test_a_rejection_is_an_exception_with_the_reason_and_the_time_to_wait(
    world: IngressBench, rejection: tuple[int, str, float], exception: type[openai.APIStatusError]
) -> None:
    world.scheduler.rejection = rejection
    async with openai_of(world) as client:
        with pytest.raises(exception) as raised:
            await client.completions.create(model="m", prompt=[1, 2, 3])

    assert raised.value.code == raised.value.response.headers["x-pointsman-reject-reason"] == rejection[1]
    assert float(raised.value.response.headers["retry-after"]) >= max(1.0, rejection[2])


@pytest.mark.parametrize("shows_usage", [True, False])
@pytest.mark.parametrize("more", [b"", b'data: {"choi'])
async def test_a_stream_that_breaks_off_raises_after_what_there_was(
    world: IngressBench, more: bytes, shows_usage: bool
) -> None:
    world.one.script.append(Behaviour.BREAKS_OFF)
    world.one.first_piece += more
    texts: list[str] = []
    options: Any = {"include_usage": shows_usage}
    async with openai_of(world) as client:
        stream = await client.completions.create(model="m", prompt=[1, 2, 3], stream=True, stream_options=options)
        with pytest.raises(openai.APIError) as raised:
            await collect(stream, texts)

    assert texts == ["first"]
    assert raised.value.code == "engine_failed"


async def collect(stream: Any, texts: list[str]) -> None:
    """What there is, up to an exception."""
    async for part in stream:
        texts.append(part.choices[0].text)  # noqa: PERF401 - it must survive the exception


# Asking again, as the client does by itself


@pytest.mark.parametrize("rejection", [(429, "queue_full", 1.2), (503, "no_instance", 1.2)])
async def test_the_client_asks_again_when_it_was_told_to_and_not_before(
    world: IngressBench, rejection: tuple[int, str, float]
) -> None:
    world.scheduler.rejection = rejection
    async with openai_of(world, max_retries=2) as client:
        asking = asyncio.create_task(client.completions.create(model="m", prompt=[1, 2, 3]))
        await eventually(lambda: len(world.scheduler.asked) == 1)
        world.scheduler.rejection = None
        answer = await asking

    first, second = world.scheduler.asked
    assert answer.choices[0].text == "answer"
    assert 1.9 < second.arrived_at - first.arrived_at < 10
    assert first.request != second.request


async def test_the_client_does_not_ask_again_for_what_can_never_be(world: IngressBench) -> None:
    world.scheduler.rejection = (429, "slo_unreachable", 5.0)
    async with openai_of(world, max_retries=2) as client:
        with pytest.raises(openai.RateLimitError) as raised:
            await client.completions.create(model="m", prompt=[1, 2, 3])

    assert len(world.scheduler.asked) == 1
    assert "retry-after" not in raised.value.response.headers


async def test_the_client_does_not_ask_again_for_what_took_all_the_time_there_is() -> None:
    async with world_with(request_timeout_seconds=1.0) as world:
        world.one.script.append(Behaviour.HANGS)
        async with openai_of(world, max_retries=2) as client:
            with pytest.raises(openai.APIStatusError, match="took too long"):
                await client.completions.create(model="m", prompt=[1, 2, 3])

        assert len(world.one.received) == 1


async def test_an_engine_that_fails_is_replaced_by_the_ingress_and_the_client_need_not_ask_again(
    world: IngressBench,
) -> None:
    world.one.script.append(Behaviour.RESETS)
    async with openai_of(world) as client:
        answer = await client.completions.with_raw_response.create(model="m", prompt=[1, 2, 3])

    assert answer.headers["x-pointsman-instance"] == TWO
    assert [received.path for received in world.two.received] == [COMPLETIONS]


async def test_a_response_that_breaks_off_ends_with_the_event_that_the_client_knows(world: IngressBench) -> None:
    kind = "response.output_text.delta"
    delta = {"type": kind, "delta": "Good", "item_id": "i", "output_index": 0, "content_index": 0, "logprobs": []}
    world.one.says["/v1/responses"] = [f"event: {kind}\n".encode() + event({**delta, "sequence_number": 0})]
    async with openai_of(world) as client:
        stream = await client.responses.create(model="m", input="hello", stream=True)
        first, last = [told async for told in stream]

    assert first.type == kind
    assert isinstance(last, ResponseErrorEvent)
    assert (last.type, last.code, last.sequence_number) == ("error", "engine_failed", 1)
    assert "broke off" in last.message
