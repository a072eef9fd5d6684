"""OpenAI's Responses API as a chat: the messages and tools that an engine's chat template is given for it.

Pure. vLLM turns `instructions` and `input` into chat messages before it renders them; this does the same, so that the
prompt's keys are those of the same conversation however it is asked. What has no such form (pictures, built-in tools,
conversations that the engine keeps) stands in the messages as a part of its own kind: what comes before it is known.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pointsman_ingress.http.request_headers import cleaned
from pointsman_ingress.prompt.content_parts import UNKNOWN, foreign_part

Message = dict[str, Any]


@dataclass(slots=True)
class ChatForm:
    """What the template is given. `foreign` is the kind of the first thing that has no place in it, and `foreign_message`
    where that would stand; empty where there is none."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    foreign: str = ""
    foreign_message: int = 0
    continues: bool = False
    """Whether the last message is unfinished, and to be gone on with."""

    def add(self, role: str, **fields: Any) -> None:
        """One more message. What an assistant said and what it called are one message, as long as neither is there yet."""
        last = self.messages[-1] if self.messages else {}
        if role == last.get("role") == "assistant" and all(last.get(name) is None for name in fields):
            last.update(fields)
        else:
            self.messages.append({"role": role, **fields})

    def call(self, call_id: Any, name: Any, arguments: Any) -> None:
        """A tool that the assistant called; calls that follow one another are one message."""
        called = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and isinstance(last.get("tool_calls"), list):
            last["tool_calls"].append(called)
        else:
            self.add("assistant", tool_calls=[called])

    def cannot_tell(self, kind: str) -> None:
        """From here on nothing is known."""
        self.take({"role": "user", "content": [{"type": kind}]}, foreign=cleaned(kind) or UNKNOWN)

    def take(self, message: Message, *, foreign: str) -> None:
        """A message as it is. `foreign`: what of it has no place in a template; empty where all of it has."""
        if foreign and not self.foreign:
            self.foreign, self.foreign_message = foreign, len(self.messages)
        self.messages.append(message)


def chat_form(
    *, instructions: str, given: str | list[dict[str, Any]], tools: list[dict[str, Any]], kept_elsewhere: str
) -> ChatForm:
    """`given` is the request's `input`; `kept_elsewhere` names what precedes it and only the engine has, if anything."""
    form = ChatForm()
    if any(tool.get("type") not in ("function", None) for tool in tools):
        form.cannot_tell("tools")
    form.tools = [_tool(tool) for tool in tools if tool.get("type") == "function"] or None
    if instructions:
        form.add("system", content=instructions)
    if kept_elsewhere:
        form.cannot_tell(kept_elsewhere)
    if isinstance(given, str):
        form.add("user", content=given)
    else:
        _add_items(form, given)
    return form


def _add_items(form: ChatForm, items: Iterable[dict[str, Any]]) -> None:
    item: dict[str, Any] = {}
    for item in items:
        _add_item(form, item)
    unfinished = item.get("status") in ("in_progress", "incomplete")
    form.continues = unfinished and item.get("type", "message") in ("message", "reasoning")


def _add_item(form: ChatForm, item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        _add_message(form, item)
    elif kind == "function_call":
        if item.get("namespace"):
            form.cannot_tell("namespace")
        form.call(item.get("call_id"), item.get("name"), item.get("arguments"))
    elif kind == "function_call_output" and isinstance(item.get("output"), str):
        form.add("tool", content=item["output"], tool_call_id=item.get("call_id"))
    elif kind == "reasoning" and (thought := _thought(item)) is not None:
        form.add("assistant", reasoning=thought)
    else:
        form.cannot_tell(str(kind))


def _add_message(form: ChatForm, item: dict[str, Any]) -> None:
    """What an assistant said is its first part alone; other messages are taken as they are, parts and all."""
    content = item.get("content")
    if item["role"] != "assistant":
        form.take(item, foreign=foreign_part(content))
        return
    if isinstance(content, list) and content:
        content = content[0].get("text") if isinstance(content[0], dict) else None
    if isinstance(content, str):
        form.add("assistant", content=content)
    else:
        form.cannot_tell("assistant")


def _thought(item: dict[str, Any]) -> str | None:
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts and isinstance(parts[0], dict):
            text = parts[0].get("text")
            return text if isinstance(text, str) else None
    return None if item.get("encrypted_content") else ""


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as chat completions have it: what describes it one level down."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
