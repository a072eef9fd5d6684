"""Predicted TTFT with floors: plain early rejection rejects long prompts, since short ones fill the queue up to their
SLO. A tenth of prompt lengths has a floor of `decile_floor` of the overall attainment, a tenant `tenant_floor` of its
max-min fair share; each is *owed* what it lacks (`trackers.attainment`). A request needs `queue + price * prefill <= TTFT
budget` where it was placed, `price = e ** (gap / PATIENCE)`; the gap is how much less its groups are owed than those owed
most. What does not fit there moves to where it does, for at most `held_work_max` times the work that others wait for on
average. PRICE_MAX: beyond, refusing others hardly makes room for those who are owed. Bias: rejects some shorter prompts
for fewer long ones. Limits: floors hold in the long run and within capacity; prompts that exceed their SLO alone have none;
cached prefixes do not lower the price."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf, log
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import SHARE, bounded
from pointsman.contracts.decisions import Settings
from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission.base import Refusal
from pointsman.policies.admission.predicted_ttft import PredictedTtft
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import EngineSeconds, plain_sum
from pointsman.state.trackers.attainment import Attainment, Tally
from pointsman.state.trackers.base import Tracker

PATIENCE = 7.0
"""Requests owed that raise the price by a factor of e."""
PRICE_MAX = 5.0
SPARE = 0.1
"""Share of the SLO up to which a queue is open to all."""


@dataclass(frozen=True)
class PredictedTtftFair(PredictedTtft):
    name: ClassVar[str] = "predicted_ttft_fair"
    absent: ClassVar[Settings] = {**PredictedTtft.absent, "held_work_max": 0.0}

    decile_floor: float = bounded(0.6, SHARE)
    tenant_floor: float = bounded(0.8, SHARE)
    held_work_max: float = 1.0

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (Attainment(decile_share=self.decile_floor, tenant_share=self.tenant_floor), *super().trackers())

    @override
    def in_time(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        if choice.chosen.ttft_with_margin > view.budget:
            late = f"{choice.chosen.instance} would miss the objective"
            choice = _moved(view, f"{late}: first token soonest") or choice
        answer = super().in_time(view, choice)
        if isinstance(answer, Choice):
            price = self.price(view)
            if price > 1.0 and not _fits(view, choice.chosen, price):
                kept = f"{choice.chosen.instance} keeps room for others: first token soonest"
                moved = _moved(view, kept, price, self.held_work_max) if self.held_work_max else None
                return moved or _keep_back(view, choice.chosen, price)
        return answer

    def price(self, view: PoolView) -> float:
        """From 1, which is `predicted_ttft`."""
        seen = view.tracker(Attainment).of(view.request.priority)
        gap = _gap(seen.deciles, seen.deciles[seen.decile(view.request.prompt_tokens)])
        if len(seen.tenants) > 1:
            gap += _gap(seen.tenants.values(), seen.tenants.get(view.request.tenant, Tally()))
        return exp(min(gap / PATIENCE, log(PRICE_MAX)))


def _moved(view: PoolView, reason: str, price: float = 1.0, work_max: float = 1.0) -> Choice | None:
    """To the soonest instance where it fits, if that takes at most `work_max` times the work that others wait for on
    average."""
    spare = SPARE * view.request.slo_ttft
    if view.columns is not None:
        soonest = view.columns.soonest_of_little_work(work_max, price, spare)
    else:
        waiting = sum(candidate.queued_requests for candidate in view.candidates)
        work = plain_sum(candidate.queue_seconds for candidate in view.candidates)
        bound = work_max * work / waiting if waiting else inf
        able = [
            candidate
            for candidate in view.candidates
            if candidate.prefill_seconds <= bound
            and candidate.ttft_with_margin <= view.budget
            and _fits(view, candidate, price)
        ]
        soonest = min(able, key=lambda candidate: candidate.predicted_ttft, default=None)
    return None if soonest is None else Choice(soonest, reason, view.considered)


def _fits(view: PoolView, candidate: CandidateEstimate, price: float) -> bool:
    """Also behind a queue that is open to all."""
    open_to_all = candidate.queue_seconds <= SPARE * view.request.slo_ttft
    return open_to_all or _priced_ttft(candidate, price) <= view.budget


def _gap(groups: Iterable[Tally], own: Tally) -> float:
    return max([group.owed for group in groups]) - own.owed


def _priced_ttft(candidate: CandidateEstimate, price: float) -> EngineSeconds:
    return candidate.ttft_with_margin + (price - 1) * candidate.prefill_seconds


def _keep_back(view: PoolView, candidate: CandidateEstimate, price: float) -> Refusal:
    detail = (
        f"predicted time to first token is {candidate.ttft_with_margin:.2f} s on {candidate.instance}; of the "
        f"{view.budget:.2f} s that are left, room is kept for those who got less than their share: "
        f"{price:.1f} times its prefill of {candidate.prefill_seconds:.2f} s must fit in behind the queue"
    )
    return Refusal(
        RejectReason.HELD_BACK, detail, min(_priced_ttft(candidate, price) - view.budget, candidate.queue_seconds)
    )
