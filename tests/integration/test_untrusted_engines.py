"""Engines that lie, beside honest ones, through the ingress and the worker as they are in production."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pointsman.contracts.requests import RequestFailed, RequestFinished
from pointsman_ingress import proxy
from tests.support.events import joined
from tests.support.ingress_world import CHAT, COMPLETIONS, HELLO, ONE, TOKENS, TWO, World, world_with
from tests.support.raw_engine import HEAD, STREAM_HEAD, RawEngine, running_raw_engine, whole
from tests.support.waiting import eventually

USAGE = b'"usage":{"prompt_tokens":%s,"completion_tokens":2}'
CHUNK = b'data: {"choices":[{"text":"a"}]}'


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with world_with() as opened:
        yield opened


@pytest.fixture
async def liar(world: World) -> AsyncIterator[RawEngine]:
    """In the place of the first of two engines, which the scheduler prefers."""
    async with running_raw_engine() as engine:
        world.scheduler.engines[ONE] = engine.url
        yield engine


async def ask(world: World, path: str = COMPLETIONS, body: dict[str, Any] = TOKENS) -> tuple[int, bytes]:
    async with world.post(path, body) as answer:
        return answer.status, await answer.read()


NOT_ANSWERS = {
    "garbage": [b"\x00\x01\x02\r\n\r\n"],
    "no status": [b"HTTP/1.1 \r\n\r\n"],
    "status 99999": [b"HTTP/1.1 99999 x\r\n\r\n"],
    "status 204": [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "status 202": [whole(b"{}", head=b"HTTP/1.1 202 Accepted\r\n")],
    "status 101": [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello"],
    "redirect": [b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"],
    "two lengths": [HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok"],
    "length of 400 digits": [HEAD + b"content-length: " + b"9" * 400 + b"\r\n\r\nok"],
    "status line of a megabyte": [b"HTTP/1.1 200 " + b"a" * 2**20],
    "header of a megabyte": [HEAD + b"x: " + b"a" * 2**20],
    "100,000 headers": [HEAD, *[b"".join(b"x-%d: a\r\n" % n for n in range(1000))] * 100],
    "breaks off": [HEAD + b"content-length: 100\r\n\r\n{"],
    "stream that says nothing": [STREAM_HEAD],
}
"""After these the next engine is asked: the client has seen nothing."""


@pytest.mark.parametrize("name", NOT_ANSWERS)
async def test_what_is_no_answer_costs_the_client_nothing(world: World, liar: RawEngine, name: str) -> None:
    liar.otherwise = NOT_ANSWERS[name]

    status, body = await ask(world)

    assert status == 200
    assert json.loads(body)["choices"] == [{"text": "answer"}]
    (end,) = await world.events()
    assert isinstance(end, RequestFinished)
    assert end.instance == TWO


ODD_ANSWERS = {
    "usage of 400 digits": whole(b'{"choices":[],' + USAGE % (b"9" * 400) + b"}"),
    "infinite usage": whole(b'{"choices":[],' + USAGE % b"1e400" + b"}"),
    "negative usage": whole(b'{"choices":[],' + USAGE % b"-7" + b"}"),
    "deeply nested": whole(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no JSON": whole(b"\xff\xfe\x00"),
    "nothing": whole(b""),
    "content type that is no header": whole(b"{}", content_type="text/ÿ€".encode()),
    "content type of kilobytes": whole(b"{}", content_type=b"a" * 4000),
    "compressed, it says": whole(b"{}", head=HEAD + b"content-encoding: gzip\r\n"),
    "stream with usage of 400 digits": STREAM_HEAD
    + CHUNK
    + b'\n\ndata: {"choices":[],'
    + USAGE % (b"9" * 400)
    + b"}\n\ndata: [DONE]\n\n",
}
"""The client gets these as they are."""


@pytest.mark.parametrize("name", ODD_ANSWERS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_odd_answer_is_the_clients_business_and_its_numbers_are_not_believed(
    world: World, liar: RawEngine, name: str, path: str
) -> None:
    liar.otherwise = [ODD_ANSWERS[name]]

    status, _ = await ask(world, path, TOKENS if path == COMPLETIONS else HELLO)

    assert status == 200
    ends = [event for event in await world.events() if isinstance(event, RequestFinished | RequestFailed)]
    assert [type(end) for end in ends] == [RequestFinished]
    assert isinstance(ends[0], RequestFinished)
    assert ends[0].prompt_tokens == -1


STREAMED = {"model": "m", "prompt": [1, 2, 3], "stream": True}


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
async def test_a_stream_is_shown_as_it_comes_and_without_the_usage_however_its_lines_end(
    world: World, liar: RawEngine, end: bytes
) -> None:
    liar.otherwise = [STREAM_HEAD + CHUNK + end, CHUNK + end, b'data: {"choices":[],' + USAGE % b"3" + b"}" + end, b"data: [DONE]" + end]  # fmt: skip
    liar.pause_seconds = 0.3
    async with world.post(COMPLETIONS, STREAMED) as answer:
        first, others_sent = await answer.content.readany(), liar.sent_bytes
        rest = await answer.content.read()

    assert first == CHUNK + end
    assert others_sent < sum(map(len, liar.otherwise[:3]))
    assert rest == CHUNK + end + b"data: [DONE]" + end
    end_said = (await world.events())[-1]
    assert isinstance(end_said, RequestFinished)
    assert (end_said.prompt_tokens, end_said.completion_tokens) == (3, 2)


BROKEN_STREAMS = {
    "breaks off": [STREAM_HEAD + CHUNK + b"\n\n"],
    "breaks off within an event": [STREAM_HEAD + CHUNK + b"\r\n"],
    "is no HTTP any more": [
        HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n22\r\n" + CHUNK + b"\n\n\r\n",
        b"no chunk\r\n",
    ],
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
async def test_a_stream_that_goes_wrong_ends_with_one_error_event_of_its_own(
    world: World, liar: RawEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "CUT_CHECK_WALL_SECONDS", 0.2)
    liar.otherwise = BROKEN_STREAMS[name]
    liar.pause_seconds = 0.1

    status, body = await ask(world, COMPLETIONS, STREAMED)

    assert status == 200
    last = body.replace(b"\r\n", b"\n").rstrip().split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    end = (await world.events())[-1]
    assert isinstance(end, RequestFailed)
    assert end.reason == "engine_broke_off"


async def test_a_stream_without_an_empty_line_passes_through_and_holds_up_nobody(world: World, liar: RawEngine) -> None:
    liar.otherwise = [STREAM_HEAD, b'data: {"usage": "' + b"a" * 65_536]
    liar.repeats = 500  # 32 MB
    slowest = 0.0

    async def others() -> None:
        nonlocal slowest
        while True:
            began = asyncio.get_running_loop().time()
            async with world.client.get(f"{world.url}/health"):
                pass
            slowest = max(slowest, asyncio.get_running_loop().time() - began)

    asking = asyncio.create_task(others())
    _, body = await ask(world, COMPLETIONS, STREAMED)
    asking.cancel()

    assert len(body) > 32_000_000
    assert slowest < 5.0


# Length, names and models


async def test_one_engine_with_a_short_context_shortens_it_for_nobody(world: World) -> None:
    await world.log.append(joined(ONE, epoch=2, url=world.one.url, max_model_len=1))
    await eventually_asked(world, 1000)

    status, _ = await ask(world)
    too_long, said = await ask(world, body={**TOKENS, "max_tokens": 900})

    assert status == 200
    assert world.scheduler.asked[-1].context_tokens == 203
    assert too_long == 400
    assert b"maximum context length is 1000 tokens" in said


async def test_an_engine_with_another_model_is_offered_to_nobody(world: World) -> None:
    await world.log.append(joined("liar", model="other", url="http://127.0.0.1:1", aliases=["mine"]))
    await world.log.append(joined(TWO, epoch=2, url=world.two.url, max_model_len=2000, aliases=["m-latest"]))
    await eventually_asked(world, 2000)

    async with world.client.get(f"{world.url}/v1/models") as answer:
        listed = [card["id"] for card in (await answer.json())["data"]]
    refused, _ = await ask(world, body={**TOKENS, "model": "other"})
    served, _ = await ask(world, body={**TOKENS, "model": "m-latest"})

    assert listed == ["m", "m-latest"]
    assert (refused, served) == (404, 200)
    assert world.scheduler.asked[-1].alias == "m-latest"


async def eventually_asked(world: World, length: int) -> None:
    """Wait until the ingress offers this context."""

    async def offered() -> bool:
        async with world.client.get(f"{world.url}/v1/models") as answer:
            return any(card.get("max_model_len") == length for card in (await answer.json())["data"])

    await eventually(offered)
