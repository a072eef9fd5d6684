"""Reasons why requests are rejected, cancelled or moved, and why moves are refused. Values are the strings on the wire.
Sentences are for operators; code branches on them only for events older than `cause`."""

from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Self

from typing_extensions import override

from pointsman.primitives import InstanceId


class RejectReason(StrEnum):
    SLO_TTFT = "slo_ttft"
    SLO_UNREACHABLE = "slo_unreachable"
    SLO_TPOT = "slo_tpot"
    HELD_BACK = "held_back"
    BEST_EFFORT_FULL = "best_effort_full"
    """Late even alone, and too many such requests wait."""
    QUEUE_FULL = "queue_full"
    NO_INSTANCE = "no_instance"
    ALREADY_ENDED = "already_ended"
    UNKNOWN_REQUEST = "unknown_request"
    RATE_LIMITED = "rate_limited"
    """Requests or tokens per time of its tenant."""
    CONCURRENCY_EXCEEDED = "concurrency_exceeded"
    QUOTA_EXCEEDED = "quota_exceeded"
    """The tenant's tokens of this day."""
    LOG_OVERLOADED = "log_overloaded"
    SCHEDULER_OVERLOADED = "scheduler_overloaded"
    """The log does not take the leader's writes as fast as they come, or requests come faster than it decides. Not written
    themselves: RequestsRefused counts them."""


TENANT_LIMITS = frozenset({RejectReason.RATE_LIMITED, RejectReason.CONCURRENCY_EXCEEDED, RejectReason.QUOTA_EXCEEDED})


@dataclass(frozen=True, slots=True)
class RejectAnswer:
    """`retryable`: whether the same request may succeed later."""

    status: int
    advice: str
    retryable: bool = True


_LATER = RejectAnswer(HTTPStatus.TOO_MANY_REQUESTS.value, "Ask again later.")
_UNAVAILABLE = RejectAnswer(HTTPStatus.SERVICE_UNAVAILABLE.value, "Ask again later.")

REJECT_ANSWERS = {
    RejectReason.SLO_TTFT: RejectAnswer(
        HTTPStatus.TOO_MANY_REQUESTS.value, "Ask again later, or with a longer objective (x-slo-ttft-ms)."
    ),
    RejectReason.SLO_UNREACHABLE: RejectAnswer(
        HTTPStatus.TOO_MANY_REQUESTS.value,
        "Ask with a longer objective (x-slo-ttft-ms) or a shorter prompt.",
        retryable=False,
    ),
    RejectReason.SLO_TPOT: RejectAnswer(
        HTTPStatus.TOO_MANY_REQUESTS.value, "Ask again later, or with a longer objective (x-slo-tpot-ms)."
    ),
    RejectReason.HELD_BACK: _LATER,
    RejectReason.BEST_EFFORT_FULL: RejectAnswer(
        HTTPStatus.TOO_MANY_REQUESTS.value,
        "Ask again later, with a longer objective (x-slo-ttft-ms) or a shorter prompt.",
    ),
    RejectReason.QUEUE_FULL: _LATER,
    RejectReason.NO_INSTANCE: _UNAVAILABLE,
    RejectReason.ALREADY_ENDED: _UNAVAILABLE,
    RejectReason.UNKNOWN_REQUEST: _LATER,
    RejectReason.RATE_LIMITED: _LATER,
    RejectReason.CONCURRENCY_EXCEEDED: _LATER,
    RejectReason.QUOTA_EXCEEDED: RejectAnswer(
        HTTPStatus.TOO_MANY_REQUESTS.value, "Ask your operator for a larger quota.", retryable=False
    ),
    RejectReason.LOG_OVERLOADED: _UNAVAILABLE,
    RejectReason.SCHEDULER_OVERLOADED: _UNAVAILABLE,
}


def reject_answer(reason: str) -> RejectAnswer:
    try:
        return REJECT_ANSWERS[RejectReason(reason)]
    except ValueError:
        return _LATER


CODE_LENGTH_MAX = 64


class _Cause(StrEnum):
    """What may be a code of a newer version is read as unknown."""

    @classmethod
    @override
    def _missing_(cls, value: object) -> Self | None:
        return cls("") if isinstance(value, str) and len(value) <= CODE_LENGTH_MAX else None


class CancelCause(_Cause):
    UNKNOWN = ""
    CLIENT_GONE = "client_gone"
    TIMEOUT = "timeout"
    INGRESS_STOPPED = "ingress_stopped"
    INGRESS_SILENT = "ingress_silent"
    ENGINE_IDLE = "engine_idle"
    """The engine reports no work, but the state has the request there."""
    NEVER_ENDED = "never_ended"
    GRANT_UNHEARD = "grant_unheard"
    """Granted to an instance that has left; the ingress still asks for a place."""

    @property
    def sentence(self) -> str:
        return _SENTENCES.get(self, self.value)


_SENTENCES = {
    CancelCause.INGRESS_SILENT: "its ingress is gone, or has it no longer",
    CancelCause.ENGINE_IDLE: "its engine says that nothing runs there",
    CancelCause.NEVER_ENDED: "granted long ago and never ended",
}
GIVEN_UP = frozenset(_SENTENCES)
"""Causes for which the leader ends a request because no other process does."""


def grant_unheard(instance: InstanceId) -> str:
    return f"its grant to {instance} was not heard of"


class FailReason(StrEnum):
    """Why an ingress ended a request as failed. A hand-over that was refused has its RejectReason instead."""

    ENGINE_REFUSED = "engine_refused"
    """A 4xx, or an endpoint that the engine lacks."""
    ENGINE_FAILED = "engine_failed"
    ENGINE_BROKE_OFF = "engine_broke_off"
    """In a stream that the client already had begun to read."""
    RETRY_BUDGET_SPENT = "retry_budget_spent"
    NO_PLACE = "no_place"
    """Neither scheduler nor engine."""
    REQUEST_TOO_LARGE = "request_too_large"
    """The bus does not take its command."""
    ANSWER_TOO_LARGE = "answer_too_large"
    TOO_MANY_BODIES = "too_many_bodies"
    """Its answer, or its body for two engines, is more than may be held now."""
    TIMEOUT = "timeout"
    MALFORMED_BODY = "malformed_body"
    INTERNAL_ERROR = "internal_error"


class MoveCause(_Cause):
    UNKNOWN = ""
    RELOCATED = "relocated"
    PLANNED = "planned"
    REBOUND = "rebound"


def relocated(source: InstanceId) -> str:
    return f"{source} takes no requests any more"


class MoveRefusal(StrEnum):
    REBIND_OFF = "rebind_off"
    NOT_WAITING = "not_waiting"
    ELSEWHERE = "elsewhere"
    TARGET_UNAVAILABLE = "target_unavailable"
    TARGET_LATE = "target_late"
    TARGET_FULL = "target_full"
    NO_GAIN = "no_gain"
    NOT_OVERDUE = "not_overdue"
    REBOUND_BEFORE = "rebound_before"
    BOUND = "bound"
    TOO_MANY_REBOUND = "too_many_rebound"


class PlanRefusal(StrEnum):
    OTHER_TERM = "other_term"
    TOO_OLD = "too_old"
    TOO_LONG = "too_long"
    LOG_BUSY = "log_busy"


class CommandRefusal(StrEnum):
    UNKNOWN_COMMAND = "unknown_command"
    NEWER_WIRE = "newer_wire"
    """It needs a higher WIRE_VERSION than its receiver has."""
    INVALID = "invalid"
    UNEXPECTED = "unexpected"
    """A command of another subject."""


# Events written before `cause` was a field

_CANCEL_CAUSES = {
    **{cause.value: cause for cause in CancelCause},
    **{text: cause for cause, text in _SENTENCES.items()},
}


def recorded_cancel_cause(reason: str) -> CancelCause:
    """From the sentence or code of a RequestCancelled without a cause."""
    if reason.startswith("its grant to ") and reason.endswith(" was not heard of"):
        return CancelCause.GRANT_UNHEARD
    return _CANCEL_CAUSES.get(reason, CancelCause.UNKNOWN)


def recorded_move_cause(reason: str, source: InstanceId, *, rebound: bool) -> MoveCause:
    if rebound:
        return MoveCause.REBOUND
    return MoveCause.RELOCATED if reason == relocated(source) else MoveCause.PLANNED
