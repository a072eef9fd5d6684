"""Predicted TTFT with floors: no group of requests pays alone for the others being on time.

Rejecting what is predicted late rejects long prompts: past saturation, short ones are admitted until the queue is as
long as *their* SLO allows, and then no long one fits. This policy keeps queues short enough for them by rejecting from
the groups that are better off, first those requests whose rejection frees most.

*Groups* are the tenths of prompts by length and the tenants (`trackers.attainment`). Each has a floor of requests on
time and is *owed* what it lacks: a tenth `decile_floor` of the overall attainment, a tenant `tenant_floor` of its max-
min fair share of the prompt tokens on time. Both are aimed at `margin` too high, since only a debt moves anything.

A request pays a *price*: behind a queue of more than `spare` of its SLO it needs `queue + price * prefill <= TTFT
budget left`. The price is `e ** (gap / patience)`; the gap is how much less its tenth is owed than the tenth that is
owed most, plus the same for its tenant. The group that is owed most pays 1, which is `predicted_ttft_global`. Debts
settle where the floors are just kept; they are the multipliers of the floors in "most on time, floors kept". A short
queue admits everything on time, so no engine is idle for a floor.

Bias: some shorter prompts are rejected in favour of fewer long ones (`docs/research/policies.md` has the cost). Limits:
floors hold in the long run and as far as capacity allows; prompts that alone exceed their SLO have no floor; what a
prompt leaves in the cache does not lower its price, so a pool that starts cold in an overload stays cold longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import ClassVar

from typing_extensions import override

from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.admission.predicted_ttft_global import choice_or_soonest, priced_ttft
from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice
from pointsman.state.trackers.attainment import Attainment, Tally
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decode_load import DecodeLoad


@dataclass(frozen=True)
class PredictedTtftFair(AdmissionPolicy):
    """`patience`: requests owed that raise the price by a factor of e; less reacts faster and swings. `spare`: share of
    the SLO up to which a queue is open to all; it keeps engines busy."""

    name: ClassVar[str] = "predicted_ttft_fair"

    decile_floor: float = 0.6
    tenant_floor: float = 0.8
    margin: float = 0.07
    patience: float = 7.0
    spare: float = 0.1
    tpot_check: bool = False

    def __post_init__(self) -> None:
        if not self.patience > 0:
            msg = f"patience must be positive, not {self.patience}"
            raise ValueError(msg)

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
        """How many times its prefill this request must fit in: 1 where no group is owed more than its own."""
        seen = view.tracker(Attainment)
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
