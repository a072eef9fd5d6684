"""What the ingress reads out of Anthropic's bodies. That it is what vLLM makes of them, `tests/vllm` asks vLLM itself."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.adapters.tokenizer import Tokenizer
from pointsman.adapters.tokenizer.chat_template import ChatTemplate
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.prompt.messages_input import parse_messages
from pointsman_ingress.prompt.parsed_request import Chat, ParsedRequest

ASKS = {"role": "user", "content": "How is the weather?"}
NOTE = {"role": "system", "content": "It is late."}

WORDS = st.sampled_from(
    [
        "text",
        "image",
        "thinking",
        "tool_use",
        "tool_result",
        "tool_reference",
        "tool_addition",
        "redacted_thinking",
        "x",
    ]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["type", "text", "source", "thinking", "id", "name", "input", "content", "tool_use_id", "tool_name", "input_schema"]
)
BLOCKS = st.fixed_dictionaries({"type": WORDS | ANYTHING}) | st.dictionaries(NAMES, ANYTHING, max_size=5)
CONTENTS = st.lists(BLOCKS | ANYTHING, max_size=4) | ANYTHING
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | ANYTHING, "content": CONTENTS}
)


def parsed(**fields: Any) -> ParsedRequest:
    return parse_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": [ASKS], **fields}).encode())


def chat(**fields: Any) -> Chat:
    prompt = parsed(**fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


@given(st.lists(MESSAGES, max_size=3), CONTENTS, st.lists(BLOCKS, max_size=2) | st.none())
def test_any_messages_body_is_parsed_or_refused(messages: Any, system: Any, tools: Any) -> None:
    try:
        prompt = chat(messages=messages, system=system, tools=tools)
    except ApiError:
        return
    for form in (prompt, prompt.system_first):
        assert form is None or not form.unsupported or 0 <= form.unsupported_message < len(form.messages)
        assert form is None or form.unsupported.isprintable()


@pytest.mark.parametrize(
    "fields", [{"messages": []}, {"messages": None}, {"messages": "x"}, {"max_tokens": 0}, {"system": 7}]
)
def test_invalid_messages_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as raised:
        parsed(**fields)

    assert raised.value.status == 400


def test_fields_of_other_apis_are_ignored() -> None:
    found = parsed(n=3, truncate_prompt_tokens=5, user="x", prompt_logprobs=1, stream=True)

    assert (found.answers, found.truncates, found.user, found.reads_cache) == (1, False, "", True)
    assert not found.may_add_usage


def test_system_messages_are_placed_as_the_template_requires() -> None:
    found = chat(system="Be brief.", messages=[ASKS, NOTE])

    assert [message["role"] for message in found.messages] == ["system", "user", "system"]
    assert found.system_first is not None
    assert found.system_first.messages == [{"role": "system", "content": "Be brief.It is late."}, ASKS]
    assert chat(system="Be brief.").system_first is None


@pytest.mark.parametrize(
    ("tool", "unsupported"),
    [({"name": "x", "input_schema": {}}, ""), ({"type": "web_search_20250305", "name": "x"}, "tools")],
)
def test_tools_other_than_functions_are_unsupported(tool: dict[str, Any], unsupported: str) -> None:
    found = chat(tools=[tool])

    assert (found.unsupported, found.unsupported_message) == (unsupported, 0)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "low"),
        ("{% if enable_thinking is false %}<think></think>{% endif %}", "none"),
        ("{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}", "low"),
        ("{{ reasoning_effort if reasoning_effort in ['low', 'high'] else 'max' }}", "low"),
        ("{{ reasoning_effort }}", "none"),
    ],
)
def test_disabled_thinking_uses_the_templates_own_argument(source: str, expected: str) -> None:
    tokenizer = Tokenizer(Tokenizer.builtin()._backend, chat_template=ChatTemplate(source, special_tokens={}))

    assert tokenizer.effort_without_thinking == expected
