"""Usage of streams: asked for without changing anything else, taken out again wherever chunks are cut, and compared."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_ingress.life import EQUAL, FEWER, MORE, UNKNOWN, compared
from pointsman_ingress.openai_requests import parse_chat
from pointsman_ingress.stream_usage import UsageRemover, asking_for_usage

USAGE = 'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
OTHERS = st.sampled_from([
    'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    'data: {"choices":[{"delta":{"content":"\\"usage\\": \\n\\n é 世"}}],"usage":null}\n\n',
    'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":1}}\n\n',
    'data: {"error":{"message":"usage"}}\n\n',
    ": a comment with \"usage\"\n\n",
    'data: {"usage" is no JSON\n\n',
])  # fmt: skip


@given(before=st.lists(OTHERS, max_size=6), usage=st.booleans(), cuts=st.lists(st.integers(1, 60), max_size=30))
def test_wherever_chunks_are_cut_all_but_the_usage_passes(before: list[str], usage: bool, cuts: list[int]) -> None:
    stream = ("".join(before) + USAGE * usage + "data: [DONE]\n\n").encode()
    remover, shown, rest = UsageRemover(), b"", stream
    for cut in [*cuts, len(stream)]:
        chunk, rest = rest[:cut], rest[cut:]
        if chunk:
            shown += remover.shown(chunk)

    assert shown + remover.rest() == ("".join(before) + "data: [DONE]\n\n").encode()


def test_whole_events_are_never_held_back() -> None:
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    remover = UsageRemover()

    assert remover.shown(event) == event
    assert remover.shown(event + event[:5]) == event
    assert remover.shown(event[5:]) == event


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "say \\"stream_options\\""}], "stream": true}',
        b' {"messages":[{"role":"user","content":"\\u00e9 \\ud83d\\ude00"}],"stream":true,"seed":1e2,"x":[1.50, null]}',
        b'{"stream":true,"stream_options":null,"messages":[{"role":"user","content":"a"}]}',
        b'{"stream":true,"stream_options":{"include_usage":false,"y":1},"messages":[{"role":"user","content":"a"}]}',
    ],
)
def test_usage_is_asked_for_and_nothing_else_changes(body: bytes) -> None:
    sent: dict[str, Any] = json.loads(asking_for_usage(body))

    wished = json.loads(body)
    assert sent.pop("stream_options") == {**(wished.pop("stream_options", None) or {}), "include_usage": True}
    assert sent == wished


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, False),
        ({"stream": False}, False),
        ({"stream": True}, True),
        ({"stream": True, "stream_options": {}}, True),
        ({"stream": True, "stream_options": {"include_usage": True}}, False),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, False),
    ],
)
def test_it_is_asked_for_only_where_the_client_did_not_and_would_not_see_it(
    fields: dict[str, Any], asked: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}

    assert parse_chat(json.dumps(body).encode()).usage_may_be_asked is asked


@pytest.mark.parametrize(
    ("predicted", "reported", "outcome"),
    [(-1, 64, UNKNOWN), (64, -1, UNKNOWN), (64, 64, EQUAL), (64, 112, EQUAL), (64, 128, MORE), (64, 48, FEWER), (0, 0, EQUAL)],
)  # fmt: skip
def test_a_hit_may_be_larger_by_less_than_a_key(predicted: int, reported: int, outcome: str) -> None:
    assert compared(predicted, reported, granularity=64) == outcome
