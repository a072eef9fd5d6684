"""Anthropic's messages as vLLM makes chats of them: `vllm_messages.json` holds what its own code made of each body, and which
templates it takes for ones that want a system message at the head alone. `tests/vllm/test_messages_as_chats.py` asks it anew;
where it changes its mind, the file is made anew from that version; see its `vllm`."""

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters.tokenizer.chat_template import ChatTemplate
from pointsman_ingress.prompt.messages_input import parse_messages
from pointsman_ingress.prompt.parsed_request import Chat

RECORDED = json.loads(Path(__file__).with_name("vllm_messages.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("recorded", RECORDED["conversations"])
def test_a_messages_request_becomes_the_chat_that_vllm_makes_of_it(recorded: dict[str, Any]) -> None:
    prompt = parse_messages(json.dumps({"model": "m", "max_tokens": 9, **recorded["body"]}).encode()).prompt
    assert isinstance(prompt, Chat)

    anywhere = recorded["anywhere"]
    assert told(prompt) == anywhere
    assert told(prompt.system_first or prompt) == recorded.get("first", anywhere)


@pytest.mark.parametrize("recorded", RECORDED["templates"])
def test_where_a_template_takes_system_messages_is_found_out_as_vllm_does(recorded: dict[str, Any]) -> None:
    assert ChatTemplate(recorded["source"], special_tokens={}).system_first is recorded["system_first"]


def told(chat: Chat) -> dict[str, Any]:
    """What a template is told of it."""
    assert chat.unsupported == ""
    effort = "none" if chat.without_thinking else (chat.chat_template_kwargs or {}).get("reasoning_effort")
    return {"messages": chat.messages, "tools": chat.tools, "effort": effort}
