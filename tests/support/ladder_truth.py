"""The six rungs of the hit-rate ladder from what a simulation really is: the caches of its engines, looked at when a
request is placed, and the prompts as they came. Simple and slow; nothing of `pointsman.analysis` is used. Also the log
that a fleet would have written of it."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    tokens: dict[str, int]


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
        self.begins_with = -1
        """The request with which the log begins; -1: the first."""
        self.log_begins = 0
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
        while self.empty_at and self.empty_at[0][0] <= now:
            self._empty(self.empty_at.pop(0)[1])
        if len(self.truth) == self.begins_with and command.attempt == 1:
            self._begin()
        self._look(command, now)
        super()._route(command, now)

    def _begin(self) -> None:
        """What was sent before is forgotten, but for what engines hold."""
        self.log_begins = len(self.log)
        self.prefixes = {key for engine in self.fleet.engines.values() for key in self._held(engine)}
        self.cache = list(self.prefixes)

    def _held(self, engine: SimulatedEngine) -> set[BlockKey]:
        return set(map(BlockKey, engine.model.cache.cached())) if engine.alive else set()

    def _empty(self, number: int) -> None:
        """No event tells of it, and its worker notices nothing."""
        cache = list(self.fleet.engines.values())[number].model.cache
        evictable = cache._unheld.take(len(cache._unheld))
        for block in evictable:
            del cache._holders[block]

    def _look(self, command: RouteRequest, now: EngineSeconds) -> None:
        keys, prompt, state = unpack_keys(command.keys), command.prompt_tokens, self.state
        ready = [name for name in state.fleet.ready if name not in command.excluded]
        real = [self._held(self.fleet.engines[name]) for name in ready]
        waiting = [r for r in state.workload.requests.values() if r.stage in (Stage.PENDING, Stage.PREFILL)]
        real += [set(r.keys) for r in waiting if r.id != command.request]
        known = state.hits(keys)
        found = {
            "perfect": self.usable(max((leading(keys, held) for held in real), default=0), prompt),
            "known": self.usable(max((known.get(name, 0) for name in ready), default=0), prompt),
        }
        number = int(command.request)
        if command.attempt > 1:
            self.truth[number].tokens |= found
            return
        found["unbounded"] = self.usable(leading(keys, self.prefixes), prompt)
        found["capacity"] = self.usable(leading(keys, set(self.cache)), prompt)
        self.truth[number] = TrueRequest(number, command.tenant, now, prompt, found)
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
        for number, row in enumerate(self.outcome.rows):
            if row.end == "finished" and number >= self.begins_with:
                request = self.truth[number]
                tokens = request.tokens
                tokens["chosen"], tokens["delivered"] = row.predicted_cached_tokens, row.cached_tokens
                tokens["known"] = max(tokens["known"], tokens["chosen"])
                tokens["perfect"] = max(tokens["perfect"], tokens["delivered"])
                tokens["unbounded"] = max(tokens["unbounded"], tokens["perfect"], tokens["capacity"])
                found.append(request)
        return found

    def state_before(self, entries: int) -> State:
        """As a follower has it after so many entries of the log."""
        state = State(PoolSettings(block_tokens=self.block_tokens, speed=self.pool.mirror.speed))
        for sequence, event in enumerate(self.log[:entries], 1):
            state.apply(event, sequence)
        return state


def leading(keys: list[BlockKey], held: set[BlockKey]) -> int:
    for depth, key in enumerate(keys):
        if key not in held:
            return depth
    return len(keys)


def shares(requests: Sequence[TrueRequest]) -> dict[str, float]:
    prompt = sum(request.prompt_tokens for request in requests)
    return {rung: sum(request.tokens[rung] for request in requests) / prompt for rung in RUNGS}
