"""Prefills that ingresses saw end: what tells of the pace of an engine."""

from pointsman.contracts.requests import PrefillFinished
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.workload import Request, Stage


def prefilled(event: PrefillFinished, state: State) -> tuple[Request, EngineSeconds] | None:
    """The request whose prefill the event ends, and when, by the leader's clock; None for what a leader assumed. Call before
    the event is applied."""
    request = state.workload.requests.get(event.request)
    if event.stamp is not None or request is None or request.stage is not Stage.PREFILL:
        return None
    return request, event.at + request.clock_offset
