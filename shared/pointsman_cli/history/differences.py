"""Prints one difference of a replay: both decisions side by side, and the state before them."""

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from pointsman.simulation.replay import Difference
from pointsman_cli.output_file import json_of
from pointsman_cli.terminal import heading, json_text, say, table

EQUAL_SETTINGS = "equal on both sides"


def show_difference(console: Console, difference: Difference) -> None:
    event = difference.recorded or difference.recomputed
    where = f"entry {difference.sequence:,}" if difference.sequence else "not in the log"
    decision = f"decision {difference.number} of term {difference.term}, {type(event).__name__} ({where})"
    heading(console, f"first difference: {decision}")
    left = _lines(difference.recorded, "the log has no such decision here", like=difference.recomputed)
    right = _lines(difference.recomputed, "deciding again gives none", like=difference.recorded)
    rows = table("recorded in the log", "decided again")
    for column in rows.columns:
        column.no_wrap = False
    for ours, theirs, same in _side_by_side(left, right):
        style = "" if same else "bold red"
        rows.add_row(Text(ours, style=style), Text(theirs, style=style))
    console.print(rows)
    say(console, "known when it was decided:")
    for line in _known(difference.known):
        say(console, line)


def _lines(event: Any, absent: str, *, like: Any) -> list[str]:
    if event is None:
        return [absent]
    content = msgspec.to_builtins(event)
    if like is not None and "settings" in content and content["settings"] == getattr(like, "settings", None):
        content["settings"] = EQUAL_SETTINGS
    if "keys" in content:
        content["keys"] = f"{len(content['keys'])} characters of base64"
    return json_text(json_of(content)).rstrip("\n").split("\n")


def _known(known: dict[str, Any]) -> Iterator[str]:
    yield _compact({name: value for name, value in known.items() if name != "instances"})
    for instance in known.get("instances", []):
        yield "  " + _compact(instance)


def _compact(content: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=0).decode()


def _side_by_side(left: list[str], right: list[str]) -> Iterator[tuple[str, str, bool]]:
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for step in range(max(i2 - i1, j2 - j1)):
            ours = left[i1 + step] if i1 + step < i2 else ""
            theirs = right[j1 + step] if j1 + step < j2 else ""
            yield ours, theirs, tag == "equal"
