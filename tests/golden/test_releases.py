"""Two releases that follow each other read each other's messages: what the one before wrote means the same here, and what we
write it takes, by its own schema. `make test-upgrade` runs both for real.

`releases/461fb369.jsonl` are the golden messages of that commit, `.schema.json` the JSON schema of its structs
(`msgspec.json.schema_components([LogEvent, AnyCommand])`). With each release, those of the one before replace them.
"""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from pointsman.contracts.codec import AnyCommand, LogEvent, decode_command, decode_event, encode
from pointsman.contracts.envelope import Event
from pointsman_lab.torture.older_release import NEW_EVENTS
from tests.golden.samples import COMMANDS, EVENTS

RELEASES = Path(__file__).parent / "releases"
BEFORE = RELEASES / "461fb369.jsonl"
SCHEMAS: dict[str, Any] = json.loads(BEFORE.with_suffix(".schema.json").read_text())
NEW = {
    "CommandRefused": "an answer to what the release before cannot send",
    "NoteHeartbeat": "on a subject that it does not serve: the worker writes the report into the log, as it does",
    "HeartbeatNoted": "an answer to what the release before cannot send",
    "RequestsRefused": "an event that it does not know is skipped; nothing is folded from it",
}
"""Messages that the release before does not know, and why it need not. Events are in `older_release.NEW_EVENTS`, too."""
MESSAGES: list[LogEvent | AnyCommand] = [*EVENTS, *COMMANDS]


def names(line: bytes) -> str:
    return str(json.loads(line)["type"])


@pytest.mark.parametrize("line", BEFORE.read_bytes().splitlines(), ids=names)
def test_a_message_of_the_release_before_means_the_same(line: bytes) -> None:
    is_event = "at" in json.loads(line)
    read = decode_event(line) if is_event else decode_command(line)

    assert type(read).__name__ == names(line)
    assert json.loads(encode(read)) == json.loads(line), "a field of it has gone, or a default has changed"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_the_release_before_takes_what_we_write(message: LogEvent | AnyCommand) -> None:
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # here, since importing it takes seconds

    name, written = type(message).__name__, json.loads(encode(message))
    if name not in SCHEMAS:
        assert name in NEW, "say in NEW why the release before need not know it"
        return
    validator = Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMAS})

    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(written)] == []


def test_torture_has_a_release_before_that_skips_the_new_events() -> None:
    assert {event.__name__ for event in NEW_EVENTS} == {event.__name__ for event in get_args(LogEvent)} & set(NEW)


@pytest.mark.parametrize("message", [m for m in MESSAGES if isinstance(m, Event)], ids=lambda m: type(m).__name__)
def test_an_event_without_any_optional_field_still_has_what_the_release_before_requires(message: Event) -> None:
    """A field that it requires and that is optional here would be left out where it has its default."""
    required = set(SCHEMAS.get(type(message).__name__, {}).get("required", ())) - {"type"}
    ours = {field.name for field in msgspec.structs.fields(message) if field.required}

    assert required <= ours
