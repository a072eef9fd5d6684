"""Rejects requests that cannot meet their SLO where they were placed. Source: Mooncake (FAST'25), section 4.1. Compares
the TTFT budget with corrected queue plus prefill, and the TPOT SLO with recent seconds per token. A request that would
be late even alone, or on idle instances, is no matter of load: it is admitted as best effort (`state.best_effort`), where
its first token is soonest. One with a long prefill does not overtake such requests: it must be on time behind those that
wait there too, since both hold an engine for seconds. Bias: prompts that just meet their SLO alone are rejected first.
Limit: uses the present decode load."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import SHARE, bounded
from pointsman.contracts.decisions import Settings
from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decode_load import DecodeLoad

DECODE_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class PredictedTtft(AdmissionPolicy):
    """`hard_limit`: reject also what would be late even alone. `best_effort_wait_max`: without it, reject that if its
    prefill would begin later; 0: never. `overtaking_max`: longest prefill that overtakes best-effort requests, over the TTFT
    budget. `tpot_check`: off, since prefills between decode steps slow them beyond what
    their own load explains."""

    name: ClassVar[str] = "predicted_ttft"
    absent: ClassVar[Settings] = {"hard_limit": True, "best_effort_wait_max": 300.0, "overtaking_max": 1.0}

    hard_limit: bool = False
    best_effort_wait_max: EngineSeconds = 0.0
    overtaking_max: float = bounded(0.25, SHARE)
    tpot_check: bool = False

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (DecodeLoad(),) if self.tpot_check else ()

    @override
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        if self.hard_limit:
            return self.in_time(view, choice)
        if is_late_alone(view):
            return best_effort(view, self.best_effort_wait_max)
        answer = self.in_time(view, choice)
        if isinstance(answer, Choice) and answer.chosen.prefill_seconds > self.overtaking_max * view.budget:
            answer = _behind_best_effort(view, answer)
        if isinstance(answer, Refusal) and (holders := view.on_time_by_hits()):
            return best_effort(view, self.best_effort_wait_max, holders)
        return answer

    def in_time(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        """Of a request that could meet its TTFT SLO alone, or with a hard limit."""
        if choice.chosen.ttft_with_margin > view.budget:
            return too_late(view, choice.chosen)
        if self.tpot_check and (tpot := excessive_tpot(view, choice.chosen)):
            return too_slow(view, choice.chosen, tpot)
        return choice


def _behind_best_effort(view: PoolView, choice: Choice) -> Choice | Refusal:
    behind = view.behind_best_effort(choice.chosen)
    if behind.ttft_with_margin <= view.budget:
        return choice
    soonest = min(view.candidates, key=lambda candidate: view.behind_best_effort(candidate).predicted_ttft)
    if view.behind_best_effort(soonest).ttft_with_margin > view.budget:
        return too_late(view, behind)
    reason = f"best-effort requests wait on {choice.chosen.instance}: first token soonest behind such"
    return Choice(soonest, reason, choice.considered)


def is_late_alone(view: PoolView) -> bool:
    """Whether it would miss its TTFT SLO on every instance with an empty queue. Not if the SLO has passed already, but for a
    further attempt of what was so: it has waited for its turn."""
    return view.was_best_effort or (view.budget > 0 and view.is_late_alone())


def best_effort(
    view: PoolView, wait_max: EngineSeconds, among: Collection[InstanceId] | None = None
) -> Choice | Refusal:
    candidates = [view.best_effort_candidate(instance) for instance in among or view.eligible]
    soonest = min(candidates, key=lambda candidate: (candidate.predicted_ttft, -candidate.cached_tokens))
    if wait_max and soonest.queue_seconds > wait_max:
        detail = (
            f"the prompt alone takes {soonest.prefill_seconds:.2f} s, more than its objective of "
            f"{view.request.slo_ttft:g} s, and its prefill would begin in {soonest.queue_seconds:.0f} s; the limit for "
            f"such requests is {wait_max:g} s (best_effort_wait_max)"
        )
        return Refusal(RejectReason.BEST_EFFORT_FULL, detail, soonest.queue_seconds - wait_max)
    reason = "late even alone: as best effort where its first token is soonest"
    return Choice(soonest, reason, candidates, best_effort=True)


def excessive_tpot(view: PoolView, candidate: CandidateEstimate) -> EngineSeconds | None:
    """Expected seconds per token if they exceed the SLO, else None."""
    if view.request.max_output_tokens <= 1:
        return None
    tpot = view.tracker(DecodeLoad).predicted_tpot(candidate.instance, view.request, view.now)
    return tpot if tpot is not None and tpot > view.request.slo_tpot else None


def too_late(view: PoolView, candidate: CandidateEstimate) -> Refusal:
    detail = (
        f"predicted time to first token is {candidate.ttft_with_margin:.2f} s on {candidate.instance}, "
        f"{max(0.0, view.budget):.2f} s are left of the objective of {view.request.slo_ttft:g} s"
    )
    alone = min(candidate.prefill_seconds, view.least_prefill)
    if alone > view.request.slo_ttft:
        return Refusal(RejectReason.SLO_UNREACHABLE, f"{detail}; the prompt alone takes longer", alone)
    return Refusal(
        RejectReason.SLO_TTFT, detail, max(0.0, min(candidate.ttft_with_margin - view.budget, candidate.queue_seconds))
    )


def too_slow(view: PoolView, candidate: CandidateEstimate, tpot: EngineSeconds) -> Refusal:
    detail = (
        f"predicted time per output token is {tpot * 1000:.0f} ms on {candidate.instance}, "
        f"the objective is {view.request.slo_tpot * 1000:g} ms"
    )
    return Refusal(RejectReason.SLO_TPOT, detail, DECODE_RETRY_SECONDS)
