"""Anthropic's Messages API as in vLLM: one text block, no thinking, no tool calls."""

import json
from typing import Any

from pointsman.adapters.tokenizer.chat_template import SYSTEM_LINE_LEFT_OUT
from pointsman.primitives import Tokens
from pointsman_engine_sim.answers import TEXT_MARK, Heading, encode
from pointsman_engine_sim.openai_bodies import ApiError, ChatBody, Generate, check_sampling, decoded, well_formed

STOP_REASON = "max_tokens"


class MessagesBody(Generate, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse_messages(data: bytes) -> MessagesBody:
    """Raises ApiError."""
    body = decoded(data, MessagesBody)
    check_sampling(body)
    return body


def chat_of(body: MessagesBody) -> ChatBody:
    """Converts to a chat. Raises ApiError for blocks other than text and tools."""
    with well_formed("messages"):
        messages = _system(body.system)
        for message in body.messages:
            role, content = message["role"], message["content"]
            messages += _system(content) if role == "system" else _messages(role, content)
        functions = None if body.tools is None else [_function(tool) for tool in body.tools]
    return ChatBody(messages=messages, tools=functions, chat_template_kwargs=body.chat_template_kwargs)


def usage(*, prompt: Tokens, completion: Tokens, cached: Tokens) -> dict[str, Any]:
    return {"input_tokens": prompt - cached, "output_tokens": completion, "cache_read_input_tokens": cached}


def counted(prompt: Tokens) -> bytes:
    return encode({"input_tokens": prompt, "context_management": {"original_input_tokens": prompt}})


def whole_message(heading: Heading, text: str, numbers: dict[str, Any], _transfer: object = None) -> bytes:
    return encode(_message(heading, [{"type": "text", "text": text}], STOP_REASON, numbers))


def error(failed: ApiError) -> bytes:
    return encode({"type": "error", "error": {"type": failed.kind, "message": failed.message}})


class MessageFrames:
    def __init__(self, heading: Heading) -> None:
        nothing = {"input_tokens": 0, "output_tokens": 0}
        self.before = b""
        start = _event("message_start", message=_message(heading, [], None, nothing))
        self.opening = start + _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        delta = _event("content_block_delta", index=0, delta={"type": "text_delta", "text": TEXT_MARK})
        self._head, _, self._tail = delta.partition(encode(TEXT_MARK)[1:-1])

    def text(self, json_text: str, *, last: bool) -> bytes:  # noqa: ARG002 - as in a chunk, which says so
        return self._head + json_text.encode() + self._tail

    def ending(self, _text: str, numbers: dict[str, Any] | None) -> bytes:
        delta = {"stop_reason": STOP_REASON, "stop_sequence": None}
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=delta, usage=numbers)
            + _event("message_stop")
        )


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def _message(
    heading: Heading, content: list[dict[str, Any]], stop_reason: str | None, numbers: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": heading.id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": heading.model,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": numbers,
    }


def _system(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the block that Claude Code puts first: it may change with every request, and vLLM drops it."""
    if not isinstance(content, str):
        content = "".join(block["text"] for block in content if not block["text"].startswith(SYSTEM_LINE_LEFT_OUT))
    return [{"role": "system", "content": content}] if content else []


def _messages(role: str, content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block.get("content"))}
        for block in content
        if block["type"] == "tool_result"
    ]
    texts = [{"type": "text", "text": block["text"]} for block in content if block["type"] == "text"]
    calls = [_call(block) for block in content if block["type"] == "tool_use"]
    others = {block["type"] for block in content} - {"text", "tool_use", "tool_result"}
    if others:
        raise ApiError(400, f"the simulated engine reads no {min(others)}", param="messages")
    text_content = {"content": texts[0]["text"] if len(texts) == 1 else texts} if texts else {}
    called = {"tool_calls": calls} if calls else {}
    return [*results, {"role": role, **text_content, **called}] if text_content or called else results


def _result(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(item["text"] for item in content or [])


def _call(block: dict[str, Any]) -> dict[str, Any]:
    called = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": called}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    given = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": given}
