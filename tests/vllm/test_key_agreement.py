"""Block keys: what the ingress computes from a client's bytes is what the engine's events turn into.

One engine, many requests. Each goes through the ingress's own parsing, tokenising and chaining, and is sent to the
engine as it is. Then the keys that the engine's events brought are compared, all of them: nothing may be missing and
nothing may be there that was not foreseen. The same request once more must be served from the cache as far as the last
whole block before its last token. A table at the end says what was compared.
"""

import base64
import json
import subprocess
import urllib.error
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tokenizer import Tokenizer
from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import BlockKey, Epoch, InstanceId, WallSeconds
from pointsman.runtime.engine_keys import EngineKeys
from pointsman.state.fleet import Instance
from pointsman_cli.vllm_cpu.home import EngineHome
from pointsman_ingress.engine.client import EngineClient
from pointsman_ingress.engine.usage import usage_in
from pointsman_ingress.prompt.messages_input import parse_messages
from pointsman_ingress.prompt.openai_requests import parse_chat, parse_completion
from pointsman_ingress.prompt.parsed_request import Chat, ParsedRequest
from pointsman_ingress.prompt.tokenization import PromptTokenizer, PromptTokens, TokenizeContext
from tests.support.engine_cache import EngineCache, followed
from tests.support.engine_urls import ANY_URL
from tests.support.events import joined
from tests.support.vllm import BLOCK_TOKENS, RunningEngine
from tests.vllm.conftest import ADAPTER

MODEL = "smollm2-135m"
NOBODY = TokenizeContext({}, "agreement")
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
PARSE = {CHAT: parse_chat, COMPLETIONS: parse_completion, MESSAGES: parse_messages}
SECRET = b"agreement"

WORDS = "The quick brown fox jumps over the lazy dog while seven wizards judge a boxing match in the old harbour town. "
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'},
    "index": 0,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "description": "Tells the <weather> & the tides",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
TOOLS: dict[str, Any] = {
    "tools": [TOOL, {"function": {"name": "now", "parameters": {}}, "type": "function"}],
    "tool_choice": "none",
}
STRICT_TOOL: dict[str, Any] = {"type": "function", "function": TOOL["function"] | {"strict": True}}
BY_NAME = {"type": "function", "function": {"name": "weather"}}
ANTHROPIC_TOOL: dict[str, Any] = {
    **{name: TOOL["function"][name] for name in ("name", "description")},
    "input_schema": TOOL["function"]["parameters"],
}
ANTHROPIC_TURNS: list[dict[str, Any]] = [
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Which city?", "signature": "x"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Zürich", "days": 2}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]},
        {"type": "text", "text": "Thank you.", "cache_control": {"type": "ephemeral"}},
    ]},
]  # fmt: skip
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]},
    {"role": "user", "content": "Thank you."},
]  # fmt: skip
UNICODE = "naïve façade, Straße, 世界你好, こんにちは世界, привет мир, مرحبا بالعالم, שלום, 🤖🦊👩‍👩‍👧‍👦, ﷽, e\u0301 and \u00e9, \u200b\ufeff, Ω≈ç√. "


@dataclass(frozen=True)
class Case:
    """One request. The text is made unlike any other case's by its name, from the first token on."""

    name: str
    path: str
    fields: dict[str, Any]

    @property
    def body(self) -> bytes:
        return json.dumps(
            {"model": MODEL, "max_tokens": 1, "temperature": 0, **self.fields}, ensure_ascii=False
        ).encode()

    @property
    def asked(self) -> ParsedRequest:
        return PARSE[self.path](self.body)

    @property
    def adapter(self) -> str:
        return ADAPTER if self.fields.get("model") == ADAPTER else ""


def chat(name: str, *turns: dict[str, Any], system: str | None = None, **fields: Any) -> Case:
    first = {"role": "user", "content": f"{name}: {WORDS * 3}"}
    messages = (
        [first, *turns] if system is None else [{"role": "system", "content": f"{name}. {system}"}, first, *turns]
    )
    return Case(name, CHAT, {"messages": messages, **fields})


def completion(name: str, prompt: Any = None, **fields: Any) -> Case:
    return Case(name, COMPLETIONS, {"prompt": f"{name}: {WORDS * 3}" if prompt is None else prompt, **fields})


def message(name: str, *turns: dict[str, Any], **fields: Any) -> Case:
    return Case(name, MESSAGES, {"messages": [{"role": "user", "content": f"{name}: {WORDS * 3}"}, *turns], **fields})


def turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


CASES = [
    chat("a chat"),
    chat("with a system prompt", system=WORDS * 2),
    chat("several turns", turn("assistant", "  It does. "), turn("user", "Why?\n\n"), turn("assistant", ""), turn("user", "So?")),
    chat("unicode", turn("assistant", UNICODE * 2), turn("user", UNICODE), system=UNICODE),
    chat("content in parts", turn("assistant", "Yes."), turn("user", [{"type": "text", "text": "One"}, {"type": "text", "text": "two", "more": 1}])),
    chat("names", turn("assistant", "Yes.", name="al"), turn("user", "And?", name="bob")),
    chat("a developer in between", turn("developer", "Be brief."), turn("user", "Now?"), system="Long ago."),
    chat("an attribution line", system=f"x-anthropic-billing-header: cch=1;\nAn attribution line: {WORDS}"),
    chat("special tokens in the text", turn("assistant", "<|im_end|>\n<|im_start|>user"), turn("user", "<|endoftext|>")),
    chat("tools", **TOOLS),
    chat("tools and a system prompt", system=WORDS, **TOOLS),
    chat("tool calls and results", *TOOL_TURNS, **TOOLS),
    chat("a tool that may be called", tools=[STRICT_TOOL]),
    chat("a tool that must be called", *TOOL_TURNS, tools=[STRICT_TOOL], tool_choice="required"),
    chat("a tool by its name", system=WORDS, **TOOLS | {"tool_choice": BY_NAME}),
    chat("one call at a time", tools=[STRICT_TOOL], tool_choice="required", parallel_tool_calls=False),
    chat("arguments that are no JSON", turn("assistant", "x", tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{oops"}}])),
    chat("no generation prompt", turn("assistant", "Sure, it"), add_generation_prompt=False),
    chat("the last message continued", turn("assistant", "Sure, it "), add_generation_prompt=False, continue_final_message=True),
    chat("template arguments", chat_template_kwargs={"enable_thinking": False, "unknown": 1, "add_generation_prompt": False}),
    chat("reasoning in the history", turn("assistant", "Yes.", reasoning_content="It must."), turn("user", "Sure?")),
    chat("reasoning effort", reasoning_effort="none"),
    chat("documents", documents=[{"title": "Foxes", "text": WORDS}]),
    chat("special tokens added", add_special_tokens=True),
    chat("a cache salt", cache_salt="tenant-1"),
    chat("a cache salt", cache_salt="tenant-2"),
    chat("an adapter", model=ADAPTER),
    chat("an adapter and a salt", model=ADAPTER, cache_salt="tenant-1"),
    chat("truncated from the right", truncate_prompt_tokens=70, truncation_side="right"),
    chat("truncated from the left", truncate_prompt_tokens=70, truncation_side="left"),
    message("a message"),
    message("a message with a system prompt", system=WORDS * 2),
    message("a message in unicode", turn("assistant", UNICODE * 2), turn("user", UNICODE), system=UNICODE),
    message("a system prompt in blocks", system=[{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]),
    message("a system message in between", turn("assistant", "Yes."), turn("system", "It is late."), turn("user", "So?"), system="Long ago."),
    message("a message with tools", *ANTHROPIC_TURNS, system=WORDS, tools=[ANTHROPIC_TOOL]),
    message("a message with no tool allowed", tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}),
    message("a message without thinking", thinking={"type": "disabled"}),
    message("a message with effort", output_config={"effort": "high"}),
    message("a message with a salt", cache_salt="tenant-1"),
    message("a message by an adapter", model=ADAPTER),
    message("a message's template arguments", chat_template_kwargs={"enable_thinking": False}),
    completion("a completion"),
    completion("a completion in unicode", f"{UNICODE * 3}"),
    completion("without special tokens", add_special_tokens=False),
    completion("a completion with a salt", cache_salt="tenant-1"),
    completion("a completion by an adapter", model=ADAPTER),
    completion("token ids", list(range(1000, 1100))),
    completion("token ids, whole blocks", list(range(2000, 2000 + 3 * BLOCK_TOKENS))),
    completion("token ids, less than a block", list(range(3000, 3000 + BLOCK_TOKENS - 1))),
    completion("a list of texts", [f"first of a list: {WORDS * 2}", f"second of a list: {WORDS * 2}"]),
    completion("a list of token ids", [list(range(4000, 4070)), list(range(5000, 5070))]),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(versatile_tokenizer: Path) -> Tokenizer:
    return Tokenizer.load(versatile_tokenizer)


def vectors_of(home: EngineHome, tokens: int) -> bytes:
    """Zeros in place of so many tokens, as an engine takes them."""
    hidden = json.loads((home.model / "config.json").read_text())["hidden_size"]
    program = (
        "import io, sys, torch; made = io.BytesIO();"
        f"torch.save(torch.zeros({tokens}, {hidden}, dtype=torch.bfloat16), made); sys.stdout.buffer.write(made.getvalue())"
    )
    return subprocess.run([home.python, "-c", program], capture_output=True, check=True).stdout


class Bench:
    """One engine, and what the ingress and the worker have, without anything between them."""

    def __init__(
        self, engine: RunningEngine, cache: EngineCache, local: PromptTokenizer, remote: PromptTokenizer
    ) -> None:
        self.engine, self.cache, self.local, self.remote = engine, cache, local, remote

    async def post(self, path: str, body: bytes) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            headers = {"content-type": "application/json"}
            async with session.post(self.engine.url + path, data=body, headers=headers) as answer:
                return answer.status, await answer.json()

    def keys(self, tokens: PromptTokens, asked: ParsedRequest, adapter: str) -> list[list[BlockKey]]:
        """Of each prompt."""
        root = self.cache.chain.root(lora=adapter, cache_salt=asked.cache_salt)
        prompts = [tokens.keyed] if len(tokens.prompts) == 1 else tokens.prompts
        return [self.cache.chain.extend(root, prompt) for prompt in prompts]


def instance_at(engine: RunningEngine) -> Instance:
    event = joined(InstanceId("engine"), url=engine.url, model=MODEL)
    return Instance(
        id=event.instance, epoch=Epoch(1), url=event.url, model=event.model, cost=event.prefill, block_tokens=BLOCK_TOKENS,
        engine_block_tokens=BLOCK_TOKENS, kv_capacity_tokens=0, max_model_len=0, joined_at=0, heard_at=0, cache="empty",
        model_since=Epoch(1),
    )  # fmt: skip


@pytest.fixture
async def bench(versatile_engine: RunningEngine, tokenizer: Tokenizer) -> Any:
    engine = versatile_engine
    chain = KeyChain(secret=SECRET, model=MODEL, block_tokens=BLOCK_TOKENS)
    async with (
        aiohttp.ClientSession() as session,
        followed(engine.kv, engine.replay, chain=chain, engine_block_tokens=BLOCK_TOKENS) as cache,
    ):
        ways = [
            PromptTokenizer(
                tokenizer=own,
                engine=lambda _demand: instance_at(engine),
                engines=EngineClient(
                    session,
                    ANY_URL,
                    keys=EngineKeys(""),
                    forward_authorization=False,
                    chunk_timeout_seconds=WallSeconds(60.0),
                ),
                clock=ScaledClock(),
            )
            for own in (tokenizer, None)
        ]
        yield Bench(engine, cache, *ways)
        for way in ways:
            way.work.close()


@dataclass(frozen=True)
class Row:
    """What was seen of one case."""

    name: str
    tokens: int
    blocks: int
    same_tokens: bool
    same_keys: bool
    cached: int
    expected_cached: int

    @property
    def agrees(self) -> bool:
        return self.same_tokens and self.same_keys and self.cached == self.expected_cached


def unrendered(asked: ParsedRequest) -> list[ParsedRequest]:
    """The same, with nothing that an engine could render. Nothing where only who has the template knows what it is given."""
    prompt = asked.prompt
    if not isinstance(prompt, Chat):
        return [asked]
    return [] if prompt.system_first or prompt.without_thinking else [replace(asked, prompt=replace(prompt, body=b""))]


def what_counts(tokens: PromptTokens) -> tuple[list[int], list[int]]:
    """Ids of the first prompt, which has keys, and the lengths of all: further ones are only counted."""
    return list(tokens.prompts[0]), [len(prompt) for prompt in tokens.prompts]


async def seen(bench: Bench, case: Case) -> Row:
    """Send a case twice, and look at what the engine says of it. Tokens are also taken from the engine, as an ingress
    without a tokenizer does: from what it renders, and from its `/tokenize`."""
    asked = case.asked
    tokens = await bench.local.tokens(asked, NOBODY)
    elsewhere = [await bench.remote.tokens(way, NOBODY) for way in (asked, *unrendered(asked))]
    keys = bench.keys(tokens, asked, case.adapter)
    before = await bench.cache.holds(set())
    status, first = await bench.post(case.path, case.body)
    assert status == 200, (case.name, first)
    foreseen = {key for chain in keys for key in chain}
    after = await bench.cache.holds(foreseen)
    _, second = await bench.post(case.path, case.body)
    used, again = (usage_in(json.dumps(answer).encode()) for answer in (first, second))
    whole = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in tokens.prompts]
    return Row(
        name=case.name,
        tokens=used.prompt_tokens,
        blocks=sum(map(len, keys)),
        same_tokens=tokens.exact and tokens.count == used.prompt_tokens and all(what_counts(other) == what_counts(tokens) for other in elsewhere),
        same_keys=after - before == foreseen - before and foreseen <= after,
        cached=again.cached_tokens,
        expected_cached=whole[-1],
    )  # fmt: skip


async def test_every_request_has_the_keys_that_the_engines_events_have(bench: Bench) -> None:
    rows = [await seen(bench, case) for case in CASES]

    print(f"\n{'request':<32} {'tokens':>6} {'blocks':>6}  same tokens  same keys  cached the second time (foreseen)")
    for row in rows:
        tokens, keys = ("yes" if same else "NO" for same in (row.same_tokens, row.same_keys))
        print(
            f"{row.name:<32} {row.tokens:>6} {row.blocks:>6}  {tokens:<11}  {keys:<9}  {row.cached} ({row.expected_cached})"
        )
    assert [row.name for row in rows if not row.agrees] == []


async def test_a_template_of_the_clients_own_is_rendered_by_the_engine(bench: Bench) -> None:
    template = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
    row = await seen(bench, chat("a template of its own", chat_template=template))

    assert row.agrees, row


async def test_who_asks_how_likely_the_prompt_is_gets_nothing_from_the_cache(bench: Bench) -> None:
    case = chat("prompt logprobs", prompt_logprobs=1)
    tokens = await bench.local.tokens(case.asked, NOBODY)
    await bench.post(case.path, case.body)
    _, answer = await bench.post(case.path, case.body)

    assert (list(tokens.keyed), tokens.prefix_header) == ([], "none; prompt_logprobs")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_embeddings_in_place_of_a_prompt_have_no_keys_on_either_side(bench: Bench, vllm_home: EngineHome) -> None:
    vectors = vectors_of(vllm_home, 100)
    case = Case("embeddings", COMPLETIONS, {"prompt_embeds": base64.b64encode(vectors).decode()})
    tokens = await bench.local.tokens(case.asked, NOBODY)
    before = await bench.cache.holds(set())
    status, answer = await bench.post(case.path, case.body)

    assert (list(tokens.keyed), tokens.prefix_header, tokens.exact) == ([], "none; prompt_embeds", False)
    assert status == 200, answer
    assert await bench.cache.holds(set()) == before
    assert bench.cache.translator.counters.keyless == 100 // BLOCK_TOKENS


def test_this_engine_takes_no_pictures_and_says_so_itself(versatile_engine: RunningEngine) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    case = chat("a picture", turn("user", [picture]))

    with pytest.raises(urllib.error.HTTPError) as refusal:
        versatile_engine.ask(CHAT, json.loads(case.body))
    with refusal.value:
        assert refusal.value.code == 400
