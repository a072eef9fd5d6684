"""Which candidates of a decision are listed; the others are a number and a range."""

from dataclasses import dataclass, fields

from pointsman.primitives import EngineSeconds
from pointsman_cli.explain.values import DecisionRecord, WeighedCandidate
from pointsman_cli.formatting import seconds

LISTED_MAX = 12
"""Of more, those that the log does not name are not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCandidates:
    """Not listed. `ttft_min`, `ttft_max`: predicted, computed again from what the leader knew. `sentence`: all this in words."""

    weighed: bool
    count: int
    ttft_min: EngineSeconds
    ttft_max: EngineSeconds
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDecision(DecisionRecord):
    """As `pointsman explain --json` and the console show it: `candidates` are those listed."""

    others: list[OtherCandidates]


def as_listed(decision: DecisionRecord) -> ListedDecision:
    known = {field.name: getattr(decision, field.name) for field in fields(decision)}
    return ListedDecision(**known | {"candidates": listed(decision), "others": others(decision)})


def listed(decision: DecisionRecord) -> list[WeighedCandidate]:
    if len(decision.candidates) <= LISTED_MAX:
        return decision.candidates
    return [c for c in decision.candidates if c.recorded or c.chosen]


def others(decision: DecisionRecord) -> list[OtherCandidates]:
    shown = {c.instance for c in listed(decision)}
    left = [c for c in decision.candidates if c.instance not in shown]
    return [
        _others(ttfts, weighed=weighed)
        for weighed in (True, False)
        if (ttfts := [c.predicted_ttft for c in left if c.weighed is weighed])
    ]


def _others(ttfts: list[EngineSeconds], *, weighed: bool) -> OtherCandidates:
    count, least, most = len(ttfts), min(ttfts), max(ttfts)
    what = f"{count:,} other{'s' if count > 1 else ''}{'' if weighed else ', not weighed'}"
    span = seconds(least) + (f" to {seconds(most)}" if count > 1 else "")
    sentence = f"and {what}: first token in {span}"
    return OtherCandidates(weighed=weighed, count=count, ttft_min=least, ttft_max=most, sentence=sentence)
