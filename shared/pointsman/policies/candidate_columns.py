"""The candidates of one request as columns: the same numbers as `PoolView.candidate` gives, to the last bit, for all
ready instances in a few array operations. A policy that needs few of them makes only those (`estimate`). In: the columns
of State, the request, its hits, and the estimates of those instances that columns do not describe.

Limit: not where instances fetch prefixes from each other, nor under tenants' limits of KV capacity: there nearly each
candidate is of its own kind."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import overload

import msgspec
import numpy as np
from typing_extensions import override

from pointsman.contracts.decisions import Candidate
from pointsman.policies.candidates import CandidateEstimate, LazyCandidates
from pointsman.primitives import EngineSeconds, InstanceId, Tokens, plain_sum
from pointsman.state.instance_columns import Column, InstanceColumns
from pointsman.state.workload import Request


class CandidateColumns:
    """Rows are in the order of `names`, all ready instances."""

    def __init__(
        self,
        known: InstanceColumns,
        request: Request,
        now: EngineSeconds,
        *,
        budget: EngineSeconds,
        hits: Mapping[InstanceId, int],
        block_tokens: Tokens,
        transfer_seconds: EngineSeconds,
        alone: Mapping[int, CandidateEstimate],
    ) -> None:
        """`alone`: by row, where the estimate is none of these columns'."""
        self.known, self.names, self._request = known, known.names, request
        self._budget = budget
        prompt_tokens, position = request.prompt_tokens, known.position
        rows = len(self.names)
        hit_blocks: Column = np.zeros(rows + 1)  # the last one for holders that are no candidates
        hit_blocks[[position.get(name, rows) for name in hits]] = list(hits.values())
        self.hit_blocks = hit_blocks[:rows]
        self.cached_tokens: Column = np.minimum(self.hit_blocks * block_tokens, known.cacheable_tokens(prompt_tokens))
        self.uncached_tokens: Column = prompt_tokens - self.cached_tokens
        self.work_seconds = known.prefill_work(prompt_tokens, self.cached_tokens, self.uncached_tokens)
        self.prefill_seconds = known.prefill_seconds(self.work_seconds, self.uncached_tokens)
        self.queue_seconds = known.queue_seconds(now)
        self.transfer_seconds: Column | None = None
        if transfer_seconds:
            self.transfer_seconds = np.where(known.prefills_only, transfer_seconds, 0.0)
        self.load_seconds: Column | None = None
        self.made: dict[int, CandidateEstimate] = {}
        for row, estimate in alone.items():
            self._take(row, estimate)
        self.margin_seconds = known.margin_seconds(self.queue_seconds)

    def _take(self, row: int, estimate: CandidateEstimate) -> None:
        self.made[row] = estimate
        self.hit_blocks[row] = estimate.hit_blocks
        self.cached_tokens[row] = estimate.cached_tokens
        self.uncached_tokens[row] = estimate.uncached_tokens
        self.work_seconds[row] = estimate.work_seconds
        self.prefill_seconds[row] = estimate.prefill_seconds
        self.queue_seconds[row] = estimate.queue_seconds
        if estimate.load_seconds:
            if self.load_seconds is None:
                self.load_seconds = np.zeros(len(self.names))
            self.load_seconds[row] = estimate.load_seconds

    def ttft_behind(self, queue_seconds: Column) -> Column:
        ttft: Column = queue_seconds + self.prefill_seconds
        if self.load_seconds is not None:
            ttft += self.load_seconds
        if self.transfer_seconds is not None:
            ttft += self.transfer_seconds
        return ttft

    def kv_waits(self, answer_tokens: float, tpot_max: EngineSeconds) -> Column | None:
        """See `PoolView.kv_waits`. `answer_tokens`: expected. None: nobody waits."""
        known, capacity, request = self.known, self.known.kv_capacity, self._request
        lacking = (known.requests + 1) * answer_tokens
        lacking += known.prompt_tokens + request.prompt_tokens
        lacking -= capacity
        rows = (lacking > 0).nonzero()[0]
        if not rows.size:
            return None
        waits: Column = np.zeros(len(self.names))
        waits[rows] = lacking[rows] / capacity[rows] * answer_tokens * min(request.slo_tpot, tpot_max)
        return waits

    @cached_property
    def predicted_ttft(self) -> Column:
        return self.ttft_behind(self.queue_seconds)

    @cached_property
    def candidates(self) -> "ColumnCandidates":
        return ColumnCandidates(self, self.queue_seconds)

    def is_late_alone(self) -> bool:
        """See `PoolView.is_late_alone`."""
        budget = self._budget
        if any(known.ttft_alone <= budget for known in self.made.values()):
            return False  # nearly always: no need to look at the others
        return bool(budget < (self.predicted_ttft - self.queue_seconds).min())

    def on_time_alone(self) -> list[InstanceId]:
        rows = (self.predicted_ttft - self.queue_seconds <= self._budget).nonzero()[0]
        return [self.names[row] for row in rows.tolist()]

    def soonest_of_little_work(self, work_max: float, price: float, spare: EngineSeconds) -> CandidateEstimate | None:
        """See `admission.predicted_ttft_fair`."""
        waiting, work = int(self.known.queued_requests.sum()), plain_sum(self.queue_seconds.tolist())
        bound = work_max * work / waiting if waiting else np.inf
        ttft, budget = self.predicted_ttft, self._budget
        with_margin = ttft + self.margin_seconds
        fits = (self.queue_seconds <= spare) | (with_margin + (price - 1) * self.prefill_seconds <= budget)
        rows = ((self.prefill_seconds <= bound) & (with_margin <= budget) & fits).nonzero()[0]
        return self.estimate(int(rows[ttft[rows].argmin()])) if rows.size else None

    def estimate(self, row: int) -> CandidateEstimate:
        known = self.made.get(row)
        if known is None:
            known = self.made[row] = _estimate(self.names[row], *[column.item(row) for column in self._numbers()])
        return known

    @cached_property
    def estimates(self) -> list[CandidateEstimate]:
        """Of all instances."""
        made = list(map(_estimate, self.names, *[column.tolist() for column in self._numbers()]))
        for row, estimate in self.made.items():
            made[row] = estimate
        return made

    def _numbers(self) -> tuple[Column, ...]:
        """As `_estimate` takes them."""
        known = self.known
        return (
            self.hit_blocks, self.cached_tokens, self.uncached_tokens, self.queue_seconds, self.prefill_seconds,
            self.work_seconds, known.queued_tokens, known.queued_requests, known.requests, self.margin_seconds,
            *(() if self.transfer_seconds is None else (self.transfer_seconds,)),
        )  # fmt: skip


def _estimate(
    instance: InstanceId,
    hit_blocks: float,
    cached_tokens: float,
    uncached_tokens: float,
    queue_seconds: EngineSeconds,
    prefill_seconds: EngineSeconds,
    work_seconds: EngineSeconds,
    queued_tokens: float,
    queued_requests: float,
    requests: float,
    margin_seconds: EngineSeconds,
    transfer_seconds: EngineSeconds = 0.0,
) -> CandidateEstimate:
    return CandidateEstimate(
        instance=instance,
        hit_blocks=int(hit_blocks),
        cached_tokens=int(cached_tokens),
        uncached_tokens=int(uncached_tokens),
        queue_seconds=queue_seconds,
        prefill_seconds=prefill_seconds,
        work_seconds=work_seconds,
        queued_tokens=int(queued_tokens),
        queued_requests=int(queued_requests),
        requests=int(requests),
        interval_of=(queue_seconds + prefill_seconds, work_seconds),
        margin_seconds=margin_seconds,
        transfer_seconds=transfer_seconds,
    )


class ColumnCandidates(LazyCandidates):
    """`queue_seconds`: with waits that a policy added."""

    def __init__(self, columns: CandidateColumns, queue_seconds: Column) -> None:
        self.columns = columns
        self.queue_seconds = queue_seconds
        same = queue_seconds is columns.queue_seconds
        self.predicted_ttft: Column = columns.predicted_ttft if same else columns.ttft_behind(queue_seconds)
        self._made: list[CandidateEstimate] | None = None

    @override
    def __len__(self) -> int:
        return len(self.columns.names)

    @overload
    def __getitem__(self, index: int) -> CandidateEstimate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[CandidateEstimate]: ...

    @override
    def __getitem__(self, index: int | slice) -> CandidateEstimate | Sequence[CandidateEstimate]:
        if isinstance(index, slice):
            return self._all()[index]
        row = range(len(self))[index]
        return self._waiting(row, self.columns.estimate(row))

    @override
    def __iter__(self) -> Iterator[CandidateEstimate]:
        return iter(self._all())

    @override
    def recorded(self, chosen: InstanceId, *, by_ttft: int, by_hit: int) -> list[Candidate]:
        ttft, hits = self.predicted_ttft, self.columns.hit_blocks
        kept = [row] if (row := self.columns.known.position.get(chosen)) is not None else []
        for part, first, second in ((by_ttft, ttft, -hits), (by_hit, -hits, ttft)):
            kept += _least(part, first, second, kept)
        return [self._recorded(row) for row in sorted(kept)]

    def _recorded(self, row: int) -> Candidate:
        """Without an estimate, if there is none: nobody else asks for it."""
        columns = self.columns
        if row in columns.made:
            return self[row].recorded()
        return Candidate(
            instance=columns.names[row],
            hit_blocks=int(columns.hit_blocks.item(row)),
            uncached_tokens=int(columns.uncached_tokens.item(row)),
            queue_seconds=self.queue_seconds.item(row),
            prefill_seconds=columns.prefill_seconds.item(row),
            predicted_ttft=self.predicted_ttft.item(row),
        )

    def _waiting(self, row: int, estimate: CandidateEstimate) -> CandidateEstimate:
        seconds = self.queue_seconds.item(row)
        return (
            estimate if seconds == estimate.queue_seconds else msgspec.structs.replace(estimate, queue_seconds=seconds)
        )

    def _all(self) -> list[CandidateEstimate]:
        if self._made is None:
            self._made = [self._waiting(row, estimate) for row, estimate in enumerate(self.columns.estimates)]
        return self._made


def _least(count: int, first: Column, second: Column, other_than: list[int]) -> list[int]:
    """Rows by two keys, then by row."""
    count = min(count, len(first) - len(other_than))
    left = first.copy()
    left[other_than] = np.inf
    found: list[int] = []
    for _ in range(count):
        row = int(left.argmin())
        equals = (left == left[row]).nonzero()[0]
        if equals.size > 1:
            row = int(equals[second[equals].argmin()])
        found.append(row)
        left[row] = np.inf
    return found
