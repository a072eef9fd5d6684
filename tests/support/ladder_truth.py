"""The six rungs of the hit-rate ladder from what a simulation really is: the caches of its engines, looked at when a
request is placed, and the prompts as they came. Simple and slow; nothing of `pointsman.analysis` is used. Also the log
that a fleet would have written of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRequest
from pointsman.primitives import BlockKey, EngineSeconds
from pointsman.simulation.block_cache import CacheChange, RunCached
from pointsman.simulation.scenario import NO_MIRROR, FleetMirror
from pointsman.simulation.simulated_fleet import SimulatedEngine
from pointsman.simulation.simulator import Scenario, Simulation
from pointsman.simulation.workload import WorkloadRequest
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Stage

RUNGS = ("unbounded", "capacity", "perfect", "known", "chosen", "delivered")


@dataclass
class TrueRequest:
    number: int
    tenant: str
    at: EngineSeconds
    prompt_tokens: int
    log_entries: int
    """In the log before it."""
    tokens: dict[str, int] = field(default_factory=dict)


class WatchedCaches(Simulation):
    """A simulation that notes, at each placement, what every engine really holds, and keeps a log."""

    def __init__(
        self, scenario: Scenario, requests: Sequence[WorkloadRequest], mirror: FleetMirror = NO_MIRROR
    ) -> None:
        super().__init__(scenario, requests, mirror)
        self.block_tokens = scenario.block_tokens
        self.log: list[LogEvent] = []
        self.truth: dict[int, TrueRequest] = {}
        self.prefixes: set[BlockKey] = set()
        self.cache: list[BlockKey] = []
        self.empty_at: list[tuple[EngineSeconds, int]] = []
        """When the cache of an engine is emptied behind everybody's back."""
        apply = self.pool.apply

        def noted(event: LogEvent, now: EngineSeconds) -> None:
            self.log.append(event)
            apply(event, now)

        deliver = self.fleet.deliver

        def seen(engine: SimulatedEngine, changes: list[CacheChange], now: EngineSeconds) -> None:
            for change in changes:
                if isinstance(change, RunCached):
                    self._generated([BlockKey(key) for key in change.hashes])
            deliver(engine, changes, now)

        self.pool.apply = noted  # type: ignore[method-assign]
        self.fleet.deliver = seen  # type: ignore[method-assign]

    @override
    def carry_out(self, events: list[LogEvent], now: EngineSeconds) -> None:
        self.log += events
        super().carry_out(events, now)

    @override
    def _route(self, command: RouteRequest, now: EngineSeconds) -> None:
        if command.attempt == 1:
            while self.empty_at and self.empty_at[0][0] <= now:
                self._empty(self.empty_at.pop(0)[1], now)
            self._look(command, now)
        super()._route(command, now)

    def _empty(self, number: int, now: EngineSeconds) -> None:
        """No event tells of it, and its worker notices nothing."""
        cache = list(self.fleet.engines.values())[number].model.cache
        evictable = cache._unheld.take(len(cache._unheld))
        for block in evictable:
            del cache._holders[block]

    def _look(self, command: RouteRequest, now: EngineSeconds) -> None:
        keys, prompt = unpack_keys(command.keys), command.prompt_tokens
        state = self.state
        real = [set(map(BlockKey, self.fleet.engines[name].model.cache.cached())) for name in state.fleet.ready]
        waiting = [r for r in state.workload.requests.values() if r.stage in (Stage.PENDING, Stage.PREFILL)]
        real += [set(request.keys) for request in waiting]
        known = state.hits(keys)
        blocks = {
            "unbounded": leading(keys, self.prefixes),
            "capacity": leading(keys, set(self.cache)),
            "perfect": max((leading(keys, held) for held in real), default=0),
            "known": max((known.get(name, 0) for name in state.fleet.ready), default=0),
        }
        self.truth[int(command.request)] = TrueRequest(
            int(command.request), command.tenant, now, prompt, len(self.log),
            {rung: self.usable(count, prompt) for rung, count in blocks.items()},
        )  # fmt: skip
        self._use(keys)

    def _generated(self, keys: list[BlockKey]) -> None:
        if not self.prefixes.issuperset(keys):
            self._use([key for key in keys if key not in self.prefixes])

    def _use(self, keys: list[BlockKey]) -> None:
        self.prefixes |= set(keys)
        kept = set(keys)
        self.cache = [key for key in self.cache if key not in kept] + keys[::-1]
        tokens = sum(engine.kv_capacity_tokens for engine in self.state.fleet.instances)
        del self.cache[: max(0, len(self.cache) - tokens // self.block_tokens)]

    def usable(self, blocks: int, prompt: int) -> int:
        """The last token is always computed, and engines share whole blocks only."""
        return min(blocks, (prompt - 1) // self.block_tokens) * self.block_tokens

    def finished(self) -> list[TrueRequest]:
        found = []
        for number, row in enumerate(self._outcome.rows):
            if row.end == "finished":
                request = self.truth[number]
                tokens = request.tokens
                tokens["chosen"], tokens["delivered"] = row.predicted_cached_tokens, row.cached_tokens
                tokens["known"] = max(tokens["known"], tokens["chosen"])
                tokens["perfect"] = max(tokens["perfect"], tokens["delivered"])
                tokens["unbounded"] = max(tokens["unbounded"], tokens["perfect"], tokens["capacity"])
                found.append(request)
        return found

    def new_state(self) -> State:
        return State(PoolSettings(block_tokens=self.block_tokens, speed=self.pool.mirror.speed))


def leading(keys: list[BlockKey], held: set[BlockKey]) -> int:
    for depth, key in enumerate(keys):
        if key not in held:
            return depth
    return len(keys)


def shares(requests: Sequence[TrueRequest]) -> dict[str, float]:
    prompt = sum(request.prompt_tokens for request in requests)
    return {rung: sum(request.tokens[rung] for request in requests) / prompt for rung in RUNGS}
