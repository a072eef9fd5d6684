"""How each request of a log ended, once. In: arrivals and ends in log order, before State has applied them. Out: the end
that counts, with the request as State last had it. An ingress may still end what a leader gave up, so a give-up is held
back until then, or until the log ends."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pointsman.contracts.decisions import RequestEnd, counts_as_end, is_final_end
from pointsman.contracts.requests import RequestArrived, RequestCancelled, is_given_up
from pointsman.primitives import EngineSeconds, RequestId
from pointsman.state.state import State
from pointsman.state.workload import Request
from pointsman_cli.doctor.samples import keep

GIVEN_UP_MAX = 20_000
ARRIVED_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Ended:
    """`request` is None if neither the log nor its checkpoint has the arrival. `given_up`: by a leader, before or at last.
    `slo_ttft`: as the client asked; State lengthens it for admission."""

    event: RequestEnd
    request: Request | None
    given_up: RequestCancelled | None
    ingress: str
    slo_ttft: EngineSeconds


class RequestEnds:
    def __init__(self) -> None:
        self._arrived: dict[RequestId, tuple[str, EngineSeconds]] = {}
        """Ingress and SLO."""
        self._given_up: OrderedDict[RequestId, Ended] = OrderedDict()

    def arrive(self, event: RequestArrived) -> None:
        if event.request not in self._arrived:
            keep(self._arrived, event.request, (event.ingress, event.slo_ttft), ARRIVED_MAX)

    def earlier(self, event: RequestEnd, state: State) -> str | None:
        """The type of the end that counts instead of this one, if there is one."""
        if event.request in state.workload.requests:
            return None
        held = self._given_up.get(event.request)
        if held is not None and counts_as_end(event, held.event):
            return None
        return state.workload.end_of(event.request)

    def take(self, event: RequestEnd, state: State) -> Iterator[Ended]:
        """An end without an earlier one. Gives it unless it is held back, and what has been held back for too long."""
        held = self._given_up.pop(event.request, None)
        ended = replace(held, event=event) if held is not None else self._ended(event, state)
        if is_final_end(event):
            yield ended
            return
        self._given_up[event.request] = ended
        if len(self._given_up) > GIVEN_UP_MAX:
            yield self._given_up.popitem(last=False)[1]

    def _ended(self, event: RequestEnd, state: State) -> Ended:
        request = state.workload.requests.get(event.request)
        ingress, slo_ttft = self._arrived.pop(event.request, ("", request.slo_ttft if request is not None else 0.0))
        return Ended(event, request, event if is_given_up(event) else None, ingress, slo_ttft)

    def held_back(self) -> Iterator[Ended]:
        """At the end of the log."""
        yield from self._given_up.values()
