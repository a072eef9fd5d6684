"""Ends that say nothing about the fleet: an engine, or the message bus, refused what the client asked for; a limit of its
tenant did; the client hung up."""

from http import HTTPStatus

from pointsman.contracts.decisions import RequestEnd, RequestRejected
from pointsman.contracts.reasons import TENANT_LIMITS, CancelCause, FailReason
from pointsman.contracts.requests import RequestCancelled, RequestFailed, RequestFinished

STATUSES = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.NOT_IMPLEMENTED,
    }
)
"""Not 401, 403, 404, 408 and 429: an engine that answers so is misconfigured or busy."""


def is_clients_fault(event: RequestFailed) -> bool:
    """A prompt for which the bus is too small, or an answer that nobody can hold, is the client's, as one is that an engine
    refuses."""
    if event.reason in (FailReason.REQUEST_TOO_LARGE, FailReason.ANSWER_TOO_LARGE):
        return True
    return event.reason == FailReason.ENGINE_REFUSED and event.status in STATUSES


def tells_of_fleet(end: RequestEnd) -> bool:
    """Whether it counts when the fleet is judged by the share of requests that it served in time."""
    match end:
        case RequestFinished():
            return True
        case RequestRejected():
            return end.reason not in TENANT_LIMITS
        case RequestFailed():
            return not is_clients_fault(end)
        case RequestCancelled():
            return end.cause not in (CancelCause.CLIENT_GONE, CancelCause.UNKNOWN)
