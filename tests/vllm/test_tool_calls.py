"""Tools, with the official client in front and an engine that makes calls of what its model says.

The model is too small to want a tool by itself, so it is made to want one, and guided decoding leaves it nothing but calls
that fit. The chat template shows it the tools, the calls and their results: what is cached of all that must be foreseen.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.up import pointsman_up
from tests.support.vllm import BLOCK_TOKENS, VERDICT_SECONDS_MAX, RunningEngine

MODEL = "smollm2-135m"
CITIES, DAYS = {"Zürich", "Bern"}, {"today", "tomorrow"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city, on one of two days.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": sorted(CITIES)},
            "day": {"type": "string", "enum": sorted(DAYS)},
        },
        "required": ["city", "day"],
        "additionalProperties": False,
    },
    "strict": True,
}
CHAT_TOOL: Any = {"type": "function", "function": WEATHER}
WORDED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "day": "today"}}\n</tool_call>'
CHAT_CHOICES: dict[str, Any] = {
    "by name": {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "required": {"tool_choice": "required"},
    "as the model words it": {"tool_choice": "auto", "extra_body": {"structured_outputs": {"choice": [WORDED]}}},
}
RESPONSE_TOOL: Any = {"type": "function", **WEATHER}
RESPONSE_CHOICES: dict[str, Any] = {"by name": {"type": "function", "name": "weather"}, "required": "required"}
ROUNDS = 3


@pytest.fixture(scope="module")
def client(
    versatile_engine: RunningEngine, versatile_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAI]:
    """Of a fleet in front of the one engine."""
    told = ("--engine", versatile_engine.address, "--block-tokens", str(BLOCK_TOKENS))
    with pointsman_up(tmp_path_factory.mktemp("fleet"), *told, "--tokenizer", str(versatile_tokenizer)) as up:
        up.wait_for("✓ engine-1 .*: the keys of a chat agree", VERDICT_SECONDS_MAX)
        with OpenAI(base_url=up.url + "/v1", api_key="unused", max_retries=0, timeout=120) as opened:
            yield opened


def asked(opening: str) -> list[Any]:
    rules = "You tell the weather, and nothing else, to everyone who asks. " * 8
    return [
        {"role": "system", "content": f"{opening} {rules}"},
        {"role": "user", "content": "Will it rain in Zürich tomorrow?"},
    ]


def fits(arguments: str) -> bool:
    said = json.loads(arguments)
    return set(said) == {"city", "day"} and said["city"] in CITIES and said["day"] in DAYS


@pytest.mark.parametrize("choice", CHAT_CHOICES)
def test_a_tool_is_called_whole_and_in_pieces(client: OpenAI, choice: str, unlike_any_other: str) -> None:
    told: Any = {
        "model": MODEL,
        "messages": asked(unlike_any_other),
        "tools": [CHAT_TOOL],
        "max_tokens": 100,
        "temperature": 0,
        **CHAT_CHOICES[choice],
    }
    whole = client.chat.completions.create(**told).choices[0]
    with client.chat.completions.stream(**told) as stream:
        streamed = stream.get_final_completion().choices[0]

    assert whole.finish_reason == streamed.finish_reason == ("stop" if choice == "by name" else "tool_calls")
    for message in (whole.message, streamed.message):
        (call,) = message.tool_calls or []
        assert call.type == "function"
        assert call.id
        assert call.function.name == "weather"
        assert fits(call.function.arguments)


@pytest.mark.parametrize("choice", RESPONSE_CHOICES)
def test_a_response_calls_a_tool_whole_and_in_pieces(client: OpenAI, choice: str, unlike_any_other: str) -> None:
    told: Any = {
        "model": MODEL,
        "input": asked(unlike_any_other),
        "tools": [RESPONSE_TOOL],
        "tool_choice": RESPONSE_CHOICES[choice],
        "max_output_tokens": 100,
        "temperature": 0,
    }
    whole = client.responses.create(**told)
    with client.responses.stream(**told) as stream:
        streamed = stream.get_final_response()

    call: Any
    for response in (whole, streamed):
        (call,) = response.output
        assert call.type == "function_call"
        assert call.name == "weather"
        assert fits(call.arguments)


def test_of_each_round_of_call_and_result_as_much_is_cached_as_was_predicted(
    client: OpenAI, unlike_any_other: str
) -> None:
    messages = asked(unlike_any_other)
    predicted, reported = [], []
    for _ in range(ROUNDS):
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,
            tools=[CHAT_TOOL],
            tool_choice="required",
            max_tokens=100,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert raw.headers["x-pointsman-prefix"] == "exact"
        chunks = list(raw.parse())
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        predicted.append(int(raw.headers["x-pointsman-cached-tokens"]))
        reported.append(usage.prompt_tokens_details.cached_tokens)
        call = one_call(chunks)
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "It rains until noon."})

    assert predicted == reported
    assert predicted[0] == 0
    assert predicted[1] >= 4 * BLOCK_TOKENS
    assert predicted[2] >= predicted[1] + 2 * BLOCK_TOKENS, "the call and its result are found again, too"


def one_call(chunks: list[Any]) -> dict[str, Any]:
    """The one call that a stream makes, as the next request tells of it."""
    pieces = [piece for chunk in chunks for choice in chunk.choices for piece in choice.delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    arguments = "".join(piece.function.arguments or "" for piece in pieces)
    return {
        "id": pieces[0].id,
        "type": "function",
        "function": {"name": pieces[0].function.name, "arguments": arguments},
    }


def test_a_tool_that_was_not_named_cannot_be_called(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(
            model=MODEL,
            messages=asked(""),
            tools=[CHAT_TOOL],
            tool_choice={"type": "function", "function": {"name": "tides"}},
        )
