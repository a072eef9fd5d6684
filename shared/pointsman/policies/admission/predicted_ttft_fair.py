"""Predicted TTFT with floors: nobody pays alone for the others being on time.

Refusing what is predicted late means refusing long prompts: past saturation short ones are let in until the queue is
as long as the objective allows *them*, and then no long one ever fits. Letting long ones in although they are late
helps nobody. What helps is queues that stay short enough for them, so this policy keeps back those who are better
off.

*Groups* are the tenths of prompts by length and the tenants (`memories.attainment`). Each group has a ratio and a
floor:

- a tenth: its attainment over the overall one; floor `decile_floor`;
- a tenant: its prompt tokens served on time, over its fair share of all that were: as many as it asked for, at most
  the n-th part of the n tenants; floor `tenant_floor`. Who asks for more than the n-th part is owed only that.

A group's *need* is 0 while its ratio is `margin` or more above its floor, 1 at the floor and below, and straight
between. A request is *held back* by the largest need among tenths (or tenants) less the need of its own: it must then
be predicted within `1 - reserve * held_back` of what is left of its TTFT objective. A group in need so finds shorter
queues until its ratio has risen into the margin. It is first of all the next longer prompts that make room, which
costs the fewest requests: they free the most work each, and the bar counts their own prefill. An instance without a
queue takes everyone, so no engine falls idle for a floor.

Otherwise it is `predicted_ttft_global`: what meets its objective on the chosen instance or on the soonest passes.

Bias: some shorter prompts are refused in favour of fewer long ones, as the operator's floors ask; overall attainment
falls accordingly (at 1.6 times the capacity and lengths that spread widely from 0.86 to 0.75). Limits: floors hold as
far as capacity allows, over a window of outcomes, and not for prompts that alone take longer than their objective;
groups with fewer than `outcomes_min` outcomes in the window have no need.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.admission.predicted_ttft_global import choice_or_soonest
from pointsman.policies.pool_view import Option, PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import Seconds
from pointsman.state.memories.attainment import Attainment, Tally
from pointsman.state.memories.base import Memory
from pointsman.state.memories.decode_load import DecodeLoad

OUTCOMES_TO_BEGIN = 50
"""Outcomes before which nobody is held back."""


@dataclass(frozen=True)
class PredictedTtftFair(AdmissionPolicy):
    """`reserve`: the share of the TTFT objective that the better off must leave free at the greatest need."""

    name: ClassVar[str] = "predicted_ttft_fair"

    decile_floor: float = 0.6
    tenant_floor: float = 0.8
    margin: float = 0.1
    reserve: float = 0.9
    outcomes_min: int = 10
    tpot_check: bool = False

    @override
    def memories(self) -> tuple[Memory, ...]:
        return (Attainment(), DecodeLoad()) if self.tpot_check else (Attainment(),)

    @override
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        admitted = choice_or_soonest(view, choice, check_tpot=self.tpot_check)
        held_back = self.held_back(view)
        if isinstance(admitted, Refusal) or not held_back:
            return admitted
        ttft_max = view.budget * (1 - self.reserve * held_back)
        fair = choice_or_soonest(view, choice, check_tpot=self.tpot_check, ttft_max=ttft_max)
        return fair if isinstance(fair, Choice) else _keep_back(admitted.option, ttft_max)

    def held_back(self, view: PoolView) -> float:
        """From 0, nobody needs more than this request's own groups, to 1."""
        seen = view.recall(Attainment)
        if seen.overall.requests < OUTCOMES_TO_BEGIN:
            return 0.0
        request = view.request
        own_decile = self._decile_need(seen.deciles[seen.decile(request.prompt_tokens)], seen.overall)
        greatest_decile = max(self._decile_need(tally, seen.overall) for tally in seen.deciles)
        return max(greatest_decile - own_decile, self._held_back_for_tenants(seen, seen.tenants.get(request.tenant)))

    def _held_back_for_tenants(self, seen: Attainment, own: Tally | None) -> float:
        if len(seen.tenants) < 2 or own is None:
            return 0.0
        part = seen.overall.tokens_on_time / len(seen.tenants)
        greatest = max(self._tenant_need(tally, part) for tally in seen.tenants.values())
        return greatest - self._tenant_need(own, part)

    def _decile_need(self, tally: Tally, overall: Tally) -> float:
        if tally.requests < self.outcomes_min or not overall.on_time:
            return 0.0
        return self._need(tally.attainment / overall.attainment, self.decile_floor)

    def _tenant_need(self, tally: Tally, part: float) -> float:
        fair_share = min(tally.tokens, part)
        if tally.requests < self.outcomes_min or not fair_share:
            return 0.0
        return self._need(tally.tokens_on_time / fair_share, self.tenant_floor)

    def _need(self, ratio: float, floor: float) -> float:
        return min(1.0, max(0.0, (floor + self.margin - ratio) / self.margin))


def _keep_back(option: Option, ttft_max: Seconds) -> Refusal:
    detail = (
        f"predicted time to first token is {option.predicted_ttft:.2f} s on {option.instance}; what exceeds "
        f"{ttft_max:.2f} s is kept for those who got less than their share"
    )
    return Refusal("held_back", detail, min(option.predicted_ttft - ttft_max, option.queue_seconds))
