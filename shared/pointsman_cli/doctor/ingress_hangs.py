"""When an ingress hung: a leader gave its requests up because it was silent, and later it wrote again. In: events that
count, in log order. What an ingress measured while it hung says nothing of its engines."""

from dataclasses import dataclass

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestArrived, RequestEvent, is_given_up
from pointsman.primitives import EngineSeconds, RequestId
from pointsman_cli.doctor.samples import keep
from pointsman_cli.terminal import wall_span

HANG_WALL_SECONDS_MIN = 2.0
"""Less than leaders wait (`waiter_seconds`, 3 s). An ingress that only lost its connection leaves no such gap: what it wrote
meanwhile reaches the log later."""
REQUESTS_MAX = 50_000
INGRESSES_MAX = 1_000
HANGS_MAX = 100


@dataclass(frozen=True, slots=True)
class Hang:
    """`begun`: when the ingress last wrote before; `ended`: when it wrote again."""

    ingress: str
    begun: EngineSeconds
    ended: EngineSeconds

    def within(self, since: EngineSeconds, until: EngineSeconds) -> EngineSeconds:
        """How long it hung in that time."""
        return max(0.0, min(until, self.ended) - max(since, self.begun))

    def line(self, speed: float) -> str:
        return f"{self.ingress} hung: it wrote nothing from {wall_span(self.begun, self.ended, speed)}"


@dataclass(slots=True)
class _Request:
    ingress: str
    granted_at: EngineSeconds


class IngressHangs:
    """Knows the newest hang of each ingress. `seen`: the first ones of the log."""

    def __init__(self, speed: float) -> None:
        self.seen: list[Hang] = []
        self._hang_seconds_min: EngineSeconds = HANG_WALL_SECONDS_MIN * speed
        self._requests: dict[RequestId, _Request] = {}
        self._heard: dict[str, EngineSeconds] = {}
        self._given_up: dict[str, EngineSeconds] = {}
        """When its first request was, of each ingress that has been silent since."""
        self._newest: dict[str, Hang] = {}

    def note(self, event: LogEvent) -> None:
        """Call before the others."""
        if isinstance(event, RequestArrived) and event.ingress:
            keep(self._requests, event.request, _Request(event.ingress, event.arrived_at), REQUESTS_MAX)
            self._hear(event.ingress, event.arrived_at)
        elif isinstance(event, RequestEvent) and (request := self._requests.get(event.request)) is not None:
            if isinstance(event, RequestGranted):
                request.granted_at = event.at
            if event.stamp is None:
                self._hear(request.ingress, event.at)
            elif is_given_up(event) and event.cause is CancelCause.INGRESS_SILENT:
                self._given_up.setdefault(request.ingress, event.at)

    def _hear(self, ingress: str, at: EngineSeconds) -> None:
        given_up_at = self._given_up.get(ingress)
        heard = self._heard.get(ingress, at)
        if given_up_at is not None and at > given_up_at:
            del self._given_up[ingress]
            self._end(Hang(ingress, heard, at))
        keep(self._heard, ingress, max(heard, at), INGRESSES_MAX)

    def _end(self, hang: Hang) -> None:
        if hang.ended - hang.begun < self._hang_seconds_min:
            return
        keep(self._newest, hang.ingress, hang, INGRESSES_MAX)
        if len(self.seen) < HANGS_MAX:
            self.seen.append(hang)

    def ingress_of(self, request: RequestId) -> str | None:
        """None if its arrival does not name it, or is not in the log."""
        known = self._requests.get(request)
        return known.ingress if known is not None else None

    def seconds_of(self, request: RequestId, since: EngineSeconds, until: EngineSeconds) -> EngineSeconds:
        """How long its ingress hung in that time."""
        known = self._requests.get(request)
        hang = self._newest.get(known.ingress) if known is not None else None
        return hang.within(since, until) if hang is not None else 0.0

    def of_attempt(self, event: RequestEvent) -> Hang | None:
        """The hang of its ingress between its grant and this event, if there was one."""
        request = self._requests.get(event.request)
        hang = self._newest.get(request.ingress) if request is not None else None
        if request is None or hang is None or not hang.within(request.granted_at, event.at):
            return None
        return hang
