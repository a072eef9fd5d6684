"""What the ingress serves beside chats and completions: responses by their prefix, embeddings by load, and questions that
any engine of the pool can answer."""

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.requests import PrefillFinished, RequestFailed, RequestFinished
from tests.support.engine_sim import running_engine as simulated_engine
from tests.support.events import joined, reported
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import CHAT, ONE, TWO, World, eventually_listed, world_with
from tests.support.waiting import eventually

RESPONSES, EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"
LONG = "Every block of this prompt has a key of its own. " * 20
USAGE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 1,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 8,
}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


CREATED = event("response.created", response={"id": "resp_1", "usage": None})
DELTA = event("response.output_text.delta", delta="Good day")
COMPLETED = event("response.completed", response={"id": "resp_1", "output": [], "usage": USAGE})


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with world_with(tokenizer="builtin") as opened:
        yield opened


# Responses

TOOL = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"input": LONG}, {"messages": [{"role": "user", "content": LONG}]}),
    (
        {"instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG}]},
    ),
    (
        {
            "input": [
                {"role": "user", "content": LONG},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
                {"role": "user", "content": "And tomorrow?"},
            ],
            "tools": [{"type": "function", **TOOL}],
        },
        {
            "messages": [
                {"role": "user", "content": LONG},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                {"role": "assistant", "content": "It rains."},
                {"role": "user", "content": "And tomorrow?"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
    ),
]


@pytest.mark.parametrize(("response", "chat"), FORMS, ids=["text", "items", "tools"])
async def test_a_response_has_the_keys_of_the_same_conversation_as_a_chat(
    world: World, response: dict[str, Any], chat: dict[str, Any]
) -> None:
    world.one.says[RESPONSES] = {"id": "resp_1", "usage": USAGE}
    for path, body in ((RESPONSES, response), (CHAT, chat)):
        async with world.post(path, {"model": "m", **body}) as answer:
            await answer.read()
        assert (answer.status, answer.headers["x-pointsman-prefix"]) == (200, "exact")

    asked, same = world.scheduler.asked
    assert asked.keys == same.keys != b""
    assert asked.prompt_tokens == same.prompt_tokens


@pytest.mark.parametrize(
    "more",
    [
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/1.png"}]}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": "go on", "previous_response_id": "resp_0"},
        {"input": "look it up", "tools": [{"type": "web_search"}]},
    ],
)
async def test_a_response_that_cannot_be_known_is_served_all_the_same_and_says_so(
    world: World, more: dict[str, Any]
) -> None:
    world.one.says[RESPONSES] = {"id": "resp_1", "usage": USAGE}
    async with world.post(RESPONSES, {"model": "m", "instructions": LONG, **more}) as answer:
        await answer.read()

    assert answer.status == 200
    assert answer.headers["x-pointsman-prefix"].startswith(("partial", "none"))
    assert not world.scheduler.asked[0].exact


@pytest.mark.parametrize(
    "item", [{"role": "user", "content": [{"type": "x\r\nx-mine: yes"}]}, {"type": "x\r\nx-mine: yes"}]
)
async def test_what_a_client_calls_its_parts_makes_no_header(world: World, item: dict[str, Any]) -> None:
    world.one.says[RESPONSES] = {"id": "resp_1", "usage": USAGE}
    async with world.post(RESPONSES, {"model": "m", "input": [item]}) as answer:
        await answer.read()

    assert answer.headers["x-pointsman-prefix"].endswith("; xx-mine: yes")
    assert "x-mine" not in answer.headers


async def test_the_stream_of_a_response_passes_through_and_its_usage_is_in_the_log(world: World) -> None:
    pieces = [CREATED, DELTA[:30], DELTA[30:], DELTA, COMPLETED[:40], COMPLETED[40:]]
    world.one.says[RESPONSES] = pieces
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        content = await answer.read()

    assert content == b"".join(pieces)
    first, end = await world.events()
    assert isinstance(first, PrefillFinished)
    assert isinstance(end, RequestFinished)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (7, 1, 4)


async def test_the_last_event_of_a_response_may_be_as_long_as_the_answer(world: World) -> None:
    whole = event("response.completed", response={"output": ["x" * 2_000_000], "usage": USAGE})
    world.one.says[RESPONSES] = [DELTA, *(whole[at : at + 50_000] for at in range(0, len(whole), 50_000))]
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        assert (await answer.read()).endswith(whole)

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert end.completion_tokens == 1


async def test_an_engine_that_only_announced_a_response_can_still_be_replaced(world: World) -> None:
    world.one.says[RESPONSES] = [CREATED]
    world.two.says[RESPONSES] = [CREATED, DELTA, COMPLETED]
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        content = await answer.read()

    assert answer.headers["x-pointsman-instance"] == TWO
    assert content == CREATED + DELTA + COMPLETED


async def test_a_response_that_breaks_off_ends_with_an_error(world: World) -> None:
    world.one.says[RESPONSES] = [CREATED, DELTA]
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        content = await answer.text()

    assert json.loads(content.rpartition("data: ")[2])["error"]["code"] == "engine_failed"
    assert isinstance((await world.events())[-1], RequestFailed)


# Embeddings


@pytest.mark.parametrize("given", ["hello", ["one", "two"], [1, 2, 3], [[1, 2], [3]]])
async def test_embeddings_are_placed_by_load_and_end_in_the_log_as_prefills(world: World, given: Any) -> None:
    world.one.says[EMBEDDINGS] = {"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}}
    async with world.post(EMBEDDINGS, {"model": "m", "input": given}) as answer:
        await answer.read()

    asked = world.scheduler.asked[0]
    assert (answer.status, asked.keys, asked.exact, asked.max_output_tokens) == (200, b"", False, 0)
    assert 1 <= asked.prompt_tokens <= 4
    first, end = await world.events()
    assert isinstance(first, PrefillFinished)
    assert isinstance(end, RequestFinished)
    assert (end.prompt_tokens, end.completion_tokens) == (3, 0)


@pytest.mark.parametrize("path", [EMBEDDINGS, RESPONSES, DETOKENIZE])
async def test_an_endpoint_that_the_engines_do_not_have_is_refused_by_name(world: World, path: str) -> None:
    async with world.post(path, {"model": "m", "input": "hello", "tokens": [1]}) as answer:
        error = (await answer.json())["error"]

    assert (answer.status, error["code"]) == (404, "endpoint_not_found")
    assert path in error["message"]


@pytest.mark.parametrize(
    ("path", "body"), [(EMBEDDINGS, {"input": []}), (RESPONSES, {"input": None}), (RESPONSES, {"input": 7})]
)
async def test_a_body_without_anything_to_read_is_refused(world: World, path: str, body: dict[str, Any]) -> None:
    async with world.post(path, {"model": "m", **body}) as answer:
        assert answer.status == 400
    async with world.post(path, {**body, "input": "hello", "model": "nobody"}) as answer:
        assert answer.status == 404

    assert world.scheduler.asked == []


# Questions that any engine answers


async def test_tokens_and_texts_come_from_an_engine_with_little_to_do_and_leave_no_trace(world: World) -> None:
    async with simulated_engine() as engine:
        now = ScaledClock().now()
        await world.log.append(joined(TWO, url=engine.url, epoch=2, at=now))
        await world.log.append(msgspec.structs.replace(reported(ONE, 0, [], at=now), running=5, aliases=["known"]))
        await eventually_listed(world, "known")
        async with world.post(TOKENIZE, {"prompt": "hello", "add_special_tokens": False}) as answer:
            tokens = (await answer.json())["tokens"]
        async with world.post(DETOKENIZE, {"tokens": tokens}) as back:
            text = (await back.json())["prompt"]

    assert (answer.headers["x-pointsman-instance"], text) == (TWO, "hello")
    assert world.scheduler.asked == []
    assert await world.events() == []


async def test_a_question_goes_to_another_engine_when_one_fails(world: World) -> None:
    world.one.says[DETOKENIZE] = world.two.says[DETOKENIZE] = {"prompt": "hello"}
    world.one.script.append(Behaviour.RESETS)
    async with world.post(DETOKENIZE, {"model": "m", "tokens": [1]}) as answer:
        assert (await answer.json()) == {"prompt": "hello"}

    assert answer.headers["x-pointsman-instance"] == TWO


async def test_a_question_is_bounded_as_a_request_is() -> None:
    async with world_with(request_timeout=0.2) as world:
        world.one.script.append(Behaviour.HANGS)
        async with world.post(DETOKENIZE, {"model": "m", "tokens": [1]}) as answer:
            assert answer.status == 408

        await eventually(lambda: world.one.given_up == 1)


async def test_the_answers_are_counted(world: World) -> None:
    async with world.post(TOKENIZE, {"model": "m", "prompt": "hello"}) as answer:
        await answer.read()
    async with world.client.get(world.url + "/metrics") as metrics:
        assert 'pointsman_http_requests_total{route="/tokenize",status="200"}' in await metrics.text()
