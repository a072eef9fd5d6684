"""vLLM's response bodies. The constant part of a stream's chunks is rendered once per request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from pointsman.primitives import Tokens

DONE = b"data: [DONE]\n\n"
FINISH_REASON = "length"
TEXT_MARK = "\x00text\x00"

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Heading:
    id: str
    created: int
    model: str


def usage(*, prompt: Tokens, completion: Tokens, cached: Tokens) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Frames(Protocol):
    before: bytes
    opening: bytes

    def text(self, json_text: str, *, last: bool) -> bytes: ...

    def ending(self, text: str, numbers: dict[str, Any] | None) -> bytes: ...


class ChunkFrames:
    def __init__(
        self, heading: Heading, *, object_name: str, opening: dict[str, Any] | None, delta: dict[str, Any]
    ) -> None:
        """`opening`: the choice of a first chunk without text. `delta`: that of others, with `TEXT_MARK` as text."""
        self._heading = {"id": heading.id, "object": object_name, "created": heading.created, "model": heading.model}
        self.before = b""
        self.opening = b"" if opening is None else self._event([opening])
        self._head, self._tail = self._around_text(delta, finish_reason=None)
        _, self._last_tail = self._around_text(delta, finish_reason=FINISH_REASON)

    def text(self, json_text: str, *, last: bool) -> bytes:
        return self._head + json_text.encode() + (self._last_tail if last else self._tail)

    def ending(self, _text: str, numbers: dict[str, Any] | None) -> bytes:
        return (b"" if numbers is None else self._event([], usage=numbers)) + DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + encode({**self._heading, "choices": choices, **more}) + b"\n\n"

    def _around_text(self, delta: dict[str, Any], *, finish_reason: str | None) -> tuple[bytes, bytes]:
        head, _, tail = self._event([{**delta, "finish_reason": finish_reason}]).partition(encode(TEXT_MARK)[1:-1])
        return head, tail


def completion_frames(heading: Heading) -> ChunkFrames:
    delta = {"index": 0, "text": TEXT_MARK, "logprobs": None, "finish_reason": None, "stop_reason": None}
    return ChunkFrames(heading, object_name="text_completion", opening=None, delta=delta)


def chat_frames(heading: Heading) -> ChunkFrames:
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    delta = {"index": 0, "delta": {"content": TEXT_MARK}, "logprobs": None, "finish_reason": None, "stop_reason": None}
    return ChunkFrames(heading, object_name="chat.completion.chunk", opening=opening, delta=delta)


def whole_completion(
    heading: Heading, text: str, numbers: dict[str, Any], transfer: dict[str, Any] | None = None
) -> bytes:
    """`transfer`: `kv_transfer_params` of its KV cache."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": FINISH_REASON, "stop_reason": None}
    return _whole(heading, "text_completion", choice, numbers, transfer)


def whole_chat(heading: Heading, text: str, numbers: dict[str, Any], transfer: dict[str, Any] | None = None) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": FINISH_REASON, "stop_reason": None}
    return _whole(heading, "chat.completion", choice, numbers, transfer)


def model_list(model: str, *, created: int, max_model_len: Tokens, adapters: Mapping[str, str]) -> bytes:
    common = {"object": "model", "created": created, "owned_by": "pointsman-engine-sim", "permission": []}
    base = {"id": model, **common, "root": model, "parent": None, "max_model_len": max_model_len}
    cards = [{"id": name, **common, "root": path, "parent": model} for name, path in adapters.items()]
    return encode({"object": "list", "data": [base, *cards]})


def _whole(
    heading: Heading,
    object_name: str,
    choice: dict[str, Any],
    numbers: dict[str, Any],
    transfer: dict[str, Any] | None,
) -> bytes:
    return encode(
        {
            "id": heading.id,
            "object": object_name,
            "created": heading.created,
            "model": heading.model,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": numbers,
            "prompt_logprobs": None,
            "kv_transfer_params": transfer,
        }
    )
