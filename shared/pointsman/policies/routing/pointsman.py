"""Our own: least growth of squared queues, unless that makes others miss their SLO (`docs/research/policies.md`).

- Cost: least `(wait + prefill / 2) * prefill` of the instances that meet the SLO (MaxWeight: Tassiulas and Ephremides
  1992; Wang et al. 2013). A prefill also stalls decodes: each counts as `decode_seconds` of wait.
- Memory: a request that lacks KV blocks waits until others free them (`PoolView.kv_waits`).
- Detour: it computes a cached prefix again, to be on time, only if that displaces at most `displaced_max` others; a tenth
  of that before requests are given up. Displaced: extra work / mean work * (queue / SLO) ** PRESSURE_POWER.
- Demand: no such limit if more than `demand_max` / n of what waits begins with that prefix, on n instances: a copy lasts.
- Late: if no instance can meet the SLO, the longest queue among holders: on-time requests avoid it.
- Shares: while requests are given up or many refused, a tenant that has more than its share is on time only where the
  queue is short; while they are given up, the detours of one that has less are not limited.
- Freshness: if the view is older than `stale_after_s`, only owners of the prefix on the ring: no herding.

Bias: late requests wait longest (about `late_queue_max_s`). Limits: relies on the predicted TTFT; no look-ahead.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import msgspec
from typing_extensions import override

from pointsman.contracts.decisions import Settings
from pointsman.policies.hash_ring import home_among, ring_candidates
from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of
from pointsman.primitives import EngineSeconds
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.tenant_shares import TenantShares

TPOT_REFERENCE: EngineSeconds = 0.1
PRESSURE_POWER = 5
GIVEN_UP = 1.5
"""A queue of so many SLOs shows that requests are given up."""
MANY_REFUSED = 0.15
SHORT = 0.1
STALE_CANDIDATES = 3
HOLDER_SHARE = 0.5
"""Of the prompt, cached."""


@dataclass(frozen=True)
class Pointsman(RoutingPolicy):
    """`decode_seconds`: at a TPOT SLO of TPOT_REFERENCE, in inverse proportion at others. `kv_turnover`: factor on the
    wait for KV blocks. `tenant_excess_max`: of all service, beyond fair shares. `tenant_lack_max`: of its fair share."""

    name: ClassVar[str] = "pointsman"
    absent: ClassVar[Settings] = {"demand_max": 1e9, "tenant_lack_max": 1.0}

    decode_seconds: float = 0.05
    kv_turnover: float = 1.0
    displaced_max: float = 1.0
    demand_max: float = 2.0
    late_queue_max_s: float = 600.0
    tenant_excess_max: float = 0.05
    tenant_lack_max: float = 0.2
    stale_after_s: float = 0.25

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (TenantShares(),)

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = self._with_kv_waits(view, candidates_of(view))
        if view.staleness > self.stale_after_s:
            owners = ring_candidates(view.eligible, view.ring_key, STALE_CANDIDATES)
            candidates = [candidate for candidate in candidates if candidate.instance in owners]
        if min(candidate.prefill_seconds for candidate in candidates) > view.budget:
            return self._cheapest(view, candidates, candidates)
        given_up = max(map(_queue, candidates)) > GIVEN_UP * view.budget
        on_time = [candidate for candidate in candidates if candidate.predicted_ttft <= view.budget]
        reason = "late everywhere"
        shares, tenant = view.tracker(TenantShares), view.request.tenant
        contended = given_up or shares.refused_share > MANY_REFUSED
        if contended and shares.excess(tenant) > self.tenant_excess_max:
            on_time = [candidate for candidate in on_time if candidate.queue_seconds <= SHORT * view.budget]
            reason = "its tenant has more than its share"
        if not on_time:
            return self._late(view, candidates, reason)
        detour = self._cheapest(view, on_time, candidates)
        if given_up and shares.lack(tenant) > self.tenant_lack_max:
            return detour
        if given_up:
            instead = self._late(view, candidates, "on time only at the cost of others")
            saved, displaced_max = 0.0, self.displaced_max  # work behind the late delays nobody who is on time
        else:
            instead = self._cheapest(view, candidates, candidates)
            saved, displaced_max = instead.chosen.prefill_seconds, self.displaced_max / 10
        if detour.chosen.prefill_seconds <= instead.chosen.prefill_seconds:
            return detour
        extra = detour.chosen.prefill_seconds - saved
        if _displaced(extra, detour.chosen, view.budget, candidates) <= displaced_max:
            return detour
        return detour if self._in_demand(view, candidates) else instead

    def _in_demand(self, view: PoolView, candidates: list[CandidateEstimate]) -> bool:
        """Whether more requests wait for the longest cached prefix than one instance's part of those that wait."""
        blocks = max(candidate.hit_blocks for candidate in candidates)
        queues = [candidate.instance for candidate in candidates if candidate.queue_seconds <= GIVEN_UP * view.budget]
        return view.pending_share(blocks, queues) * len(candidates) > self.demand_max

    def _with_kv_waits(self, view: PoolView, candidates: list[CandidateEstimate]) -> list[CandidateEstimate]:
        waits = view.kv_waits(candidates) if self.kv_turnover else []
        if not any(waits):
            return candidates
        return [
            msgspec.structs.replace(candidate, queue_seconds=candidate.queue_seconds + self.kv_turnover * wait)
            for candidate, wait in zip(candidates, waits, strict=True)
        ]

    def _cheapest(self, view: PoolView, among: list[CandidateEstimate], considered: list[CandidateEstimate]) -> Choice:
        stall = self.decode_seconds * TPOT_REFERENCE / (view.request.slo_tpot or inf)
        costs = [_cost(candidate, stall) for candidate in among]
        least = min(costs)
        chosen = _spread(view, [candidate for candidate, cost in zip(among, costs, strict=True) if cost == least])
        reason = f"costs least: {chosen.prefill_seconds:.3f} s of work behind {chosen.queue_seconds:.3f} s"
        return Choice(chosen, reason, considered)

    def _late(self, view: PoolView, candidates: list[CandidateEstimate], reason: str) -> Choice:
        bounded = [candidate for candidate in candidates if candidate.queue_seconds <= self.late_queue_max_s]
        if not bounded:
            return Choice(min(candidates, key=_queue), f"{reason}, and every queue is long: the shortest", candidates)
        enough = HOLDER_SHARE * view.request.prompt_tokens
        holders = [candidate for candidate in bounded if candidate.cached_tokens >= enough]
        longest = max(holders or bounded, key=_queue)
        return Choice(longest, f"{reason}: where it delays nobody who is on time", candidates)


def _cost(candidate: CandidateEstimate, stall: EngineSeconds) -> float:
    decoding = candidate.requests - candidate.waiting
    wait = candidate.predicted_ttft - candidate.prefill_seconds + stall * decoding
    return (wait + candidate.prefill_seconds / 2) * candidate.prefill_seconds


def _displaced(
    extra: EngineSeconds, detour: CandidateEstimate, budget: EngineSeconds, candidates: list[CandidateEstimate]
) -> float:
    """Requests on time that so much more work makes late."""
    short = [candidate for candidate in candidates if candidate.queue_seconds <= budget]
    waiting, work = sum(candidate.waiting for candidate in short), sum(map(_queue, short))
    pressure = (detour.queue_seconds + detour.prefill_seconds / 2) / budget
    displaced: float = extra * waiting / work * pressure**PRESSURE_POWER if work else 0.0
    return displaced


def _queue(candidate: CandidateEstimate) -> EngineSeconds:
    return candidate.queue_seconds


def _spread(view: PoolView, equals: list[CandidateEstimate]) -> CandidateEstimate:
    if len(equals) == 1:
        return equals[0]
    known = next((candidate for candidate in equals if candidate.instance == view.last_instance), None)
    if known is not None:
        return known
    home = home_among([candidate.instance for candidate in equals], view.ring_key)
    return next(candidate for candidate in equals if candidate.instance == home)
