"""One round of migrations away from overloaded instances. Source: DualMap's Eq. 6: the benefit is the predicted TTFT at
the source minus that at the end of the target's queue, recomputation included. A *source* has a pending request that
would miss its SLO, is stalled, or takes no requests. It gives requests by descending benefit that meet their SLO at the
target, until the rest is on time; a stalled or leaving source gives whatever gains. A source takes nothing in the
round. Limits: estimates queues as FCFS, ignores shared blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import gt

from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.policies.rebalancing.migration_check import NEVER
from pointsman.policies.stall_detection import stalled_seconds
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.fleet import Instance, Status
from pointsman.state.slower_tiers import TierBlocks
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request

LOOK_UPS_PER_MIGRATION = 4
"""Index look-ups of a round per move that it may make."""


COLD_TARGETS_MAX = 8
"""Targets without a hit that are compared for one request; those with a hit always are."""


@dataclass(slots=True, eq=False)
class Target:
    """`queue`: expected seconds before a request that joins now, with the moves of this round."""

    instance: Instance
    queue: EngineSeconds


Targets = Callable[[Request], Sequence[Target]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """`slo_share`: share of the TTFT SLO that a request may take. `waste_weight`: of prefill that the source would
    not compute. `recompute_queue_max`: behind a longer queue no such prefill."""

    slo_share: float
    stall_seconds: EngineSeconds
    migrations_max: int
    waste_weight: float = 0.0
    recompute_queue_max: EngineSeconds = NEVER


class MigrationPlanner:
    def __init__(self, state: State, now: EngineSeconds, limits: RoundLimits) -> None:
        self.targets: dict[InstanceId, Target] = {}
        """Ready instances that are neither source nor stalled, by name."""
        self.state, self.now = state, now
        self._limits = limits
        self._sources: list[_Source] = []
        for instance in state.fleet.ready:
            self._add_ready(state.fleet[instance], now)
        for instance_left in state.fleet.instances:
            if instance_left.status is not Status.READY:
                self._add_unready(instance_left, now)

    def plan(self, targets_for: Callable[["MigrationPlanner"], Targets]) -> MigrationPlan:
        """`targets_for`: called only if there is work."""
        if not self._sources or not self.targets:
            return MigrationPlan(self.state.sequence)
        return MigrationPlan(self.state.sequence, tuple(self._moves(targets_for(self))))

    def _add_ready(self, instance: Instance, now: EngineSeconds) -> None:
        queue = self.state.workload.queues.get(instance.id) or InstanceQueue()
        stall_after = self._limits.stall_seconds
        stalled = stalled_seconds(queue, now, after=stall_after) if stall_after > 0 else 0.0
        if queue.pending:
            source = _source(self.state, instance.id, queue, stalled, now, self._limits.slo_share)
            if source.overloaded:
                self._sources.append(source)
                return
        if not stalled and instance.id not in self.state.fleet.on_trial:
            self.targets[instance.id] = Target(instance, self.state.queue_seconds(instance.id, now))

    def _add_unready(self, instance: Instance, now: EngineSeconds) -> None:
        """An instance that takes no requests: the silence of a suspected one counts as a stall."""
        queue = self.state.workload.queues.get(instance.id)
        if queue is None or not queue.pending:
            return
        silent = max(0.0, now - instance.heard_at) if instance.status is Status.SUSPECTED else 0.0
        source = _source(self.state, instance.id, queue, silent, now, self._limits.slo_share, leaves=True)
        self._sources.append(source)

    def _moves(self, targets: Targets) -> list[Migration]:
        moves: list[Migration] = []
        look_ups_left = LOOK_UPS_PER_MIGRATION * self._limits.migrations_max
        heap = self._by_potential()
        while heap and len(moves) < self._limits.migrations_max:
            _, number, waiting = heappop(heap)
            if not waiting.source.overloaded:
                continue
            known = waiting.hits is not None
            if not known:
                if not look_ups_left or not self._find_targets(waiting, targets):
                    continue
                look_ups_left -= 1
                waiting.hits = self.state.hits_of(waiting.request)
                waiting.loads = self.state.slower.loads(waiting.request.keys, waiting.hits)
            offer = self._best_offer(waiting)
            if offer is None:
                continue
            if known:
                moves.append(_move(waiting, offer))
            else:
                heappush(heap, (-offer.benefit, number, waiting))
        return moves

    def _by_potential(self) -> list[tuple[float, int, "_Waiting"]]:
        shortest = min(target.queue for target in self.targets.values())
        heap: list[tuple[float, int, _Waiting]] = []
        for source in self._sources:
            for place, (end, limit) in enumerate(zip(source.ends, source.limits, strict=True)):
                if shortest < end and shortest <= limit:
                    heap.append((shortest - end, len(heap), _Waiting(source, place)))
        heapify(heap)
        return heap

    def _find_targets(self, waiting: "_Waiting", targets: Targets) -> bool:
        limit = waiting.source.limits[waiting.place]
        request = waiting.request
        waiting.targets = [
            target
            for target in targets(request)
            if target.queue <= limit
            and target.instance.id not in request.excluded
            and target.instance.can_serve(request)
        ]
        return bool(waiting.targets)

    def _best_offer(self, waiting: "_Waiting") -> "_Offer | None":
        source, place = waiting.source, waiting.place
        here, work_here, limit = source.ends[place], source.work[place], source.limits[place]
        best: _Offer | None = None
        most = 0.0
        hits = waiting.hits or {}
        cold = 0
        for target in waiting.targets:
            if target.instance.id not in hits and target.instance.id not in waiting.loads:
                cold += 1
                if cold > COLD_TARGETS_MAX:
                    continue
            if here - target.queue <= most:
                continue
            work = self._work(waiting, target)
            if work > work_here and target.queue > self._limits.recompute_queue_max:
                continue
            ttft = target.queue + work
            benefit = here - ttft - self._limits.waste_weight * max(0.0, work - work_here)
            if benefit > most and ttft <= limit:
                most = benefit
                best = _Offer(target, work, benefit)
        return best

    def _work(self, waiting: "_Waiting", target: Target) -> EngineSeconds:
        state, instance = self.state, target.instance
        known = waiting.work.get(instance.id)
        if known is not None:
            return known
        hit = waiting.hits.get(instance.id, 0) if waiting.hits else 0
        tokens = waiting.request.prompt_tokens
        cached = state.latency.cached_tokens(instance, hit, tokens) if hit else 0
        load_seconds = 0.0
        if instance.id in waiting.loads:
            cached, loads = state.cached(instance, hit, waiting.loads[instance.id], tokens)
            load_seconds = state.slower.load_seconds(instance, loads)
        work = load_seconds + state.latency.expected_prefill(
            instance.id, state.latency.prefill_seconds(instance, tokens, cached), tokens - cached
        )
        waiting.work[instance.id] = work
        return work


@dataclass(slots=True, eq=False)
class _Source:
    """Queue of an overloaded instance. Expected seconds from now."""

    id: InstanceId
    stalled: EngineSeconds
    before: EngineSeconds
    requests: list[Request]
    work: list[EngineSeconds]
    limits: list[EngineSeconds]
    owed: list[EngineSeconds]
    """The same, `NEVER` for requests that left or would be late even alone."""
    leaves: bool = False
    ends: list[EngineSeconds] = field(default_factory=list)
    overloaded: bool = False

    def __post_init__(self) -> None:
        self._predict()

    def give(self, place: int) -> None:
        self.work[place] = 0.0
        self.owed[place] = NEVER
        self._predict()

    @property
    def why(self) -> str:
        if self.leaves:
            return f"{self.id} takes no requests"
        if self.stalled:
            return f"{self.id} has finished no prefill for {self.stalled:.1f} s"
        return f"the queue of {self.id} would miss objectives"

    def _predict(self) -> None:
        ends = list(accumulate(self.work, initial=self.before))
        del ends[0]
        self.ends = ends
        self.overloaded = self.leaves or bool(self.stalled) or any(map(gt, ends, self.owed))


def _source(
    state: State,
    instance: InstanceId,
    queue: InstanceQueue,
    stalled: EngineSeconds,
    now: EngineSeconds,
    slo_share: float,
    *,
    leaves: bool = False,
) -> _Source:
    requests = sorted(queue.pending.values(), key=lambda request: request.best_effort)  # these go last
    expected = state.latency.expected_seconds
    work = [expected(instance, request.prefill_seconds, request.uncached_tokens) for request in requests]
    limits = [request.arrived_at + slo_share * request.slo_ttft - now for request in requests]
    return _Source(
        id=instance,
        stalled=stalled,
        before=expected(instance, *queue.engine_left(now)) + stalled,
        requests=requests,
        work=work,
        limits=limits,
        owed=[limit if own <= limit else NEVER for own, limit in zip(work, limits, strict=True)],
        leaves=leaves,
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    """`place`: in the queue of its source. `hits`: None before the look-up."""

    source: _Source
    place: int
    targets: list[Target] = field(default_factory=list)
    hits: dict[InstanceId, int] | None = None
    loads: dict[InstanceId, TierBlocks] = field(default_factory=dict)
    work: dict[InstanceId, EngineSeconds] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        return self.source.requests[self.place]


@dataclass(frozen=True, slots=True)
class _Offer:
    target: Target
    work: EngineSeconds
    benefit: EngineSeconds


def _move(waiting: _Waiting, offer: _Offer) -> Migration:
    source, target = waiting.source, offer.target
    migration = Migration(
        request=waiting.request.id,
        source=source.id,
        target=target.instance.id,
        benefit=offer.benefit,
        reason=f"{source.why}; first token {offer.benefit:.2f} s sooner",
    )
    target.queue += offer.work
    source.give(waiting.place)
    return migration
