"""Which candidates of a decision are listed; the others are a number and a range."""

from dataclasses import dataclass

from pointsman.primitives import EngineSeconds
from pointsman_cli.explain.values import DecisionRecord, WeighedCandidate
from pointsman_cli.formatting import seconds

LISTED_MAX = 12
"""Of more, those that the log does not name are not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCandidates:
    """Not listed. `ttft_min`, `ttft_max`: predicted, computed again from what the leader knew."""

    weighed: bool
    count: int
    ttft_min: EngineSeconds
    ttft_max: EngineSeconds

    @property
    def sentence(self) -> str:
        what = f"{self.count:,} other{'s' if self.count > 1 else ''}{'' if self.weighed else ', not weighed'}"
        span = seconds(self.ttft_min) + (f" to {seconds(self.ttft_max)}" if self.count > 1 else "")
        return f"and {what}: first token in {span}"


def listed(decision: DecisionRecord) -> list[WeighedCandidate]:
    if len(decision.candidates) <= LISTED_MAX:
        return decision.candidates
    return [c for c in decision.candidates if c.recorded or c.chosen]


def others(decision: DecisionRecord) -> list[OtherCandidates]:
    shown = {c.instance for c in listed(decision)}
    left = [c for c in decision.candidates if c.instance not in shown]
    return [
        OtherCandidates(weighed=weighed, count=len(ttfts), ttft_min=min(ttfts), ttft_max=max(ttfts))
        for weighed in (True, False)
        if (ttfts := [c.predicted_ttft for c in left if c.weighed is weighed])
    ]
