"""Anthropic's Messages API as a chat: the messages and tools that an engine's chat template is given for it.

Pure. vLLM turns `system`, `messages` and `tools` into a chat completion before it renders them; this does the same (as vLLM
0.32 does), so that the prompt's keys are those of the same conversation however it is asked. What has no such form
(pictures, documents, tools that are no functions) stands in the messages as a part of its own kind: what comes before it is
known.
"""

import json
from collections.abc import Iterable
from typing import Any

from pointsman_ingress.prompt.content_parts import foreign_part
from pointsman_ingress.prompt.responses_input import ChatForm, Message

Block = dict[str, Any]

LEFT_OUT = "x-anthropic-billing-header"
"""vLLM leaves out a block of a system prompt that begins like this: its client writes another number into it each time."""

TOOL_CHANGES = ("tool_addition", "tool_removal")


def has_system_messages(messages: Iterable[Message]) -> bool:
    """Whether a system message stands among the others. Where it goes then depends on the model's template."""
    return any(message.get("role") == "system" for message in messages)


def messages_form(*, system: Any, messages: list[Message], tools: list[Message] | None, system_first: bool) -> ChatForm:
    """`system_first`: the texts of all system messages go into the first one, for a template that takes it nowhere else."""
    form = ChatForm()
    if any(block.get("type") in TOOL_CHANGES for message in messages for block in _blocks(message.get("content"))):
        form.cannot_tell("tools")
    form.tools = _tools(form, tools)
    texts = [system] if isinstance(system, str) else _system_texts(system)
    if system_first:
        texts += [_system_text(message.get("content")) for message in messages if message.get("role") == "system"]
    if head := "".join(texts):
        form.take({"role": "system", "content": head}, foreign="")
    for message in messages:
        _add_message(form, message, system_first=system_first)
    return form


def _add_message(form: ChatForm, message: Message, *, system_first: bool) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        text = _system_text(content)
        if text and not system_first:
            form.take({"role": "system", "content": text}, foreign="")
    elif role not in ("user", "assistant") or not isinstance(content, str | list):
        form.cannot_tell("message")
    elif isinstance(content, str):
        form.take({"role": role, "content": content}, foreign="")
    else:
        _add_blocks(form, role, content)


def _add_blocks(form: ChatForm, role: str, blocks: list[Any]) -> None:
    """The results of tools become messages of their own, before the one that holds the rest."""
    parts: list[Block] = []
    calls: list[Block] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        match kind:
            case "text" if isinstance(block.get("text"), str | None):
                parts += [_text(block["text"])] if block.get("text") else []
            case "image":
                parts += [{"type": "image_url"}] if block.get("source") else []
            case "thinking" if isinstance(block.get("thinking"), str | None):
                thoughts += [block["thinking"]] if block.get("thinking") is not None else []
            case "tool_use" if block.get("id"):
                calls.append(_call(block))
            case "tool_result" if role == "user":
                _add_result(form, block)
            case "tool_result":
                parts.append(_text(f"Tool result: {block.get('content') or ''}"))
            case "redacted_thinking" | "tool_reference":
                pass
            case _:
                form.cannot_tell(str(kind))
    _add_rest(form, role, parts, calls, thoughts)


def _add_rest(form: ChatForm, role: str, parts: list[Block], calls: list[Block], thoughts: list[str]) -> None:
    """What an assistant did not say is a message all the same, what a user did not say is none."""
    message: Message = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if alone else parts
    if role != "user" or parts:
        form.take(message, foreign=foreign_part(parts))


def _add_result(form: ChatForm, block: Block) -> None:
    """What a tool said: its text, then its pictures as a user's, then the tools that it names."""
    content, call = block.get("content"), block.get("tool_use_id") or ""
    items = _blocks(content)
    said = [item.get("text", "") for item in items if item.get("type") == "text"]
    if any(not isinstance(text, str) for text in said):
        form.cannot_tell("tool_result")
        return
    text = content if isinstance(content, str) else "\n".join(said)
    form.take({"role": "tool", "tool_call_id": call, "content": text}, foreign="")
    pictures = [{"type": "image_url"} for item in items if item.get("type") == "image"]
    if pictures:
        form.take({"role": "user", "content": pictures}, foreign=foreign_part(pictures))
    named = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    references = [{"type": "tool_reference", "name": name} for name in named if name]
    if references:
        form.take({"role": "tool", "tool_call_id": call, "content": references}, foreign="")


def _call(block: Block) -> Block:
    called = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": called}


def _tools(form: ChatForm, tools: list[Message] | None) -> list[Message] | None:
    """Functions, as chat completions have them."""
    if tools is None:
        return None
    if any(not isinstance(tool.get("input_schema"), dict) for tool in tools):
        form.cannot_tell("tools")
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
    """What a system message among the others says."""
    if isinstance(content, str):
        return "" if content.startswith(LEFT_OUT) else content
    return "".join(_system_texts(content))


def _system_texts(content: Any) -> list[str]:
    texts = [block.get("text") for block in _blocks(content) if block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str) and text and not text.startswith(LEFT_OUT)]


def _blocks(content: Any) -> list[Block]:
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _text(text: str) -> Block:
    return {"type": "text", "text": text}
