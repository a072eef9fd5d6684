"""Read-only input of a routing policy: one request, and predictions for each instance that could take it. Predicted
TTFT counts from now: `(queue + prefill) * correction + transfer`."""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pointsman.contracts.decisions import TierTokens
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.prefix_fetch import FetchSource, fetch_source, fetch_to, shared_fetch_seconds
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, Tokens, plain_sum
from pointsman.state import fold_versions, kv_shares
from pointsman.state.fleet import Instance
from pointsman.state.latency_model import LatencyModel
from pointsman.state.priority_classes import LOWEST, RANK, QueueClass
from pointsman.state.slower_tiers import TierBlocks
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import EMPTY_QUEUE, InstanceQueue, Request

if TYPE_CHECKING:
    from pointsman.policies.candidate_columns import CandidateColumns
    from pointsman.state.instance_columns import InstanceColumns

M = TypeVar("M", bound=Tracker)

COLUMNS_FROM = 32
"""Instances from which on arrays are faster than a pass over objects."""
EXACT_TOKENS_MAX: Tokens = 2**26
"""Squares of longer prompts are no exact doubles."""
ALONE_SHARE = 0.25
"""If more instances than this need to be computed by themselves, all are."""


class PoolView:
    def __init__(
        self,
        state: State,
        request: Request,
        now: EngineSeconds,
        *,
        excluded: Collection[InstanceId] = (),
        transfer_seconds: EngineSeconds | None = 0.0,
        fetches: bool = True,
    ) -> None:
        """`excluded`: instances that failed it. `transfer_seconds`: of the KV transfer; None if no instance can
        decode. `fetches`: whether it may have its prefix fetched."""
        self.request = request
        self.now = now
        self._state = state
        self._limits_kv = state.tenants.limits_kv
        self._ahead: QueueClass = request.priority if state.pending.has_below(request.priority) else LOWEST
        """Pending work from this class on is ahead of it."""
        self._excluded = excluded
        self._fetches = fetches and bool(state.fleet.fetches)
        self.some_ready = bool(state.fleet.ready)
        self.eligible: tuple[InstanceId, ...] = state.fleet.ready_for(request, excluded)
        """Ready instances that can serve this request, sorted by name; without `excluded` and `on_trial`."""
        self._transfer_seconds = transfer_seconds or 0.0
        if transfer_seconds is None:
            self.eligible = tuple(i for i in self.eligible if state.fleet[i].role != "prefill")
        self.on_trial: tuple[InstanceId, ...] = ()
        """Half-open instances that could serve it; candidates only if there are no others."""
        if state.fleet.on_trial:
            self.on_trial = tuple(i for i in self.eligible if i in state.fleet.on_trial)
            self.eligible = tuple(i for i in self.eligible if i not in self.on_trial) or self.eligible

    @cached_property
    def budget(self) -> EngineSeconds:
        return self.request.deadline - self.now

    @property
    def retried(self) -> bool:
        return bool(self._excluded)

    @property
    def staleness(self) -> EngineSeconds:
        """Age of the newest event in this view; 0 on the leader."""
        return max(0.0, self.now - self._state.last_at)

    @property
    def placements(self) -> int:
        return self._state.placements

    @property
    def block_tokens(self) -> Tokens:
        return self._state.settings.block_tokens

    @cached_property
    def candidates(self) -> list[CandidateEstimate]:
        if self.columns is not None:
            return self.columns.estimates
        return [self.candidate(instance) for instance in self.eligible]

    @property
    def considered(self) -> Sequence[CandidateEstimate]:
        """The candidates; of a large pool each is made when it is looked at."""
        return self.candidates if self.columns is None else self.columns.candidates

    @property
    def was_best_effort(self) -> bool:
        """Whether an earlier attempt of it was admitted so."""
        return self.request.best_effort and self._state.settings.fold_version >= fold_versions.BEST_EFFORT_STAYS

    def is_late_alone(self) -> bool:
        """Whether it would miss its budget even if it had the pool for itself."""
        if self.columns is not None:
            return self.columns.is_late_alone()
        budget = self.budget
        return all(budget < candidate.ttft_alone for candidate in self.candidates)

    def on_time_by_hits(self) -> list[InstanceId]:
        """Where it could meet its budget alone, if that takes hits and load is not why it is late: half of the other
        instances are idle. Or if it takes blocks that are promised and not yet held, and none of a slower tier."""
        state, budget, keys = self._state, self.budget, self.request.keys
        if budget <= 0 or state.settings.fold_version < fold_versions.PROMISED_LATE:
            return []
        if self.columns is not None:
            names = self.columns.on_time_alone()
        else:
            names = [candidate.instance for candidate in self.candidates if candidate.ttft_alone <= budget]
        if state.settings.fold_version >= fold_versions.IDLE_LATE and self._are_half_idle(names):
            return names
        promised = state.promises.beginning_with(keys)
        if not all(name in promised for name in names):
            return []  # nearly always: no need to look at the index again
        held = state.hits(keys, promised=False)
        for name in names:
            blocks = held.get(name, 0)
            if self._hits.get(name, 0) <= blocks or name in self._loadable:
                return []
            if self.candidate(name, hit_blocks=blocks).ttft_alone <= budget:
                return []
        return names

    def _are_half_idle(self, but: list[InstanceId]) -> bool:
        """Whether there are eligible instances but these, and half of them have no prefill work."""
        others = set(self.eligible).difference(but)
        return bool(others) and 2 * sum(not self.queue(name).queued_requests for name in others) >= len(others)

    @property
    def least_prefill(self) -> EngineSeconds:
        if self.columns is not None:
            return float(self.columns.prefill_seconds.min())
        return min(candidate.prefill_seconds for candidate in self.candidates)

    @cached_property
    def columns(self) -> "CandidateColumns | None":
        """The candidates as columns, if the pool is large and columns describe nearly all of it."""
        state, fleet = self._state, self._state.fleet
        if (
            len(self.eligible) < COLUMNS_FROM
            or self.eligible is not fleet.ready
            or fleet.fetches
            or self._limits_kv
            or self.request.prompt_tokens > EXACT_TOKENS_MAX
            or type(state.latency) is not LatencyModel
        ):
            return None
        known = state.columns
        alone = self._rows_alone(known)
        if len(alone) > ALONE_SHARE * len(known.names):
            return None
        # Imported here: who never decides for a large pool needs no arrays.
        from pointsman.policies.candidate_columns import CandidateColumns

        return CandidateColumns(
            known,
            self.request,
            self.now,
            budget=self.budget,
            hits=self._hits,
            block_tokens=self.block_tokens,
            transfer_seconds=self._transfer_seconds,
            alone={row: self.candidate(known.names[row]) for row in alone},
        )

    def _rows_alone(self, known: "InstanceColumns") -> set[int]:
        """Rows whose numbers columns do not give: prefixes in slower tiers, work of several classes, fetches under way."""
        alone = set(known.special)
        alone |= {row for name in self._loadable if (row := known.position.get(name)) is not None}
        if self._ahead != LOWEST:
            alone |= known.rows_with_pending()
            if self._reserved is not None and (row := known.position.get(self._reserved.instance)) is not None:
                alone.add(row)
        return alone

    @cached_property
    def affinity_key(self) -> BlockKey | None:
        """None for a prompt without a whole block."""
        return self._state.hotness.affinity_key(self.request.keys)

    @cached_property
    def ring_key(self) -> BlockKey:
        if self.affinity_key is not None:
            return self.affinity_key
        return BlockKey(int.from_bytes(blake2b(self.request.id.encode(), digest_size=8).digest(), "little"))

    @cached_property
    def last_instance(self) -> InstanceId | None:
        request = self.request
        return self._state.session_affinity.last_instance(request.tenant, request.session, request.keys)

    @cached_property
    def expected_output_tokens(self) -> float:
        return self._state.output_lengths.expected(self.request.tenant, self.request.max_output_tokens)

    def tracker(self, kind: type[M]) -> M:
        return self._state.tracker(kind)

    def queue(self, instance_id: InstanceId) -> InstanceQueue:
        return self._state.workload.queues.get(instance_id, EMPTY_QUEUE)

    def candidate(
        self,
        instance_id: InstanceId,
        *,
        hit_blocks: int | None = None,
        loads: tuple[TierTokens, ...] = (),
        ahead: QueueClass | None = None,
    ) -> CandidateEstimate:
        """`hit_blocks` and the `loads` among them: as given instead of as known. `ahead`: pending work from this class
        on is ahead of it."""
        state, latency = self._state, self._state.latency
        prompt_tokens = self.request.prompt_tokens
        instance = state.fleet[instance_id]
        if hit_blocks is None:
            hit_blocks, loadable = self._hits.get(instance_id, 0), self._loadable.get(instance_id)
        else:
            loadable = None
        if loadable:
            cached, loaded = state.cached(instance, hit_blocks, loadable, prompt_tokens)
            hit_blocks, loads = hit_blocks + sum(loadable.values()), tuple(loaded)
        else:
            cached = latency.cached_tokens(instance, hit_blocks, prompt_tokens)
        uncached = prompt_tokens - cached
        work = latency.prefill_seconds(instance, prompt_tokens, cached)
        queue = state.workload.queues.get(instance_id, EMPTY_QUEUE)
        work_ahead = self._work_ahead(instance_id, queue, ahead or self._ahead)
        queue_seconds = latency.expected_seconds(instance_id, *work_ahead)
        prefill_seconds = latency.expected_prefill(instance_id, work, uncached)
        estimate = CandidateEstimate(
            instance=instance_id,
            hit_blocks=hit_blocks,
            cached_tokens=cached,
            uncached_tokens=uncached,
            queue_seconds=queue_seconds,
            prefill_seconds=prefill_seconds,
            work_seconds=work,
            queued_tokens=queue.queued_tokens,
            queued_requests=queue.queued_requests,
            requests=queue.requests,
            interval_of=(queue_seconds + prefill_seconds, work),
            transfer_seconds=self._transfer_seconds and (self._transfer_seconds if instance.role == "prefill" else 0.0),
            loads=loads,
            load_seconds=state.slower.load_seconds(instance, loads) if loads else 0.0,
            margin_seconds=latency.margin_seconds(instance_id, queue_seconds),
        )
        return self._with_fetch(instance, queue, estimate) if self._fetches else estimate

    def _work_ahead(
        self, instance_id: InstanceId, queue: InstanceQueue, ahead: QueueClass
    ) -> tuple[EngineSeconds, Tokens]:
        """Prefill work ahead of this request there, uncorrected, and its tokens. The best-effort request whose turn it is goes
        first; those that wait for their tenant's share of the KV capacity do not."""
        seconds, tokens = queue.work_ahead(self.now, ahead)
        if ahead != LOWEST and self._reserved is not None and self._reserved.instance == instance_id:
            seconds += self._reserved.prefill_seconds
            tokens += self._reserved.uncached_tokens
        if self._limits_kv:
            overtaken_seconds, overtaken_tokens = self._overtaken(queue)
            seconds, tokens = max(0.0, seconds - overtaken_seconds), tokens - overtaken_tokens
        return seconds, tokens

    def _with_fetch(self, instance: Instance, queue: InstanceQueue, computed: CandidateEstimate) -> CandidateEstimate:
        replace = msgspec.structs.replace
        fetch = fetch_to(self._state, self.request, self._fetch_source, instance, computed.hit_blocks, self.now)
        if fetch is None:
            seconds = shared_fetch_seconds(queue, self.request, self.now)
            return replace(computed, transfer_seconds=seconds) if seconds else computed
        return replace(
            computed,
            uncached_tokens=computed.uncached_tokens - fetch.tokens,
            prefill_seconds=fetch.prefill_seconds,
            work_seconds=fetch.work_seconds,
            transfer_seconds=fetch.seconds,
            fetch_from=fetch.source,
            fetched_tokens=fetch.tokens,
        )

    def behind_best_effort(self, candidate: CandidateEstimate) -> CandidateEstimate:
        """Behind the best-effort requests that are pending there, too."""
        seconds = self.queue(candidate.instance).best_effort_seconds
        if self._reserved is not None and self._reserved.instance == candidate.instance:
            seconds -= self._reserved.prefill_seconds  # it is ahead already
        if seconds <= 0:
            return candidate
        return msgspec.structs.replace(candidate, queue_seconds=candidate.queue_seconds + seconds)

    def best_effort_candidate(self, instance_id: InstanceId) -> CandidateEstimate:
        """Behind all that is pending there, or until its turn. With the prefixes that best-effort requests before it
        will leave."""
        known, deferred = self._hits.get(instance_id, 0), self._deferred_hits.get(instance_id, 0)
        found = self.candidate(instance_id, hit_blocks=deferred if deferred > known else None, ahead=LOWEST)
        wait = self._state.best_effort.wait(self.now)
        return msgspec.structs.replace(found, queue_seconds=max(found.queue_seconds, wait))

    @cached_property
    def _reserved(self) -> Request | None:
        """The best-effort request whose turn it is: it goes before requests that come now."""
        known = kv_shares.best_effort_turn(self._state, self.now)
        return known[0] if known is not None else None

    @cached_property
    def _deferred_hits(self) -> dict[InstanceId, int]:
        hits: dict[InstanceId, int] = dict(self._hits)
        self._state.deferred.extend_hits(self.request.keys, hits)
        return hits

    def _overtaken(self, queue: InstanceQueue) -> tuple[EngineSeconds, Tokens]:
        """Pending work of other tenants that wait for their share of the KV capacity."""
        request, waits = self.request, kv_shares.waiters(self._state)
        waiting = [
            other
            for other in queue.pending.values()
            if RANK[other.queue_class] >= RANK[request.queue_class] and other.tenant != request.tenant and waits(other)
        ]
        return plain_sum(other.prefill_seconds for other in waiting), sum(other.uncached_tokens for other in waiting)

    def kv_waits(self, candidates: list[CandidateEstimate], tpot_max: EngineSeconds) -> list[EngineSeconds]:
        """Of each: until others have freed the KV blocks that the request and those ahead of it lack. Each of them is
        assumed to have an answer as long as this one's expected. A full cache is assumed to turn over once in the time
        of an answer at its TPOT SLO, at most `tpot_max` (Little's law). Prefixes that requests share count for each of
        them. 0 on an instance that only prefills."""
        fleet, queues = self._state.fleet, self._state.workload.queues
        own, answer = self.request.prompt_tokens, self.expected_output_tokens
        tpot = min(self.request.slo_tpot, tpot_max)
        waits = []
        for candidate in candidates:
            instance = fleet[candidate.instance]
            capacity = instance.kv_capacity_tokens
            ahead = queues.get(candidate.instance, EMPTY_QUEUE).prompt_tokens
            lacking = ahead + own + (candidate.requests + 1) * answer - capacity
            if lacking <= 0 or capacity <= 0 or instance.role == "prefill":
                waits.append(0.0)
            else:
                waits.append(lacking / capacity * answer * tpot)
        return waits

    def pending_share(self, blocks: int, instances: Iterable[InstanceId]) -> float:
        """Of the requests pending there, that of those whose prompts begin with the same blocks as this one."""
        keys = self.request.keys
        if not 0 < blocks <= len(keys):
            return 0.0
        last, same, pending = keys[blocks - 1], 0, 0
        for instance in instances:
            queue = self.queue(instance).pending
            pending += len(queue)
            same += sum(len(other.keys) >= blocks and other.keys[blocks - 1] == last for other in queue.values())
        return same / pending if pending else 0.0

    def familiar(self, equals: list[CandidateEstimate]) -> CandidateEstimate:
        """The instance that served this session last, else the first."""
        if len(equals) > 1:
            last = self.last_instance
            return next((candidate for candidate in equals if candidate.instance == last), equals[0])
        return equals[0]

    @cached_property
    def _fetch_source(self) -> FetchSource | None:
        return fetch_source(self._state, self.request, self.now, self._excluded)

    @cached_property
    def _hits(self) -> dict[InstanceId, int]:
        return self._state.hits_of(self.request)

    @cached_property
    def _loadable(self) -> dict[InstanceId, TierBlocks]:
        slower = self._state.slower
        return slower.loads(self.request.keys, self._hits) if slower else {}
