"""Whether an ingress chose the engine itself, because no scheduler answered. A grant of an ingress alone does not show it: when
another leader begins, ingresses log the grants of their requests again, since that leader may not know them."""

from typing import TypeGuard

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestHandedOver
from pointsman.state.state import State


def is_placed_alone(event: LogEvent, before: State) -> TypeGuard[RequestGranted]:
    """`before`: without the event."""
    if not isinstance(event, RequestGranted) or event.stamp is not None:
        return False
    request = before.workload.requests.get(event.request)
    return request is None or not is_told_again(event, request.instance)


def is_told_again(event: RequestGranted | RequestHandedOver, known: str | None) -> bool:
    """Whether an ingress tells what the log has: that the request is at the instance `known`."""
    return event.stamp is None and event.instance == known
