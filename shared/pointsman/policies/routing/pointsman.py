"""Our own: least growth of squared queues, unless that makes others miss their SLO (`docs/research/policies.md`).

- Cost: least `(wait + prefill / 2) * prefill` of the instances that meet the SLO (MaxWeight: Tassiulas and Ephremides
  1992; Wang et al. 2013). A prefill also stalls decodes: each counts as `decode_seconds` of wait.
- Memory: a request that lacks KV blocks waits until others free them (`PoolView.kv_waits`).
- Detour: it computes a cached prefix again, to be on time, only if that displaces at most `displaced_max` others; a tenth
  of that before requests are given up. Displaced: extra work / mean work * (queue / SLO) ** PRESSURE_POWER.
- Demand: no such limit if more than `demand_max` / n of what waits begins with that prefix, on n instances: a copy lasts.
- Late: if no instance can meet the SLO, the longest queue among holders: on-time requests avoid it.
- Shares: while requests are given up, or many refused of those who have no more than their share, a tenant that has more is
  on time only where the queue is short; while they are given up, the detours of one that has less are not limited.
- Freshness: if the view is older than `stale_after_s`, only owners of the prefix on the ring: no herding.

Bias: late requests wait longest (about `late_queue_max_s`). Limits: relies on the predicted TTFT; no look-ahead.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from typing_extensions import override

from pointsman.contracts.decisions import Settings
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.hash_ring import home_among, ring_candidates
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, require_eligible
from pointsman.policies.routing.weighed import Rows, Weighed, weighed_list
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.tenant_shares import TenantShares

TPOT_REFERENCE: EngineSeconds = 0.1
TPOT_MIN: EngineSeconds = 1e-6
PRESSURE_POWER = 5
GIVEN_UP = 1.5
"""A queue of so many SLOs shows that requests are given up."""
SHORT = 0.1
STALE_CANDIDATES = 3
HOLDER_SHARE = 0.5
"""Of the prompt, cached."""


@dataclass(frozen=True)
class Pointsman(RoutingPolicy):
    """`decode_seconds`: at a TPOT SLO of TPOT_REFERENCE, in inverse proportion at others. `kv_turnover`: factor on the
    wait for KV blocks. `kv_tpot_max`: others do not answer slower because a client allows it. `tenant_excess_max`: of all
    service, beyond fair shares. `tenant_lack_max`: of its fair share."""

    name: ClassVar[str] = "pointsman"
    absent: ClassVar[Settings] = {"kv_tpot_max": 1e9, "demand_max": 1e9, "tenant_lack_max": 1.0}

    decode_seconds: float = 0.05
    kv_turnover: float = 1.0
    kv_tpot_max: EngineSeconds = TPOT_REFERENCE
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
        candidates = self._weighed(view)
        if candidates.least_prefill > view.budget:
            return self._cheapest(view, candidates)
        given_up = candidates.longest_queue > GIVEN_UP * view.budget
        on_time = candidates.on_time(view.budget)
        reason = "late everywhere"
        shares, tenant = view.tracker(TenantShares), view.request.tenant
        contended = given_up or shares.many_refused
        if contended and shares.excess(tenant) > self.tenant_excess_max:
            on_time = candidates.with_queue_within(SHORT * view.budget, on_time)
            reason = "its tenant has more than its share"
        if not len(on_time):
            return self._late(view, candidates, reason)
        detour = self._cheapest(view, candidates, on_time)
        if given_up:
            if shares.lack(tenant) > self.tenant_lack_max:
                return detour
            instead = self._late(view, candidates, "on time only at the cost of others")
            saved, displaced_max = 0.0, self.displaced_max  # work behind the late delays nobody who is on time
        elif len(on_time) == len(candidates):
            return detour
        else:
            instead = self._cheapest(view, candidates)
            saved, displaced_max = instead.chosen.prefill_seconds, self.displaced_max / 10
        if detour.chosen.prefill_seconds <= instead.chosen.prefill_seconds:
            return detour
        extra = detour.chosen.prefill_seconds - saved
        if _displaced(extra, detour.chosen, view.budget, candidates) <= displaced_max:
            return detour
        in_demand = candidates.demand(view, GIVEN_UP * view.budget) * len(candidates) > self.demand_max
        return detour if in_demand else instead

    def _weighed(self, view: PoolView) -> Weighed:
        eligible = require_eligible(view)
        if view.staleness > self.stale_after_s:
            owners = ring_candidates(eligible, view.ring_key, STALE_CANDIDATES)
            stale = [view.candidate(name) for name in eligible if name in owners]
            return weighed_list(view, stale, self.kv_turnover, self.kv_tpot_max)
        if view.columns is None:
            return weighed_list(view, view.candidates, self.kv_turnover, self.kv_tpot_max)
        from pointsman.policies.routing.weighed_columns import WeighedColumns  # needs arrays, a small pool does not

        return WeighedColumns(view.columns, view.expected_output_tokens, self.kv_turnover, self.kv_tpot_max)

    def _cheapest(self, view: PoolView, candidates: Weighed, among: Rows | None = None) -> Choice:
        stall = self.decode_seconds * TPOT_REFERENCE / max(view.request.slo_tpot or inf, TPOT_MIN)
        equals = candidates.cheapest(among, stall)
        chosen = candidates[equals[_spread(view, equals)]]
        reason = f"costs least: {chosen.prefill_seconds:.3f} s of work behind {chosen.queue_seconds:.3f} s"
        return Choice(chosen, reason, candidates)

    def _late(self, view: PoolView, candidates: Weighed, reason: str) -> Choice:
        bounded = candidates.with_queue_within(self.late_queue_max_s)
        if not len(bounded):
            return Choice(candidates.shortest(), f"{reason}, and every queue is long: the shortest", candidates)
        holders = candidates.with_cached(HOLDER_SHARE * view.request.prompt_tokens, bounded)
        longest = candidates.longest(holders if len(holders) else bounded)
        return Choice(longest, f"{reason}: where it delays nobody who is on time", candidates)


def _displaced(extra: EngineSeconds, detour: CandidateEstimate, budget: EngineSeconds, candidates: Weighed) -> float:
    """Requests on time that so much more work makes late."""
    waiting, work = candidates.waiting(candidates.with_queue_within(budget))
    pressure = (detour.queue_seconds + detour.prefill_seconds / 2) / budget
    displaced: float = extra * waiting / work * pressure**PRESSURE_POWER if work else 0.0
    return displaced


def _spread(view: PoolView, equals: Collection[InstanceId]) -> InstanceId:
    if len(equals) == 1:
        return next(iter(equals))
    last = view.last_instance
    return last if last is not None and last in equals else home_among(equals, view.ring_key)
