"""Usage of streams: requested, removed for any chunking, and compared."""

import json
import random
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_ingress.engine import streams
from pointsman_ingress.engine.body_rewrites import ask_for_usage
from pointsman_ingress.engine.streams import (
    CHUNKS,
    LAST_EVENT_BYTES_MAX,
    MESSAGE_EVENTS,
    NAMED_EVENTS,
    StreamShape,
    StreamTail,
)
from pointsman_ingress.engine.usage import (
    COUNT_MAX,
    HELD_BYTES_MAX,
    TAIL_BYTES_MAX,
    EventFilter,
    Usage,
    usage_at_end,
    usage_in,
)
from pointsman_ingress.lifecycle import EQUAL, FEWER, MORE, UNKNOWN, compared
from pointsman_ingress.prompt.openai_requests import parse_chat

USAGE = 'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
SAID: dict[str, Any] = {"choices": [{"text": "a"}], "usage": None}
OTHERS = st.sampled_from([
    'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    'data: {"choices":[{"delta":{"content":"\\"usage\\": \\n\\n é 世"}}],"usage":null}\n\n',
    'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":1}}\n\n',
    'data: {"error":{"message":"usage"}}\n\n',
    ": a comment with \"usage\"\n\n",
    'data: {"usage" is no JSON\n\n',
])  # fmt: skip


@given(before=st.lists(OTHERS, max_size=6), usage=st.booleans(), cuts=st.lists(st.integers(1, 60), max_size=30))
def test_only_usage_is_removed_for_any_chunking(before: list[str], usage: bool, cuts: list[int]) -> None:
    stream = ("".join(before) + USAGE * usage + "data: [DONE]\n\n").encode()
    remover, shown, rest = EventFilter(removes_usage=True), b"", stream
    for cut in [*cuts, len(stream)]:
        chunk, rest = rest[:cut], rest[cut:]
        if chunk:
            shown += remover.feed(chunk)

    assert shown + remover.rest() == ("".join(before) + "data: [DONE]\n\n").encode()


def tokens_delivered(*events: dict[str, Any]) -> int:
    tail = StreamTail(CHUNKS)
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    for at in range(0, len(stream), 37):
        tail.feed(stream[at : at + 37])
    return tail.delivered_tokens


def counted(tokens: int, text: str = "a") -> dict[str, Any]:
    return {"choices": [{"text": text}], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([], 0),
        ([SAID] * 5, 5),
        ([SAID] * 500, 500),
        ([counted(n) for n in (0, 0, 0, 1, 2)], 2),
        ([counted(8 * n, "a" * 30) for n in range(300)], 8 * 299),
        ([counted(0), *[SAID] * 5], 5),
        ([counted(20), *[SAID] * 5], 25),
        ([{**SAID, "usage": "many"}] * 4, 4),
        ([SAID, {"error": {"message": "no", "code": 400}}], 1),
        ([*[SAID] * 40, {"error": "no"}], 40),
    ],
    ids=["nothing", "events", "many events", "events without tokens", "events of several tokens",
         "a count before the first", "a count before the last", "no count",
         "an error", "an error behind many"],
)  # fmt: skip
def test_a_stream_that_ended_early_counts_tokens_where_the_engine_tells_them(
    events: list[dict[str, Any]], tokens: int
) -> None:
    assert tokens_delivered(*events) == tokens


USED = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def events_of(stream: bytes) -> list[bytes]:
    """The data of each event, by the letter of the standard, byte by byte."""
    lines, line, at = list[bytes](), b"", 0
    while at < len(stream):
        byte = stream[at : at + 1]
        if byte in (b"\r", b"\n"):
            at += stream[at : at + 2] == b"\r\n"
            lines.append(line)
            line = b""
        else:
            line += byte
        at += 1
    events, data = list[bytes](), list[bytes]()
    for line in lines:
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            events.append(b"\n".join(data))
            data = []
    return events


def stream_of(chance: random.Random, *, line_ends: list[bytes]) -> tuple[bytes, list[bytes]]:
    """A stream with some usage events in it, and the data of all others. Where one begins as LF ends, none ends in CR:
    these two would be one end of a line."""
    stream, others = b"", list[bytes]()
    for _ in range(chance.randint(1, 5)):
        end = chance.choice(line_ends)
        used = chance.random() < 0.4
        space, name = chance.choice([b"", b" "]), chance.choice([b"", b"event: x" + end, b": usage" + end])
        data = json.dumps(USED if used else SAID).encode()
        stream += name + b"data:" + space + data + end + end
        others += [] if used else [data]
    return stream + b"data: [DONE]\n\n", [*others, b"[DONE]"]


@pytest.mark.parametrize("line_ends", [[b"\n"], [b"\r\n"], [b"\r"], [b"\n", b"\r\n", b"\r"]])
@pytest.mark.parametrize("seed", range(12))
def test_only_usage_is_removed_for_any_line_ends_and_chunking(line_ends: list[bytes], seed: int) -> None:
    stream, others = stream_of(random.Random(seed), line_ends=line_ends)
    cuts = [[at] for at in range(1, len(stream))] + [list(range(1, len(stream)))]
    for cut in cuts:
        pieces = [stream[a:b] for a, b in zip([0, *cut], [*cut, len(stream)], strict=True)]
        remover = EventFilter(removes_usage=True)
        shown = b"".join(remover.feed(piece) for piece in pieces) + remover.rest()

        assert events_of(shown) == others, f"seed {seed}, cut at {cut}"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_whole_event_passes_immediately_for_any_line_ends(end: bytes) -> None:
    event = b"data: " + json.dumps(SAID).encode() + end + end
    remover = EventFilter(removes_usage=True)
    at_once = remover.feed(event), remover.feed(event + event[:9]), remover.feed(event[9:])

    assert at_once == (event, event, event)


def test_what_a_usage_event_holds_beside_its_counts_is_not_built() -> None:
    event = b'data: {"choices":[],"usage":{"a":[%b[]]}}\n\n' % (b"[]," * 5_000_000)
    began = time.process_time()

    assert EventFilter(removes_usage=True).feed(event) == b""
    assert time.process_time() - began < 0.5


def test_an_event_too_long_for_usage_passes_and_the_next_is_searched() -> None:
    long = b'data: {"usage": "' + b"a" * (3 * HELD_BYTES_MAX)
    usage = b"data: " + json.dumps(USED).encode()
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        stream = long + b'"}' + end + usage + end + b"data: [DONE]" + end
        for size in (1000, 4099, HELD_BYTES_MAX):
            remover, shown, held_most = EventFilter(removes_usage=True), b"", 0
            for at in range(0, len(stream), size):
                shown += remover.feed(stream[at : at + size])
                held_most = max(held_most, at + size - len(shown))

            assert shown + remover.rest() == long + b'"}' + end + b"data: [DONE]" + end
            assert held_most <= HELD_BYTES_MAX + size


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_of_empty_events_without_number_none_is_looked_at(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a megabyte of them took half a second."""
    looked: list[bytes] = []

    passed = EventFilter._passed

    def data_of(event: bytes) -> bytes:
        looked.append(event)
        return event

    def counted(remover: EventFilter, event: bytes) -> bytes:
        looked.append(event)
        return passed(remover, event)

    monkeypatch.setattr(streams, "event_data", data_of)
    monkeypatch.setattr(EventFilter, "_passed", counted)
    chunk = end * 1000 + b'data: {"error":{"message":"no"}}' + end * 1000 + b'data: {"usage":1}' + end * 1000
    tail, remover = StreamTail(CHUNKS), EventFilter(removes_usage=True)
    tail.feed(chunk)

    assert remover.feed(chunk) + remover.rest() == chunk
    assert len(looked) == 2


def test_an_unfinished_event_has_bounded_cost() -> None:
    chunk = b'data: {"usage": ' + b"a" * 16_000
    remover, tail, shown = EventFilter(removes_usage=True), StreamTail(CHUNKS), 0
    named = StreamTail(NAMED_EVENTS)
    named.feed(b"event: response.completed\n")
    tracemalloc.start()
    for _ in range(4_000):  # 64 MB
        shown += len(remover.feed(chunk))
        tail.feed(chunk)
        named.feed(chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert shown == 4_000 * len(chunk)
    assert peak < LAST_EVENT_BYTES_MAX + 4 * (HELD_BYTES_MAX + TAIL_BYTES_MAX) + 1_000_000
    assert tail.mid_event
    assert not tail.has_ended


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_the_tail_has_end_and_usage_for_any_chunking(end: bytes) -> None:
    usage = json.dumps(USED).encode()
    chats = b"data: " + b"x" * 500 + 2 * end + b"data: " + usage + 2 * end + b"data: [DONE]" + 2 * end
    whole = json.dumps({"response": {"text": "a" * 50_000, "usage": {"input_tokens": 3, "output_tokens": 2}}}).encode()
    answers = b"event: response.output_text.delta" + end + b"data: {}" + 2 * end
    answers += b"event: response.completed" + end + b"data: " + whole + 2 * end
    for stream, shape, size in (
        (chats, CHUNKS, 1),
        (chats, CHUNKS, 7),
        (answers, NAMED_EVENTS, 1000),
        (answers, NAMED_EVENTS, 7),
    ):
        tail = StreamTail(shape)
        ended_at = 0
        for at in range(0, len(stream), size):
            tail.feed(stream[at : at + size])
            ended_at = ended_at or (tail.has_ended and at)
        tail_usage = next(usage_in(data) for data in tail.data_backwards() if b"usage" in data)

        assert (tail_usage.prompt_tokens, tail_usage.completion_tokens) == (3, 2)
        assert tail.shows_output
        assert ended_at
        assert not tail.mid_event


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"data": [{"embedding": [0.5] * 9}]}, {}),
        ({"usage": {"completion_tokens": 9}, "tools": [{"usage": {"completion_tokens": 8}}]}, {"user": "a"}),
        ({"choices": [{"text": 'x"usage":{"completion_tokens":9}'}]}, {"kv_transfer_params": {"usage": {"a": [1]}}}),
        ({}, {"choices": [{"usage": {"completion_tokens": 7}}] * 3}),
    ],
)
@pytest.mark.parametrize("usage", [{"prompt_tokens": 3, "completion_tokens": 2}, None])
def test_the_usage_at_the_end_of_a_long_answer_is_that_of_the_whole(
    before: dict[str, Any], after: dict[str, Any], usage: dict[str, int] | None
) -> None:
    answer = json.dumps({"text": "a" * 100_000, **{k: v for k, v in before.items() if k != "usage"}})[:-1]
    answer += ", " + json.dumps({"usage": usage, **after})[1:]

    assert usage_at_end(answer.encode()) == usage_in(answer.encode())
    assert usage_at_end(json.dumps({"usage": usage, "data": "a" * 100_000}).encode()) is None


@pytest.mark.parametrize(
    "answer",
    [
        b'{"usage": {"prompt_tokens": %s}}' % (b"9" * 400),
        b'{"usage": {"prompt_tokens": %d}}' % (COUNT_MAX + 1),
        b'{"usage": {"prompt_tokens": -2}}',
        b'{"usage": {"prompt_tokens": 1.5}}',
        b'{"usage": {"prompt_tokens": 1e400}}',
        b'{"usage": {"completion_tokens": "3"}}',
        b'{"usage": {"prompt_tokens_details": {"cached_tokens": %d}}}' % 2**70,
        b'{"usage": [3]}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xff\xfe",
        b"",
    ],
)
def test_impossible_counts_are_unknown(answer: bytes) -> None:
    assert usage_in(answer) == Usage()


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
    sent: dict[str, Any] = json.loads(ask_for_usage(body))

    wished = json.loads(body)
    assert sent.pop("stream_options") == {**(wished.pop("stream_options", None) or {}), "include_usage": True}
    assert sent == wished


def test_no_spelling_keeps_usage_and_so_the_tenants_budget_from_being_counted() -> None:
    body = rb'{"stream":true,"stream\u005foptions":{"include_usage":false},"prompt":"a"}'
    assert json.loads(ask_for_usage(body))["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({}, False),
        ({"stream": False}, False),
        ({"stream": True}, True),
        ({"stream": True, "stream_options": {}}, True),
        ({"stream": True, "stream_options": {"include_usage": True}}, False),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, True),
    ],
)
def test_usage_is_added_only_if_the_client_did_not_ask_for_it(fields: dict[str, Any], added: bool) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}

    assert parse_chat(json.dumps(body).encode()).may_add_usage is added


@pytest.mark.parametrize(
    ("predicted", "reported", "outcome"),
    [(-1, 64, UNKNOWN), (64, -1, UNKNOWN), (64, 64, EQUAL), (64, 112, EQUAL), (64, 128, MORE), (64, 48, FEWER), (0, 0, EQUAL)],
)  # fmt: skip
def test_a_hit_may_exceed_the_prediction_by_less_than_a_key(predicted: int, reported: int, outcome: str) -> None:
    assert compared(predicted, reported, granularity=64) == outcome


def test_text_of_a_model_is_neither_an_end_nor_an_event() -> None:
    tail = StreamTail(CHUNKS)
    for text in ("streams end with data: [DONE]", "[DONE]", "data: data: data:"):
        tail.feed(b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n")

    assert (tail.has_ended, tail.events) == (False, 3)
    tail.feed(b"data: [DONE]\n\n")
    assert (tail.has_ended, tail.events) == (True, 4)


def test_a_stream_that_is_its_end_alone_has_ended() -> None:
    tail = StreamTail(CHUNKS)
    tail.feed(b"data: [DONE]\r\n\r\n")

    assert tail.has_ended


LAST_EVENTS = [
    (CHUNKS, b"data: {}\n\n", b"data: [DONE]\n\n"),
    (CHUNKS, b"data: {}\r\n\r\n", b"data:[DONE]\r\n\r\n"),
    (NAMED_EVENTS, b"event: response.output_text.delta\ndata: {}\n\n", b'event: response.completed\ndata: {"a":1}\n\n'),
    (
        MESSAGE_EVENTS,
        b"event: content_block_start\ndata: {}\n\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
]


@pytest.mark.parametrize(("shape", "first", "last"), LAST_EVENTS)
def test_a_last_event_ends_a_stream_wherever_it_is_cut(shape: StreamShape, first: bytes, last: bytes) -> None:
    for cut in range(1, len(last)):
        tail, over = StreamTail(shape), list[bool]()
        for part in (first, last[:cut], last[cut:]):
            tail.feed(part)
            over.append(tail.is_over)

        assert over == [False, over[1] and not last[cut:].strip(), True], cut
