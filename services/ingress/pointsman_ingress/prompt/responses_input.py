"""Parses OpenAI's /v1/responses into the same chat as vLLM, so that equal conversations have equal keys."""

import json
from dataclasses import replace
from typing import Any

import msgspec

from pointsman_ingress.http.errors import bad_request
from pointsman_ingress.prompt.content_parts import ChatForm, Message, unsupported_part
from pointsman_ingress.prompt.openai_requests import Body, decoded, lenient, parsed, positive, with_effort
from pointsman_ingress.prompt.parsed_request import Chat, ParsedRequest

CUSTOM_INPUT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
"""What vLLM shows of a custom tool."""
KEPT_BY_ENGINE = ("previous_response_id", "previous_input_messages", "prompt")


class Reasoning(msgspec.Struct):
    effort: str | None = None


class _ResponseBody(Body):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    previous_response_id: str | None = None
    previous_input_messages: list[Any] | None = None
    prompt: Any = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_response_body = lenient(_ResponseBody)


def parse_response(body: bytes) -> ParsedRequest:
    """Raises ApiError."""
    fields = decoded(_response_body, body)
    if not fields.input and not fields.previous_input_messages:
        raise bad_request("`input` must be a text or a list of items.", param="input")
    given, tools = fields.input or "", fields.tools or []
    kept = next((name for name in KEPT_BY_ENGINE if getattr(fields, name)), "")
    form = chat_form(instructions=fields.instructions or "", given=given, tools=tools, kept_by_engine=kept)
    unfinished = continues(given)
    prompt = Chat.of(
        form,
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        chat_template_kwargs=with_effort(
            fields.chat_template_kwargs, fields.reasoning.effort if fields.reasoning else None
        ),
        add_special_tokens=True,
    )
    field = "max_output_tokens"
    request = parsed(fields, prompt, "input", positive(fields.max_output_tokens, field), output_field=field)
    truncates = fields.truncation not in (None, "disabled")
    # Of a tool call nothing is shown before vLLM's parser knows the tool, or has read all of it.
    begins_late = fields.include_reasoning is False or (bool(tools) and fields.tool_choice != "none")
    return replace(request, truncates=truncates, truncate_to=0, may_add_usage=False, begins_late=begins_late)


def chat_form(
    *, instructions: str, given: str | list[dict[str, Any]], tools: list[dict[str, Any]], kept_by_engine: str
) -> ChatForm:
    """`given`: the request's `input`. `kept_by_engine`: field that refers to earlier input, if any."""
    form = ChatForm()
    form.tools = [shown for tool in tools for shown in _shown(tool)] if tools else None
    if instructions:
        form.add({"role": "system", "content": instructions})
    if kept_by_engine:
        form.add_unsupported(kept_by_engine)
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        _add_item(form, item)
    return form


def continues(given: str | list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last message."""
    item = given[-1] if given and not isinstance(given, str) else {}
    unfinished = item.get("status") in ("in_progress", "incomplete")
    return unfinished and item.get("type", "message") in ("message", "reasoning")


def _add_item(form: ChatForm, item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        _add_message(form, item)
    elif kind == "function_call":
        name = item.get("name")
        _add_call(form, item, _flat(item["namespace"], name) if item.get("namespace") else name, item.get("arguments"))
    elif kind == "custom_tool_call":
        given = json.dumps({CUSTOM_INPUT: item.get("input") or ""}, ensure_ascii=False)
        _add_call(form, item, item.get("name"), given)
    elif kind in ("function_call_output", "custom_tool_call_output") and isinstance(item.get("output"), str):
        form.add({"role": "tool", "content": item["output"], "tool_call_id": item.get("call_id")})
    elif kind == "reasoning" and (thought := _reasoning_text(item)) is not None:
        _add_to_assistant(form, reasoning=thought)
    else:
        form.add_unsupported(str(kind))


def _add_message(form: ChatForm, item: Message) -> None:
    content = item.get("content")
    if item["role"] != "assistant":
        form.add(item, unsupported=unsupported_part(content))
        return
    if isinstance(content, list) and content:
        content = content[0].get("text") if isinstance(content[0], dict) else None
    if isinstance(content, str):
        _add_to_assistant(form, content=content)
    else:
        form.add_unsupported("assistant")


def _add_call(form: ChatForm, item: dict[str, Any], name: Any, arguments: Any) -> None:
    call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
    last = form.messages[-1] if form.messages else {}
    if last.get("role") == "assistant" and isinstance(last.get("tool_calls"), list):
        last["tool_calls"].append(call)
    else:
        _add_to_assistant(form, tool_calls=[call])


def _add_to_assistant(form: ChatForm, **fields: Any) -> None:
    """Merges text, reasoning and calls of an assistant."""
    last = form.messages[-1] if form.messages else {}
    if last.get("role") == "assistant" and all(last.get(name) is None for name in fields):
        last.update(fields)
    else:
        form.add({"role": "assistant", **fields})


def _reasoning_text(item: dict[str, Any]) -> str | None:
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts and isinstance(parts[0], dict):
            text = parts[0].get("text")
            return text if isinstance(text, str) else None
    return None if item.get("encrypted_content") else ""


def _shown(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """To the model: functions, also those of a namespace, and custom tools as functions of one text; of others nothing."""
    match tool.get("type"):
        case "function":
            return [_tool(tool)]
        case "custom":
            described = {"description": tool["description"]} if tool.get("description") is not None else {}
            return [_tool({"name": tool.get("name"), **described, "parameters": CUSTOM_PARAMETERS})]
        case "namespace":
            inner = tool.get("tools")
            functions = [f for f in inner if isinstance(f, dict)] if isinstance(inner, list) else []
            named = [{**f, "name": _flat(tool.get("name"), f.get("name"))} for f in functions]
            return [_tool(function) for function in named if function.get("type") == "function"]
        case _:
            return []


def _flat(namespace: Any, name: Any) -> str:
    return f"{namespace}__{name}"


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
