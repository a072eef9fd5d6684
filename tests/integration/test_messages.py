"""Anthropic's Messages API: placed by its prefix like the chat that it is, and answered as Anthropic's clients expect it, in
streams and where something goes wrong."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from yarl import URL

from pointsman.contracts.requests import (
    PrefillFinished,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import CHAT, TWO, IngressBench, world_with
from tests.support.waiting import eventually

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
LONG = "Every block of this prompt has a key of its own. " * 20
ASK: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}
USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2}
ANSWER = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "usage": USAGE}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


START = event("message_start", message={**ANSWER, "usage": {"input_tokens": 0, "output_tokens": 0}})
BLOCK = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
DELTA = event("content_block_delta", index=0, delta={"type": "text_delta", "text": "Good day"})
LAST = event("message_delta", delta={"stop_reason": "end_turn"}, usage=USAGE)
STOP = event("message_stop")


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    async with world_with(tokenizer="builtin") as opened:
        opened.one.says[MESSAGES] = ANSWER
        yield opened


async def stream_of(world: IngressBench, *pieces: bytes) -> bytes:
    world.one.says[MESSAGES] = list(pieces)
    async with world.post(MESSAGES, {**ASK, "stream": True}) as answer:
        content: bytes = await answer.read()
    return content


# Placed as a chat

TOOL = {"name": "weather", "description": "of a city"}
SCHEMA = {"type": "object", "properties": {}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({}, {}),
    "system": (
        {
            "system": [
                {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief."},
            ]
        },
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG}]},
    ),
    "tools": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": LONG}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
            ],
            "tools": [{**TOOL, "input_schema": SCHEMA}],
        },
        {
            "messages": [
                {"role": "user", "content": LONG},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}],
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_message_has_the_keys_of_the_same_conversation_as_a_chat(world: IngressBench, form: str) -> None:
    message, chat = FORMS[form]
    for path, body in ((MESSAGES, message), (CHAT, chat)):
        async with world.post(path, {**ASK, **body}) as answer:
            await answer.read()
        assert (answer.status, answer.headers["x-pointsman-prefix"]) == (200, "exact")

    asked, same = world.scheduler.asked
    assert asked.keys == same.keys != b""
    assert (asked.prompt_tokens, asked.max_output_tokens) == (same.prompt_tokens, 5)


async def test_a_picture_leaves_what_comes_before_it_known(world: IngressBench) -> None:
    turns = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes."}]
    said = []
    for content in (LONG, [PIXEL, {"type": "text", "text": "And this?"}]):
        async with world.post(MESSAGES, {**ASK, "messages": [*turns, {"role": "user", "content": content}]}) as answer:
            await answer.read()
            said.append(answer.headers["x-pointsman-prefix"])

    known, part = (asked.keys for asked in world.scheduler.asked)
    assert said == ["exact", "partial; image_url"]
    assert part != b""
    assert known.startswith(part)


async def test_a_picture_is_work_and_takes_no_room_from_the_answer(world: IngressBench) -> None:
    asks = [
        {"role": "user", "content": content} for content in ("What is this?", [PIXEL, {"type": "text", "text": "?"}])
    ]
    for ask in asks:
        async with world.post(CHAT, {"model": "m", "messages": [ask]}) as answer:
            await answer.read()

    text, pictured = world.scheduler.asked
    assert text.prompt_tokens < 100
    assert (pictured.prompt_tokens, pictured.context_tokens) == (1000, 1000)  # all of the engines' context
    assert pictured.max_output_tokens > 900


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ([{"type": "document", "source": {}}], "document"),
        ([{"type": "x\r\nx-mine: yes"}], "xx-mine: yes"),
        ([{}], "None"),
    ],
)
async def test_what_cannot_be_read_is_served_all_the_same_and_says_so(
    world: IngressBench, content: Any, kind: str
) -> None:
    messages = [*ASK["messages"], {"role": "user", "content": content}]
    async with world.post(MESSAGES, {**ASK, "messages": messages}) as answer:
        assert answer.status == 200

    assert answer.headers["x-pointsman-prefix"] == f"partial; {kind}"
    assert "x-mine" not in answer.headers


async def test_an_engine_renders_it_where_there_is_no_tokenizer_here() -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": "hello"}]}
    async with world_with() as world:
        world.one.says[MESSAGES] = ANSWER
        for renders in (True, False):
            world.one.renders = world.two.renders = renders
            async with world.post(MESSAGES, ask) as answer:
                await answer.read()
            assert (answer.status, answer.headers["x-pointsman-prefix"]) == (200, "exact")

        paths = [question.path for engine in (world.one, world.two) for question in engine.questions]
        assert paths == [f"{MESSAGES}/render", f"{MESSAGES}/render", "/tokenize"]


async def test_what_only_the_engine_knows_of_its_template_is_guessed_where_it_does_not_render() -> None:
    async with world_with() as world:
        world.one.says[MESSAGES] = ANSWER
        for more in (
            {"thinking": {"type": "disabled"}},
            {"messages": [*ASK["messages"], {"role": "system", "content": "Be kind."}]},
        ):
            async with world.post(MESSAGES, {**ASK, **more}) as answer:
                await answer.read()
            assert answer.headers["x-pointsman-prefix"] == "none; guessed"


async def test_the_user_of_the_metadata_names_tenant_and_conversation(world: IngressBench) -> None:
    async with world.post(MESSAGES, {**ASK, "metadata": {"user_id": "bob"}}) as answer:
        await answer.read()

    assert (world.scheduler.asked[0].tenant, world.scheduler.asked[0].session) == ("bob", "bob")


# Answers


async def test_usage_counts_what_came_from_the_cache_as_a_part_of_the_prompt(world: IngressBench) -> None:
    async with world.post(MESSAGES, ASK) as answer:
        assert await answer.json() == ANSWER

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (7, 2, 4)


async def test_a_stream_passes_through_as_it_is_and_its_usage_is_in_the_log(world: IngressBench) -> None:
    pieces = [START, BLOCK[:30], BLOCK[30:], DELTA, event("ping"), LAST, STOP]
    assert await stream_of(world, *pieces) == b"".join(pieces)

    first, end = await world.events()
    assert isinstance(first, PrefillFinished)
    assert isinstance(end, RequestFinished)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (7, 2, 4)
    assert "stream_options" not in world.one.received[0].fields


async def test_an_engine_that_did_not_even_start_a_message_can_still_be_replaced(world: IngressBench) -> None:
    world.two.says[MESSAGES] = [START, BLOCK, DELTA, LAST, STOP]
    assert await stream_of(world, event("ping")) == START + BLOCK + DELTA + LAST + STOP

    assert world.scheduler.asked[1].excluded == ["engine-1"]


async def test_a_count_of_tokens_is_answered_by_an_engine_and_leaves_no_trace(world: IngressBench) -> None:
    world.one.says[COUNT] = world.two.says[COUNT] = {"input_tokens": 7}
    async with world.post(COUNT, {"model": "m", "messages": ASK["messages"]}) as answer:
        assert await answer.json() == {"input_tokens": 7}

    assert world.scheduler.asked == []
    assert await world.events() == []


# Errors


def told(content: bytes) -> tuple[str, str]:
    """Type and message of an error in Anthropic's shape, which has nothing else in it."""
    error = json.loads(content)
    assert set(error) == {"type", "error"}
    assert error["type"] == "error"
    assert set(error["error"]) == {"type", "message"}
    return error["error"]["type"], error["error"]["message"]


def last_event(content: bytes) -> bytes:
    """The data of the last event, which is an error and set apart from what came before."""
    _, name, rest = content.rpartition(b"event: error\n")
    assert name
    assert rest.startswith(b"data: ")
    assert rest.endswith(b"\n\n")
    return rest.removeprefix(b"data: ")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (MESSAGES, b"{", 400, "invalid_request_error"),
        (MESSAGES, {**ASK, "messages": []}, 400, "invalid_request_error"),
        (MESSAGES, {**ASK, "messages": "hello"}, 400, "invalid_request_error"),
        (MESSAGES, {**ASK, "max_tokens": -1}, 400, "invalid_request_error"),
        (MESSAGES, {**ASK, "max_tokens": 5000}, 400, "invalid_request_error"),
        (MESSAGES, {**ASK, "model": "nobody"}, 404, "not_found_error"),
        (COUNT, {**ASK, "model": "nobody"}, 404, "not_found_error"),
        (COUNT, ASK, 404, "not_found_error"),
        (MESSAGES, b" " * 9_000_000, 413, "request_too_large"),
    ],
)
async def test_what_is_refused_is_told_in_anthropics_shape(
    world: IngressBench, path: str, body: Any, status: int, kind: str
) -> None:
    async with world.post(path, body) as answer:
        assert (answer.status, told(await answer.read())[0]) == (status, kind)

    assert world.scheduler.asked == []


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/batches", "/batches/msgbatch_1/results", "/", "/%62atches", "/count_tokens/"])
async def test_a_path_below_messages_that_does_not_exist_is_refused_in_anthropics_shape(
    world: IngressBench, method: str, path: str
) -> None:
    url = URL(world.url + MESSAGES + path, encoded=True)
    async with world.client.request(method, url, json=ASK) as answer:
        assert (answer.status, told(await answer.read())[0]) == (404, "not_found_error")
        assert answer.headers["request-id"] == answer.headers["x-pointsman-request-id"]


async def test_engines_that_do_not_have_it_are_said_not_to(world: IngressBench) -> None:
    world.one.says.clear()
    async with world.post(MESSAGES, ASK) as answer:
        kind, message = told(await answer.read())

    assert (answer.status, kind) == (404, "not_found_error")
    assert MESSAGES in message


@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/count_tokens"])
async def test_anthropics_clients_read_the_requests_id_of_answers_and_refusals(world: IngressBench, path: str) -> None:
    for body in (ASK, {**ASK, "messages": 7}):
        async with world.post(path, body) as answer:
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
    async with world.post("/v1/completions", {"model": "m", "prompt": [1]}) as answer:
        assert "request-id" not in answer.headers


async def test_another_method_is_told_in_the_same_shape(world: IngressBench) -> None:
    async with world.client.get(world.url + MESSAGES) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        told(await answer.read())


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (503, "overloaded_error")])
async def test_a_rejection_says_when_to_ask_again(world: IngressBench, status: int, kind: str) -> None:
    world.scheduler.rejection = (status, "slo_ttft", 2.5)
    async with world.post(MESSAGES, ASK) as answer:
        assert told(await answer.read())[0] == kind

    assert (answer.status, answer.headers["retry-after"]) == (status, "3")
    assert answer.headers["x-pointsman-reject-reason"] == "slo_ttft"


async def test_what_an_engine_refuses_is_passed_on(world: IngressBench) -> None:
    world.one.script.append(Behaviour.REFUSES)
    async with world.post(MESSAGES, ASK) as answer:
        assert (answer.status, "the engine says no" in await answer.text()) == (400, True)


@pytest.mark.parametrize("piece", [DELTA, DELTA[:20]])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(world: IngressBench, piece: bytes) -> None:
    content = await stream_of(world, START, BLOCK, piece)

    shown = START + BLOCK + (piece if piece == DELTA else b"")
    assert content.startswith(shown + b"event: error")
    assert told(last_event(content))[0] == "api_error"
    assert isinstance((await world.events())[-1], RequestFailed)


async def test_an_error_of_the_engines_own_ends_a_stream(world: IngressBench) -> None:
    failed = event("error", error={"type": "internal_error", "message": "no memory"})
    world.one.says[MESSAGES], world.one.goes_on = [START, BLOCK, DELTA, failed], asyncio.Event()
    async with world.post(MESSAGES, {**ASK, "stream": True}) as answer:
        assert await answer.content.readexactly(len(START)) == START
        world.one.goes_on.set()
        assert await answer.read() == BLOCK + DELTA + failed


async def test_the_start_of_a_message_is_a_sign_of_life_before_hidden_reasoning() -> None:
    async with world_with(tokenizer="builtin", first_byte_seconds_min=0.2, first_byte_factor=1.0) as world:
        world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
        world.one.first_piece = START
        async with world.post(MESSAGES, {**ASK, "stream": True}) as answer:
            assert await answer.content.readexactly(len(START)) == START

        assert answer.headers["x-pointsman-instance"] != TWO
        assert not [event for event in await world.events() if isinstance(event, RequestAttemptFailed)]


async def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    async with world_with(tokenizer="builtin", request_timeout_seconds=0.5) as world:
        world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
        world.one.first_piece = BLOCK
        async with world.post(MESSAGES, {**ASK, "stream": True}) as answer:
            content = await answer.read()

    assert content.startswith(BLOCK)
    assert told(last_event(content))[0] == "timeout_error"


async def test_a_client_that_hangs_up_stops_the_engine(world: IngressBench) -> None:
    world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
    world.one.first_piece = BLOCK
    async with world.post(MESSAGES, {**ASK, "stream": True}) as answer:
        await answer.content.readany()
        answer.close()

    await eventually(lambda: world.one.given_up == 1)
    assert isinstance((await world.events())[-1], RequestCancelled)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x_api_key": "sk-1"}, 200),
        ({"authorization": "Bearer sk-1"}, 200),
        ({"authorization": "Bearer wrong", "x_api_key": "sk-1"}, 401),
        ({"authorization": "Bearer ", "x_api_key": "sk-1"}, 200),
        ({"authorization": "Bearer", "x_api_key": "sk-1"}, 200),
        ({"authorization": "Bearer "}, 401),
        ({"x_api_key": "wrong"}, 401),
        ({"x_api_key": ""}, 401),
        ({}, 401),
    ],
)
async def test_the_key_may_be_shown_as_anthropics_clients_show_it(headers: dict[str, str], status: int) -> None:
    async with world_with(tokenizer="builtin", keys={"sk-1": "alice"}) as world:
        world.one.says[MESSAGES] = ANSWER
        async with world.post(MESSAGES, ASK, **headers) as answer:
            content = await answer.read()

        assert answer.status == status
        if status == 401:
            assert told(content)[0] == "authentication_error"
        else:
            assert world.scheduler.asked[0].tenant == "alice"
            assert "x-api-key" not in world.one.received[0].headers


async def test_a_key_that_is_not_ours_to_check_reaches_the_engine_and_no_other_header_does(world: IngressBench) -> None:
    async with world.post(MESSAGES, ASK, x_api_key="sk-1", cookie="x=1") as answer:
        await answer.read()

    received = world.one.received[0].headers
    assert received["x-api-key"] == "sk-1"
    assert "cookie" not in received
    assert answer.headers["x-pointsman-instance"] != TWO
