"""Predicted TTFT with floors: plain early rejection rejects long prompts, since short ones fill the queue up to their
SLO. A tenth of prompt lengths has a floor of `decile_floor` of the overall attainment, a tenant `tenant_floor` of its
max-min fair share; each is *owed* what it lacks (`trackers.attainment`). A request needs `queue + price * prefill <= TTFT
budget` where it was placed, `price = e ** (gap / PATIENCE)`; the gap is how much less its groups are owed than those owed
most. PRICE_MAX: beyond, refusing others hardly makes room for those who are owed. Bias: rejects some shorter prompts for
fewer long ones. Limits: floors hold in the long run and within capacity; prompts that exceed their SLO alone have none;
cached prefixes do not lower the price."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf, log
from typing import ClassVar

from typing_extensions import override

from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission.base import Refusal
from pointsman.policies.admission.predicted_ttft import PredictedTtft
from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import EngineSeconds
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

    decile_floor: float = 0.6
    tenant_floor: float = 0.8

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (Attainment(decile_share=self.decile_floor, tenant_share=self.tenant_floor), *super().trackers())

    @override
    def in_time(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        if choice.chosen.predicted_ttft > view.budget:
            choice = _moved(view, choice)
        answer = super().in_time(view, choice)
        if isinstance(answer, Choice):
            price = self.price(view)
            queued = choice.chosen.queue_seconds > SPARE * view.request.slo_ttft
            if queued and price > 1.0 and _priced_ttft(choice.chosen, price) > view.budget:
                return _keep_back(view, choice.chosen, price)
        return answer

    def price(self, view: PoolView) -> float:
        """From 1, which is `predicted_ttft`."""
        seen = view.tracker(Attainment).of(view.request.priority)
        gap = _gap(seen.deciles, seen.deciles[seen.decile(view.request.prompt_tokens)])
        if len(seen.tenants) > 1:
            gap += _gap(seen.tenants.values(), seen.tenants.get(view.request.tenant, Tally()))
        return exp(min(gap / PATIENCE, log(PRICE_MAX)))


def _moved(view: PoolView, choice: Choice) -> Choice:
    """To the soonest instance on time, if that takes no more work than others wait for on average."""
    soonest = view.columns.soonest_of_little_work() if view.columns is not None else _soonest_of_little_work(view)
    if soonest is None:
        return choice
    return Choice(soonest, f"{choice.chosen.instance} would miss the objective: first token soonest", view.weighed)


def _soonest_of_little_work(view: PoolView) -> CandidateEstimate | None:
    waiting = sum(candidate.waiting for candidate in view.candidates)
    work = sum(candidate.queue_seconds for candidate in view.candidates)
    bound = work / waiting if waiting else inf
    able = [
        candidate
        for candidate in view.candidates
        if candidate.predicted_ttft <= view.budget and candidate.prefill_seconds <= bound
    ]
    return min(able, key=lambda candidate: candidate.predicted_ttft, default=None)


def _gap(groups: Iterable[Tally], own: Tally) -> float:
    return max(group.owed for group in groups) - own.owed


def _priced_ttft(candidate: CandidateEstimate, price: float) -> EngineSeconds:
    return candidate.predicted_ttft + (price - 1) * candidate.prefill_seconds


def _keep_back(view: PoolView, candidate: CandidateEstimate, price: float) -> Refusal:
    detail = (
        f"predicted time to first token is {candidate.predicted_ttft:.2f} s on {candidate.instance}; of the "
        f"{view.budget:.2f} s that are left, room is kept for those who got less than their share: "
        f"{price:.1f} times its prefill of {candidate.prefill_seconds:.2f} s must fit in behind the queue"
    )
    return Refusal(
        RejectReason.HELD_BACK, detail, min(_priced_ttft(candidate, price) - view.budget, candidate.queue_seconds)
    )
