"""What to compare a router with: one queue for all engines and one shared cache, prefill only. Engines batch as real
ones do: a step computes up to `max_num_batched_tokens`, prompts in chunks, and all its first tokens come at its end. A
prefix can be used by every engine as soon as its computation begins.

Orders: `fcfs`, and `most_on_time` (Moore and Hodgson 1968, with all engines as one machine; a heuristic). With `foresight`
the latter knows which blocks later requests use. A router has neither the queue, nor the cache, nor the foresight; yet the
order is a heuristic, so that a router may be better."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

from pointsman.contracts.fleet import PrefillCost
from pointsman.primitives import BlockKey, EngineSeconds, Tokens
from pointsman.simulation.outcome import Outcome, RequestRow
from pointsman.simulation.scenario import Scenario, block_keys
from pointsman.simulation.workload import WorkloadRequest
from pointsman.state.engine_profiles import PROFILES
from pointsman.state.trackers.attainment import DECILES, Tally, tenth

CentralOrder = Literal["fcfs", "most_on_time"]

Late = Literal["dropped", "served last"]
"""What `most_on_time` does with requests that can no longer be on time. Serving them fills the cache for later ones."""

LACK_WEIGHT = 4.0

REUSE_DISCOUNT = 0.75
"""Of work on blocks that later requests use, when somebody must be set aside and there is foresight."""


def central_queue(
    scenario: Scenario,
    requests: Sequence[WorkloadRequest],
    order: CentralOrder,
    *,
    decile_floor: float = 0.0,
    late: Late = "dropped",
    foresight: bool = True,
) -> Outcome:
    """Serves the requests (in arrival order). Uses the scenario's instances, profile, total cache size, batched tokens
    and SLO. `decile_floor`: attainment of every tenth of prompts by length over the overall one; 0 for none; it,
    `late` and `foresight` are of `most_on_time` alone."""
    return _Central(scenario, requests, order, decile_floor, late, foresight).run()


class SharedCache:
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
    """`carried`: a prompt whose chunks do not end with the present step, and its computed tokens."""

    carried: tuple[RequestRow, Tokens] | None = None


@dataclass(slots=True)
class _Step:
    tokens_left: Tokens
    computing: EngineSeconds = 0.0
    completed: list[RequestRow] = field(default_factory=list)


class _Central:
    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[WorkloadRequest],
        order: CentralOrder,
        decile_floor: float,
        late: Late,
        foresight: bool,
    ) -> None:
        self._scenario = scenario
        self._order = order
        self._late: Late = late
        self._discount = REUSE_DISCOUNT if foresight else 0.0
        self._cost = PROFILES[scenario.profile].prefill_cost
        capacity = scenario.kv_capacity_tokens or PROFILES[scenario.profile].kv_capacity_tokens
        self._cache = SharedCache(scenario.instances * capacity // scenario.block_tokens)
        self._rows = [scenario.row(number, request) for number, request in enumerate(requests)]
        self._keys = [block_keys(request, scenario.block_tokens) for request in requests]
        self._uses_left = Counter(key for keys in self._keys for key in keys)
        self._floors = _Floors(self._rows, decile_floor)
        self._engines = [_Engine() for _ in range(scenario.instances)]
        self._waiting: list[RequestRow] = []
        self._overdue: list[RequestRow] = []

    def run(self) -> Outcome:
        free = [(0.0, number) for number in range(len(self._engines))]
        heapify(free)
        arrived = 0
        now = 0.0
        while True:
            free_at, number = heappop(free)
            engine = self._engines[number]
            now = max(now, free_at)
            while arrived < len(self._rows) and self._rows[arrived].arrived_at <= now:
                row = self._rows[arrived]
                self._uses_left.subtract(self._keys[row.number])
                self._waiting.append(row)
                arrived += 1
            ends_at = self._run_step(engine, now)
            if ends_at is None and arrived == len(self._rows):
                if not free:
                    break
                continue
            # An idle engine looks again when the next request arrives.
            heappush(free, (self._rows[arrived].arrived_at if ends_at is None else ends_at, number))
        ends = [row.ended_at for row in self._rows if row.ended_at is not None]
        return Outcome(self._rows, virtual_seconds=max(ends, default=0.0))

    # One step of one engine

    def _run_step(self, engine: _Engine, now: EngineSeconds) -> EngineSeconds | None:
        """The end of the step that begins now; None if there is nothing to compute."""
        step = _Step(self._scenario.max_num_batched_tokens)
        carried, engine.carried = engine.carried, None
        if carried is not None:
            self._compute(engine, step, *carried)
        for row in self._choose(now):
            if step.tokens_left <= 0 or not self._fits(step, row, now):
                break
            self._begin(engine, step, row)
        if not step.computing and not step.completed:
            return None
        ends_at = now + self._cost.fixed_s + max(self._cost.floor_s, step.computing)
        for row in step.completed:
            row.first_token_at = row.ended_at = ends_at
            row.end = "finished"
            self._floors.count(row)
        return ends_at

    def _begin(self, engine: _Engine, step: _Step, row: RequestRow) -> None:
        (self._waiting if row in self._waiting else self._overdue).remove(row)
        row.cached_tokens = self._cached(row)
        self._cache.keep(self._keys[row.number])
        self._compute(engine, step, row, row.cached_tokens)

    def _compute(self, engine: _Engine, step: _Step, row: RequestRow, computed: Tokens) -> None:
        until = min(row.prompt_tokens, computed + step.tokens_left)
        step.tokens_left -= until - computed
        step.computing += computing_seconds(self._cost, until, computed)
        if until == row.prompt_tokens:
            step.completed.append(row)
        else:
            engine.carried = (row, until)

    def _fits(self, step: _Step, row: RequestRow, now: EngineSeconds) -> bool:
        """Whether nobody of the step becomes late by this one. Engines ask no such thing, a bound may."""
        if self._order != "most_on_time" or not step.computing:
            return True
        cached = self._cached(row)
        chunk = min(row.prompt_tokens, cached + step.tokens_left)
        computing = step.computing + computing_seconds(self._cost, chunk, cached)
        ends_at = now + self._cost.fixed_s + max(self._cost.floor_s, computing)
        rest = row.prompt_tokens - chunk
        row_ends_at = ends_at + (self._steps(rest) * self._cost.fixed_s if rest else 0.0)
        row_ends_at += computing_seconds(self._cost, row.prompt_tokens, chunk)
        endings = [(row, row_ends_at), *((one, ends_at) for one in step.completed)]
        return all(end <= one.arrived_at + one.slo_ttft for one, end in endings if self._can_be_on_time(one, now))

    def _choose(self, now: EngineSeconds) -> list[RequestRow]:
        """Whom the step takes, in this order, as far as its tokens reach."""
        if self._order == "fcfs":
            return list(self._waiting)
        self._put_overdue_aside(now)
        return self._most_on_time(self._waiting, now) or self._overdue[:1]

    def _put_overdue_aside(self, now: EngineSeconds) -> None:
        for row in [row for row in self._waiting if not self._can_be_on_time(row, now)]:
            self._waiting.remove(row)
            if self._late == "dropped":
                row.end, row.reason, row.ended_at = "rejected", "slo_ttft", now
                self._floors.count(row)
            else:
                self._overdue.append(row)

    def _most_on_time(self, waiting: list[RequestRow], now: EngineSeconds) -> list[RequestRow]:
        """By urgency, as many as can be on time; when one cannot, the request with the most work per weight is set
        aside."""
        kept: list[tuple[float, int, RequestRow, EngineSeconds]] = []
        before = 0.0
        urgency = {row.number: self._urgency(row) for row in waiting}
        for row in sorted(waiting, key=lambda row: (urgency[row.number], row.number)):
            work = computing_seconds(self._cost, row.prompt_tokens, self._cached(row))
            dear = work * (1 - self._discount * self._reused_share(row)) / self._floors.weight(row)
            heappush(kept, (-dear, row.number, row, work))
            if now + before + self._seconds(row) > row.arrived_at + row.slo_ttft:
                before -= heappop(kept)[3] / self._scenario.instances
            before += work / self._scenario.instances
        return sorted((row for _, _, row, _ in kept), key=lambda row: (urgency[row.number], row.number))

    def _reused_share(self, row: RequestRow) -> float:
        """Of its uncached blocks, those that later requests use."""
        keys = self._keys[row.number]
        uncached = keys[self._cache.hit(keys) :]
        return sum(self._uses_left[key] > 0 for key in uncached) / len(uncached) if uncached else 0.0

    def _urgency(self, row: RequestRow) -> EngineSeconds:
        """Its deadline; for a tenth below its floor, less the prefill time that one engine takes longer than all
        together."""
        deadline = row.arrived_at + row.slo_ttft
        if self._floors.weight(row) <= 1.0:
            return deadline
        return deadline - self._seconds(row) * (1 - 1 / self._scenario.instances)

    def _can_be_on_time(self, row: RequestRow, now: EngineSeconds) -> bool:
        return now + self._seconds(row) <= row.arrived_at + row.slo_ttft

    def _seconds(self, row: RequestRow) -> EngineSeconds:
        """Alone on an engine: a long prompt takes several steps."""
        cached = self._cached(row)
        computing = computing_seconds(self._cost, row.prompt_tokens, cached)
        return self._steps(row.prompt_tokens - cached) * self._cost.fixed_s + max(self._cost.floor_s, computing)

    def _steps(self, tokens: Tokens) -> int:
        return -(-tokens // self._scenario.max_num_batched_tokens)

    def _cached(self, row: RequestRow) -> int:
        block = self._scenario.block_tokens
        return min(self._cache.hit(self._keys[row.number]), (row.prompt_tokens - 1) // block) * block


def computing_seconds(cost: PrefillCost, total: Tokens, cached: Tokens) -> EngineSeconds:
    """Seconds that tokens `cached..total` add to a step that reads its weights anyway."""
    return cost.per_token_s * (total - cached) + cost.per_token_squared_s * (total * total - cached * cached)
