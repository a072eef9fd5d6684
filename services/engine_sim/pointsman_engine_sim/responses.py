"""The Responses API as in vLLM: one text message, no reasoning, no tool calls."""

from typing import Any

from pointsman.primitives import Tokens
from pointsman_engine_sim.answers import TEXT_MARK, Heading, encode
from pointsman_engine_sim.openai_bodies import ApiError, Generate, check_sampling, decoded, well_formed


class ResponseBody(Generate, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse_response(data: bytes) -> ResponseBody:
    """Raises ApiError."""
    body = decoded(data, ResponseBody)
    check_sampling(body)
    if body.previous_response_id:
        message = f"Response with id '{body.previous_response_id}' not found."
        raise ApiError(404, message, kind="invalid_request_error", param="response_id")
    return body


def messages_of(body: ResponseBody) -> list[dict[str, Any]]:
    """Messages for the chat template. Raises ApiError for other items."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    with well_formed("input"):
        return messages + [_message(item) for item in body.input]


def tools_of(body: ResponseBody) -> list[dict[str, Any]] | None:
    with well_formed("tools"):
        functions = [tool for tool in body.tools or [] if tool.get("type") == "function"]
    rest = [{name: value for name, value in tool.items() if name != "type"} for tool in functions]
    return [{"type": "function", "function": function} for function in rest] or None


def usage(*, prompt: Tokens, completion: Tokens, cached: Tokens) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def whole_response(heading: Heading, text: str, numbers: dict[str, Any], _transfer: object = None) -> bytes:
    return encode(_response(heading, "completed", [_item(heading, text)], numbers))


class ResponseFrames:
    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._number = 0
        begun = _response(heading, "in_progress", [], None)
        self.before = self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )
        place = {"item_id": _item_id(heading), "output_index": 0, "content_index": 0}
        self._place = place
        self.opening = self._event(
            "response.output_item.added", output_index=0, item=_item(heading, None)
        ) + self._event("response.content_part.added", **place, part=_part(""))

    def text(self, json_text: str, *, last: bool) -> bytes:  # noqa: ARG002 - as in a chunk, which says so
        event = self._event("response.output_text.delta", **self._place, delta=TEXT_MARK, logprobs=[])
        return event.replace(encode(TEXT_MARK)[1:-1], json_text.encode())

    def ending(self, text: str, numbers: dict[str, Any] | None) -> bytes:
        item = _item(self._heading, text)
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event("response.completed", response=_response(self._heading, "completed", [item], numbers))
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(data) + b"\n\n"


def _message(item: dict[str, Any]) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if item.get("type") == "function_call":
        called = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": called}
        return {"role": "assistant", "tool_calls": [call]}
    if not isinstance(role, str):
        raise ApiError(400, f"Unsupported input item type: {item.get('type')}", param="input")
    if isinstance(content, list) and role == "assistant":
        content = content[0].get("text") if content else ""
    return {"role": role, "content": content}


def _response(
    heading: Heading, status: str, output: list[dict[str, Any]], numbers: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": heading.id,
        "object": "response",
        "created_at": heading.created,
        "status": status,
        "model": heading.model,
        "output": output,
        "usage": numbers,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": None,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "background": False,
        "service_tier": "auto",
        "truncation": "disabled",
    }


def _item(heading: Heading, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    status = "in_progress" if text is None else "completed"
    return {"id": _item_id(heading), "type": "message", "role": "assistant", "status": status, "content": content}


def _item_id(heading: Heading) -> str:
    return f"msg_{heading.id}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
