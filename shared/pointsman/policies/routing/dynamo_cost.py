"""Least `overlap_weight * prefill blocks + active blocks` with the request there; shared active blocks count once.
Source: NVIDIA Dynamo's KV router; above temperature 0 a softmax over scaled costs draws. Bias: waiting work counts
nearly twice; a weight of 4 to 16 reverses that. Limits: assumes equally fast instances; output blocks do not count."""

from dataclasses import dataclass
from itertools import accumulate
from math import exp
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of
from pointsman.policies.seeded_random import uniform
from pointsman.state.trackers.active_blocks import ActiveBlocks
from pointsman.state.trackers.base import Tracker


@dataclass(frozen=True)
class DynamoCost(RoutingPolicy):
    name: ClassVar[str] = "dynamo_cost"
    rule: ClassVar[str] = "counts blocks to compute and blocks in use, not seconds"

    overlap_weight: float = 1.0
    temperature: float = 0.0
    seed: int = 0

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (ActiveBlocks(),)

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        costs = self._costs(view, candidates)
        if self.temperature > 0:
            chosen = self._by_chance(view, candidates, costs)
            return Choice(chosen, f"by chance, weighted by cost at temperature {self.temperature:g}", candidates)
        least = min(costs)
        equals = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == least]
        return Choice(view.familiar(equals), f"least cost, {least:.1f} blocks", candidates)

    def _costs(self, view: PoolView, candidates: list[CandidateEstimate]) -> list[float]:
        active = view.tracker(ActiveBlocks).blocks_with(view.request.keys, view.eligible)
        weight = self.overlap_weight / view.block_tokens
        return [weight * (o.queued_tokens + o.uncached_tokens) + active[o.instance] for o in candidates]

    def _by_chance(self, view: PoolView, candidates: list[CandidateEstimate], costs: list[float]) -> CandidateEstimate:
        least, most = min(costs), max(costs)
        spread = (most - least or 1.0) * self.temperature
        heights = list(accumulate(exp((least - cost) / spread) for cost in costs))
        mark = uniform(self.seed, view.request.id) * heights[-1]
        return next(
            (candidate for candidate, top in zip(candidates, heights, strict=True) if mark < top), candidates[-1]
        )
