"""What the ingress serves beside chats and completions: responses by their prefix, embeddings by load, and questions that
any engine of the pool can answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.requests import PrefillFinished, RequestFailed, RequestFinished
from tests.support.engine_sim import running_engine as simulated_engine
from tests.support.events import joined, reported
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import CHAT, ONE, TWO, IngressBench, eventually_listed, world_with
from tests.support.raw_engine import running_raw_engine, whole
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
async def world() -> AsyncIterator[IngressBench]:
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
    ({"input": LONG, "tools": [{"type": "web_search"}]}, {"messages": [{"role": "user", "content": LONG}]}),
]


@pytest.mark.parametrize(("response", "chat"), FORMS, ids=["text", "items", "tools", "web search"])
async def test_a_response_has_the_keys_of_the_same_conversation_as_a_chat(
    world: IngressBench, response: dict[str, Any], chat: dict[str, Any]
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
    ],
)
async def test_a_response_that_cannot_be_known_is_served_all_the_same_and_says_so(
    world: IngressBench, more: dict[str, Any]
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
async def test_what_a_client_calls_its_parts_makes_no_header(world: IngressBench, item: dict[str, Any]) -> None:
    world.one.says[RESPONSES] = {"id": "resp_1", "usage": USAGE}
    async with world.post(RESPONSES, {"model": "m", "input": [item]}) as answer:
        await answer.read()

    assert answer.headers["x-pointsman-prefix"].endswith("; xx-mine: yes")
    assert "x-mine" not in answer.headers


async def test_the_stream_of_a_response_passes_through_and_its_usage_is_in_the_log(world: IngressBench) -> None:
    pieces = [CREATED, DELTA[:30], DELTA[30:], DELTA, COMPLETED[:40], COMPLETED[40:]]
    world.one.says[RESPONSES] = pieces
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        content = await answer.read()

    assert content == b"".join(pieces)
    first, end = await world.events()
    assert isinstance(first, PrefillFinished)
    assert isinstance(end, RequestFinished)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (7, 1, 4)


async def test_the_last_event_of_a_response_may_be_as_long_as_the_answer(world: IngressBench) -> None:
    whole = event("response.completed", response={"output": ["x" * 2_000_000], "usage": USAGE})
    world.one.says[RESPONSES] = [DELTA, *(whole[at : at + 50_000] for at in range(0, len(whole), 50_000))]
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        assert (await answer.read()).endswith(whole)

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert end.completion_tokens == 1


async def test_an_engine_that_only_announced_a_response_can_still_be_replaced(world: IngressBench) -> None:
    world.one.says[RESPONSES] = [CREATED]
    world.two.says[RESPONSES] = [CREATED, DELTA, COMPLETED]
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        content = await answer.read()

    assert answer.headers["x-pointsman-instance"] == TWO
    assert content == CREATED + DELTA + COMPLETED


@pytest.mark.parametrize("begun", [b"", DELTA[:-10], DELTA[:10]])
async def test_a_response_that_breaks_off_ends_with_an_error(world: IngressBench, begun: bytes) -> None:
    world.one.says[RESPONSES] = [CREATED, DELTA, begun]
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        content = await answer.text()

    assert content.startswith((CREATED + DELTA).decode())
    name, _, data = content.removeprefix((CREATED + DELTA).decode()).partition("\n")
    error = json.loads(data.removeprefix("data: "))
    assert name == "event: error"
    assert error.pop("message").startswith("The engine broke off in the middle of its answer")
    assert error == {"type": "error", "code": "engine_failed", "param": None, "sequence_number": 2}
    assert isinstance((await world.events())[-1], RequestFailed)


@pytest.mark.parametrize(
    ("last", "end"),
    [
        (
            event("error", code="server_error", message="CUDA error", param=None, sequence_number=2),
            ("engine_broke_off", 502),
        ),
        (
            event("response.failed", response={"id": "resp_1", "error": {"code": "server_error", "message": "x"}}),
            ("engine_broke_off", 502),
        ),
        (
            event("response.failed", response={"id": "resp_1", "error": {"code": "invalid_image", "message": "x"}}),
            ("engine_refused", 400),
        ),
    ],
)
async def test_a_response_whose_stream_says_that_it_failed_has_failed(
    world: IngressBench, last: bytes, end: tuple[str, int]
) -> None:
    world.one.says[RESPONSES], world.one.goes_on = [CREATED + DELTA, last], asyncio.Event()
    async with world.post(RESPONSES, {"model": "m", "input": "hello", "stream": True}) as answer:
        assert await answer.content.readexactly(len(CREATED + DELTA)) == CREATED + DELTA
        world.one.goes_on.set()
        assert await answer.read() == last

    failed = (await world.events())[-1]
    assert isinstance(failed, RequestFailed)
    assert (failed.reason, failed.status) == end


# Embeddings


@pytest.mark.parametrize("given", ["hello", ["one", "two"], [1, 2, 3], [[1, 2], [3]]])
async def test_embeddings_are_placed_by_load_and_end_in_the_log_as_prefills(world: IngressBench, given: Any) -> None:
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


@pytest.mark.parametrize("inputs", [1, 400])
@pytest.mark.parametrize("text", ["hello", "hello " * 50_000], ids=["sent directly", "sent by aiohttp's client"])
async def test_embeddings_as_bytes_come_with_what_tells_them_apart_and_their_usage(
    world: IngressBench, inputs: int, text: str
) -> None:
    items = [
        {"index": n, "start": 4 * n, "end": 4 * n + 4, "shape": [1], "embed_dtype": "float32"} for n in range(inputs)
    ]
    metadata = json.dumps({"id": "e", "data": items, "usage": {"prompt_tokens": 3, "total_tokens": 3}})
    told = b"HTTP/1.1 200 OK\r\nx-other: secret\r\nmetadata: " + metadata.encode() + b"\r\n"
    async with running_raw_engine() as engine:
        engine.otherwise = [whole(b"\x00\x01" * 70_000, head=told, content_type=b"application/octet-stream")]
        await world.grants({ONE: engine.url})
        asking = json.dumps({"model": "m", "input": text, "encoding_format": "bytes"})
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession(max_field_size=1 << 20) as client,
            client.post(world.url + EMBEDDINGS, data=asking, headers=headers) as answer,
        ):
            assert (answer.status, len(await answer.read())) == (200, 140_000)

    end = (await world.events())[-1]
    assert (answer.headers["metadata"], answer.content_type) == (metadata, "application/octet-stream")
    assert "x-other" not in answer.headers
    assert isinstance(end, RequestFinished)
    assert end.prompt_tokens == 3


@pytest.mark.parametrize(
    "path", [EMBEDDINGS, RESPONSES, DETOKENIZE, "/v2/rerank", "/v1/score", "/pooling", "/classify"]
)
async def test_an_endpoint_that_the_engines_do_not_have_is_refused_by_name(world: IngressBench, path: str) -> None:
    async with world.post(path, {"model": "m", "input": "hello", "tokens": [1]}) as answer:
        error = (await answer.json())["error"]

    assert (answer.status, error["code"]) == (404, "endpoint_not_found")
    assert path in error["message"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("The model does not support Embeddings API", (404, "endpoint_not_found")),
        ("Embedding prompt not supported for beam search", (400, "NotImplementedError")),
        ("", (400, "NotImplementedError")),
    ],
)
@pytest.mark.parametrize("path", [EMBEDDINGS, "/tokenize"])
async def test_what_an_engine_has_not_implemented_is_the_endpoint_or_a_parameter(
    world: IngressBench, path: str, message: str, expected: tuple[int, str]
) -> None:
    error = {"message": message, "type": "NotImplementedError", "code": 501}
    async with running_raw_engine() as engine:
        engine.otherwise = [whole(json.dumps({"error": error}).encode(), head=b"HTTP/1.1 501 Not Implemented\r\n")]
        await world.grants({ONE: engine.url, TWO: engine.url})
        async with world.post(path, {"model": "m", "input": "hello", "prompt": "hello"}) as answer:
            said = (await answer.json())["error"]

    assert answer.status == expected[0]
    assert expected[1] in (said["code"], said.get("type"))
    assert expected[0] == 404 or said["message"] == message


@pytest.mark.parametrize(
    ("path", "body"), [(EMBEDDINGS, {"input": []}), (RESPONSES, {"input": None}), (RESPONSES, {"input": 7})]
)
async def test_a_body_without_anything_to_read_is_refused(world: IngressBench, path: str, body: dict[str, Any]) -> None:
    async with world.post(path, {"model": "m", **body}) as answer:
        assert answer.status == 400
    async with world.post(path, {**body, "input": "hello", "model": "nobody"}) as answer:
        assert answer.status == 404

    assert world.scheduler.asked == []


# Pairs, pools, sound

PAIR_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score")
RERANK = {"query": "q" * 40, "documents": ["d" * 80, "d" * 80]}
"""10 tokens, about, with 20 each."""


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        *((path, RERANK, 60) for path in PAIR_PATHS),
        ("/score", {"text_1": "q" * 40, "text_2": "d" * 80}, 30),
        ("/score", {"queries": ["q" * 40] * 3, "documents": ["d" * 80] * 3}, 90),
        ("/score", {"data_1": {"content": [{"type": "text", "text": "q" * 40}]}, "data_2": ["d" * 80]}, 30),
        ("/pooling", {"input": ["q" * 40, "q" * 40]}, 20),
        ("/pooling", {"messages": [{"role": "user", "content": "q" * 40}]}, 10),
        ("/classify", {"input": [1, 2, 3]}, 3),
        ("/classify", {}, 1),
    ],
)
async def test_what_is_read_and_not_written_is_placed_by_how_much_that_is(
    world: IngressBench, path: str, body: dict[str, Any], tokens: int
) -> None:
    world.one.says[path] = {"usage": {"prompt_tokens": 3, "total_tokens": 3}}
    async with world.post(path, {"model": "m", **body}) as answer:
        assert await answer.json() == world.one.says[path]

    asked = world.scheduler.asked[0]
    assert (answer.status, asked.keys, asked.exact, asked.max_output_tokens) == (200, b"", False, 0)
    assert tokens <= asked.prompt_tokens <= tokens + 6
    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert end.prompt_tokens == 3


PICTURE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
LOOK = [{"role": "user", "content": PICTURE}]


@pytest.mark.parametrize(
    ("path", "body", "believed"),
    [
        ("/v1/embeddings", {"messages": LOOK}, 1000),
        ("/pooling", {"messages": LOOK}, 1000),
        ("/score", {"data_1": "q", "data_2": {"content": PICTURE * 3}}, 3000),
        ("/rerank", {"query": "q", "documents": [{"content": PICTURE}, "d"]}, 2000),
        ("/rerank", {"query": "q", "documents": ["d", "d"]}, 100),
        ("/v1/embeddings", {"input": "hello"}, 100),
    ],
)
async def test_an_engines_count_of_what_is_no_text_is_believed_up_to_the_models_context(
    world: IngressBench, path: str, body: dict[str, Any], believed: int
) -> None:
    """Of texts up to a multiple of what they can be."""
    world.one.says[path] = {"usage": {"prompt_tokens": 1_000_000}}
    async with world.post(path, {"model": "m", **body}) as answer:
        assert answer.status == 200

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert end.prompt_tokens == believed if believed >= 1000 else end.prompt_tokens <= believed


def sound(**fields: str) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("file", b"RIFF" * 5_000, filename="a.wav", content_type="audio/wav")
    for name, value in fields.items():
        form.add_field(name, value)
    return form


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_a_form_with_sound_reaches_the_engine_as_it_came(world: IngressBench, path: str) -> None:
    world.one.says[path] = {"text": "Good day"}
    async with world.client.post(world.url + path, data=sound(model="m", language="en")) as answer:
        assert await answer.json() == {"text": "Good day"}

    received = world.one.received[0]
    kind = received.headers["content-type"]
    boundary = kind.rpartition("boundary=")[2].encode()
    assert kind.startswith("multipart/form-data; boundary=")
    assert received.body.startswith(b"--" + boundary)
    assert received.body.endswith(b"--" + boundary + b"--\r\n")
    assert b"RIFF" * 5_000 in received.body
    asked = world.scheduler.asked[0]
    assert (asked.keys, asked.exact, asked.streaming) == (b"", False, False)
    assert 20 < asked.prompt_tokens < 100
    assert asked.max_output_tokens > 0


async def test_sound_may_be_written_down_as_it_is_heard(world: IngressBench) -> None:
    pieces = [event("chunk"), b"data: [DONE]\n\n"]
    world.one.says["/v1/audio/transcriptions"] = pieces
    async with world.client.post(
        world.url + "/v1/audio/transcriptions", data=sound(model="m", stream="true", user="bob")
    ) as answer:
        assert await answer.read() == b"".join(pieces)

    assert world.scheduler.asked[0].streaming
    assert world.scheduler.asked[0].tenant == "bob"


async def test_a_form_goes_to_another_engine_whole_when_one_fails(world: IngressBench) -> None:
    world.two.says["/v1/audio/transcriptions"] = {"text": "Good day"}
    world.one.script.append(Behaviour.RESETS)
    async with world.client.post(world.url + "/v1/audio/transcriptions", data=sound(model="m")) as answer:
        assert (answer.status, answer.headers["x-pointsman-instance"]) == (200, TWO)

    one, two = world.one.received[0], world.two.received[0]
    assert (one.body, one.headers["content-type"]) == (two.body, two.headers["content-type"])


@pytest.mark.parametrize(
    ("data", "kind", "status", "code"),
    [
        (b"{}", "application/json", 400, "invalid_body"),
        (b"--x\r\n", "multipart/form-data; boundary=x", 400, "malformed_body"),
        (b"x" * 9_000_000, "multipart/form-data; boundary=x", 413, "body_too_large"),
        (
            b"--x\r\n" + b'content-disposition: form-data; name="model"\r\n\r\nnobody\r\n--x--',
            "multipart/form-data; boundary=x",
            404,
            "model_not_found",
        ),
    ],
)
async def test_a_form_that_cannot_be_served_is_refused(
    world: IngressBench, data: bytes, kind: str, status: int, code: str
) -> None:
    async with world.post("/v1/audio/transcriptions", data, content_type=kind) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)

    assert world.scheduler.asked == []


async def test_a_form_stays_as_it_is_where_engines_are_told_whose_request_it_is() -> None:
    async with world_with(forward_tenant=True) as world:
        world.one.says["/v1/audio/transcriptions"] = {"text": "Good day"}
        async with world.client.post(world.url + "/v1/audio/transcriptions", data=sound(model="m")) as answer:
            assert answer.status == 200

        assert b"vllm_xargs" not in world.one.received[0].body


# Questions that any engine answers


async def test_tokens_and_texts_come_from_an_engine_with_little_to_do_and_leave_no_trace(world: IngressBench) -> None:
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


async def test_a_question_goes_to_another_engine_when_one_fails(world: IngressBench) -> None:
    world.one.says[DETOKENIZE] = world.two.says[DETOKENIZE] = {"prompt": "hello"}
    world.one.script.append(Behaviour.RESETS)
    async with world.post(DETOKENIZE, {"model": "m", "tokens": [1]}) as answer:
        assert (await answer.json()) == {"prompt": "hello"}

    assert answer.headers["x-pointsman-instance"] == TWO


async def test_a_question_is_bounded_as_a_request_is() -> None:
    async with world_with(request_timeout_seconds=0.2) as world:
        world.one.script.append(Behaviour.HANGS)
        async with world.post(DETOKENIZE, {"model": "m", "tokens": [1]}) as answer:
            assert answer.status == 408

        await eventually(lambda: world.one.given_up == 1)


async def test_the_answers_are_counted(world: IngressBench) -> None:
    async with world.post(TOKENIZE, {"model": "m", "prompt": "hello"}) as answer:
        await answer.read()
    async with world.client.get(world.admin_url + "/metrics") as metrics:
        of_pool = 'model="m",pool="default",route="/tokenize",status="200"'
        assert f"pointsman_http_requests_total{{{of_pool}}}" in await metrics.text()
