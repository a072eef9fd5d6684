"""Failures that say nothing about the fleet: an engine refused what the client asked for."""

from http import HTTPStatus

from pointsman.contracts.requests import RequestFailed

REFUSED = "engine_refused"
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
    return event.reason == REFUSED and event.status in STATUSES
