"""Preble: exploit a long cached prefix, else explore where the work costs least.

Source: Preble (ICLR'25), E2. Exploit: where more than half of the prompt is cached, the holder of the longest hit, then
the least load of the last `window_s` seconds. Explore: the least sum of windowed load L, eviction cost M and own
prefill P. Here a full cache is assumed, so that each computed token evicts one: M = hit share * P.

Bias: finished work in the window weighs like waiting work: it balances minutes and overlooks the moment. Limits: decode
is not part of L; the paper's later corrections are left to rebalancing.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of
from pointsman.primitives import Seconds
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.windowed_load import WindowedLoad


@dataclass(frozen=True)
class Preble(RoutingPolicy):
    """`exploit_share`: the share of the prompt above which a hit decides alone."""

    name: ClassVar[str] = "preble"

    window_s: float = 180.0
    exploit_share: float = 0.5

    def __post_init__(self) -> None:
        if self.window_s <= 0:
            msg = f"window_s must be above 0, not {self.window_s}"
            raise ValueError(msg)

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


def _exploration_seconds(load: WindowedLoad, candidate: CandidateEstimate) -> Seconds:
    evicting = load.hit_share(candidate.instance) * candidate.work_seconds
    return load.seconds(candidate.instance) + evicting + candidate.work_seconds


def _cheapest(view: PoolView, costs: list[tuple[Seconds, CandidateEstimate]]) -> CandidateEstimate:
    least = min(cost for cost, _ in costs)
    return view.familiar([candidate for cost, candidate in costs if cost == least])
