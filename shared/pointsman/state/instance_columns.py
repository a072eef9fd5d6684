"""Queues and learned corrections of all ready instances as columns of numbers: the work ahead of a new request at each
of them in a few array operations, instead of a pass over objects. Derived from State: `Workload.changed` and
`LatencyModel.changed` name the instances whose row is out of date, so keeping it costs by what changed. Every number is
the same double as `InstanceQueue.work_ahead` and `Correction.seconds` give: the same operations in the same order.

Limits: prompts whose squares are exact doubles; not of work that waits for a fetch, nor of a step without work (`special`)."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.state.correction import FAR, LONG, Correction
from pointsman.state.fleet import Fleet
from pointsman.state.latency_model import LatencyModel
from pointsman.state.workload import EMPTY_QUEUE, InstanceQueue, Workload

Column: TypeAlias = NDArray[np.float64]

QUEUE_FIELDS = (
    "pending_seconds", "prefill_seconds", "working_since", "step_seconds", "step_tokens", "queued_tokens", "requests",
    "queued_requests", "pending", "prompt_tokens",
)  # fmt: skip
LEARNED_FIELDS = ("factor", "token_share", "token_seconds", "tokens", "known")
"""Of one prompt, and of work ahead."""
FIXED_FIELDS = ("fixed_s", "per_token_s", "per_token_squared_s", "floor_s", "kv_capacity", "prefills_only")
UNLEARNED = (1.0, 0.0, 0.0, 1.0, 0.0)
NO_STEP = (np.inf, 0)
"""Of an idle engine: nothing of it passes, and there is no division by zero."""


class InstanceColumns:
    """Rows are in the order of `names`."""

    def __init__(self, fleet: Fleet, workload: Workload, latency: LatencyModel) -> None:
        self.names = names = fleet.ready
        self.position = {name: row for row, name in enumerate(names)}
        self.special: set[int] = set()
        """Rows that `queue_work` does not know."""
        self._workload, self._latency = workload, latency
        self._queues: Column = np.zeros((len(QUEUE_FIELDS), len(names)))
        self.queued_tokens, self.requests, self.queued_requests, self.pending, self.prompt_tokens = self._queues[5:]
        self._of_prompt: Column = np.zeros((len(LEARNED_FIELDS), len(names)))
        self._of_work: Column = np.zeros((len(LEARNED_FIELDS), len(names)))
        self.step_seconds: Column = np.zeros(len(names))
        """Of a full step of each engine."""
        fixed: Column = np.zeros((len(FIXED_FIELDS), len(names)))
        for row, name in enumerate(names):
            instance = fleet[name]
            cost = instance.cost
            fixed[:, row] = (
                cost.fixed_s, cost.per_token_s, cost.per_token_squared_s, cost.floor_s, instance.kv_capacity_tokens,
                instance.role == "prefill",
            )  # fmt: skip
            self._read_queue(row, workload.queues.get(name, EMPTY_QUEUE))
            self._read_learned(row, name)
        self.fixed_s, self.per_token_s, self.per_token_squared_s, self.floor_s, capacity, prefills = fixed
        self.prefills_only = prefills > 0
        self.kv_capacity: Column = np.where((capacity > 0) & ~self.prefills_only, capacity, np.inf)
        """Infinite where nobody waits for it."""
        engine_block_tokens = [fleet[name].engine_block_tokens for name in names]
        self._engine_block_tokens = np.array(engine_block_tokens, dtype=np.int64)
        self._same_block_tokens = engine_block_tokens[0] if len(set(engine_block_tokens)) == 1 else None
        workload.changed.clear()
        latency.changed.clear()

    def refresh(self) -> None:
        position = self.position
        if changed := self._workload.changed:
            queues = self._workload.queues
            for name in changed:
                if (row := position.get(name)) is not None:
                    self._read_queue(row, queues.get(name, EMPTY_QUEUE))
            changed.clear()
        if changed := self._latency.changed:
            for name in changed:
                if (row := position.get(name)) is not None:
                    self._read_learned(row, name)
            changed.clear()

    def row(self, name: InstanceId) -> list[float]:
        """Queue and what was learned of one instance."""
        column = self.position[name]
        return [
            *self._queues[:, column].tolist(),
            *self._of_prompt[:, column].tolist(),
            *self._of_work[:, column].tolist(),
            self.step_seconds.item(column),
            column in self.special,
        ]

    def rows_with_pending(self) -> set[int]:
        return set(self.pending.nonzero()[0].tolist())

    def cacheable_tokens(self, prompt_tokens: Tokens) -> Column | Tokens:
        """What a hit can save at most (`LatencyModel.cached_tokens`)."""
        if same := self._same_block_tokens:
            return max(0, (prompt_tokens - 1) // same * same)
        blocks = (prompt_tokens - 1) // self._engine_block_tokens
        cacheable: Column = np.maximum(0.0, blocks * self._engine_block_tokens)
        return cacheable

    def queue_seconds(self, now: EngineSeconds) -> Column:
        """Corrected, of all work ahead of a new request (`InstanceQueue.work_ahead`). `special` rows are wrong."""
        pending_seconds, seconds, working_since, work, step_tokens, tokens = self._queues[:6]
        done = np.minimum(np.maximum(now - working_since, 0.0), work)
        left = np.maximum(seconds - done, 0.0)
        left += pending_seconds
        done /= work
        done *= step_tokens
        return _corrected(left, tokens - np.trunc(done, out=done), self._of_work)

    def prefill_work(self, prompt_tokens: Tokens, cached_tokens: Column, uncached_tokens: Column) -> Column:
        """By the uncorrected cost model."""
        seconds: Column = self.per_token_s * uncached_tokens
        squares = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
        squares *= self.per_token_squared_s
        seconds += squares
        np.maximum(seconds, self.floor_s, out=seconds)
        seconds += self.fixed_s
        return seconds

    def prefill_seconds(self, work: Column, uncached_tokens: Column) -> Column:
        """Corrected, of one prompt."""
        return _corrected(work, uncached_tokens, self._of_prompt)

    def margin_seconds(self, queue_seconds: Column) -> Column:
        margins: Column = self._latency.margin.steps * np.minimum(queue_seconds, self.step_seconds)
        return margins

    def _read_queue(self, row: int, queue: InstanceQueue) -> None:
        first = next(iter(queue.prefill.values()), None)
        step = queue.step if first is not None else NO_STEP
        if step[0] <= 0 or (first is not None and first.fetching):  # less than no work: only lying events have it
            step = NO_STEP
            self.special.add(row)
        else:
            self.special.discard(row)
        self._queues[:, row] = (
            queue.pending_seconds,
            queue.prefill_seconds if first is not None else 0.0,
            queue.working_since,
            *step,
            queue.pending_tokens + (queue.prefill_tokens if first is not None else 0),
            queue.requests,
            queue.queued_requests,
            len(queue.pending),
            queue.prompt_tokens,
        )

    def _read_learned(self, row: int, name: InstanceId) -> None:
        latency = self._latency
        self._of_prompt[:, row] = _learned(latency.corrections.get(name), one_prompt=True)
        self._of_work[:, row] = _learned(latency.of_work(name), one_prompt=False)
        self.step_seconds[row] = latency.step_seconds(name)


def _learned(known: Correction | None, *, one_prompt: bool) -> tuple[float, ...]:
    if known is None or not known.token_share:
        return (known.factor, *UNLEARNED[1:]) if known is not None else UNLEARNED
    far = (LONG * known.longest if one_prompt else FAR * known.most_tokens) if known.by_length else np.inf
    return known.factor, known.token_share, known.token_seconds, known.tokens, far


def _corrected(work: Column, tokens: Column, learned: Column) -> Column:
    factor, share, token_seconds, token_sum, known = learned
    corrected = work * factor
    far = (tokens > known).nonzero()[0]
    if far.size:
        share = share.copy()
        share[far] *= known[far] / tokens[far]
    by_tokens: Column = tokens * token_seconds
    by_tokens /= token_sum
    by_tokens -= corrected
    by_tokens *= share
    by_tokens += corrected
    return by_tokens
