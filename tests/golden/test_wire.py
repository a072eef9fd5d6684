"""The wire format: bytes that were written once are read for ever, and new code writes the same.

After a deliberate change (a new field with a default) write the bytes anew with
`POINTSMAN_WRITE_GOLDEN=1 pytest tests/golden`, and look at the difference before committing it.
"""

import os
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
        assert ".".join(subject.split(".")[:3]) in stored, subject


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
