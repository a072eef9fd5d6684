"""A bound that no router can reach: one queue for all engines and one shared cache, prefill only. Orders: `fcfs` and
`most_on_time` (Moore and Hodgson 1968, with all engines as one machine; a heuristic). A request may join a running
step, and its first token comes when its own share is computed."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from pointsman.contracts.fleet import PrefillCost
from pointsman.primitives import BlockKey, EngineSeconds, Tokens
from pointsman.simulation.outcome import Outcome, RequestRow
from pointsman.simulation.scenario import Scenario, block_keys
from pointsman.simulation.workload import WorkloadRequest
from pointsman.state.engine_profiles import PROFILES, prefill_seconds
from pointsman.state.trackers.attainment import DECILES, Tally, tenth

CentralOrder = Literal["fcfs", "most_on_time"]

LACK_WEIGHT = 4.0


def central_queue(
    scenario: Scenario, requests: Sequence[WorkloadRequest], order: CentralOrder, *, decile_floor: float = 0.0
) -> Outcome:
    """Serves the requests (in arrival order). Uses the scenario's instances, profile, total cache size, batched tokens
    and SLO. `decile_floor`: attainment of every tenth of prompts by length over the overall one; 0 for none; without
    effect on `fcfs`."""
    return _Central(scenario, requests, order, decile_floor).run()


class _SharedCache:
    """LRU over blocks of all served prompts, a prompt's last blocks evicted first."""

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


class _Floors:
    def __init__(self, rows: Sequence[RequestRow], decile_floor: float) -> None:
        ordered = sorted(row.prompt_tokens for row in rows)
        self._deciles = [tenth(ordered, row.prompt_tokens) for row in rows]
        self._tallies = [Tally() for _ in range(DECILES)]
        self._overall = Tally()
        self._floor = decile_floor

    def weight(self, row: RequestRow) -> float:
        tally = self._tallies[self._deciles[row.number]]
        lacking = self._floor * self._overall.attainment * tally.requests - tally.on_time
        return 1.0 + LACK_WEIGHT * max(0.0, lacking)

    def count(self, row: RequestRow) -> None:
        for tally in (self._overall, self._tallies[self._deciles[row.number]]):
            tally.count(row.prompt_tokens, row.on_time, 1)


@dataclass(slots=True)
class _Engine:
    tokens_left: Tokens = 0
    computed_at: EngineSeconds = 0.0
    read_at: EngineSeconds = 0.0

    @property
    def ends_at(self) -> EngineSeconds:
        return max(self.computed_at, self.read_at)


class _Central:
    def __init__(
        self, scenario: Scenario, requests: Sequence[WorkloadRequest], order: CentralOrder, decile_floor: float
    ) -> None:
        self._scenario = scenario
        self._order = order
        self._cost = PROFILES[scenario.profile].prefill_cost
        capacity = scenario.kv_capacity_tokens or PROFILES[scenario.profile].kv_capacity_tokens
        self._cache = _SharedCache(scenario.instances * capacity // scenario.block_tokens)
        self._rows = [scenario.row(number, request) for number, request in enumerate(requests)]
        self._keys = [block_keys(request, scenario.block_tokens) for request in requests]
        self._floors = _Floors(self._rows, decile_floor)
        self._engines = [_Engine() for _ in range(scenario.instances)]
        self._free_at = [(0.0, number) for number in range(scenario.instances)]
        heapify(self._free_at)

    def run(self) -> Outcome:
        waiting: list[RequestRow] = []
        coming = iter(self._rows)
        following = next(coming, None)
        now = 0.0
        while waiting or following is not None:
            free_at, number = heappop(self._free_at)
            if not waiting and following is not None:
                free_at = max(free_at, following.arrived_at)
            now = max(now, free_at)
            while following is not None and following.arrived_at <= now:
                waiting.append(following)
                following = next(coming, None)
            chosen = self._choose(waiting, now)
            if chosen is not None:
                self._serve(chosen, self._engines[number], now)
            heappush(self._free_at, (max(now, self._engines[number].computed_at), number))
        return Outcome(self._rows, virtual_seconds=max(engine.ends_at for engine in self._engines))

    def _choose(self, waiting: list[RequestRow], now: EngineSeconds) -> RequestRow | None:
        """Takes the next request out of `waiting`, and drops overdue ones for `most_on_time`."""
        if self._order == "most_on_time":
            for row in [row for row in waiting if now + self._seconds(row) > row.arrived_at + row.slo_ttft]:
                waiting.remove(row)
                row.end, row.reason, row.ended_at = "rejected", "slo_ttft", now
                self._floors.count(row)
            kept = self._most_on_time(waiting, now)
        else:
            kept = waiting
        if not kept:
            return None
        chosen = kept[0]
        waiting.remove(chosen)
        return chosen

    def _most_on_time(self, waiting: list[RequestRow], now: EngineSeconds) -> list[RequestRow]:
        """By urgency, as many as can be on time; when one cannot, the request with the most work per weight is set
        aside."""
        kept: list[tuple[float, int, RequestRow, EngineSeconds]] = []
        before = 0.0
        urgency = {row.number: self._urgency(row) for row in waiting}
        for row in sorted(waiting, key=lambda row: (urgency[row.number], row.number)):
            work = self._work(row)
            heappush(kept, (-work / self._floors.weight(row), row.number, row, work))
            if now + before + self._seconds(row) > row.arrived_at + row.slo_ttft:
                before -= heappop(kept)[3] / self._scenario.instances
            before += work / self._scenario.instances
        return sorted((row for _, _, row, _ in kept), key=lambda row: (urgency[row.number], row.number))

    def _urgency(self, row: RequestRow) -> EngineSeconds:
        """Its deadline; for a tenth below its floor, less the prefill time that one engine takes longer than all
        together."""
        deadline = row.arrived_at + row.slo_ttft
        if self._floors.weight(row) <= 1.0:
            return deadline
        return deadline - self._seconds(row) * (1 - 1 / self._scenario.instances)

    def _seconds(self, row: RequestRow) -> EngineSeconds:
        return prefill_seconds(self._cost, row.prompt_tokens, self._cached(row))

    def _work(self, row: RequestRow) -> EngineSeconds:
        if row.prompt_tokens - self._cached(row) > self._scenario.max_num_batched_tokens:
            return self._seconds(row)
        return computing_seconds(self._cost, row.prompt_tokens, self._cached(row))

    def _cached(self, row: RequestRow) -> int:
        block = self._scenario.block_tokens
        return min(self._cache.hit(self._keys[row.number]), (row.prompt_tokens - 1) // block) * block

    def _serve(self, row: RequestRow, engine: _Engine, now: EngineSeconds) -> None:
        row.cached_tokens = self._cached(row)
        uncached = row.prompt_tokens - row.cached_tokens
        if uncached > engine.tokens_left or now > engine.ends_at:
            begins_at = max(now, engine.ends_at) + self._cost.fixed_s
            engine.computed_at, engine.read_at = begins_at, begins_at + self._cost.floor_s
            engine.tokens_left = max(uncached, self._scenario.max_num_batched_tokens)
        computing = computing_seconds(self._cost, row.prompt_tokens, row.cached_tokens)
        engine.computed_at = max(now, engine.computed_at) + computing
        engine.tokens_left -= uncached
        row.first_token_at = row.ended_at = engine.ends_at
        row.end = "finished"
        self._floors.count(row)
        self._cache.keep(self._keys[row.number])


def computing_seconds(cost: PrefillCost, total: Tokens, cached: Tokens) -> EngineSeconds:
    """Seconds that tokens `cached..total` add to a step that reads its weights anyway."""
    return cost.per_token_s * (total - cached) + cost.per_token_squared_s * (total * total - cached * cached)
