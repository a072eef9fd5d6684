"""Failures that say nothing about the fleet: an engine, or the message bus, refused what the client asked for."""

from http import HTTPStatus

from pointsman.contracts.reasons import FailReason
from pointsman.contracts.requests import RequestFailed

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
