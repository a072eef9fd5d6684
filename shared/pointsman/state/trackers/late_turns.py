"""Whose first token can still be on time, and when a request that cannot has its turn all the same.

Serving late requests last keeps the others on time but would starve the late ones past saturation; letting them age
into the front would make everyone late. So they get a share of the work: each prefill second granted to a request
that was on time earns the line `late_share` seconds of credit, and while the credit is positive the oldest late
request goes first. A grant of a late one costs its own prefill seconds. The line saves up one second at most and owes
one prefill at most, so quiet times neither pay for a burst nor are paid for later.

A late request therefore waits, while others keep the line busy, no longer than they need for (1 + 1/late_share)
times the prefill seconds of the late ones before it and its own.

A request counts as late only if it would be late by more than predictions usually err, a tenth of the time until its
first token. One that is late by less may well be on time if it keeps its turn, and is late for certain if it loses it.

The one who picks and the one who books must agree on what is late, whatever else State learns about latency; so this
memory keeps its own pace of each instance: seconds that prefills took over seconds that the cost model said, fading.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override

from pointsman.primitives import InstanceId, Seconds
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import InstanceQueue, Request

CREDIT_SECONDS_MAX = 1.0
LATE_BEYOND = 0.9
"""A request is late if so much of the time predicted until its first token is too long already."""

PACE_FADE = 0.95
PACE_PRIOR_SECONDS = 2.0
PACE_MIN, PACE_MAX = 0.25, 4.0


@dataclass(slots=True)
class Pace:
    """How long prefills take on one instance, in units of its cost model."""

    observed: Seconds = PACE_PRIOR_SECONDS
    predicted: Seconds = PACE_PRIOR_SECONDS

    @property
    def factor(self) -> float:
        return min(PACE_MAX, max(PACE_MIN, self.observed / self.predicted))

    def learn(self, *, predicted: Seconds, observed: Seconds) -> None:
        self.observed = PACE_FADE * self.observed + min(observed, 2 * PACE_MAX * predicted)
        self.predicted = PACE_FADE * self.predicted + predicted


class LateCredit(Tracker):
    """One credit and one pace an instance."""

    def __init__(self, *, late_share: float) -> None:
        """`late_share`: 0 never lets a late request go before one that is on time."""
        self._late_share = late_share
        self._credits: dict[InstanceId, Seconds] = {}
        self._paces: dict[InstanceId, Pace] = {}

    def split(
        self, requests: Iterable[Request], line: InstanceQueue, now: Seconds
    ) -> tuple[list[Request], list[Request]]:
        """Those that may be on time if they are granted now, and those that are late even then; order is kept."""
        before = line.engine_seconds_left(now)
        on_time: list[Request] = []
        late: list[Request] = []
        factor = 0.0
        for request in requests:
            factor = factor or self.factor(request.instance)
            seconds = (before + request.prefill_seconds) * factor
            (late if _is_late(request, seconds, now) else on_time).append(request)
        return on_time, late

    def due(self, instance: InstanceId) -> bool:
        """Whether a late request goes before those that are on time."""
        return self._credits.get(instance, 0.0) > 0

    def factor(self, instance: InstanceId) -> float:
        """Seconds that a prefill takes on this instance for each that its cost model says."""
        pace = self._paces.get(instance)
        return pace.factor if pace else 1.0

    @override
    def granted(self, request: Request, at: Seconds) -> None:
        credit = self._credits.get(request.instance, 0.0)
        if _is_late(request, request.engine_seconds * self.factor(request.instance), at):
            credit = max(0.0, credit) - request.prefill_seconds
        else:
            credit = min(CREDIT_SECONDS_MAX, credit + self._late_share * request.prefill_seconds)
        self._credits[request.instance] = credit

    @override
    def handed_over(self, request: Request, at: Seconds) -> None:
        self._learn(request.prefilled_by, request, at)

    @override
    def first_token(self, request: Request, at: Seconds) -> None:
        if not request.prefilled_by:
            self._learn(request.instance, request, at)

    @override
    def joined(self, instance: InstanceId, at: Seconds) -> None:
        self.left(instance, at)

    @override
    def left(self, instance: InstanceId, at: Seconds) -> None:
        self._credits.pop(instance, None)
        self._paces.pop(instance, None)

    def _learn(self, instance: InstanceId, request: Request, at: Seconds) -> None:
        pace = self._paces.setdefault(instance, Pace())
        pace.learn(predicted=request.engine_seconds, observed=at - request.granted_at)


def _is_late(request: Request, seconds: Seconds, now: Seconds) -> bool:
    """Whether a first token predicted in so many seconds would come too late, beyond doubt."""
    return now + LATE_BEYOND * seconds > request.deadline
