"""Exactness of tokens: truncated prompts, images, prompt embeddings, client templates."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tokenizer import Tokenizer
from pointsman.primitives import WallSeconds
from pointsman.runtime.engine_keys import EngineKeys
from pointsman.state.fleet import Fleet
from pointsman_ingress.engine.client import EngineClient, EngineRequest
from pointsman_ingress.engine.refusals import REFUSAL_BYTES_MAX
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.prompt import tokenization
from pointsman_ingress.prompt.media_tokens import AUDIO_TOKENS_MIN, IMAGE_TOKENS, VIDEO_TOKENS
from pointsman_ingress.prompt.messages_input import parse_messages
from pointsman_ingress.prompt.openai_requests import parse_chat, parse_completion
from pointsman_ingress.prompt.parsed_request import ParsedRequest
from pointsman_ingress.prompt.responses_input import parse_response
from pointsman_ingress.prompt.tokenization import PROMPTS_AT_ONCE_MAX, PromptTokenizer, PromptTokens, TokenizeContext
from pointsman_ingress.token_ids import token_ids
from tests.support.engine_urls import ANY_URL
from tests.support.events import joined

CONTEXT = TokenizeContext({}, "r")
SYSTEM = {"role": "system", "content": "You look at things. " * 10}
PICTURE = {"type": "image_url", "image_url": {"url": "https://x/1.png"}}


@pytest.fixture
async def tokenizer() -> AsyncIterator[PromptTokenizer]:
    """With the builtin tokenizer, and no engine to ask."""
    async with aiohttp.ClientSession() as session:
        made = PromptTokenizer(
            tokenizer=Tokenizer.builtin(),
            engine=lambda _adapter: None,
            engines=EngineClient(
                session,
                ANY_URL,
                keys=EngineKeys(""),
                forward_authorization=True,
                chunk_timeout_seconds=WallSeconds(60.0),
            ),
            clock=ScaledClock(),
        )
        yield made
        made.work.close()


async def of_chat(tokenizer: PromptTokenizer, *messages: dict[str, Any], **fields: Any) -> PromptTokens:
    body = json.dumps({"messages": messages, **fields}).encode()
    return await tokenizer.tokens(parse_chat(body), CONTEXT)


async def of_completion(tokenizer: PromptTokenizer, **fields: Any) -> PromptTokens:
    body = json.dumps(fields).encode()
    return await tokenizer.tokens(parse_completion(body), CONTEXT)


async def test_a_plain_prompt_is_exact(tokenizer: PromptTokenizer) -> None:
    tokens = await of_chat(tokenizer, SYSTEM)

    assert (tokens.exact, tokens.prefix_header) == (True, "exact")
    assert tokens.keyed == tokens.prompts[0]


@pytest.mark.parametrize(
    ("fields", "kept", "exact", "prefix_header"),
    [
        ({"truncation_side": "right"}, slice(0, 10), True, "exact"),
        ({"truncation_side": "left"}, slice(-10, None), True, "exact"),
        ({}, slice(0, 10), False, "partial; truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 100}, slice(0, 20), True, "exact"),
        ({"truncate_prompt_tokens": -1}, slice(0, 20), False, "partial; truncate_prompt_tokens"),
    ],
)
async def test_a_prompt_is_truncated_as_by_the_engine(
    tokenizer: PromptTokenizer, fields: dict[str, Any], kept: slice, exact: bool, prefix_header: str
) -> None:
    ids = list(range(300, 320))
    tokens = await of_completion(tokenizer, prompt=ids, **{"truncate_prompt_tokens": 10, **fields})

    assert (list(tokens.keyed), tokens.exact, tokens.prefix_header) == (ids[kept], exact, prefix_header)


@pytest.mark.parametrize(
    "content", [[PICTURE], [{"type": "text", "text": "What is this?"}, PICTURE], [{"image_url": "x"}]]
)
async def test_only_text_before_the_message_with_an_image_is_exact(
    tokenizer: PromptTokenizer, content: list[Any]
) -> None:
    turns: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Hello."}, {"role": "user", "content": content}]
    text = await of_chat(tokenizer, *turns[:2], {"role": "user", "content": "\n\nSomething else."})
    tokens = await of_chat(tokenizer, *turns, {"role": "assistant", "content": [PICTURE]})

    assert (tokens.exact, tokens.prefix_header) == (False, "partial; image_url")
    assert text.prompts[0][: len(tokens.keyed)] == tokens.keyed
    before = Tokenizer.builtin().encode(f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\nHello.")
    assert len(before) < len(tokens.keyed) < len(text.prompts[0])


SOUND = {"type": "input_audio", "input_audio": {"data": "A" * 4_000_000, "format": "mp3"}}
AFAR = {"type": "audio_url", "audio_url": {"url": "https://x/1.mp3"}}
FILM = {"type": "video_url", "video_url": {"url": "https://x/1.mp4"}}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("parts", "estimated"),
    [
        ([PICTURE], IMAGE_TOKENS),
        ([{"image_url": "https://x/1.png"}, PICTURE], 2 * IMAGE_TOKENS),
        ([SOUND], 3_000_000 // 500),
        ([AFAR], AUDIO_TOKENS_MIN),
        ([FILM, PICTURE], VIDEO_TOKENS + IMAGE_TOKENS),
        ([{"type": "file", "file": {"file_data": "A" * 9_000}}], 0),
    ],
)
async def test_media_count_behind_the_text_and_change_no_key(
    tokenizer: PromptTokenizer, parts: list[Any], estimated: int
) -> None:
    text = [{"type": "text", "text": "What is this?"}]
    alone = await of_chat(tokenizer, SYSTEM, {"role": "user", "content": [{"type": "unknown"}, *text]})
    tokens = await of_chat(tokenizer, SYSTEM, {"role": "user", "content": [*text, *parts]})

    assert tokens.count == alone.count + estimated
    assert list(tokens.keyed) == list(alone.keyed)


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_messages, {"max_tokens": 1, "messages": [{"role": "user", "content": [PIXEL]}]}),
        (
            parse_messages,
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [PIXEL]}]}
                ],
            },
        ),
        (parse_response, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x"}]}]}),
    ],
)
async def test_an_image_counts_whichever_way_it_comes(
    tokenizer: PromptTokenizer, parse: Callable[[bytes], ParsedRequest], body: dict[str, Any]
) -> None:
    tokens = await tokenizer.tokens(parse(json.dumps(body).encode()), CONTEXT)

    assert tokens.estimated == IMAGE_TOKENS


async def test_media_and_vectors_count_no_more_than_fits(tokenizer: PromptTokenizer) -> None:
    film = parse_chat(json.dumps({"messages": [SYSTEM, {"role": "user", "content": [FILM]}]}).encode())
    vectors = parse_completion(json.dumps({"prompt_embeds": ["A" * 4 * 2**20] * 2}).encode())
    free = [await tokenizer.tokens(request, CONTEXT) for request in (film, vectors)]
    narrow = [await tokenizer.tokens(request, replace(CONTEXT, model_len=300)) for request in (film, vectors)]

    assert [tokens.estimated for tokens in free] == [VIDEO_TOKENS, 2 * (1 + 3 * 2**20 // 8_192)]
    assert [tokens.count for tokens in narrow] == [300, 600]


async def test_a_token_takes_four_bytes(tokenizer: PromptTokenizer) -> None:
    text, chat = "word " * 5_000, {"role": "user", "content": "word " * 5_000}
    for tokens in (await of_completion(tokenizer, prompt=text), await of_chat(tokenizer, chat)):
        assert sys.getsizeof(tokens.prompts[0]) < 5 * tokens.count


async def test_prompt_embeds_and_prompt_logprobs_have_no_keys(tokenizer: PromptTokenizer) -> None:
    vectors = await of_completion(tokenizer, prompt_embeds="AAAA")
    likely = await of_chat(tokenizer, SYSTEM, prompt_logprobs=0)
    echoed = await of_completion(tokenizer, prompt="Hello", echo=True, logprobs=1)

    assert [(len(t.keyed), t.exact) for t in (vectors, likely, echoed)] == [(0, False), (0, True), (0, True)]
    assert (vectors.prefix_header, likely.prefix_header, echoed.prefix_header) == (
        "none; prompt_embeds",
        *["none; prompt_logprobs"] * 2,
    )


async def test_client_templates_are_not_run_locally(tokenizer: PromptTokenizer) -> None:
    tokens = await of_chat(tokenizer, SYSTEM, chat_template="{% for x in range(9999) %}{% endfor %}")

    assert (tokens.exact, tokens.prefix_header) == (False, "none; guessed")


def called_with(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00"])
async def test_half_a_character_in_the_arguments_of_a_tool_call_is_the_clients_mistake(
    tokenizer: PromptTokenizer, half: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await of_chat(tokenizer, SYSTEM, called_with(f'{{"a": "{half}"}}'))

    assert refused.value.status == 400
    assert (await of_chat(tokenizer, SYSTEM, called_with('{"a": "\\ud83d\\ude00"}'))).exact


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([called_with(json.dumps({"a": "word " * 10_000}))], {}),
        ([{"role": "user", "content": "word " * 10_000}], {}),
        ([SYSTEM], {"documents": [{"text": "word " * 10_000}]}),
        ([SYSTEM], {"tools": [{"type": "function", "function": {"name": "f", "description": "word " * 10_000}}]}),
    ],
)
async def test_a_long_chat_is_encoded_in_a_thread_wherever_its_text_stands(
    tokenizer: PromptTokenizer, messages: list[dict[str, Any]], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[int]()
    render = Tokenizer.render_chat

    def rendered(*arguments: Any, **named: Any) -> str:
        threads.add(threading.get_ident())
        return render(*arguments, **named)

    monkeypatch.setattr(Tokenizer, "render_chat", rendered)
    body = json.dumps({"messages": messages, **fields}).encode()
    await tokenizer.tokens(parse_chat(body), replace(CONTEXT, light=True))

    assert threads
    assert threading.get_ident() not in threads


Asked = Callable[..., Coroutine[Any, Any, tuple[int, bytes]]]


def asking_an_engine(tokenizer: PromptTokenizer, ask: Asked) -> list[str]:
    """`ask`: in place of its HTTP. Returns the names of engines that are said to have failed."""
    engine, failed = Fleet().join(joined("a")), list[str]()
    tokenizer.tokenizer = None
    tokenizer.engine = lambda _demand: engine
    tokenizer.failed = failed.append
    tokenizer.engines.ask = ask  # type: ignore[method-assign]
    return failed


def tokens_of(request: EngineRequest) -> bytes:
    text = json.loads(request.body)["prompt"]
    return json.dumps({"count": len(text), "tokens": list(text.encode())}).encode()


async def test_of_many_prompts_some_are_with_the_engine_at_once_and_all_are_counted(tokenizer: PromptTokenizer) -> None:
    there = most = 0

    async def ask(request: EngineRequest, **_: Any) -> tuple[int, bytes]:
        nonlocal there, most
        there += 1
        most = max(most, there)
        await asyncio.sleep(0)
        there -= 1
        return 200, tokens_of(request)

    asking_an_engine(tokenizer, ask)
    tokens = await of_completion(tokenizer, prompt=["a" * length for length in range(1, 101)])

    assert tokens.exact
    assert [len(prompt) for prompt in tokens.prompts] == [*range(1, 101)]
    assert list(tokens.keyed) == [ord("a")]
    assert 1 < most <= PROMPTS_AT_ONCE_MAX


@pytest.mark.parametrize(("slow", "blamed"), [(0, ["a"]), (50, [])])
async def test_an_engine_has_failed_that_does_not_answer_and_not_one_that_takes_long_for_many(
    tokenizer: PromptTokenizer, slow: int, blamed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "ENGINE_WALL_SECONDS_MAX", 0.05)
    asked = 0

    async def ask(request: EngineRequest, **_: Any) -> tuple[int, bytes]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(10.0 if asked > slow else 0.0)
        return 200, tokens_of(request)

    failed = asking_an_engine(tokenizer, ask)
    tokens = await of_completion(tokenizer, prompt=["a" * 40] * 100)

    assert not tokens.exact
    assert len(tokens.prompts) == 100
    assert failed == blamed


async def test_the_time_of_our_own_threads_is_not_the_engines(
    tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "ENGINE_WALL_SECONDS_MAX", 0.05)

    async def late(_light: bool, _owner: str, work: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0.1)
        return work(*arguments)

    async def ask(request: EngineRequest, **_: Any) -> tuple[int, bytes]:
        return 200, tokens_of(request)

    monkeypatch.setattr(tokenizer.work, "run_unless", late)
    failed = asking_an_engine(tokenizer, ask)

    assert (await of_completion(tokenizer, prompt="a text")).exact
    assert not failed


async def test_many_token_ids_of_an_engine_are_read_in_a_thread(
    tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, threads = list(range(100_000)), list[int]()

    def noted(listed: bytes) -> Sequence[int]:
        threads.append(threading.get_ident())
        return token_ids(listed)

    async def answered(*_: Any, **__: Any) -> tuple[int, bytes]:
        return 200, json.dumps({"tokens": ids}).encode()

    monkeypatch.setattr("pointsman_ingress.prompt.tokenization.token_ids", noted)
    asking_an_engine(tokenizer, answered)
    tokens = await of_completion(tokenizer, prompt="a text")

    assert [list(prompt) for prompt in tokens.prompts] == [ids]
    assert threads
    assert threading.get_ident() not in threads


async def test_the_bytes_of_an_image_are_no_tokens_of_a_guess(tokenizer: PromptTokenizer) -> None:
    tokenizer.tokenizer = None
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    text = {"type": "text", "text": "What is this? " * 10}
    tokens = await of_chat(tokenizer, {"role": "user", "content": [text, picture]})

    text_tokens = tokens.count - tokens.estimated
    assert not tokens.exact
    assert len(text["text"]) // 4 <= text_tokens < 200
    assert tokens.estimated == IMAGE_TOKENS


async def refusal_of(tokenizer: PromptTokenizer, answer: web.Response) -> str:
    """What a client is told if the engine refuses the prompt with this answer."""

    async def refuse(_: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_post("/tokenize", refuse)
    async with TestServer(app) as server:
        engine = Fleet().join(joined("a", url=str(server.make_url("/"))))
        tokenizer.tokenizer, tokenizer.engine = None, lambda _demand: engine
        with pytest.raises(ApiError) as refused:
            await of_completion(tokenizer, prompt="a")
    assert refused.value.status == 400
    return refused.value.message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": "Too long for http://10.0.0.1:8000."}}, "Too long for (address)"),
        ({"message": "Too long."}, "Too long"),
        ({"detail": "Too long."}, "Too long"),
        ({"error": "Too long."}, "the engine does not say why"),
        ({"error": {"message": ""}}, "the engine does not say why"),
        ({"detail": [{"msg": "Too long"}]}, "the engine does not say why"),
        (["Too long"], "the engine does not say why"),
        ({"error": {"message": "a" * REFUSAL_BYTES_MAX}}, "the engine does not say why"),
    ],
)
async def test_why_an_engine_refuses_a_prompt_is_told(tokenizer: PromptTokenizer, body: object, reason: str) -> None:
    told = await refusal_of(tokenizer, web.json_response(body, status=400))

    assert told == f"The prompt does not fit this model: {reason}."


async def test_of_a_long_refusal_little_is_read_and_nothing_built(tokenizer: PromptTokenizer) -> None:
    """Five million lists took a second and 400 MB."""
    began = time.process_time()
    told = await refusal_of(tokenizer, web.Response(body=b'{"error":[%b[]]}' % (b"[]," * 5_000_000), status=400))

    assert "the engine does not say why" in told
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(("prompt_bytes", "exact"), [(1, False), (80_000, True)])
async def test_no_more_tokens_are_read_than_a_prompt_can_have(
    tokenizer: PromptTokenizer, prompt_bytes: int, exact: bool
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"count": 200_000, "tokens": [1] * 200_000})

    app = web.Application(client_max_size=1 << 20)
    app.router.add_post("/tokenize", answer)
    async with TestServer(app) as server:
        engine = Fleet().join(joined("a", url=str(server.make_url("/"))))
        tokenizer.tokenizer, tokenizer.engine = None, lambda _demand: engine
        tokens = await of_completion(tokenizer, prompt="a" * prompt_bytes)

    assert tokens.exact == exact
