"""`predicted_ttft_fair` of November 2026. Predicted TTFT with floors: plain early rejection rejects long prompts, since short ones fill the queue up to their
SLO. A tenth of prompt lengths has a floor of `decile_floor` of the overall attainment, a tenant `tenant_floor` of its
max-min fair share; each is *owed* what it lacks (`trackers.attainment`), aimed `margin` too high. Behind a queue of
more than `spare` of its SLO, a request needs `queue + price * prefill <= TTFT budget`, `price = e ** (gap / patience)`;
the gap is how much less its groups are owed than those owed most. Bias: rejects some shorter prompts for fewer long
ones. Limits: floors hold in the long run; prompts that exceed their SLO alone have none; cached prefixes do not lower
the price."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import POSITIVE, bounded
from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.admission.predicted_ttft import excessive_tpot, too_late, too_slow
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import EngineSeconds
from pointsman.state.trackers.attainment import Attainment, Tally
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decode_load import DecodeLoad


@dataclass(frozen=True)
class PredictedTtftFair1(AdmissionPolicy):
    """`patience`: requests owed that raise the price by a factor of e. `spare`: share of the SLO."""

    name: ClassVar[str] = "predicted_ttft_fair"

    decile_floor: float = 0.6
    tenant_floor: float = 0.8
    margin: float = 0.07
    patience: float = bounded(7.0, POSITIVE)
    spare: float = 0.1
    tpot_check: bool = False

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        aim = 1 + self.margin
        seen = Attainment(decile_share=self.decile_floor * aim, tenant_share=self.tenant_floor * aim)
        return (seen, DecodeLoad()) if self.tpot_check else (seen,)

    @override
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        admitted = choice_or_soonest(view, choice, check_tpot=self.tpot_check)
        price = self.price(view)
        if isinstance(admitted, Refusal) or price <= 1.0:
            return admitted
        spare = self.spare * view.request.slo_ttft
        fair = choice_or_soonest(view, choice, check_tpot=self.tpot_check, price=price, spare=spare)
        return fair if isinstance(fair, Choice) else _keep_back(view, admitted.chosen, price)

    def price(self, view: PoolView) -> float:
        """At least 1, which is `predicted_ttft_global`."""
        seen = view.tracker(Attainment).of(view.request.priority)
        gap = _gap(seen.deciles, seen.deciles[seen.decile(view.request.prompt_tokens)])
        if len(seen.tenants) > 1:
            gap += _gap(seen.tenants.values(), seen.tenants.get(view.request.tenant, Tally()))
        return exp(gap / self.patience)


def _gap(groups: Iterable[Tally], own: Tally) -> float:
    return max(group.owed for group in groups) - own.owed


def _keep_back(view: PoolView, candidate: CandidateEstimate, price: float) -> Refusal:
    detail = (
        f"predicted time to first token is {candidate.predicted_ttft:.2f} s on {candidate.instance}; of the "
        f"{view.budget:.2f} s that are left, room is kept for those who got less than their share: "
        f"behind a queue, {price:.1f} times its prefill of {candidate.prefill_seconds:.2f} s must fit in"
    )
    return Refusal(
        RejectReason.HELD_BACK, detail, min(priced_ttft(candidate, price) - view.budget, candidate.queue_seconds)
    )


def choice_or_soonest(
    view: PoolView, choice: Choice, *, check_tpot: bool, price: float = 1.0, spare: EngineSeconds = 0.0
) -> Choice | Refusal:
    """The choice if it meets both SLOs, else the soonest candidate that does, else a refusal. `price`: multiple of
    its prefill that must fit behind a queue of more than `spare`."""

    def meets(candidate: CandidateEstimate) -> bool:
        return (
            candidate.predicted_ttft <= view.budget
            and (candidate.queue_seconds <= spare or priced_ttft(candidate, price) <= view.budget)
            and not (check_tpot and excessive_tpot(view, candidate))
        )

    if meets(choice.chosen):
        return choice
    able = [candidate for candidate in view.candidates if meets(candidate)]
    if able:
        soonest = _soonest(able, price)
        return Choice(
            soonest, f"{choice.chosen.instance} would miss the objective: first token soonest", view.candidates
        )
    soonest = _soonest(view.candidates)
    tpot = excessive_tpot(view, soonest) if check_tpot and soonest.predicted_ttft <= view.budget else None
    return too_slow(view, soonest, tpot) if tpot else too_late(view, soonest)


def priced_ttft(candidate: CandidateEstimate, price: float) -> EngineSeconds:
    return candidate.queue_seconds + price * candidate.prefill_seconds


def _soonest(candidates: list[CandidateEstimate], price: float = 1.0) -> CandidateEstimate:
    return min(candidates, key=lambda candidate: (priced_ttft(candidate, price), -candidate.cached_tokens))
