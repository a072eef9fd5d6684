"""Exploits a hit of more than half of the prompt (longest, then least load of the last `window_s`), else explores:
least sum of windowed load, eviction and prefill. Source: Preble (ICLR'25), E2, with a full cache assumed: eviction =
hit share * prefill. Bias: balances minutes, overlooks the moment. Limits: decode is not part of the load; corrections
are left to rebalancing."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import POSITIVE, SHARE, bounded
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of
from pointsman.primitives import EngineSeconds
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.windowed_load import WindowedLoad


@dataclass(frozen=True)
class Preble(RoutingPolicy):
    name: ClassVar[str] = "preble"
    rule: ClassVar[str] = "stays with the longest cached prefix, and balances over minutes"

    window_s: float = bounded(180.0, POSITIVE)
    exploit_share: float = bounded(0.5, SHARE)

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (WindowedLoad(self.window_s),)

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        load = view.tracker(WindowedLoad)
        longest = max(candidate.cached_tokens for candidate in candidates)
        if longest > self.exploit_share * view.request.prompt_tokens:
            costs = [(load.seconds(o.instance), o) for o in candidates if o.cached_tokens == longest]
            return Choice(_cheapest(view, costs), f"exploit: {longest} tokens of the prompt are cached", candidates)
        costs = [(_exploration_seconds(load, candidate), candidate) for candidate in candidates]
        return Choice(_cheapest(view, costs), "explore: least windowed load, eviction and prefill", candidates)


def _exploration_seconds(load: WindowedLoad, candidate: CandidateEstimate) -> EngineSeconds:
    evicting = load.hit_share(candidate.instance) * candidate.work_seconds
    return load.seconds(candidate.instance) + evicting + candidate.work_seconds


def _cheapest(view: PoolView, costs: list[tuple[EngineSeconds, CandidateEstimate]]) -> CandidateEstimate:
    least = min(cost for cost, _ in costs)
    return view.familiar([candidate for cost, candidate in costs if cost == least])
