"""The form of a body: what nests too deeply or holds too much is refused before it is parsed, whatever its strings say."""

import json
from random import Random
from typing import Any

import pytest

from pointsman_ingress.http import json_form
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.http.json_form import (
    BRACKETS_MAX,
    ENTRIES_MAX,
    NESTING_MAX,
    STRINGS_MAX,
    TOKEN_IDS_MAX,
    check_form,
    is_light,
)
from pointsman_ingress.prompt.openai_requests import PROMPTS_MAX, parse_chat, parse_completion

NASTY = ["]" * 300, "[" * 300, '"', "\\", '\\"', '\\\\"', "{" * 500, "," * 9, "\x00é\U0001f600", ""]


def refusal(body: bytes, **bounds: int) -> str:
    try:
        check_form(body, **bounds)
    except ApiError as error:
        return error.code
    return ""


def nested(levels: int, *, beside: Any = "") -> bytes:
    value: Any = 0
    for _ in range(levels):
        value = [beside, value]
    return json.dumps(value).encode()


@pytest.mark.parametrize("beside", NASTY)
@pytest.mark.parametrize("slice_bytes", [json_form.SLICE_BYTES, 7, 64])
def test_nesting_is_bounded_and_strings_do_not_count(
    monkeypatch: pytest.MonkeyPatch, beside: str, slice_bytes: int
) -> None:
    monkeypatch.setattr(json_form, "SLICE_BYTES", slice_bytes)

    assert refusal(nested(NESTING_MAX, beside=beside)) == ""
    assert refusal(nested(NESTING_MAX + 1, beside=beside)) == "malformed_body"


def test_what_is_outside_of_strings_is_found_at_every_size_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(3)
    for _ in range(200):
        value = {chance.choice(NASTY): [chance.choice(NASTY), {chance.choice(NASTY): 1}] for _ in range(5)}
        body = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode()
        monkeypatch.setattr(json_form, "SLICE_BYTES", chance.randint(1, 40))
        outside = b"".join(part for part, _ in json_form._outside_strings(body))

        counts = [outside.count(mark) for mark in (b"[", b"]", b"{", b"}")]
        assert counts == [len(value)] * 2 + [len(value) + 1] * 2, body


def test_a_text_of_backslashes_is_read_by_slices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_form, "SLICE_BYTES", 40)

    assert len(list(json_form._outside_strings(json.dumps("\\" * 1000).encode()))) >= 2000 // 41


@pytest.mark.parametrize(
    ("unit", "most"), [(b"{}", BRACKETS_MAX // 2 - 1), (b"1", ENTRIES_MAX + 1), (b'""', STRINGS_MAX)]
)
def test_lists_objects_entries_and_strings_are_bounded(unit: bytes, most: int) -> None:
    assert refusal(b"[" + b",".join([unit] * most) + b"]") == ""
    assert refusal(b"[" + b",".join([unit] * (most + 1)) + b"]") == "body_too_complex"


def test_what_only_looks_like_much_is_taken() -> None:
    text = json.dumps({"messages": [{"role": "user", "content": '{"a": [1, 2, 3]}, ' * 100_000}]}).encode()

    assert refusal(text) == ""


def test_a_prompt_of_a_million_token_ids_is_taken_and_a_chat_of_as_many_entries_is_not() -> None:
    ids = b",".join([b"1"] * (TOKEN_IDS_MAX - 10))

    assert parse_completion(b'{"prompt": [' + ids + b"]}").prompt_field == "prompt"
    with pytest.raises(ApiError, match="too many"):
        parse_chat(b'{"messages": [{}], "x": [' + ids + b"]}")


def test_the_prompts_of_one_request_are_bounded() -> None:
    parse_completion(b'{"prompt": [' + b",".join([b"[1]"] * PROMPTS_MAX) + b"]}")
    with pytest.raises(ApiError, match="at most"):
        parse_completion(b'{"prompt": [' + b",".join([b"[1]"] * (PROMPTS_MAX + 1)) + b"]}")


def test_what_takes_long_to_parse_is_not_light() -> None:
    assert is_light(b'{"messages": [{"role": "user", "content": "hello"}]}')
    assert not is_light(b"[" + b"{}," * 1000 + b"{}]")
    assert not is_light(b'{"messages": "' + b"a" * 100_000 + b'"}')
