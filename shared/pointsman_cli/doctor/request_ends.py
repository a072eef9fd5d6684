"""How each request of a log ended, once. In: arrivals, after State has applied them, and ends, before. Out: the end that
counts, with the request as State last had it. An ingress may still end what a leader gave up, or ask for it again under
another id, as for what no instance could take. Such ends are held back until then, or until the log ends."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pointsman.contracts.decisions import RequestEnd, counts_as_end, may_come_again
from pointsman.contracts.requests import RequestArrived, RequestCancelled, is_given_up
from pointsman.primitives import EngineSeconds, RequestId
from pointsman.state.state import State
from pointsman.state.workload import Request
from pointsman_cli.doctor.samples import keep

HELD_BACK_MAX = 20_000
ARRIVED_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Ended:
    """`request` is None if neither the log nor its checkpoint has the arrival. `given_up`: by a leader, before or at
    last, maybe under another id. `slo_ttft`: as the client asked; State lengthens it for admission."""

    event: RequestEnd
    request: Request | None
    given_up: RequestCancelled | None
    ingress: str
    slo_ttft: EngineSeconds


class RequestEnds:
    def __init__(self) -> None:
        self._arrived: dict[RequestId, tuple[str, EngineSeconds]] = {}
        """Ingress and SLO."""
        self._held_back: OrderedDict[RequestId, Ended] = OrderedDict()
        self._came_again: dict[RequestId, RequestCancelled | None] = {}
        """What gave a request up under its id before."""

    def arrive(self, event: RequestArrived, state: State) -> None:
        if event.request in self._arrived:
            return
        keep(self._arrived, event.request, (event.ingress, event.slo_ttft), ARRIVED_MAX)
        request = state.workload.requests.get(event.request)
        before = self._held_back.pop(request.instead_of, None) if request is not None else None
        if before is not None:
            keep(self._came_again, event.request, before.given_up, ARRIVED_MAX)

    def earlier(self, event: RequestEnd, state: State) -> str | None:
        """The type of the end that counts instead of this one, if there is one."""
        if event.request in state.workload.requests:
            return None
        held = self._held_back.get(event.request)
        if held is not None and counts_as_end(event, held.event):
            return None
        return state.workload.end_of(event.request)

    def take(self, event: RequestEnd, state: State) -> Iterator[Ended]:
        """An end without an earlier one. Gives it unless it is held back, and what has been held back for too long."""
        held = self._held_back.pop(event.request, None)
        ended = replace(held, event=event) if held is not None else self._ended(event, state)
        if not may_come_again(event):
            yield ended
            return
        self._held_back[event.request] = ended
        if len(self._held_back) > HELD_BACK_MAX:
            yield self._held_back.popitem(last=False)[1]

    def _ended(self, event: RequestEnd, state: State) -> Ended:
        request = state.workload.requests.get(event.request)
        ingress, slo_ttft = self._arrived.pop(event.request, ("", request.slo_ttft if request is not None else 0.0))
        before = self._came_again.pop(event.request, None)
        return Ended(event, request, event if is_given_up(event) else before, ingress, slo_ttft)

    def held_back(self) -> Iterator[Ended]:
        """At the end of the log."""
        yield from self._held_back.values()
