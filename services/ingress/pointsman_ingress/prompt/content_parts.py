"""The parts of a message's content: which are text, and of what kind the first other one is.

One answer for every path. Engines read the messages of a Responses request as those of a chat; a kind that they take in
the one and refuse in the other costs no more than their refusal.
"""

from typing import Any

from pointsman_ingress.http.request_headers import cleaned

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
"""Kinds that are made of tokens and nothing else."""

TEXT_FIELDS = ("text", "refusal", "thinking")
UNKNOWN = "unknown"


def foreign_part(content: Any) -> str:
    """The kind of the first part that is no text, fit for a header; empty where all is text."""
    if not isinstance(content, list):
        return ""
    return next((cleaned(kind) or UNKNOWN for part in content if (kind := _kind(part)) not in TEXT_PARTS), "")


def first_foreign(messages: list[dict[str, Any]]) -> tuple[str, int]:
    """The kind of the first part of a chat that is no text, and in which message it is; empty where there is none."""
    for at, message in enumerate(messages):
        if kind := foreign_part(message.get("content")):
            return kind, at
    return "", 0


def text_parts(content: Any) -> Any:
    """The same content without what is no text."""
    if not isinstance(content, list):
        return content
    return [part for part in content if _kind(part) in TEXT_PARTS]


def texts(content: Any) -> list[str]:
    """The texts of a content, part by part."""
    if not isinstance(content, list):
        return [content] if isinstance(content, str) else []
    return [part if isinstance(part, str) else _text(part) for part in text_parts(content)]


def _kind(part: Any) -> str:
    """What engines take a part for. Some clients leave the type out where a field says it."""
    if not isinstance(part, dict):
        return "text"
    kind = part.get("type")
    if isinstance(kind, str):
        return kind
    return next((name for name in part if isinstance(name, str)), UNKNOWN)


def _text(part: Any) -> str:
    fields = part if isinstance(part, dict) else {}
    return next((text for name in TEXT_FIELDS if isinstance(text := fields.get(name), str)), "")
