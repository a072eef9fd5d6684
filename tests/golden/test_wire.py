"""The wire format: bytes that were written once are read for ever, and new code writes the same.

A new field has a default, and a value in `samples.py`. Then write the bytes anew with `POINTSMAN_WRITE_GOLDEN=1 pytest
tests/golden/test_wire.py` (without the file it would write folds too), and look at the difference: only the field may be new.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from pointsman.contracts.codec import (
    NEVER_DECIDED,
    AnyCommand,
    LogEvent,
    UndecodableError,
    decode_command,
    decode_event,
    encode,
)
from pointsman.contracts.envelope import Event, Stamp
from pointsman.contracts.subjects import log_subjects, message_id, subject_of
from pointsman.primitives import PoolName, Term
from tests.golden.samples import COMMANDS, EVENTS

WIRE = Path(__file__).with_name("wire.jsonl")


def test_every_wire_struct_has_a_sample() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(LogEvent))
    assert {type(command) for command in COMMANDS} == set(get_args(AnyCommand))


def test_every_field_is_set_in_a_sample() -> None:
    """Else no golden byte keeps its name. Not what all events or commands have: `stamp`, `wire`."""
    unset: dict[str, bool] = {}
    for struct in structs_in([*EVENTS, *COMMANDS]):
        for field in msgspec.structs.fields(struct):
            value, name = getattr(struct, field.name), f"{type(struct).__name__}.{field.name}"
            unset[name] = unset.get(name, True) and not field.required and value == default_of(field)

    lacking = [name for name, is_unset in unset.items() if is_unset and not name.endswith((".stamp", ".wire"))]
    assert lacking == [], (
        "give each a value in tests/golden/samples.py, then write wire.jsonl: the head of this file says how"
    )


def default_of(field: msgspec.structs.FieldInfo) -> object:
    return field.default_factory() if callable(field.default_factory) else field.default


def structs_in(value: object) -> Iterator[msgspec.Struct]:
    """The structs in a sample, itself included."""
    if isinstance(value, msgspec.Struct):
        yield value
        yield from structs_in([getattr(value, name) for name in value.__struct_fields__])
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from structs_in(one)


def test_what_was_written_is_what_we_write_and_read() -> None:
    samples = [*EVENTS, *COMMANDS]
    if os.environ.get("POINTSMAN_WRITE_GOLDEN"):
        WIRE.write_bytes(b"".join(encode(sample) + b"\n" for sample in samples))
    lines = WIRE.read_bytes().splitlines()

    assert [encode(sample) for sample in samples] == lines
    assert [decode_event(line) for line in lines[: len(EVENTS)]] == EVENTS
    assert [decode_command(line) for line in lines[len(EVENTS) :]] == COMMANDS


def test_every_event_has_a_subject_that_the_stream_stores() -> None:
    stored = {subject.removesuffix(".*") for subject in log_subjects(PoolName("p"))}

    for event in EVENTS:
        subject = subject_of(PoolName("p"), event)
        assert ".".join(subject.split(".")[:3]) in stored, f"{subject}: lacks a kind in KINDS (contracts/subjects.py)"
        assert decode_event(encode(event), subject) == event


def test_message_ids_tell_events_apart() -> None:
    ids = [message_id(event) for event in EVENTS if event.stamp is None]
    known = [i for i in ids if i is not None]

    assert len(known) == len(set(known))


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b'{"type":"Unknown"}', b'{"type":"BlocksRemoved","at":1}'])
def test_what_does_not_decode_says_why(payload: bytes) -> None:
    with pytest.raises(UndecodableError, match=r".+"):
        decode_event(payload)


@pytest.mark.parametrize("kind", NEVER_DECIDED)
def test_a_stamp_on_what_no_leader_decides_does_not_decode(kind: type[Event]) -> None:
    event = next(event for event in EVENTS if isinstance(event, kind))
    stamp = Stamp(term=Term(1), number=10**9, as_of=1)

    with pytest.raises(UndecodableError, match="no leader decides"):
        decode_event(msgspec.json.encode(msgspec.structs.replace(event, stamp=stamp)))


def test_a_field_from_the_future_is_passed_over() -> None:
    line = WIRE.read_bytes().splitlines()[0]

    assert decode_event(line[:-1] + b',"colour":"blue"}') == EVENTS[0]
