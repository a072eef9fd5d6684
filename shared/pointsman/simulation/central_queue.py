"""A bound that no router can reach: one queue for all engines, and one cache that all of them share.

Each engine takes its next request only when it is free, and every prefix that any of them has computed is at hand.
Prefill only. The orders are `fcfs` and `most_on_time`: Moore and Hodgson's rule (1968) over the waiting requests, with
the engines taken for one machine that is as fast as all of them, and what can no longer be on time dropped. The
rule is exact for one machine, all released; here it is a strong heuristic, so the "bound" is one in name for it.

Limit: prefills run one by one here, while an engine batches them. Where most prompts have so few uncached tokens that
the weights' read sets their time (`floor_s`, about 260 tokens), batching beats this "bound".
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Literal

from pointsman.primitives import BlockKey, Seconds
from pointsman.simulation.outcome import Outcome, RequestRow
from pointsman.simulation.simulator import Scenario, block_keys, row_of
from pointsman.simulation.workload import WorkloadRequest
from pointsman.state.engine_profiles import PROFILES, prefill_seconds

CentralOrder = Literal["fcfs", "most_on_time"]


def central_queue(scenario: Scenario, requests: Sequence[WorkloadRequest], order: CentralOrder) -> Outcome:
    """Serve the requests (in the order of arrival) from one queue. Uses the scenario's instances, profile, cache size
    (of all instances together) and objective."""
    return _Central(scenario, requests, order).run()


class _SharedCache:
    """Blocks of all prompts served, the least recently used forgotten first, a prompt's last blocks before its first."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks: OrderedDict[BlockKey, None] = OrderedDict()
        self._blocks_max = blocks_max

    def hit(self, keys: list[BlockKey]) -> int:
        return next((depth for depth, key in enumerate(keys) if key not in self._blocks), len(keys))

    def keep(self, keys: list[BlockKey]) -> None:
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)


class _Central:
    def __init__(self, scenario: Scenario, requests: Sequence[WorkloadRequest], order: CentralOrder) -> None:
        self._scenario = scenario
        self._order = order
        self._cost = PROFILES[scenario.profile].prefill_cost
        capacity = scenario.kv_capacity_tokens or PROFILES[scenario.profile].kv_capacity_tokens
        self._cache = _SharedCache(scenario.instances * capacity // scenario.block_tokens)
        self._rows = [row_of(number, request, scenario) for number, request in enumerate(requests)]
        self._keys = [block_keys(request, scenario.block_tokens) for request in requests]
        self._free_at = [0.0] * scenario.instances
        heapify(self._free_at)

    def run(self) -> Outcome:
        waiting: list[RequestRow] = []
        coming = iter(self._rows)
        following = next(coming, None)
        now = 0.0
        while waiting or following is not None:
            free_at = heappop(self._free_at)
            if not waiting and following is not None:
                free_at = max(free_at, following.arrived_at)
            now = max(now, free_at)
            while following is not None and following.arrived_at <= now:
                waiting.append(following)
                following = next(coming, None)
            chosen = self._choose(waiting, now)
            heappush(self._free_at, now if chosen is None else self._serve(chosen, now))
        return Outcome(self._rows, virtual_seconds=max(self._free_at))

    def _choose(self, waiting: list[RequestRow], now: Seconds) -> RequestRow | None:
        """Take the next request out of `waiting`, and drop what can no longer be on time if the order says so."""
        if self._order == "most_on_time":
            for row in [row for row in waiting if now + self._seconds(row) > row.arrived_at + row.slo_ttft]:
                waiting.remove(row)
                row.end, row.reason, row.ended_at = "rejected", "slo_ttft", now
            kept = self._most_on_time(waiting, now)
        else:
            kept = waiting
        if not kept:
            return None
        chosen = kept[0]
        waiting.remove(chosen)
        return chosen

    def _most_on_time(self, waiting: list[RequestRow], now: Seconds) -> list[RequestRow]:
        """In the order of deadlines, as many as can be on time: where one cannot, the longest so far is set aside."""
        kept: list[tuple[float, int, RequestRow]] = []
        done = 0.0
        for row in sorted(waiting, key=lambda r: r.arrived_at + r.slo_ttft):
            seconds = self._seconds(row)
            heappush(kept, (-seconds, row.number, row))
            done += seconds / self._scenario.instances
            if now + max(done, seconds) > row.arrived_at + row.slo_ttft:
                done += heappop(kept)[0] / self._scenario.instances
        return sorted((row for _, _, row in kept), key=lambda r: r.arrived_at + r.slo_ttft)

    def _seconds(self, row: RequestRow) -> Seconds:
        return prefill_seconds(self._cost, row.prompt_tokens, self._cached(row))

    def _cached(self, row: RequestRow) -> int:
        block = self._scenario.block_tokens
        return min(self._cache.hit(self._keys[row.number]), (row.prompt_tokens - 1) // block) * block

    def _serve(self, row: RequestRow, now: Seconds) -> Seconds:
        row.cached_tokens = self._cached(row)
        row.first_token_at = row.ended_at = now + self._seconds(row)
        row.end = "finished"
        self._cache.keep(self._keys[row.number])
        return row.first_token_at
