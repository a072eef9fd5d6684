"""The official OpenAI client in front, real engines behind: what a simulated engine cannot answer, and whether a response is
the prompt that we take it for."""

import json
import urllib.error
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.support.vllm import BLOCK_TOKENS, RealFleet

MODEL = "smollm2-135m"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(real_fleet: RealFleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=real_fleet.url + "/v1", api_key="unused", max_retries=0, timeout=120) as opened:
        yield opened


def story() -> str:
    """Several blocks that nobody else has."""
    return f"{uuid4()} " + " ".join(f"The fox met {number} hens." for number in range(40))


def asked(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_several_choices_with_log_probabilities(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=asked("Hello"), n=2, logprobs=True, top_logprobs=2, max_tokens=4, temperature=1.0
    )

    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_an_answer_follows_the_schema_that_was_asked_for(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=asked("Which city? Answer in JSON."),
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": WEATHER["parameters"]}},
        max_tokens=64,
    )

    assert set(json.loads(answer.choices[0].message.content or "")) == {"city"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": -1}, "temperature"),
        (
            {
                "tools": [{"type": "function", "function": WEATHER}],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            },
            "--tool-call-parser",
        ),
    ],
    ids=["a value", "a tool, without a parser for calls"],
)
def test_what_the_engine_refuses_is_an_exception_in_its_words(client: OpenAI, more: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model=MODEL, messages=asked("Hello"), **more)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"instructions": "You tell stories."},
        {"tools": [{"type": "function", **WEATHER, "strict": True}], "tool_choice": "none"},
    ],
    ids=["text", "instructions", "tools"],
)
def test_of_a_response_as_much_is_cached_as_was_predicted(client: OpenAI, more: dict[str, Any]) -> None:
    text = story()
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": text}]},
        {"role": "assistant", "content": "And then?"},
        {"role": "user", "content": "Then it slept."},
    ]
    predicted, reported = [], []
    for given in (text, text, conversation, conversation):
        raw = client.responses.with_raw_response.create(
            model=MODEL, input=given, stream=True, max_output_tokens=4, **more
        )
        assert raw.headers["x-pointsman-prefix"] == "exact"
        events = list(raw.parse())
        assert events[-1].type in ("response.completed", "response.incomplete")  # of vLLM 0.32, and of 0.33
        usage = events[-1].response.usage
        assert usage is not None
        predicted.append(int(raw.headers["x-pointsman-cached-tokens"]))
        reported.append(usage.input_tokens_details.cached_tokens)

    assert predicted == reported
    assert predicted[0] == 0
    assert min(predicted[1:]) >= 4 * BLOCK_TOKENS


def test_a_response_finds_what_the_same_chat_left(client: OpenAI) -> None:
    text = story()
    client.chat.completions.create(model=MODEL, messages=asked(text), max_tokens=4)
    response = client.responses.with_raw_response.create(model=MODEL, input=text, max_output_tokens=4)
    usage = response.parse().usage

    assert usage is not None
    assert int(response.headers["x-pointsman-cached-tokens"]) == usage.input_tokens_details.cached_tokens > 0


@pytest.fixture(scope="module")
def anthropic_client(real_fleet: RealFleet) -> Iterator[Anthropic]:
    with Anthropic(base_url=real_fleet.url, api_key="unused", max_retries=0, timeout=120) as opened:
        yield opened


@pytest.mark.parametrize("more", [{}, {"system": "You tell stories."}], ids=["text", "system"])
def test_of_a_message_as_much_is_cached_as_was_predicted(anthropic_client: Anthropic, more: dict[str, Any]) -> None:
    text = story()
    conversation: Any = [
        {"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "And then?"},
        {"role": "user", "content": "Then it slept."},
    ]
    predicted, reported = [], []
    for given in (asked(text), asked(text), conversation, conversation):
        counted = anthropic_client.messages.count_tokens(model=MODEL, messages=given, **more)
        with anthropic_client.messages.stream(model=MODEL, messages=given, max_tokens=4, **more) as stream:
            usage = stream.get_final_message().usage
            headers = stream.response.headers
        assert headers["x-pointsman-prefix"] == "exact"
        cached = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0) == counted.input_tokens
        predicted.append(int(headers["x-pointsman-cached-tokens"]))
        reported.append(cached)

    assert predicted == reported
    assert predicted[0] == 0
    assert min(predicted[1:]) >= 4 * BLOCK_TOKENS


def test_a_message_finds_what_the_same_chat_left(client: OpenAI, anthropic_client: Anthropic) -> None:
    text = story()
    client.chat.completions.create(model=MODEL, messages=asked(text), max_tokens=4)
    raw = anthropic_client.messages.with_raw_response.create(model=MODEL, messages=asked(text), max_tokens=4)
    usage = raw.parse().usage

    assert int(raw.headers["x-pointsman-cached-tokens"]) == usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens


def test_what_the_engine_refuses_of_a_message_is_an_exception_in_its_words(anthropic_client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        anthropic_client.messages.create(
            model=MODEL, messages=asked("Hello"), max_tokens=4, extra_body={"temperature": -1}
        )


@pytest.mark.parametrize("path", ["/rerank", "/score", "/pooling", "/classify"])
def test_an_engine_without_a_path_says_so(real_fleet: RealFleet, path: str) -> None:
    body = {"model": MODEL, "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b", "input": "a"}
    with pytest.raises(urllib.error.HTTPError) as refusal:
        real_fleet.ask(path, body)
    with refusal.value:
        assert json.load(refusal.value)["error"]["code"] == "endpoint_not_found"


def test_a_response_that_the_engine_does_not_keep_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="resp_nothing"):
        client.responses.create(model=MODEL, input="And then?", previous_response_id="resp_nothing")


def test_an_engine_without_embeddings_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.embeddings.create(model=MODEL, input="hello")

    assert raised.value.code == "endpoint_not_found"


def test_texts_become_tokens_and_tokens_texts(real_fleet: RealFleet) -> None:
    text = "Ein Füchslein 🦊 schläft."
    tokens, headers = real_fleet.ask("/tokenize", {"model": MODEL, "prompt": text})
    back, _ = real_fleet.ask("/detokenize", {"model": MODEL, "tokens": tokens["tokens"]})

    assert back["prompt"] == text
    assert headers["x-pointsman-instance"] in ("engine-1", "engine-2")
    with pytest.raises(urllib.error.HTTPError):
        real_fleet.ask("/tokenize", {"model": MODEL})
