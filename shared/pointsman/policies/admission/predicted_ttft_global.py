"""Rejects only what no instance can serve on time; else moves the request to the soonest one. Source: Mooncake
(FAST'25), section 4.1. Bias: near saturation it trades locality for one more request on time. With stale load, routers
herd."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.admission.base import Refusal
from pointsman.policies.admission.predicted_ttft import PredictedTtft, excessive_tpot, too_late, too_slow
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice


@dataclass(frozen=True)
class PredictedTtftGlobal(PredictedTtft):
    name: ClassVar[str] = "predicted_ttft_global"

    @override
    def in_time(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        """The choice if it meets both SLOs, else the soonest candidate that does, else a refusal."""

        def meets(candidate: CandidateEstimate) -> bool:
            late = candidate.ttft_with_margin > view.budget
            return not late and not (self.tpot_check and excessive_tpot(view, candidate))

        if meets(choice.chosen):
            return choice
        able = [candidate for candidate in view.candidates if meets(candidate)]
        if able:
            reason = f"{choice.chosen.instance} would miss the objective: first token soonest"
            return Choice(_soonest(able), reason, view.candidates)
        soonest = _soonest(view.candidates)
        on_time = soonest.ttft_with_margin <= view.budget
        tpot = excessive_tpot(view, soonest) if self.tpot_check and on_time else None
        return too_slow(view, soonest, tpot) if tpot else too_late(view, soonest)


def _soonest(candidates: list[CandidateEstimate]) -> CandidateEstimate:
    return min(candidates, key=lambda candidate: (candidate.predicted_ttft, -candidate.cached_tokens))
