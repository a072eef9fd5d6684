"""`pointsman` of November 2026: least growth of squared queues, unless that makes others miss their SLO (`docs/research/policies.md`).

- Cost: least `(queue + prefill / 2) * prefill` (MaxWeight: Tassiulas and Ephremides 1992; Wang et al. 2013).
- Freshness: with a stale view only `stale_candidates` ring owners and a holder of the prompt count: no herding.
- Late: if no instance can meet the SLO, the longest queue among holders: on-time requests avoid it.
- Rescue: if all holders have queues above `calm_queue` SLOs, compute the prefix again where that is cheapest.
- Calm: below `calm_queue` SLOs, stay with the cheapest instance unless leaving it displaces few requests.
- Dear: a request that would displace more than `displaced_max` others counts as late. Displaced: extra work / mean work
  * (queue / SLO) ** `pressure_power`.

Bias: late requests wait longest (about `late_queue_max_s`). Limits: relies on the predicted TTFT; no look-ahead.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.hash_ring import home_among, ring_candidates
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of
from pointsman.primitives import plain_sum


@dataclass(frozen=True)
class Pointsman1(RoutingPolicy):
    name: ClassVar[str] = "pointsman"

    displaced_max: float = 1.0
    pressure_power: float = 3.0
    calm_queue: float = 1.5
    calm_displaced_max: float = 0.1
    calm_pressure_power: float = 5.0
    late_hit_share: float = 0.5
    late_queue_max_s: float = 600.0
    stale_after_s: float = 0.25
    stale_candidates: int = 3
    stale_hit_share: float = 0.5

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        considered = self._trusted(view, candidates) if view.staleness > self.stale_after_s else candidates
        if min(candidate.prefill_seconds for candidate in considered) > view.budget:
            return self._cheapest(view, considered, considered)
        punctual = [candidate for candidate in considered if candidate.predicted_ttft <= view.budget]
        if not punctual:
            late = self._late(view, considered, "late everywhere")
            return self._rescue(view, considered, late) or late
        detour = self._cheapest(view, punctual, considered)
        if considered is candidates and max(map(_queue, candidates)) <= self.calm_queue * view.budget:
            direct = self._cheapest(view, candidates, candidates)
            if self._displaced(detour, direct, view, candidates, self.calm_pressure_power) > self.calm_displaced_max:
                return direct
        late = self._late(view, considered, "on time only at the cost of others")
        queue = late.chosen.queue_seconds
        felt = (view.budget / queue) ** self.pressure_power if queue > view.budget else 1.0
        displaced = self._displaced(detour, late, view, candidates, self.pressure_power, felt=felt)
        return late if displaced > self.displaced_max else detour

    def _cheapest(
        self, view: PoolView, candidates: list[CandidateEstimate], considered: list[CandidateEstimate]
    ) -> Choice:
        costs = [_cost(candidate) for candidate in candidates]
        least = min(costs)
        equals = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == least]
        chosen = _spread(view, equals)
        reason = f"costs least: {chosen.prefill_seconds:.3f} s of work behind {chosen.queue_seconds:.3f} s"
        return Choice(chosen, reason, considered)

    def _displaced(
        self,
        detour: Choice,
        instead: Choice,
        view: PoolView,
        candidates: list[CandidateEstimate],
        power: float,
        felt: float = 1.0,
    ) -> float:
        """`felt`: share of the work saved elsewhere that would have delayed on-time requests."""
        if detour.chosen.prefill_seconds <= instead.chosen.prefill_seconds:
            return 0.0
        extra = detour.chosen.prefill_seconds - felt * instead.chosen.prefill_seconds
        short = [candidate for candidate in candidates if candidate.queue_seconds <= view.budget]
        waiting = sum(candidate.queued_requests for candidate in short)
        work = plain_sum(candidate.queue_seconds for candidate in short)
        if not waiting or not work:
            return 0.0
        pressure = (detour.chosen.queue_seconds + detour.chosen.prefill_seconds / 2) / view.budget
        displaced: float = extra * waiting / work * pressure**power
        return displaced

    def _rescue(self, view: PoolView, candidates: list[CandidateEstimate], late: Choice) -> Choice | None:
        """None if other instances hold the prefix, or it displaces too many."""
        enough = self.late_hit_share * view.request.prompt_tokens
        holders = [candidate for candidate in candidates if candidate.cached_tokens >= enough]
        if not holders or min(map(_queue, holders)) <= self.calm_queue * view.budget:
            return None
        near = [candidate for candidate in candidates if candidate.queue_seconds <= view.budget]
        if not near:
            return None
        rescue = self._cheapest(view, near, candidates)
        displaced = self._displaced(rescue, late, view, candidates, self.pressure_power, felt=0.0)
        if displaced > self.displaced_max:
            return None
        return Choice(rescue.chosen, "held only where the late wait: computed again for all who share it", candidates)

    def _trusted(self, view: PoolView, candidates: list[CandidateEstimate]) -> list[CandidateEstimate]:
        near = ring_candidates(view.eligible, view.ring_key, self.stale_candidates)
        enough = self.stale_hit_share * view.request.prompt_tokens
        holder = max(candidates, key=lambda candidate: candidate.cached_tokens)
        return [o for o in candidates if o.instance in near or (o is holder and o.cached_tokens >= enough)]

    def _late(self, view: PoolView, candidates: list[CandidateEstimate], reason: str) -> Choice:
        bounded = [candidate for candidate in candidates if candidate.queue_seconds <= self.late_queue_max_s]
        if not bounded:
            return Choice(min(candidates, key=_queue), f"{reason}, and every queue is long: the shortest", candidates)
        enough = self.late_hit_share * view.request.prompt_tokens
        warm = [candidate for candidate in bounded if candidate.cached_tokens >= enough]
        return Choice(max(warm or bounded, key=_queue), f"{reason}: where it delays nobody who is on time", candidates)


def _cost(candidate: CandidateEstimate) -> float:
    return (candidate.queue_seconds + candidate.prefill_seconds / 2) * candidate.prefill_seconds


def _queue(candidate: CandidateEstimate) -> float:
    return candidate.queue_seconds


def _spread(view: PoolView, equals: list[CandidateEstimate]) -> CandidateEstimate:
    if len(equals) == 1:
        return equals[0]
    known = next((candidate for candidate in equals if candidate.instance == view.last_instance), None)
    if known is not None:
        return known
    home = home_among([candidate.instance for candidate in equals], view.ring_key)
    return next(candidate for candidate in equals if candidate.instance == home)
