"""Bodies of up to 8 MiB that cost most: each is refused or served, and none holds up the event loop for others."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pointsman.contracts import codec
from pointsman.contracts.requests import RequestFailed
from pointsman_ingress.http.json_form import BRACKETS_MAX, ENTRIES_MAX, STRINGS_MAX, TOKEN_IDS_MAX
from tests.support.ingress_world import CHAT, COMPLETIONS, HELLO, TOKENS, IngressBench, world_with

pytestmark = pytest.mark.quiet

SIZE = 8 * 1024 * 1024 - 1024
STALL_SECONDS_MAX = 0.1
"""With the client in the same loop; a million ids take 0.07. Without bounds it is 0.3 to 4 s. A slower
machine may take as long as it takes for IDS."""
IDS = b"[" + b",".join([b"12345"] * 350_000) + b"]"
START = b'{"model":"m","max_tokens":1,'


def listed(unit: bytes, count: int, head: bytes, tail: bytes) -> bytes:
    return START + head + b",".join([unit] * count) + tail


def filled(unit: bytes, head: bytes, tail: bytes) -> bytes:
    return listed(unit, (SIZE - len(head) - len(tail)) // (len(unit) + 1), head, tail)


def chat(text: bytes) -> bytes:
    return START + b'"messages":[{"role":"user","content":"' + text + b'"}]}'


def tool_call(arguments: str) -> bytes:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    return json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()


MESSAGES, TOOLS = b'"messages":[', b'"messages":[{"role":"user","content":"x"}],"tools":['
OBJECTS = BRACKETS_MAX // 2 - 10
Bodies = dict[str, tuple[str, Callable[[], bytes]]]
"""Path and body by name. A body is made by the test that sends it: all of them are 100 MB."""
LARGEST: Bodies = {
    "messages of nothing": (CHAT, lambda: filled(b"{}", MESSAGES, b"]}")),
    "short messages": (CHAT, lambda: filled(b'{"role":"user","content":""}', MESSAGES, b"]}")),
    "tools": (CHAT, lambda: filled(b'{"type":"function","function":{"name":"f"}}', TOOLS, b"]}")),
    "lists of one id": (COMPLETIONS, lambda: filled(b"[1]", b'"prompt":[', b"]}")),
    "texts": (COMPLETIONS, lambda: filled(b'"a"', b'"prompt":[', b"]}")),
    "documents": ("/rerank", lambda: filled(b'"a"', b'"query":"q","documents":[', b"]}")),
    "special tokens": (CHAT, lambda: chat(b"<|im_end|>ab" * (SIZE // 12 - 10))),
    "letters": (CHAT, lambda: chat(b"a" * (SIZE - 100))),
    "quotes": (CHAT, lambda: chat(b'\\"' * (SIZE // 2 - 100))),
    "arguments": (CHAT, lambda: tool_call('{"a":[' + "{}," * 2_500_000 + "1]}")),
    "deep arguments": (CHAT, lambda: tool_call('{"a":' + "[" * 100_000)),
}
WITHIN_BOUNDS: Bodies = {
    "ids": (COMPLETIONS, lambda: listed(b"12345", TOKEN_IDS_MAX - 10, b'"prompt":[', b"]}")),
    "strings": (CHAT, lambda: listed(b'"a"', STRINGS_MAX - 20, b'"messages":[{"role":"user","content":[', b"]}]}")),
    "messages": (CHAT, lambda: listed(b'{"role":"user","content":"a"}', OBJECTS, MESSAGES, b"]}")),
    "entries": (CHAT, lambda: listed(b"1", ENTRIES_MAX - 20, TOOLS + b'{"function":{"name":"f","parameters":{"a":[', b"]}}}]}")),
}  # fmt: skip


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    async with world_with(tokenizer="builtin", max_model_len=2000) as opened:
        yield opened


def is_short(worst: list[float]) -> bool:
    """Some round did not hold up the loop."""
    if min(worst) < STALL_SECONDS_MAX:
        return True
    took = []
    for _ in worst:
        began = time.perf_counter()
        json.loads(IDS)
        took.append(time.perf_counter() - began)
    return min(worst) < min(took)


@asynccontextmanager
async def lags() -> AsyncIterator[list[float]]:
    """How long the loop did not run, in seconds."""
    found = [0.0]

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.002)
            found.append(time.perf_counter() - began)

    watching = asyncio.create_task(watch())
    yield found
    watching.cancel()


@pytest.mark.parametrize(("path", "made"), [*LARGEST.values(), *WITHIN_BOUNDS.values()], ids=[*LARGEST, *WITHIN_BOUNDS])
async def test_no_body_holds_up_the_loop(world: IngressBench, path: str, made: Callable[[], bytes]) -> None:
    body = made()
    async with world.post(CHAT, HELLO) as answer:
        assert answer.status == 200
    worst = []
    for _ in range(3):
        async with lags() as found, world.post(path, body) as answer:
            assert answer.status == 400, await answer.text()
        worst.append(max(found))

    assert is_short(worst), worst


LONG: Bodies = {
    "ids": (COMPLETIONS, lambda: listed(b"12345", TOKEN_IDS_MAX - 10, b'"prompt":[', b"]}")),
    "a list of ids": (COMPLETIONS, lambda: listed(b"12345", TOKEN_IDS_MAX - 10, b'"prompt":[[', b"]]}")),
    "ids to embed": ("/v1/embeddings", lambda: listed(b"12345", TOKEN_IDS_MAX - 10, b'"input":[', b"]}")),
    "words": (CHAT, lambda: chat(b"a word and " * 500_000)),
}


@pytest.mark.parametrize(("path", "made"), LONG.values(), ids=LONG)
async def test_no_prompt_that_fits_the_model_holds_up_the_loop(path: str, made: Callable[[], bytes]) -> None:
    body = made()
    async with world_with(tokenizer="builtin", max_model_len=2_000_000, block_tokens=16) as world:
        world.scheduler.rejection = (429, "queue_full", 1.0)  # the engine here would read the body in the same loop
        worst = []
        for _ in range(3):
            async with lags() as found, world.post(path, body) as answer:
                assert answer.status == 429, await answer.text()
            worst.append(max(found))

        assert is_short(worst), worst
        assert min(asked.prompt_tokens for asked in world.scheduler.asked) > 1_000_000


async def test_a_prompt_that_is_too_large_for_the_bus_is_refused_at_once_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "PAYLOAD_BYTES_MAX", 8 * 1024)
    async with world_with(max_model_len=200_000) as world:
        body = {"model": "m", "prompt": list(range(100_000)), "max_tokens": 1}
        async with asyncio.timeout(5), world.post(COMPLETIONS, body) as answer:
            error = (await answer.json())["error"]
        async with world.post(COMPLETIONS, TOKENS) as another:
            knowledge = another.headers["x-pointsman-knowledge"]
        ends = [event for event in await world.events() if isinstance(event, RequestFailed)]

        assert (answer.status, error["code"], error["type"]) == (413, "request_too_large", "invalid_request_error")
        assert "too large for the message bus" in error["message"]
        assert "retry-after" not in answer.headers
        assert (another.status, knowledge) == (200, "exact"), "a scheduler answers"
        assert world.board.whole
        assert [(end.reason, end.status) for end in ends] == [("request_too_large", 413)]


async def test_the_product_of_query_and_documents_takes_no_memory(world: IngressBench) -> None:
    body = START + b'"query":"' + b"q" * 4_000_000 + b'","documents":[' + b",".join([b'"a"'] * 100_000) + b"]}"
    async with world.post("/rerank", body) as answer:
        await answer.read()

    assert [asked.prompt_tokens for asked in world.scheduler.asked] == [2**31]
