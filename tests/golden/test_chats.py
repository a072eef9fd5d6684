"""Chats rendered as vLLM renders them: `vllm_chats.json` holds what its own code (request model, message parsing, chat
template) made of each body. Where vLLM changes its mind, the file is made anew from that version; see its `vllm`."""

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters.tokenizer.chat_template import ChatTemplate
from pointsman_ingress.prompt.openai_requests import parse_chat
from pointsman_ingress.prompt.parsed_request import Chat

RECORDED = json.loads(Path(__file__).with_name("vllm_chats.json").read_text(encoding="utf-8"))
ENGINES_OWN = Path(__file__).parents[1] / "vllm" / "chat_template.jinja"


def rendered(template: str, body: dict[str, Any]) -> str:
    """From a client's bytes to the prompt, as the ingress does it."""
    prompt = parse_chat(json.dumps(body).encode()).prompt
    assert isinstance(prompt, Chat)
    return ChatTemplate(template, special_tokens=RECORDED["special_tokens"]).render(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        chat_template_kwargs=prompt.chat_template_kwargs,
    )


@pytest.mark.parametrize("name", RECORDED["rendered"])
def test_chats_are_rendered_as_vllm_renders_them(name: str) -> None:
    expected = RECORDED["rendered"][name]
    template = RECORDED["templates"][name]

    found = {body: rendered(template, RECORDED["bodies"][body]) for body in expected}

    assert found == expected
    assert len(found) >= 5


def test_the_template_of_the_real_engine_suite_is_the_recorded_one() -> None:
    assert RECORDED["templates"]["chatml with tools"] == ENGINES_OWN.read_text(encoding="utf-8")
