"""The candidates of the policy `pointsman`: their queues include the wait for KV blocks. `Weighed` is the interface, what the
policy asks about all of them at once. `WeighedList` passes over estimates, for small pools. `WeighedColumns`
(`weighed_columns`) gives the same answers by array operations, to the last bit and with the same ties, and makes only the
estimates that are chosen or recorded. A row is the place of a candidate in the order of names."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence, Sized

import msgspec
from typing_extensions import override

from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.primitives import EngineSeconds, InstanceId, plain_sum

Rows = Sized
"""A list of ints, or an array of them."""


class Weighed(Sequence[CandidateEstimate]):
    """Never empty."""

    @property
    @abstractmethod
    def least_prefill(self) -> EngineSeconds: ...

    @property
    @abstractmethod
    def longest_queue(self) -> EngineSeconds: ...

    @abstractmethod
    def on_time(self, budget: EngineSeconds) -> Rows: ...

    @abstractmethod
    def with_queue_within(self, seconds: EngineSeconds, among: Rows | None = None) -> Rows: ...

    @abstractmethod
    def cheapest(self, among: Rows | None, stall: EngineSeconds) -> dict[InstanceId, int]:
        """Those that cost least, of `among` or all, with their rows: many of an idle pool, whose estimates nobody needs.
        `stall`: wait for each that decodes there."""

    @abstractmethod
    def with_cached(self, tokens: float, among: Rows) -> Rows:
        """Those that have at least so many of the prompt's tokens."""

    @abstractmethod
    def shortest(self) -> CandidateEstimate: ...

    @abstractmethod
    def longest(self, among: Rows) -> CandidateEstimate: ...

    @abstractmethod
    def waiting(self, among: Rows) -> tuple[int, EngineSeconds]:
        """Requests that wait there, and the sum of their queues."""

    @abstractmethod
    def demand(self, view: PoolView, queue_max: EngineSeconds) -> float:
        """Of the requests pending behind at most `queue_max`, the share whose prompts begin with the longest prefix of
        this prompt that an instance holds."""


class WeighedList(list[CandidateEstimate], Weighed):
    def __init__(self, candidates: Iterable[CandidateEstimate]) -> None:
        super().__init__(candidates)
        self._queues = [candidate.queue_seconds for candidate in self]

    @property
    @override
    def least_prefill(self) -> EngineSeconds:
        return min(candidate.prefill_seconds for candidate in self)

    @property
    @override
    def longest_queue(self) -> EngineSeconds:
        return max(self._queues)

    @override
    def on_time(self, budget: EngineSeconds) -> Rows:
        return [row for row, candidate in enumerate(self) if candidate.ttft_with_margin <= budget]

    @override
    def with_queue_within(self, seconds: EngineSeconds, among: Rows | None = None) -> Rows:
        queues = self._queues
        return [row for row in (range(len(self)) if among is None else _rows(among)) if queues[row] <= seconds]

    @override
    def cheapest(self, among: Rows | None, stall: EngineSeconds) -> dict[InstanceId, int]:
        rows = range(len(self)) if among is None else _rows(among)
        costs = [cost(self[row], stall) for row in rows]
        least = min(costs)
        return {self[row].instance: row for row, each in zip(rows, costs, strict=True) if each == least}

    @override
    def with_cached(self, tokens: float, among: Rows) -> Rows:
        return [row for row in _rows(among) if self[row].cached_tokens >= tokens]

    @override
    def shortest(self) -> CandidateEstimate:
        return min(self, key=_queue)

    @override
    def longest(self, among: Rows) -> CandidateEstimate:
        return max((self[row] for row in _rows(among)), key=_queue)

    @override
    def waiting(self, among: Rows) -> tuple[int, EngineSeconds]:
        rows = [self[row] for row in _rows(among)]
        return sum(candidate.queued_requests for candidate in rows), plain_sum(map(_queue, rows))

    @override
    def demand(self, view: PoolView, queue_max: EngineSeconds) -> float:
        blocks = max(candidate.hit_blocks for candidate in self)
        queues = [candidate.instance for candidate in self if candidate.queue_seconds <= queue_max]
        return view.pending_share(blocks, queues)


def weighed_list(
    view: PoolView, candidates: list[CandidateEstimate], kv_turnover: float, kv_tpot_max: EngineSeconds
) -> WeighedList:
    waits = view.kv_waits(candidates, kv_tpot_max) if kv_turnover else []
    if not any(waits):
        return WeighedList(candidates)
    return WeighedList(
        msgspec.structs.replace(candidate, queue_seconds=candidate.queue_seconds + kv_turnover * wait)
        for candidate, wait in zip(candidates, waits, strict=True)
    )


def _rows(among: Rows) -> list[int]:
    assert isinstance(among, list)
    return among


def cost(candidate: CandidateEstimate, stall: EngineSeconds) -> float:
    decoding, prefill_seconds = candidate.requests - candidate.queued_requests, candidate.prefill_seconds
    wait = candidate.predicted_ttft - prefill_seconds + stall * decoding
    return (wait + prefill_seconds / 2) * prefill_seconds


def _queue(candidate: CandidateEstimate) -> EngineSeconds:
    return candidate.queue_seconds
