"""Parses Anthropic's /v1/messages into the same chat as vLLM 0.32, so that equal conversations have equal keys."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from pointsman.adapters.tokenizer.chat_template import SYSTEM_LINE_LEFT_OUT
from pointsman_ingress.http.errors import bad_request
from pointsman_ingress.prompt.content_parts import ChatForm, Message, unsupported_part
from pointsman_ingress.prompt.openai_requests import Body, decoded, lenient, parsed, positive, session_name, with_effort
from pointsman_ingress.prompt.parsed_request import Chat, ParsedRequest
from pointsman_ingress.prompt.responses_input import Reasoning

Block = dict[str, Any]

TOOL_CHANGES = ("tool_addition", "tool_removal")
USER_CHARACTERS_MAX = 512
_CLAUDE_CODE = re.compile(
    r"user_(?P<device>[0-9a-f]{64})_account_(?P<account>[0-9a-f-]*)_session_(?P<session>[0-9a-f-]+)"
)


class _ClaudeCodeUser(msgspec.Struct):
    device_id: str
    session_id: str
    account_uuid: str = ""


class _Thinking(msgspec.Struct):
    type: str | None = None


class _MessagesBody(Body):
    messages: list[Message] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None
    thinking: _Thinking | None = None
    output_config: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_messages_body = lenient(_MessagesBody)


def parse_messages(body: bytes) -> ParsedRequest:
    """Raises ApiError."""
    fields = decoded(_messages_body, body)
    if not fields.messages:
        raise bad_request("`messages` must hold at least one message.", param="messages")
    prompt = _chat(fields, fields.messages, body, system_first=False)
    if any(message.get("role") == "system" for message in fields.messages):
        prompt = replace(prompt, system_first=_chat(fields, fields.messages, body, system_first=True))
    request = parsed(fields, prompt, "messages", positive(fields.max_tokens, "max_tokens"))
    named = (fields.metadata or {}).get("user_id")
    user, session = _user_and_session(named) if isinstance(named, str) else ("", "")
    return replace(
        request,
        user=user,
        session=session_name(session),
        truncates=False,
        truncate_to=0,
        answers=1,
        may_add_usage=False,
    )


def _user_and_session(named: str) -> tuple[str, str]:
    """Claude Code names device, account and session in one text, since 2.1.78 in JSON. The account, or else the device, is
    the same in all sessions of a user."""
    found = _CLAUDE_CODE.fullmatch(named)
    if found is not None:
        return found["account"] or found["device"], found["session"]
    if named.startswith("{") and len(named) <= USER_CHARACTERS_MAX:
        with suppress(msgspec.DecodeError):
            user = msgspec.json.decode(named, type=_ClaudeCodeUser)
            return user.account_uuid or user.device_id or named, user.session_id or named
    return named, named


def _chat(fields: _MessagesBody, messages: list[Message], body: bytes, *, system_first: bool) -> Chat:
    """`system_first`: merge all system messages into the first, for templates that require it."""
    form = ChatForm()
    if any(block.get("type") in TOOL_CHANGES for message in messages for block in _blocks(message.get("content"))):
        form.add_unsupported("tools")
    form.tools = _tools(form, fields.tools)
    texts = [fields.system] if isinstance(fields.system, str) else _system_texts(fields.system)
    if system_first:
        texts += [_system_text(message.get("content")) for message in messages if message.get("role") == "system"]
    if head := "".join(texts):
        form.add({"role": "system", "content": head})
    for message in messages:
        _add_message(form, message, system_first=system_first)
    return Chat.of(
        form,
        chat_template_kwargs=with_effort(
            fields.chat_template_kwargs, fields.output_config.effort if fields.output_config else None
        ),
        body=body,
        render_path="/v1/messages/render",
        without_thinking=fields.thinking is not None and fields.thinking.type == "disabled",
    )


def _add_message(form: ChatForm, message: Message, *, system_first: bool) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        text = _system_text(content)
        if text and not system_first:
            form.add({"role": "system", "content": text})
    elif role not in ("user", "assistant") or not isinstance(content, str | list):
        form.add_unsupported("message")
    elif isinstance(content, str):
        form.add({"role": role, "content": content})
    else:
        _add_blocks(form, role, content)


def _add_blocks(form: ChatForm, role: str, blocks: list[Any]) -> None:
    """Tool results become separate messages before the rest."""
    parts: list[Block] = []
    calls: list[Block] = []
    reasoning: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        match kind:
            case "text" if isinstance(block.get("text"), str | None):
                parts += [_text(block["text"])] if block.get("text") else []
            case "image":
                parts += [{"type": "image_url"}] if block.get("source") else []
            case "thinking" if isinstance(block.get("thinking"), str | None):
                reasoning += [block["thinking"]] if block.get("thinking") is not None else []
            case "tool_use" if block.get("id"):
                calls.append(_call(block))
            case "tool_result" if role == "user":
                _add_result(form, block)
            case "tool_result":
                parts.append(_text(f"Tool result: {block.get('content') or ''}"))
            case "redacted_thinking" | "tool_reference":
                pass
            case _:
                form.add_unsupported(str(kind))
    _add_rest(form, role, parts, calls, reasoning)


def _add_rest(form: ChatForm, role: str, parts: list[Block], calls: list[Block], reasoning: list[str]) -> None:
    """Keeps empty assistant messages, drops empty user messages."""
    message: Message = {"role": role}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if parts:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if alone else parts
    if role != "user" or parts:
        form.add(message, unsupported=unsupported_part(parts))


def _add_result(form: ChatForm, block: Block) -> None:
    content, call = block.get("content"), block.get("tool_use_id") or ""
    items = _blocks(content)
    result_texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    if any(not isinstance(text, str) for text in result_texts):
        form.add_unsupported("tool_result")
        return
    text = content if isinstance(content, str) else "\n".join(result_texts)
    form.add({"role": "tool", "tool_call_id": call, "content": text})
    pictures = [{"type": "image_url"} for item in items if item.get("type") == "image"]
    if pictures:
        form.add({"role": "user", "content": pictures}, unsupported=unsupported_part(pictures))
    named = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    references = [{"type": "tool_reference", "name": name} for name in named if name]
    if references:
        form.add({"role": "tool", "tool_call_id": call, "content": references})


def _call(block: Block) -> Block:
    called = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": called}


def _tools(form: ChatForm, tools: list[Message] | None) -> list[Message] | None:
    if tools is None:
        return None
    if any(not isinstance(tool.get("input_schema"), dict) for tool in tools):
        form.add_unsupported("tools")
        return None
    return [_tool(tool) for tool in tools]


def _tool(tool: Message) -> Message:
    schema = tool["input_schema"]
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _system_text(content: Any) -> str:
    if isinstance(content, str):
        return "" if content.startswith(SYSTEM_LINE_LEFT_OUT) else content
    return "".join(_system_texts(content))


def _system_texts(content: Any) -> list[str]:
    texts = [block.get("text") for block in _blocks(content) if block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str) and text and not text.startswith(SYSTEM_LINE_LEFT_OUT)]


def _blocks(content: Any) -> list[Block]:
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _text(text: str) -> Block:
    return {"type": "text", "text": text}
