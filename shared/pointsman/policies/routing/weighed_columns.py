"""`Weighed` by array operations, for large pools."""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pointsman.policies.candidate_columns import CandidateColumns, ColumnCandidates
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.weighed import Rows, Weighed
from pointsman.primitives import EngineSeconds, InstanceId, plain_sum


class WeighedColumns(ColumnCandidates, Weighed):
    def __init__(
        self, columns: CandidateColumns, answer_tokens: float, kv_turnover: float, kv_tpot_max: EngineSeconds
    ) -> None:
        """`answer_tokens`: expected."""
        waits = columns.kv_waits(answer_tokens, kv_tpot_max) if kv_turnover else None
        super().__init__(
            columns, columns.queue_seconds if waits is None else columns.queue_seconds + kv_turnover * waits
        )

    @property
    @override
    def least_prefill(self) -> EngineSeconds:
        return float(self.columns.prefill_seconds.min())

    @property
    @override
    def longest_queue(self) -> EngineSeconds:
        return float(self.queue_seconds.max())

    @override
    def on_time(self, budget: EngineSeconds) -> Rows:
        return (self.predicted_ttft + self.columns.margin_seconds <= budget).nonzero()[0]

    @override
    def with_queue_within(self, seconds: EngineSeconds, among: Rows | None = None) -> Rows:
        within = self.queue_seconds <= seconds
        if among is None:
            return within.nonzero()[0]
        rows = _rows(among)
        return rows[within[rows]]

    @override
    def cheapest(self, among: Rows | None, stall: EngineSeconds) -> dict[InstanceId, int]:
        names, costs = self.columns.names, self.costs(stall)
        if among is None or len(among) == len(names):
            return {names[row]: row for row in (costs == costs.min()).nonzero()[0].tolist()}
        rows = _rows(among)
        costs = costs[rows]
        return {names[row]: row for row in rows[costs == costs.min()].tolist()}

    def costs(self, stall: EngineSeconds) -> NDArray[np.float64]:
        """As `cost` of each candidate, operation by operation."""
        known, prefill = self.columns.known, self.columns.prefill_seconds
        wait = self.predicted_ttft - prefill + stall * (known.requests - known.queued_requests)
        costs: NDArray[np.float64] = (wait + prefill / 2) * prefill
        return costs

    @override
    def with_cached(self, tokens: float, among: Rows) -> Rows:
        rows = _rows(among)
        return rows[self.columns.cached_tokens[rows] >= tokens]

    @override
    def shortest(self) -> CandidateEstimate:
        return self[int(self.queue_seconds.argmin())]

    @override
    def longest(self, among: Rows) -> CandidateEstimate:
        rows = _rows(among)
        return self[int(rows[self.queue_seconds[rows].argmax()])]

    @override
    def waiting(self, among: Rows) -> tuple[int, EngineSeconds]:
        """Added up in the order of a pass over the candidates."""
        rows = _rows(among)
        return int(self.columns.known.queued_requests[rows].sum()), plain_sum(self.queue_seconds[rows].tolist())

    @override
    def demand(self, view: PoolView, queue_max: EngineSeconds) -> float:
        columns = self.columns
        rows = ((self.queue_seconds <= queue_max) & (columns.known.pending > 0)).nonzero()[0]
        return view.pending_share(int(columns.hit_blocks.max()), [columns.names[row] for row in rows.tolist()])


def _rows(among: Rows) -> NDArray[np.intp]:
    assert isinstance(among, np.ndarray)
    return among
