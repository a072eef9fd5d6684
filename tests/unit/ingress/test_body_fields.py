"""What a client may send to an engine."""

import json
from typing import Any

import pytest

from pointsman.primitives import Tenant
from pointsman_ingress.endpoints import BY_PATH, CHAT_COMPLETIONS, COMPLETIONS, BodyRules
from pointsman_ingress.engine.body_rewrites import add_tenant, ask_for_usage, impose_salt, without
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.prompt import body_fields
from pointsman_ingress.prompt.body_fields import FOR_TRUSTED, OURS, CheckedFields, FieldRules
from pointsman_ingress.prompt.remote_media import MediaRules

TRUSTED, KEYED = FieldRules(trusted=True), FieldRules(trusted=False)

BENCH = {"model": "m", "prompt": "a", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None}
BENCH |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
"""As `vllm bench serve` sends it."""
LANGCHAIN = {"model": "m", "messages": [], "stream": False, "n": 1, "temperature": 0.7, "parallel_tool_calls": False}
LANGCHAIN |= {
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "max_completion_tokens": 5,
}
LANGCHAIN |= {"top_k": 5, "min_p": 0.1, "guided_json": {}, "structured_outputs": {}, "stop_token_ids": [1]}
LANGCHAIN |= {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
CLAUDE = {"model": "m", "max_tokens": 5, "messages": [], "system": [], "tools": [], "metadata": {"user_id": "u"}}
CLAUDE |= {"stream": True, "thinking": {"type": "enabled"}, "output_config": {"effort": "low"}, "temperature": 1}
CODEX = {"model": "m", "input": [], "instructions": "", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
CODEX |= {"reasoning": {}, "store": False, "stream": True, "include": [], "prompt_cache_key": "k", "text": {}}


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


NO_BOUND = body(max_tokens=None, messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/completions", BENCH),
        ("/v1/chat/completions", LANGCHAIN),
        ("/v1/messages", CLAUDE),
        ("/v1/responses", CODEX),
        ("/v1/embeddings", {"model": "m", "input": "a", "encoding_format": "base64", "dimensions": 8, "user": "u"}),
        ("/rerank", {"model": "m", "query": "q", "documents": ["d"], "top_n": 1}),
        ("/score", {"model": "m", "text_1": "q", "text_2": ["d"]}),
        ("/tokenize", {"model": "m", "messages": [], "add_generation_prompt": True, "return_token_strs": True}),
    ],
)
def test_what_usual_clients_send_is_passed_on(path: str, sent: dict[str, Any]) -> None:
    assert KEYED.check(body(**sent), BY_PATH[path].fields) == CheckedFields()


@pytest.mark.parametrize("dropped", [{}, {"temprature": 1}])
def test_a_completion_without_a_bound_reaches_the_engine_without_a_null(dropped: dict[str, Any]) -> None:
    """Older vLLM generates up to the context for a null, then fails; without the field it generates sixteen tokens."""
    rules = BodyRules(KEYED, MediaRules(trusted=False))
    asked = rules.accept(COMPLETIONS, body(prompt='"max_tokens"', max_tokens=None, **dropped), {})

    assert json.loads(asked.content) == {"prompt": '"max_tokens"'}
    assert asked.request.output_tokens == 16
    for endpoint, plain in ((COMPLETIONS, body(prompt="a", max_tokens=7)), (CHAT_COMPLETIONS, NO_BOUND)):
        assert rules.accept(endpoint, plain, {}).content is plain


def test_unknown_fields_are_not_passed_on_and_are_named() -> None:
    checked = KEYED.check(body(model="m", prompt="a", temprature=1, rid="x"), body_fields.COMPLETION)

    assert checked.dropped == ("temprature", "rid")
    assert checked.dropped_shown == "temprature, rid"
    assert json.loads(without(body(model="m", rid="x"), checked.dropped)) == {"model": "m"}


def test_names_that_do_not_fit_a_header_are_cleaned() -> None:
    checked = KEYED.check(body(**{"a\r\nset-cookie: b": 1, "\u00e9\u00e9": 2, "z" * 500: 3}), frozenset())

    assert checked.dropped_shown.isascii()
    assert checked.dropped_shown.isprintable()
    assert len(checked.dropped_shown) < 200


@pytest.mark.parametrize("name", sorted(OURS))
@pytest.mark.parametrize("rules", [TRUSTED, KEYED, FieldRules(trusted=False, allowed=OURS)])
def test_fields_that_lead_an_engine_elsewhere_are_refused_from_everybody(name: str, rules: FieldRules) -> None:
    for endpoint in BY_PATH.values():
        with pytest.raises(ApiError) as caught:
            rules.check(body(model="m", prompt="a", **{name: {"remote_host": "10.0.0.1"}}), endpoint.fields)
        assert (caught.value.status, caught.value.code) == (400, "field_not_allowed")
        assert caught.value.param == name


def test_an_escaped_name_and_a_duplicate_do_not_hide_a_field() -> None:
    escaped = b'{"model": "m", "kv_\\u0074ransfer_params": {"remote_host": "h"}}'
    twice = b'{"kv_transfer_params": null, "model": "m", "kv_transfer_params": {"remote_host": "h"}}'
    for hidden in (escaped, twice):
        with pytest.raises(ApiError):
            TRUSTED.check(hidden, body_fields.COMPLETION)


def test_a_null_that_stands_for_nothing_is_left_out() -> None:
    sent = b'{"kv_transfer_params": {"remote_host": "h"}, "model": "m", "kv_transfer_params": null}'
    checked = TRUSTED.check(sent, body_fields.COMPLETION)

    assert checked.dropped == ("kv_transfer_params",)
    assert without(sent, checked.dropped) == b'{"model":"m"}'


@pytest.mark.parametrize("name", sorted(FOR_TRUSTED))
def test_fields_for_trusted_clients_need_the_operators_permission_where_there_are_keys(name: str) -> None:
    sent = body(model="m", **{name: "x"})
    allowing = FieldRules(trusted=False, allowed=[name])

    assert not TRUSTED.check(sent, body_fields.CHAT).dropped
    assert not allowing.check(sent, body_fields.CHAT).dropped
    with pytest.raises(ApiError):
        KEYED.check(sent, body_fields.CHAT)


def test_no_client_with_a_key_puts_several_tokens_into_an_event() -> None:
    """Of a stream that ends early a tenant pays for the events."""
    for endpoint in BY_PATH.values():
        with pytest.raises(ApiError):
            KEYED.check(body(model="m", stream_interval=100), endpoint.fields)


@pytest.mark.parametrize("name", ["include_reasoning", "stream_reasoning"])
@pytest.mark.parametrize("value", [False, 0, "false", "no"])
def test_no_client_with_a_key_hides_the_tokens_that_it_pays_for(name: str, value: Any) -> None:
    for endpoint in BY_PATH.values():
        with pytest.raises(ApiError):
            KEYED.check(body(model="m", **{name: value}), endpoint.fields)
    assert not TRUSTED.check(body(model="m", **{name: value}), body_fields.CHAT).dropped


def test_what_an_engine_does_anyway_may_be_asked_for() -> None:
    asked: dict[str, Any] = {"background": False, "priority": 0, "include_reasoning": True, "stream_reasoning": True}
    for name, value in asked.items():
        assert KEYED.check(body(model="m", **{name: value}), body_fields.RESPONSE).dropped == (name,)
    for name in ("background", "priority"):
        for value in (True, 1, -1, "0", 0.5):
            with pytest.raises(ApiError):
                KEYED.check(body(model="m", **{name: value}), body_fields.RESPONSE)


def test_a_form_takes_known_fields_only() -> None:
    KEYED.check_form({"file", "model", "language", "timestamp_granularities[]"})
    KEYED.check_form({"chunking_strategy[type]", "languages[]", "keywords[]", "include[]", "known_speaker_names[]"})
    for name in ("vllm_xargs", "vllm_xargs[a]", "kv_transfer_params[]", "of_tomorrow", "[model]"):
        with pytest.raises(ApiError):
            KEYED.check_form({"file", name})


@pytest.mark.parametrize(
    "hiding",
    [
        b'{"prompt": [%b], "kv_transfer_params": {"remote_host": "h"}}',
        b'{"kv_transfer_params": {"remote_host": "h"}, "prompt": [%b]}',
        b'{"user": "\\"prompt\\":[", "kv_transfer_params": {}, "prompt": [%b], "stop": "]"}',
        b'{"user": "\\"prompt\\"", "stop": ["a", "b"], "kv_transfer_params": {}, "prompt": [%b]}',
        b'{"user": "\\"prompt\\" [ 1, 2 ", "kv_transfer_params": {}, "stop": "]", "prompt": [%b]}',
        b'{"prompt": [[%b], [1, 2]], "kv_transfer_params": {"a": [1]}}',
    ],
)
def test_a_long_list_of_token_ids_hides_nothing(hiding: bytes) -> None:
    sent = hiding % b",".join(b"%d" % number for number in range(5000))
    assert json.loads(sent)["kv_transfer_params"] is not None
    with pytest.raises(ApiError):
        TRUSTED.check(sent, body_fields.COMPLETION)


def test_a_salt_is_added_or_replaced_and_is_the_only_one() -> None:
    added = impose_salt(b' { "model" : "m" } \n', "0ff1ce", replaces=False)
    replaced = impose_salt(b'{"cache_salt": "a", "model": "m", "cache\\u005fsalt": "b"}', "0ff1ce", replaces=True)

    assert json.loads(added) == json.loads(replaced) == {"model": "m", "cache_salt": "0ff1ce"}
    assert replaced.count(b"cache") == 1
    assert KEYED.check(b'{"cache\\u005fsalt": null}', body_fields.CHAT).salted


def test_an_accepted_body_is_the_clients_own_to_the_byte_or_has_lost_what_is_unknown() -> None:
    rules = BodyRules(KEYED, MediaRules(trusted=False))
    endpoint = BY_PATH["/v1/chat/completions"]
    own = b' {"model":"m", "messages": [{"role": "user", "content": "hi"}] } '
    accepted = rules.accept(endpoint, own, {})
    other = rules.accept(endpoint, own.replace(b'"model"', b'"modle": 1, "model"'), {})

    assert (accepted.content, accepted.dropped) == (own, "")
    assert (json.loads(other.content), other.dropped) == (json.loads(own), "modle")
    assert getattr(other.request.prompt, "body", None) == other.content, "what engines render has lost it, too"


@pytest.mark.parametrize("text", [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc3\xa9" * 200_000 + b"\xc3"])
@pytest.mark.parametrize("field", [b"metadata", b"seed"])
def test_text_that_is_no_utf_8_is_refused_also_in_fields_that_routing_skips(field: bytes, text: bytes) -> None:
    rules = BodyRules(KEYED, MediaRules(trusted=False))
    sound = b'{"model":"m","messages":[{"role":"user","content":"h\xc3\xa9"}],"%b":"%b"}'
    endpoint = BY_PATH["/v1/chat/completions"]
    with pytest.raises(ApiError) as refused:
        rules.accept(endpoint, sound % (field, text), {})

    assert (refused.value.status, refused.value.code) == (400, "malformed_body")
    assert rules.accept(endpoint, sound % (field, b"\xc3\xa9" * 200_000), {}).content


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "chat\\u005ftemplate"])
def test_a_template_is_not_hidden_among_its_arguments(name: str) -> None:
    body = b'{"messages":[],"chat_template_kwargs":{"enable_thinking":false,"%b":"x"}}' % name.encode()
    with pytest.raises(ApiError) as caught:
        KEYED.check(body, body_fields.CHAT)
    assert caught.value.code == "field_not_allowed"
    FieldRules(trusted=True).check(body, body_fields.CHAT)
    FieldRules(trusted=False, allowed=["chat_template"]).check(body, body_fields.CHAT)


@pytest.mark.parametrize("arguments", [b"null", b"{}", b'{"enable_thinking":false}'])
def test_other_arguments_of_a_template_pass(arguments: bytes) -> None:
    KEYED.check(b'{"messages":[],"chat_template_kwargs":%b}' % arguments, body_fields.CHAT)


@pytest.mark.parametrize("body", [b"{}", b" { \n} ", b'{"a":{}}', b'{"a":"{"}'])
def test_a_field_is_added_to_any_object(body: bytes) -> None:
    sent = json.loads(body)

    assert json.loads(impose_salt(body, "s", replaces=False)) == {**sent, "cache_salt": "s"}
    assert json.loads(ask_for_usage(body)) == {**sent, "stream_options": {"include_usage": True}}
    assert json.loads(add_tenant(body, Tenant("t"))) == {**sent, "vllm_xargs": {"pointsman_client": "t"}}
