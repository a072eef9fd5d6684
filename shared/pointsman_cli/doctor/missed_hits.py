"""Prefill seconds that hits predicted and not delivered cost, by request, in bounded memory."""

from pointsman.contracts.requests import RequestFinished, cached_of_keys
from pointsman.primitives import EngineSeconds, RequestId
from pointsman.state.state import State
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.doctor.samples import keep

REQUESTS_MAX = 20_000


class MissedHits:
    def __init__(self) -> None:
        self._seconds: dict[RequestId, EngineSeconds] = {}

    def note(self, end: Ended, state: State) -> None:
        """Call before the end is applied."""
        event, request = end.event, end.request
        if not isinstance(event, RequestFinished) or request is None:
            return
        instance = state.fleet.get(event.instance)
        delivered = cached_of_keys(event, request.answers)
        if instance is None or delivered < 0 or request.instance != event.instance:
            return
        cached = request.prompt_tokens - request.uncached_tokens
        if delivered >= cached:
            return
        real = instance.cost.seconds(request.prompt_tokens, delivered)
        keep(self._seconds, event.request, max(0.0, real - request.prefill_seconds), REQUESTS_MAX)

    def seconds(self, request: RequestId) -> EngineSeconds:
        return self._seconds.get(request, 0.0)
