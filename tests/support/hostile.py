"""Logs, answers and texts as an attacker would write them, and the judge of what a command printed of them."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from pointsman.contracts.codec import UndecodableError, decode_event
from pointsman.ports import LogEntry

FORGED = "FORGED LINE"
MARKUP = "[/red][link=http://evil]"
HOSTILE = f"\x1b]0;title\x07\x1b[2J\x9b31m{MARKUP}\r\n{FORGED}\u202egnp.exe\u2066\u2028{FORGED}\u200b\x7f\ud7ff$x^$"
FORMULA = "=cmd|' /C calc'!A0"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CURSOR = re.compile(r"\x1b\[(?:\?25[lh]|[0-9]*[AKG])|\r")
KEPT_WORDS = ("type",)
POLICY_WORDS = ("policy", "settings", "pool")


def hostile_log(entries: Sequence[LogEntry], *, policies_too: bool, text: str = HOSTILE) -> list[LogEntry]:
    """Every string of every event is hostile, unless the event would no longer decode."""
    kept = KEPT_WORDS if policies_too else (*KEPT_WORDS, *POLICY_WORDS)
    return [_hostile_entry(entry, kept, text) for entry in entries]


def assert_harmless(output: str, *, on_terminal: bool = False) -> None:
    """No escape sequence but those of colours and progress bars, nothing that does not print, no line of theirs."""
    if on_terminal:
        output = CURSOR.sub("", COLOUR.sub("", output))
    bad = sorted({character for character in output if not character.isprintable() and character != "\n"})
    assert not bad, f"{bad} in {[line for line in output.splitlines() if not line.isprintable()][:3]}"
    assert not [line for line in output.split("\n") if line.strip().startswith(FORGED)]


def _hostile_entry(entry: LogEntry, kept: Sequence[str], text: str) -> LogEntry:
    if entry.event is None:
        return LogEntry.read(entry.sequence, entry.subject, entry.payload)
    content = msgspec.json.decode(entry.payload)
    for replace, original in list(_strings(content, kept)):
        replace(original + text)
        if not _decodes(content, entry.subject):
            replace(original)
    return LogEntry.read(entry.sequence, entry.subject, msgspec.json.encode(content))


def _decodes(content: Any, subject: str) -> bool:
    try:
        decode_event(msgspec.json.encode(content), subject)
    except UndecodableError:
        return False
    return True


def _strings(content: Any, kept: Sequence[str]) -> Iterator[tuple[Callable[[str], None], str]]:
    places = content.items() if isinstance(content, dict) else enumerate(content)
    for place, value in places:
        if place in kept:
            continue
        if isinstance(value, str):
            yield lambda text, place=place: content.__setitem__(place, text), value  # type: ignore[misc]
        elif isinstance(value, dict | list):
            yield from _strings(value, kept)
