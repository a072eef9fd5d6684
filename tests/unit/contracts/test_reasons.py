"""Causes are enumerated, and logs written before they were still have them."""

import re

import pytest

from pointsman.contracts.codec import decode_event
from pointsman.contracts.decisions import RequestMigrated
from pointsman.contracts.reasons import REJECT_ANSWERS, CancelCause, MoveCause, RejectReason, reject_answer
from pointsman.contracts.requests import RequestCancelled
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.simulation.replay import verify
from tests.support.recorded_log import RecordedFleet

CANCELLED = '{"type":"RequestCancelled","at":1.0,"request":"r","reason":"%s"}'
MIGRATED = (
    '{"type":"RequestMigrated","at":1.0,"request":"r","source":"a","instance":"b","hit_blocks":0,"uncached_tokens":1,'
    '"prefill_seconds":0.1,"predicted_ttft":0.1,"reason":"%s"%s}'
)


def test_every_reject_reason_has_an_answer() -> None:
    assert set(REJECT_ANSWERS) == set(RejectReason)
    assert {reason for reason in RejectReason if reject_answer(reason).status == 503} == {
        RejectReason.NO_INSTANCE,
        RejectReason.ALREADY_ENDED,
        RejectReason.LOG_OVERLOADED,
        RejectReason.SCHEDULER_OVERLOADED,
    }
    assert {reason for reason in RejectReason if not reject_answer(reason).retryable} == {
        RejectReason.SLO_UNREACHABLE,
        RejectReason.QUOTA_EXCEEDED,
    }
    assert reject_answer("of a newer version").status == 429


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("client_gone", CancelCause.CLIENT_GONE),
        ("timeout", CancelCause.TIMEOUT),
        ("ingress_stopped", CancelCause.INGRESS_STOPPED),
        ("its ingress is gone, or has it no longer", CancelCause.INGRESS_SILENT),
        ("its engine says that nothing runs there", CancelCause.ENGINE_IDLE),
        ("granted long ago and never ended", CancelCause.NEVER_ENDED),
        ("its grant to engine-1 was not heard of", CancelCause.GRANT_UNHEARD),
        ("something else", CancelCause.UNKNOWN),
    ],
)
def test_an_old_cancellation_has_the_cause_that_its_sentence_names(reason: str, cause: CancelCause) -> None:
    event = decode_event((CANCELLED % reason).encode())

    assert isinstance(event, RequestCancelled)
    assert event.cause is cause


@pytest.mark.parametrize(
    ("reason", "rest", "cause"),
    [
        ("a takes no requests any more", "", MoveCause.RELOCATED),
        ("0.52 s late; first token 1.00 s sooner", ',"plan":"p"', MoveCause.PLANNED),
        ("its first token from a is overdue", ',"plan":"p","rebound":true', MoveCause.REBOUND),
    ],
)
def test_an_old_move_has_the_cause_that_its_sentence_names(reason: str, rest: str, cause: MoveCause) -> None:
    event = decode_event((MIGRATED % (reason, rest)).encode())

    assert isinstance(event, RequestMigrated)
    assert event.cause is cause


def test_a_cause_of_a_newer_version_is_unknown() -> None:
    payload = (CANCELLED % "something else").replace('"reason"', '"cause":"eaten_by_the_dog","reason"')
    event = decode_event(payload.encode())

    assert isinstance(event, RequestCancelled)
    assert event.cause is CancelCause.UNKNOWN


def test_a_log_without_causes_is_verified_like_one_with_them() -> None:
    entries = RecordedFleet(policy_set(), seed=7).live(2_000).entries
    old = [_without_cause(entry) for entry in entries]
    stripped = sum(entry.payload != before.payload for entry, before in zip(old, entries, strict=True))

    verdict, before = verify(old), verify(entries)

    assert verdict.ok
    assert stripped > 4, stripped
    assert (verdict.decisions, verdict.identical) == (before.decisions, before.identical)


def _without_cause(entry: LogEntry) -> LogEntry:
    payload = re.sub(rb',"cause":"(?!failed_probe)[a-z_]+"}$', b"}", entry.payload)
    return LogEntry.read(entry.sequence, entry.subject, payload)
