"""What the ingress reads out of OpenAI bodies and headers, and what it refuses."""

import json
from array import array
from typing import Any

import pytest

from pointsman.contracts.requests import OUTPUT_UNBOUNDED
from pointsman.primitives import Tenant
from pointsman.state.output_lengths import OutputLengths
from pointsman_ingress.endpoints import CHAT_COMPLETIONS, BodyRules
from pointsman_ingress.http.errors import OPENAI_ERRORS, ApiError
from pointsman_ingress.http.request_headers import LatencySlo, session_of, slo_of, tenant_of
from pointsman_ingress.prompt.body_fields import FieldRules
from pointsman_ingress.prompt.lengths import RequestLengths
from pointsman_ingress.prompt.messages_input import parse_messages
from pointsman_ingress.prompt.openai_requests import (
    PAIRS_TOKENS_MAX,
    parse_chat,
    parse_completion,
    parse_embeddings,
    parse_pairs,
    parse_pooled,
    session_name,
)
from pointsman_ingress.prompt.parsed_request import Chat, ParsedRequest, SizedRequest, Texts, TokenIds
from pointsman_ingress.prompt.remote_media import MediaRules
from pointsman_ingress.prompt.responses_input import parse_response

DEFAULTS = LatencySlo(5.0, 0.1)
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def chat(**fields: Any) -> bytes:
    return json.dumps({**HELLO, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def refusal_of(parse: Any, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(body)
    return raised.value


def test_unknown_fields_are_ignored() -> None:
    parsed = parse_chat(chat(logit_bias={"1": 2}, something_new=[1, {"a": None}], stream=True))

    assert parsed.stream
    assert parsed.model == "m"


def test_the_newer_name_of_the_output_bound_wins() -> None:
    parsed = parse_chat(chat(max_tokens=7, max_completion_tokens=9))

    assert parsed.output_tokens == 9


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (parse_chat(chat(max_tokens=10**30)), "max_tokens"),
        (parse_chat(chat(max_completion_tokens=10**30, max_tokens=3)), "max_completion_tokens"),
        (parse_completion(completion(prompt="x", max_tokens=10**30)), "max_tokens"),
        (parse_response(b'{"input": "x", "max_output_tokens": 9000}'), "max_output_tokens"),
    ],
)
def test_an_output_bound_beyond_the_context_is_refused_in_its_own_name(request_: ParsedRequest, field: str) -> None:
    for prompt_tokens in (0, 50):
        with pytest.raises(ApiError, match=f"maximum context length is 4096 tokens; `{field}` asks for") as raised:
            RequestLengths(request_, 4096).check(prompt_tokens)

        assert raised.value.param == field
    RequestLengths(request_, 0).check(50)


@pytest.mark.parametrize(("prompt_tokens", "why"), [(4096, "4096 and leaves no room"), (4097, "4097. Shorten it")])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(prompt_tokens: int, why: str) -> None:
    for fields in ({}, {"max_tokens": 100}):
        with pytest.raises(ApiError, match=f"4096 tokens; the prompt has {why}") as raised:
            RequestLengths(parse_chat(chat(**fields)), 4096).check(prompt_tokens)

        assert raised.value.param == "messages"


def test_of_a_prompt_and_a_bound_that_fit_alone_the_engine_decides() -> None:
    RequestLengths(parse_chat(chat(max_tokens=4096)), 4096).check(4095)
    RequestLengths(parse_embeddings(completion(input="x")), 4096).check(4096)


def test_a_completion_without_a_bound_asks_for_sixteen_tokens_but_does_not_demand_them() -> None:
    parsed = parse_completion(completion(prompt="x"))

    assert (parsed.output_tokens, parsed.output_demanded) == (16, False)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", Texts(["text"])),
        (["one", "two"], Texts(["one", "two"])),
        ([1, 2, 3], TokenIds([array("I", [1, 2, 3])])),
        ([[1, 2], [3]], TokenIds([array("I", [1, 2]), array("I", [3])])),
    ],
)
def test_a_prompt_may_be_text_or_token_ids_alone_or_in_a_batch(prompt: Any, expected: Any) -> None:
    assert parse_completion(completion(prompt=prompt)).prompt == expected


@pytest.mark.parametrize("prompt", [None, [], [[]], [1, "two"], [1, [2]], [-1], [1 << 32], [1.5], {"a": 1}, 7])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    assert refusal_of(parse_completion, completion(prompt=prompt)).status == 400


@pytest.mark.parametrize(
    ("request_", "model_len", "prompt_tokens", "bound"),
    [
        (parse_chat(chat()), 1000, 100, 900),
        (parse_chat(chat()), 0, 100, OUTPUT_UNBOUNDED),
        (parse_chat(chat()), 1000, 4000, 1000),
        (parse_chat(chat(max_tokens=50)), 1000, 100, 50),
        (parse_chat(chat(max_tokens=50)), 1000, 980, 20),
        (parse_chat(chat(max_tokens=50)), 0, 100, 50),
        (parse_chat(chat(max_tokens=2**40)), 0, 100, OUTPUT_UNBOUNDED),
        (parse_embeddings(completion(input="x")), 1000, 100, 0),
        (parse_embeddings(completion(input="x")), 0, 100, 0),
    ],
)
def test_only_what_generates_nothing_has_no_output(
    request_: ParsedRequest, model_len: int, prompt_tokens: int, bound: int
) -> None:
    assert RequestLengths(request_, model_len).output_bound(prompt_tokens) == bound


def test_a_request_without_a_bound_is_expected_to_be_as_long_as_answers_are() -> None:
    lengths, tenant = OutputLengths(), Tenant("t")
    for _ in range(200):
        lengths.learn(tenant, 300, OUTPUT_UNBOUNDED)

    assert lengths.expected(tenant, RequestLengths(parse_chat(chat()), 0).output_bound(100)) == pytest.approx(
        300, rel=0.1
    )


LONG = list(range(1_000, 41_000))


@pytest.mark.parametrize("separators", [(",", ":"), (" \n,\t ", ":")])
@pytest.mark.parametrize("prompt", [LONG, [LONG], [LONG, [7], LONG], [[0, 2**32 - 1], *([[5]] * 2_000), LONG]])
def test_long_token_ids_are_read_by_slices_as_they_stand(prompt: list[Any], separators: tuple[str, str]) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}, separators=separators).encode()
    lists = prompt if isinstance(prompt[0], list) else [prompt]

    read = parse_completion(body).prompt
    assert isinstance(read, TokenIds)
    assert [list(ids) for ids in read.prompts] == lists


@pytest.mark.parametrize(
    "wrong",
    [-1, 2**32, 1.5, None, True, "two", [2], [], {}, {"a": 1}],
)
@pytest.mark.parametrize("place", ["first", "in the middle", "last"])
@pytest.mark.parametrize("batch", [False, True])
def test_anything_else_among_long_token_ids_is_refused(wrong: Any, place: str, batch: bool) -> None:
    at = {"first": 0, "in the middle": len(LONG) // 2, "last": len(LONG)}[place]
    ids = [*LONG[:at], wrong, *LONG[at:]]

    for prompt in [[ids]] if batch else [ids]:
        assert refusal_of(parse_completion, completion(prompt=prompt)).status == 400


@pytest.mark.parametrize("odd", ["[[1],2,[3]]", "[2,[1]]", "[[1],2]", "[[1],[]]", "[[[1]]]", "[]", "[[]]"])
def test_odd_lists_are_refused_however_long_they_are(odd: str) -> None:
    for padding in (0, 100_000):
        body = b'{"prompt":' + odd[:1].encode() + b" " * padding + odd[1:].encode() + b"}"

        assert refusal_of(parse_completion, body).status == 400


def test_long_inputs_to_embed_count_as_short_ones_do() -> None:
    for given in (LONG, [LONG, LONG], ["word " * 40_000], ["a" * 9] * 10_000):
        entries = [
            len(part) // 4 + 1 if isinstance(part, str) else len(part) for part in given if not isinstance(part, int)
        ]
        body = json.dumps({"model": "m", "input": given}).encode()

        assert parse_embeddings(body).prompt == SizedRequest(sum(entries) or len(given))


INLINE = "data:image/png;base64," + "A" * 100_000


@pytest.mark.parametrize(
    ("parse", "body", "tokens"),
    [
        (parse_embeddings, {"messages": [{"role": "user", "content": [{"image_url": {"url": INLINE}}]}]}, 1_000),
        (parse_embeddings, {"messages": [{"type": "image_url", "image_url": {"url": "https://x/1.png"}}]}, 1_000),
        (parse_pooled, {"input": [{"images": [INLINE, INLINE]}]}, 2_000),
        (parse_pairs, {"query": "x", "documents": {"content": [{"url": INLINE}, {"url": INLINE}]}}, 2_001),
        (parse_pairs, {"text_1": {"audio": "data:audio/mp3;base64," + "A" * 4_000_000}, "text_2": "x"}, 6_001),
        (parse_embeddings, {"input": INLINE}, 25_006),
        (parse_pairs, {"query": "data:" + "x" * 400, "documents": ["x"]}, 103),
    ],
)
def test_media_to_embed_count_by_their_kind_and_not_by_their_bytes(
    parse: Any, body: dict[str, Any], tokens: int
) -> None:
    prompt = parse(json.dumps(body).encode()).prompt

    assert isinstance(prompt, SizedRequest)
    assert tokens <= prompt.tokens <= tokens + 10


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": "hi"}', b'{"messages": []}', b"{}"]
)
def test_invalid_chats_are_refused(body: bytes) -> None:
    assert refusal_of(parse_chat, body).status == 400


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [-1, 0, -(2**70), "8.5", "eight", 1.5, 10.5])
def test_an_output_bound_must_be_a_positive_integer(name: str, value: Any) -> None:
    refusal = refusal_of(parse_chat, chat(**{name: value}))

    assert refusal.status == 400
    assert json.loads(OPENAI_ERRORS.body(refusal))["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("value", "tokens"), [(1024.0, 1024), ("512", 512), ("512.0", 512), (1e3, 1000)])
def test_numbers_and_truth_values_are_read_as_engines_read_them(value: Any, tokens: int) -> None:
    body = chat(max_tokens=value, stream="true", n="2")
    parsed = parse_chat(body)

    assert (parsed.output_tokens, parsed.stream, parsed.answers) == (tokens, True, 2)
    for parse, name in ((parse_response, "max_output_tokens"), (parse_messages, "max_tokens")):
        fields = {"input": "hello", "messages": HELLO["messages"], "stream": "false", name: value}
        read = parse(json.dumps(fields).encode())
        assert (read.output_tokens, read.stream) == (tokens, False)
    accepted = BodyRules(FieldRules(trusted=False), MediaRules(trusted=False)).accept(CHAT_COMPLETIONS, body, {})
    assert accepted.content is body


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({}, True),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True}, False),
        ({"echo": True, "top_logprobs": 2}, False),
        ({"echo": True, "top_logprobs": None}, True),
        ({"echo": False, "top_logprobs": 2}, True),
    ],
)
def test_a_chat_with_logprobs_of_its_prompt_is_not_read_from_the_cache(fields: dict[str, Any], reads: bool) -> None:
    """`echo` asks vLLM for them too: `top_logprobs` of them, which is 0 if it is not sent."""
    assert parse_chat(chat(**fields)).reads_cache == reads


def test_of_the_tools_of_a_response_functions_are_shown_and_others_hide_nothing() -> None:
    """As vLLM's own functions do (`tests/vllm/test_responses_as_chats.py`)."""
    function = {"type": "function", "name": "weather", "parameters": {}}
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "sky", "tools": [function, {"type": "custom"}]}]
    call = {"type": "function_call", "call_id": "c", "namespace": "sky", "name": "weather", "arguments": "{}"}
    chats = [
        parse_response(json.dumps({"input": [call], "tools": given}).encode()).prompt
        for given in ([*tools, function], tools[:1], [])
    ]

    assert all(isinstance(made, Chat) and not made.unsupported for made in chats)
    named, none, untold = (made.tools for made in chats if isinstance(made, Chat))
    assert [tool["function"]["name"] for tool in named or []] == ["sky__weather", "weather"]
    assert (none, untold) == ([], None)
    assert isinstance(chats[0], Chat)
    assert chats[0].messages[0]["tool_calls"][0]["function"] == {"name": "sky__weather", "arguments": "{}"}


LONG_NAME = '{"device_id": "' + "a" * 200 + '", "session_id": "%d"}'


@pytest.mark.parametrize(
    ("fields", "headers", "session"),
    [
        ({"user": "u", "prompt_cache_key": "k", "session_id": "s"}, {b"x-session-id": b"h"}, "h"),
        ({"user": "u", "prompt_cache_key": "k", "session_id": "s"}, {}, "s"),
        ({"user": "u", "prompt_cache_key": "k", "session_id": ""}, {}, "k"),
        ({"user": "u", "prompt_cache_key": None, "session_id": 7}, {}, "u"),
        ({}, {}, ""),
    ],
)
def test_the_conversation_is_named_by_the_nearest_name(
    fields: dict[str, Any], headers: dict[bytes, bytes], session: str
) -> None:
    for parsed in (parse_chat(chat(**fields)), parse_response(json.dumps({"input": "x", **fields}).encode())):
        assert session_of(headers, parsed.session) == session
        assert parsed.user == fields.get("user", "")


def test_conversations_whose_long_names_differ_at_the_end_are_two_of_one_user() -> None:
    one, other, again = (
        parse_messages(chat(max_tokens=1, metadata={"user_id": LONG_NAME % number})) for number in (1, 2, 1)
    )

    assert session_of({}, one.session) == session_of({}, again.session) != session_of({}, other.session)
    assert tenant_of({}, one.user) == tenant_of({}, other.user)
    assert parse_messages(chat(max_tokens=1, metadata={"user_id": "u"})).session == "u"


DEVICE, ACCOUNT = "d" * 64, "a8f1c0de-0000-4000-8000-000000000001"
SESSIONS = ["54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe", "57a121ec-f78c-48c3-a745-e3036a3ecc33"]
IN_ONE_TEXT = "user_%s_account_%s_session_%s"
IN_JSON = '{"device_id":"%s","account_uuid":"%s","session_id":"%s"}'


@pytest.mark.parametrize("form", [IN_ONE_TEXT, IN_JSON])
@pytest.mark.parametrize("account", [ACCOUNT, ""])
def test_sessions_of_claude_code_are_conversations_of_one_user(form: str, account: str) -> None:
    requests = [
        parse_messages(chat(max_tokens=1, metadata={"user_id": form % (DEVICE, account, session)}))
        for session in SESSIONS
    ]

    assert [session_of({}, request.session) for request in requests] == SESSIONS
    assert {tenant_of({}, request.user) for request in requests} == {account or DEVICE}


@pytest.mark.parametrize(
    "name",
    [
        "user_bob_account__session_1",
        '{"device_id": 7}',
        '{"device_id":"","session_id":""}',
        "{" * 500,
        "{not JSON",
    ],
)
def test_other_users_are_taken_as_they_are(name: str) -> None:
    request = parse_messages(chat(max_tokens=1, metadata={"user_id": name}))

    assert (request.user, request.session) == (name, session_name(name))


def test_deep_nesting_is_refused() -> None:
    body = b'{"messages": [' + b'{"content":' * 100_000

    assert refusal_of(parse_chat, body).status == 400


def test_template_arguments_reach_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    parsed = parse_chat(
        chat(
            tools=tools,
            add_generation_prompt=False,
            continue_final_message=True,
            chat_template_kwargs={"enable_thinking": False},
        )
    )

    assert parsed.prompt == Chat(
        HELLO["messages"],  # type: ignore[arg-type]
        tools=tools,
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
    )


def test_images_and_client_templates_make_tokens_inexact() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]}
    text = {"role": "user", "content": [{"type": "text", "text": "hi"}]}

    certain = [
        parse_chat(chat(messages=[text])),
        parse_chat(chat(messages=[picture])),
        parse_chat(chat(chat_template="{{ messages }}")),
    ]

    chats = [parsed.prompt for parsed in certain if isinstance(parsed.prompt, Chat)]
    assert [(chat.unsupported, chat.template) for chat in chats] == [
        ("", None),
        ("image_url", None),
        ("", "{{ messages }}"),
    ]


def test_slos_come_from_either_family_of_headers() -> None:
    assert slo_of({}, DEFAULTS) == DEFAULTS
    assert slo_of({b"x-slo-ttft-ms": b"250"}, DEFAULTS) == LatencySlo(0.25, 0.1)
    assert slo_of({b"x-llm-d-slo-tpot-ms": b"20.5"}, DEFAULTS) == LatencySlo(5.0, 0.0205)


@pytest.mark.parametrize(
    "value", [b"soon", b"-1", b"0", b"nan", b"inf", b"1e-310", b"", b"1_000", b"1e13", b"2000000000000"]
)
def test_an_slo_that_is_not_a_positive_number_is_refused(value: bytes) -> None:
    with pytest.raises(
        ApiError, match=r"x-slo-ttft-ms must be a number of milliseconds from 0\.001 to 1000000000000\.$"
    ):
        slo_of({b"x-slo-ttft-ms": value}, DEFAULTS)


def test_the_tenant_comes_from_the_fairness_header_or_the_user_field() -> None:
    assert tenant_of({b"x-llm-d-inference-fairness-id": b"team-a"}, "bob") == "team-a"
    assert tenant_of({}, "bob") == "bob"
    assert tenant_of({}, "") == "anonymous"


def test_names_are_cleaned_for_logs_and_headers() -> None:
    assert session_of({b"x-session-id": b"a\x00b\xff" + b"c" * 500}, "") == "ab" + "c" * 124
    assert tenant_of({}, "eve\r\nx-admin: 1") == "evex-admin: 1"


def test_the_size_of_query_times_documents_is_bounded() -> None:
    parsed = parse_pairs(json.dumps({"text_1": "x" * 4_000_000, "text_2": [1] * 199_000}).encode())

    assert parsed.prompt == SizedRequest(PAIRS_TOKENS_MAX)


def test_a_completion_of_the_prompt_alone_counts_as_one_token() -> None:
    """vLLM scores a prompt so."""
    parsed = parse_completion(completion(prompt="x", echo=True, logprobs=1, max_tokens=0))

    assert (parsed.output_tokens, parsed.output_demanded) == (1, True)
    for fields in ({}, {"echo": False}, {"echo": True, "max_tokens": -1}):
        with pytest.raises(ApiError):
            parse_completion(completion(prompt="x", **{"max_tokens": 0, **fields}))
