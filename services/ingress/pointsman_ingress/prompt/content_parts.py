"""Chat messages of any API: extracts text parts, finds the first part that is unsupported because it is not text."""

from dataclasses import dataclass, field
from typing import Any

from pointsman_ingress.http.request_headers import cleaned

TEXT_KINDS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
TEXT_FIELDS = ("text", "refusal", "thinking")
UNKNOWN = "unknown"

Message = dict[str, Any]


@dataclass(slots=True)
class ChatForm:
    """`unsupported`: kind of the first part without text form, or empty; `unsupported_message`: its index."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    unsupported: str = ""
    unsupported_message: int = 0

    def add(self, message: Message, *, unsupported: str = "") -> None:
        if unsupported and not self.unsupported:
            self.unsupported, self.unsupported_message = unsupported, len(self.messages)
        self.messages.append(message)

    def add_unsupported(self, kind: str) -> None:
        self.add({"role": "user", "content": [{"type": kind}]}, unsupported=cleaned(kind) or UNKNOWN)


def unsupported_part(content: Any) -> str:
    """Empty if there is none."""
    if not isinstance(content, list):
        return ""
    return next((cleaned(kind) or UNKNOWN for part in content if (kind := kind_of(part)) not in TEXT_KINDS), "")


def first_unsupported(messages: list[Message]) -> tuple[str, int]:
    for at, message in enumerate(messages):
        if kind := unsupported_part(message.get("content")):
            return kind, at
    return "", 0


def text_parts(content: Any) -> Any:
    return [part for part in content if kind_of(part) in TEXT_KINDS] if isinstance(content, list) else content


def texts(content: Any) -> list[str]:
    if not isinstance(content, list):
        return [content] if isinstance(content, str) else []
    return [part if isinstance(part, str) else _text(part) for part in text_parts(content)]


def kind_of(part: Any) -> str:
    """Some clients omit the type if a field implies it."""
    if not isinstance(part, dict):
        return "text"
    kind = part.get("type")
    if isinstance(kind, str):
        return kind
    return next((name for name in part if isinstance(name, str)), UNKNOWN)


def _text(part: Any) -> str:
    fields = part if isinstance(part, dict) else {}
    return next((text for name in TEXT_FIELDS if isinstance(text := fields.get(name), str)), "")
