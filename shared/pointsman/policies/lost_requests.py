"""Finds granted requests that their engine has lost: the engine keeps reporting that it is idle, after it reported load in
this epoch. A request in its first step gets twice its predicted prefill, and at least what an ingress gives a first byte, since vLLM
updates its counters after each step: one that lacks CPU, compiles a kernel or fetches an image reports idle for as long. One
that was prefilled elsewhere gets as much from its hand-over on. The leader's clock alone measures: what workers and ingresses date
counts by when the leader saw it change. Limit: forgotten with the term."""

from collections.abc import Iterator

from pointsman.policies.heard_reports import HeardReports
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.fleet import Instance
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE, Request, Stage

PREFILLS_WAITED = 2.0
PREFILL_SECONDS_MIN: EngineSeconds = 5.0
PREFILL_SECONDS_MAX: EngineSeconds = 120.0


class LostRequests:
    def __init__(self) -> None:
        self._idle = _SeenSince()

    def find(
        self,
        state: State,
        heard: HeardReports,
        now: EngineSeconds,
        *,
        steady_since: EngineSeconds,
        idle_after: EngineSeconds,
    ) -> list[Request]:
        """Engine seconds. `steady_since`: see `seconds_since`. Called a few times in `idle_after`."""
        instances = state.fleet.instances
        idle = self._idle.look({i.id: (i.epoch, i.idle_since, i.answers) for i in instances if _reports_idle(i)}, now)
        lost: list[Request] = []
        for name, idle_since in idle.items():
            if heard.was_heard(name, now, within=idle_after):
                unbroken = seconds_since(idle_since, now, steady_since=steady_since)
                for request in _sent(state, name):
                    sent_at = request.handed_over_at if request.prefilled_by else request.granted_at
                    waited = min(unbroken, seconds_since(sent_at, now, steady_since=steady_since))
                    if waited > idle_after + _prefill_due(state, request):
                        lost.append(request)
        return lost


def seconds_since(at: EngineSeconds, now: EngineSeconds, *, steady_since: EngineSeconds) -> EngineSeconds:
    """How long ago a leader's decision was, as far as this leader's clock has measured it: since it was elected, or its clock
    was set (`steady_since`)."""
    return now - (steady_since if at > now else max(at, steady_since))


class _SeenSince:
    """What stands at each instance, and since which look."""

    def __init__(self) -> None:
        self._seen: dict[InstanceId, tuple[object, EngineSeconds]] = {}

    def look(self, standing: dict[InstanceId, object], now: EngineSeconds) -> dict[InstanceId, EngineSeconds]:
        before, self._seen = self._seen, {}
        for name, what in standing.items():
            known = before.get(name)
            self._seen[name] = known if known is not None and known[0] == what and known[1] <= now else (what, now)
        return {name: since for name, (_, since) in self._seen.items()}


def _reports_idle(instance: Instance) -> bool:
    return instance.counts_load and instance.serving and instance.idle_since > 0.0


def _sent(state: State, instance: InstanceId) -> Iterator[Request]:
    queue = state.workload.queues.get(instance, EMPTY_QUEUE)
    for granted in (queue.prefill, queue.decoding):
        yield from (request for request in granted.values() if not request.fetching)


def _prefill_due(state: State, request: Request) -> EngineSeconds:
    if _has_first_token(request):
        return 0.0
    predicted = request.engine_seconds * state.latency.correction(request.prefilled_by or request.instance)
    return min(max(PREFILLS_WAITED * predicted, PREFILL_SECONDS_MIN), PREFILL_SECONDS_MAX)


def _has_first_token(request: Request) -> bool:
    return request.stage is Stage.DECODING and request.streaming
