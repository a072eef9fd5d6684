"""The chat that we take an Anthropic Messages request for is the one that vLLM renders. Asked of vLLM's own functions,
without an engine: a template shows every difference, but only where it looks."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

from pointsman.adapters.tokenizer.chat_template import ChatTemplate
from pointsman.tooling.vllm_cpu.home import EngineHome
from pointsman_ingress.openai_requests import Chat, parse_messages

WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}
ASKS = {"role": "user", "content": "How is the weather?"}
CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern", "ö": [1.5, None, True]}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: 17"}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


BODIES: list[dict[str, Any]] = [
    {"messages": [ASKS]},
    {"messages": [ASKS], "system": "Be brief."},
    {"messages": [ASKS], "system": [BILLING, text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")]},
    {"messages": [ASKS], "system": "x-anthropic-billing-header: 17\nBe brief."},
    {"messages": [ASKS], "system": []},
    {"messages": [user(text("one")), assistant(text("two")), user(text("three"), text(""), text("four"))]},
    {"messages": [user(text("one", cache_control={"type": "ephemeral"}))]},
    {"messages": [user(), ASKS, assistant(), ASKS, assistant(text(""))]},
    {"messages": [ASKS, assistant(THOUGHT, text("Let me see."), CALL), user(RESULT)]},
    {
        "messages": [
            ASKS,
            assistant(CALL, {**CALL, "id": "c2"}),
            user(text("Well?"), RESULT, {**RESULT, "tool_use_id": "c2"}),
        ]
    },
    {"messages": [ASKS, assistant({"type": "tool_use", "id": "c1", "name": "now"}), user({**RESULT, "content": None})]},
    {"messages": [ASKS, assistant(CALL), user({**RESULT, "content": [text("rain"), text("wind")], "is_error": True})]},
    {"messages": [ASKS, assistant(CALL), user({**RESULT, "content": []})]},
    {"messages": [ASKS, assistant(CALL), user({**RESULT, "content": [{"type": "tool_reference", "tool_name": "w"}]})]},
    {"messages": [ASKS, assistant(RESULT, {**RESULT, "content": [text("it's")]}, {**RESULT, "content": ""})]},
    {"messages": [ASKS, assistant(THOUGHT, THOUGHT, {"type": "redacted_thinking", "data": "x"}), ASKS]},
    {"messages": [user(THOUGHT), ASKS, {"role": "assistant", "content": "It is"}]},
    {"messages": [user(CALL), user(CALL, text("called"))]},
    {
        "messages": [
            system("first"),
            ASKS,
            system([text("a"), BILLING, text("b")]),
            assistant(text("x")),
            system("last"),
        ]
    },
    {
        "messages": [ASKS, system("x-anthropic-billing-header: 17"), system(""), system([BILLING]), ASKS],
        "system": "Be.",
    },
    {"messages": [ASKS], "tools": [WEATHER, {"name": "n", "input_schema": {"properties": {}}, "strict": True}]},
    {"messages": [ASKS], "tools": [{**WEATHER, "defer_loading": True, "cache_control": {"type": "ephemeral"}}]},
    {"messages": [ASKS], "tools": []},
    {"messages": [ASKS], "tools": [WEATHER], "tool_choice": {"type": "none"}},
    {"messages": [ASKS], "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
    {"messages": [ASKS], "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
]

TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
    "{{ strftime_now('%Y') }}",
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}{{ messages | tojson }}",
    "{% generation %}{{ messages }}{% endgeneration %}",
    "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{{ m.nothing }}{% endfor %}",
    "{{ messages[0].nothing.more }}",
    (Path(__file__).with_name("chat_template.jinja")).read_text(encoding="utf-8"),
]


def test_a_messages_request_becomes_the_chat_that_vllm_makes_of_it(vllm_home: EngineHome) -> None:
    theirs = asked_of_vllm(vllm_home)

    for body, chats in zip(BODIES, theirs["chats"], strict=True):
        anywhere = parse_messages(json.dumps(copy.deepcopy(body)).encode()).prompt
        assert isinstance(anywhere, Chat)
        for ours, chat in zip((anywhere, anywhere.system_first or anywhere), chats, strict=True):
            assert ours.foreign == ""
            assert {"messages": ours.messages, "tools": ours.tools} == {k: chat[k] for k in ("messages", "tools")}, body
            told = "none" if ours.without_thinking else (ours.chat_template_kwargs or {}).get("reasoning_effort")
            assert told == chat["effort"], body


def test_where_system_messages_go_is_found_out_as_vllm_does(vllm_home: EngineHome) -> None:
    theirs = asked_of_vllm(vllm_home)["system_first"]

    assert [ChatTemplate(source, special_tokens={}).system_first for source in TEMPLATES] == theirs
    assert {True, False} == set(theirs)


def asked_of_vllm(home: EngineHome) -> Any:
    program = Path(__file__).with_name("messages_as_chats.py")
    asked = json.dumps({"bodies": BODIES, "templates": TEMPLATES})
    run = subprocess.run([home.python, program], input=asked, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])
