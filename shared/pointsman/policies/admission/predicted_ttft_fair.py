"""Predicted TTFT with floors: nobody pays alone for the others being on time.

Refusing what is predicted late means refusing long prompts: past saturation short ones are let in until the queue is
as long as the objective allows *them*, and then no long one ever fits. Letting long ones in although they are late
helps nobody. What helps is queues that stay short enough for them, so this policy keeps back those who are better off,
and of those the ones whose refusal frees most.

*Groups* are the tenths of prompts by length and the tenants (`trackers.attainment`). Each should have a share of its
requests on time, and is *owed* what it lacks of that, counted from outcome to outcome:

- a tenth: `decile_floor` of the overall attainment;
- a tenant: `tenant_floor` of its fair share. Fair is, of all prompt tokens on time, as many as it asked for, but no
  more than any other has who asked for more than there is. Where that is all it asked for, the floor is that share of
  its requests; where it is half, half of that.

Both are aimed at `margin` too high: it takes a debt to move anything, and debt is attainment not had.

A request pays a *price*: behind a queue of more than `spare` of its objective it must fit in `price` times, that is
`queue + price * prefill <= what is left of its objective`. The price is `e ** (gap / patience)`; the gap is how much
less its tenth is owed than the tenth that is owed most, plus the same for its tenant. Who is owed most pays 1, and then
this is `predicted_ttft_global`.

So a prompt without work to do passes at any price, since refusing it frees nothing; the next longer ones make room
first, which costs the fewest requests. Debts settle where the floors are just kept: while they grow, so does the price,
and shorter queues let those in who are owed. In "most on time, floors kept" they are the multipliers of the floors. An
instance with less of a queue takes everyone who meets the objective there, so no engine falls idle for a floor.

Bias: some shorter prompts are refused in favour of fewer long ones, as the floors ask; `docs/research/policies.md` has what it
costs. Limits: floors hold as far as capacity allows and in the long run, not over every minute; a debt is lasting, so
a run of a few hundred requests ends somewhat below what it was aimed at; prompts that alone take longer than their
objective have no floor, and those that take nearly as long need an instance that is nearly idle. What a prompt leaves in the cache for others does
not count in its price: where a pool starts cold in an overload, refusing the uncached keeps it cold for longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import ClassVar

from typing_extensions import override

from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.admission.predicted_ttft_global import choice_or_soonest, priced_ttft
from pointsman.policies.pool_view import PoolView, ScoredInstance
from pointsman.policies.routing.base import Choice
from pointsman.state.trackers.attainment import Attainment, Tally
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decode_load import DecodeLoad


@dataclass(frozen=True)
class PredictedTtftFair(AdmissionPolicy):
    """`patience`: requests owed that raise the price by a factor of e. With little of it the policy reacts fast and swings;
    with much it is smooth, and stays further below its aim. `spare`: share of the objective up to which a queue is open
    to all. It keeps engines busy, and must leave those who are owed enough of the objective for their prefill."""

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
        """How many times its prefill this request must fit in: 1 where nobody is owed more than its own groups."""
        seen = view.tracker(Attainment)
        gap = _gap(seen.deciles, seen.deciles[seen.decile(view.request.prompt_tokens)])
        if len(seen.tenants) > 1:
            gap += _gap(seen.tenants.values(), seen.tenants.get(view.request.tenant, Tally()))
        return exp(gap / self.patience)


def _gap(groups: Iterable[Tally], own: Tally) -> float:
    return max(group.owed for group in groups) - own.owed


def _keep_back(view: PoolView, candidate: ScoredInstance, price: float) -> Refusal:
    detail = (
        f"predicted time to first token is {candidate.predicted_ttft:.2f} s on {candidate.instance}; of the "
        f"{view.budget:.2f} s that are left, room is kept for those who got less than their share: "
        f"behind a queue, {price:.1f} times its prefill of {candidate.prefill_seconds:.2f} s must fit in"
    )
    return Refusal(
        RejectReason.HELD_BACK, detail, min(priced_ttft(candidate, price) - view.budget, candidate.queue_seconds)
    )
