"""Which requests can still be on time, and when a late one is served before them. Serving late requests last would
starve them. So each prefill second granted to an on-time request earns `late_share` seconds of credit (at most
CREDIT_SECONDS_MAX); while the credit is positive the oldest late request goes first and pays its prefill seconds. It
waits at most (1 + 1/late_share) times the prefill seconds of the late ones up to it. Selection and accounting must use
the same definition of late, so the correction of the cost model is kept here: a tracker sees no State, and logs before
fold version 6 were decided by it. With State's correction six workloads differ by at most 0.3 points."""

from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override

from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import InstanceQueue, Request

CREDIT_SECONDS_MAX = 1.0
LATE_BEYOND = 0.9
"""Late if this share of the predicted TTFT exceeds the budget: allows for the usual prediction error."""

PACE_FADE = 0.95
PACE_PRIOR_SECONDS = 2.0
PACE_MIN, PACE_MAX = 0.25, 4.0


@dataclass(slots=True)
class PrefillCorrection:
    observed: EngineSeconds = PACE_PRIOR_SECONDS
    predicted: EngineSeconds = PACE_PRIOR_SECONDS

    @property
    def factor(self) -> float:
        return min(PACE_MAX, max(PACE_MIN, self.observed / self.predicted))

    def learn(self, *, predicted: EngineSeconds, observed: EngineSeconds) -> None:
        self.observed = PACE_FADE * self.observed + min(observed, 2 * PACE_MAX * predicted)
        self.predicted = PACE_FADE * self.predicted + predicted


class LateCredit(Tracker):
    def __init__(self, *, late_share: float) -> None:
        """0: late requests never go first."""
        self._late_share = late_share
        self._credits: dict[InstanceId, EngineSeconds] = {}
        self._corrections: dict[InstanceId, PrefillCorrection] = {}

    def split(
        self, requests: Iterable[Request], queue: InstanceQueue, now: EngineSeconds
    ) -> tuple[list[Request], list[Request]]:
        """Requests that may be on time if granted now, and those that are late even then, in order."""
        before = queue.engine_seconds_left(now)
        on_time: list[Request] = []
        late: list[Request] = []
        factor = 0.0
        for request in requests:
            factor = factor or self.factor(request.instance)
            seconds = (before + request.prefill_seconds) * factor
            # `_is_late`, without the calls: under load this is what an order costs.
            is_late = now + LATE_BEYOND * seconds > request.arrived_at + request.slo_ttft
            (late if is_late else on_time).append(request)
        return on_time, late

    def due(self, instance: InstanceId) -> bool:
        return self._credits.get(instance, 0.0) > 0

    def factor(self, instance: InstanceId) -> float:
        correction = self._corrections.get(instance)
        return correction.factor if correction else 1.0

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        if request.best_effort:  # its class has a share of its own
            return
        credit = self._credits.get(request.instance, 0.0)
        if _is_late(request, request.engine_seconds * self.factor(request.instance), at):
            credit = max(0.0, credit) - request.prefill_seconds
        else:
            credit = min(CREDIT_SECONDS_MAX, credit + self._late_share * request.prefill_seconds)
        self._credits[request.instance] = credit

    @override
    def handed_over(self, request: Request, at: EngineSeconds) -> None:
        self._learn(request.prefilled_by, request, at)

    @override
    def first_token(self, request: Request, at: EngineSeconds) -> None:
        if not request.prefilled_by:
            self._learn(request.instance, request, at)

    @override
    def joined(self, instance: InstanceId, at: EngineSeconds) -> None:
        self.left(instance, at)

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._credits.pop(instance, None)
        self._corrections.pop(instance, None)

    def _learn(self, instance: InstanceId, request: Request, at: EngineSeconds) -> None:
        correction = self._corrections.setdefault(instance, PrefillCorrection())
        correction.learn(predicted=request.engine_seconds, observed=at - request.granted_at)


def _is_late(request: Request, seconds: EngineSeconds, now: EngineSeconds) -> bool:
    return now + LATE_BEYOND * seconds > request.deadline
