"""Rejects only what no instance can serve on time; else moves the request to the soonest one. Source: Mooncake
(FAST'25), section 7. Bias: near saturation it trades locality for one more request on time. With stale load, routers
herd."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.admission.predicted_ttft import best_effort, excessive_tpot, is_late_alone, too_late, too_slow
from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import EngineSeconds
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decode_load import DecodeLoad


@dataclass(frozen=True)
class PredictedTtftGlobal(AdmissionPolicy):
    name: ClassVar[str] = "predicted_ttft_global"

    hard_limit: bool = False
    tpot_check: bool = False

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (DecodeLoad(),) if self.tpot_check else ()

    @override
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        if not self.hard_limit and is_late_alone(view):
            return best_effort(view, choice)
        return choice_or_soonest(view, choice, check_tpot=self.tpot_check)


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
