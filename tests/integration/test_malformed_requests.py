"""Thousands of requests that no sound client sends, over real sockets to a real ingress.

Whatever comes, the answer is an answer (never a 5xx: the engine behind is sound), nothing is logged that we would have to
mend, memory stays, and afterwards a sound client is served. A seed makes the requests; failures print what was sent.
"""

import asyncio
import ctypes
import gc
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web

from pointsman.runtime.http_protocol import HttpLimits
from pointsman_ingress import servers
from pointsman_ingress.http import call
from tests.support.ingress_world import CHAT, COMPLETIONS, ONE, TOKENS, TWO, IngressBench, world_with

SEED = 12
BODIES = 3500
HEADS = 1800
FORMS = 300
LARGE = 10
AT_ONCE = 40
ANSWER_SECONDS_MAX = 30.0
RSS_GROWTH_MAX = 64 << 20

TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": null}]}'}}
SOUND: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [TOKENS, {"model": "m", "prompt": "some words", "max_tokens": 2, "stream": True, "user": "u"}],
    CHAT: [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "what is this"}]},
                {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "a thing"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 3,
            "chat_template_kwargs": {"x": 1},
        }
    ],
    "/v1/responses": [
        {
            "model": "m",
            "input": [{"role": "user", "content": "hello"}],
            "instructions": "i",
            "reasoning": {"effort": "low"},
        }
    ],
    "/v1/messages": [
        {
            "model": "m",
            "max_tokens": 3,
            "system": [{"type": "text", "text": "be brief"}],
            "messages": [
                {"role": "user", "content": "what is this"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a thing"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        }
    ],
    "/v1/rerank": [{"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}],
    "/score": [{"model": "m", "text_1": "a", "text_2": ["b", "c"]}],
    "/pooling": [{"model": "m", "input": ["a"]}],
    "/v1/embeddings": [{"model": "m", "input": ["a", [1, 2], "c"]}],
}
JUNK: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, 1e308, "", "x", "\x00", "\ud800", "\U0010ffff" * 9,
    "<|im_end|>", "{{ x }}", "data: [DONE]\n\n", [], {}, [[]], [None], [{}], {"a": {}}, [1, "a"], "a" * 5000, ["x"] * 300,
    {"type": "image_url"}, {"role": 3}, [[[[[]]]]], "\r\nx: y",
]  # fmt: skip
HEADERS: dict[bytes, list[bytes]] = {
    b"x-slo-ttft-ms": [b"nan", b"-1", b"inf", b"1e999", b"0", b"\xff", b"", b"1" * 400],
    b"x-slo-tpot-ms": [b"NaN", b"-0", b"0x1", b"1,2", b"1e-310"],
    b"x-session-id": [b"a" * 4000, b"\xc3\x28", b"*", b"a.b>"],
    b"x-request-id": [b"a b", b".", b"a" * 3000, b"\xe2\x82", b">", b"same"],
    b"x-tenant": [b"\xff\xfe", b"", b"t" * 900],
    b"authorization": [b"Bearer", b"Bearer \xff", b"Basic x"],
    b"traceparent": [b"\xf0\x9f", b"00-0-0-0", b"a" * 999],
    b"content-type": [b"text/plain", b"multipart/form-data", b"application/json; charset=\xff"],
    b"accept-encoding": [b"gzip;q=nan"],
    b"expect": [b"100-continue", b"200-ok"],
    b"content-encoding": [b"gzip", b"br"],
}


def test_the_corpus_is_large_and_always_the_same() -> None:
    assert BODIES + HEADS + FORMS >= 5000
    assert list(corpus(Random(SEED)))[:50] == list(corpus(Random(SEED)))[:50]


async def test_nothing_that_comes_over_the_wire_is_our_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    short = partial(HttpLimits, head_seconds=0.3, unread_seconds=0.3)
    monkeypatch.setattr(servers, "HttpLimits", short)
    monkeypatch.setattr(call, "BODY_WALL_SECONDS", 0.5)
    statuses: Counter[int] = Counter()
    async with (
        sound_engine() as engine,
        world_with(tokenizer="builtin", keep_alive_seconds=1) as world,
    ):
        await world.grants({ONE: engine, TWO: engine})
        for path, bodies in SOUND.items():
            for body in bodies:
                async with world.post(path, body) as answer:
                    assert answer.status == 200, await answer.text()
        requests = corpus(Random(SEED))
        await send([next(requests) for _ in range(500)], world, statuses)
        before = resident()
        await send(list(requests), world, statuses)
        await send(list(large(Random(SEED))), world, statuses, at_once=4)
        grown = resident() - before
        async with world.post(COMPLETIONS, TOKENS) as answer:
            assert answer.status == 200

    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err + caplog.text
    assert "unexpected_error" not in said.out
    assert statuses[200] > 300
    assert statuses[400] > 1000
    assert statuses[431] >= 2 * LARGE  # else the growth of memory would tell of nothing
    assert grown < RSS_GROWTH_MAX, f"{grown >> 20} MiB"


async def send(requests: list[bytes], world: IngressBench, statuses: Counter[int], *, at_once: int = AT_ONCE) -> None:
    """All of them, some at once. Fails on the first answer that is none, or is a fault of ours."""
    port = int(world.url.rpartition(":")[2])
    turns = iter(requests)

    async def in_turn() -> None:
        for request in turns:
            answer = await answered(port, request)
            status = int(answer[9:12]) if answer else 0
            assert status < 500, (request[:3000], answer)
            statuses[status] += 1

    await asyncio.gather(*(in_turn() for _ in range(at_once)))
    world.scheduler.asked.clear()


async def answered(port: int, request: bytes) -> bytes:
    """What comes back until one answer is whole or the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            writer.write(request)
            while not whole(answer) and (piece := await reader.read(65536)):
                answer += piece
    except TimeoutError as error:
        raise AssertionError(f"no answer to {request[:3000]!r}") from error
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


def whole(answer: bytes) -> bool:
    head, _, body = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")


@asynccontextmanager
async def sound_engine() -> AsyncIterator[str]:
    """The URL of an engine that answers whatever it is asked."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


# What is sent


def corpus(chance: Random) -> Iterator[bytes]:
    """Bodies and headers that are wrong in sound HTTP, and HTTP that is not sound, mixed."""
    kinds = [with_body] * BODIES + [with_head] * HEADS + [with_form] * FORMS
    chance.shuffle(kinds)
    for kind in kinds:
        yield kind(chance)


def with_body(chance: Random) -> bytes:
    path = chance.choice(list(SOUND))
    body = spoiled(chance, chance.choice(SOUND[path]))
    return request_of(path, body, odd_headers(chance) if chance.random() < 0.4 else [])


def with_head(chance: Random) -> bytes:
    """A sound request of which bytes or lines are changed, or one of those that confuse parsers."""
    path = chance.choice(list(SOUND))
    body = json.dumps(SOUND[path][0]).encode()
    request = request_of(path, body, odd_headers(chance))
    match chance.randrange(5):
        case 0:
            return flipped(chance, request, times=chance.randint(1, 8))
        case 1:
            lines = request.split(b"\r\n")
            chance.shuffle(lines)
            return b"\r\n".join(lines)
        case 2:
            return request.replace(
                b"\r\n", chance.choice([b"\n", b"\r", b"\r\r\n", b"\n\r", b"\x0b"]), chance.randint(1, 9)
            )
        case 3:
            head, _, rest = request.partition(b"content-length: ")
            return head + chance.choice(FRAMING) + rest.partition(b"\r\n")[2]
        case _:
            line = chance.choice(REQUEST_LINES)
            return line + request.partition(b"\r\n")[2]


FORM = (
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\nRIFF....\r\n'
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
)


def with_form(chance: Random) -> bytes:
    kind = chance.choice(
        [b"multipart/form-data; boundary=b"] * 6 + [b"multipart/form-data", b"multipart/form-data; boundary="]
    )
    form = flipped(chance, FORM, times=chance.randint(0, 4))[: chance.choice([None, 40, 100])]
    return request_of("/v1/audio/transcriptions", form, [b"content-type: " + kind])


FRAMING = [
    b"content-length: 5\r\ncontent-length: 6\r\n", b"content-length: -5\r\n", b"content-length: +5\r\n", b"content-length:\r\n",
    b"content-length: 5, 5\r\n", b"content-length: 99999999999999999999\r\n", b"content-length: 9\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip\r\n", b"transfer-encoding: chunked, chunked\r\n",
    b"transfer-encoding:\x0bchunked\r\n", b"Transfer-Encoding : chunked\r\n", b"content-length: 0\r\n", b"",
    b"connection: upgrade\r\nupgrade: h2c\r\n", b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    b"host: other\r\n", b" folded: line\r\n", b": nameless\r\n", b"a b: c\r\n", b"nul\x00: 1\r\n", b"x: \x00\r\n", b"no colon\r\n",
    b"te: trailers\r\ntrailer: x\r\ntransfer-encoding: chunked\r\n",
]  # fmt: skip
REQUEST_LINES = [
    b"POST /v1/completions HTTP/1.0\r\n", b"POST /v1/completions HTTP/0.9\r\n", b"POST /v1/completions HTTP/2.0\r\n",
    b"POST /v1/completions\r\n", b"GET /v1/completions HTTP/1.1\r\n", b"HEAD /v1/models HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n",
    b"OPTIONS * HTTP/1.1\r\n", b"CONNECT a:1 HTTP/1.1\r\n", b"BREW /v1/completions HTTP/1.1\r\n", b"\r\n\r\nGET / HTTP/1.1\r\n",
    b"POST /v1/%00 HTTP/1.1\r\n", b"POST /v1/chat%2fcompletions HTTP/1.1\r\n", b"POST //v1/completions HTTP/1.1\r\n",
    b"POST http://other/v1/completions HTTP/1.1\r\n", b"POST /v1/models/%ff%fe HTTP/1.1\r\n", b"GET /v1/models/" + b"a" * 9000 + b" HTTP/1.1\r\n",
    b"POST /v1/completions?" + b"a=b&" * 900 + b" HTTP/1.1\r\n", b"POST \xff\xfe HTTP/1.1\r\n", b"post /v1/completions HTTP/1.1\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00", b"", b" POST / HTTP/1.1\r\n", b"DELETE /metrics HTTP/1.1\r\n", b"GET /../../etc/passwd HTTP/1.1\r\n",
    b"GET /readyz?verbose=%00 HTTP/1.1\r\n", b"GET /openapi.json?\xc3\x28 HTTP/1.1\r\n",
]  # fmt: skip


def request_of(path: str, body: bytes, headers: list[bytes]) -> bytes:
    fixed = [f"POST {path} HTTP/1.1".encode(), b"host: x", b"connection: close", *headers]
    if not any(header.startswith(b"content-type:") for header in headers):
        fixed.append(b"content-type: application/json")
    return b"\r\n".join([*fixed, b"content-length: %d" % len(body), b"", b""]) + body


def odd_headers(chance: Random) -> list[bytes]:
    names = chance.sample(list(HEADERS), chance.randint(1, 4))
    return [name + b": " + chance.choice(HEADERS[name]) for name in names]


def spoiled(chance: Random, sound: dict[str, Any]) -> bytes:
    """A body with something wrong in it."""
    match chance.randrange(8):
        case 0:
            body = json.dumps(sound).encode()
            return body[: chance.randrange(len(body))]
        case 1:
            return flipped(chance, json.dumps(sound).encode(), times=chance.randint(1, 5))
        case 2:
            return chance.choice(
                [b"", b"\xef\xbb\xbf{}", b"null", b"[]", b'"x"', b"1e400", b"NaN", b"{" * 99, b'{"a":1}{}']
            )
        case 3:
            return nested(chance, sound)
        case _:
            changed = json.loads(json.dumps(sound))
            for _ in range(chance.randint(1, 3)):
                change(chance, changed)
            return json.dumps(changed).encode()


def change(chance: Random, node: Any) -> None:
    """Put something else into one place of a JSON value."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chance.choice(keys)
        if not isinstance(node[key], dict | list) or chance.random() < 0.3:
            break
        node = node[key]
    if chance.random() < 0.1:
        del node[key]
    else:
        node[key] = deepcopy(chance.choice(JUNK))


def nested(chance: Random, sound: dict[str, Any]) -> bytes:
    """Nesting without end, in a field, in a string that holds JSON, or in a field that nobody knows."""
    depth = chance.choice([50, 300, 900, 990, 3000, 50_000])
    opened, closed = chance.choice([("[", "]"), ('{"a":', "}")])
    deep = opened * depth + ("1" if opened != "[" else "") + closed * chance.choice([depth, 0])
    text = json.dumps(sound)
    if "arguments" in text and chance.random() < 0.6:
        return text.replace(json.dumps(TOOL_CALL["function"]["arguments"]), json.dumps(deep)).encode()  # type: ignore[index]
    field = chance.choice([*sound, "unknown", "metadata"])
    return (text[:-1] + f', "{field}": {deep}}}').encode()


def flipped(chance: Random, data: bytes, *, times: int) -> bytes:
    """Some bytes changed, inserted, left away."""
    changed = bytearray(data)
    for _ in range(times):
        at = chance.randrange(len(changed))
        match chance.randrange(3):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                changed[at:at] = bytes([chance.randrange(256)])
            case _:
                del changed[at]
    return bytes(changed)


def large(chance: Random) -> Iterator[bytes]:
    """Few, but of many megabytes: endless heads, and bodies that do not end."""
    for _ in range(LARGE):
        yield b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (8 << 20)
        yield b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (1 << 20)
        yield b"\r\n" * (1 << 20)
        yield b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000
        half = b"x" * (4 << 20)
        yield request_of(CHAT, half, []).replace(b"%d" % len(half), b"%d" % (2 * len(half)))
        yield request_of(CHAT, b'{"messages": ' + b"[" * chance.randrange(1 << 20, 4 << 20), [])


def resident() -> int:
    """Bytes of this process in memory, without those that only the allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
