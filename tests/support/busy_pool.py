"""A pool in virtual time, in one process: tenants share system prompts, conversations grow, and engines that keep to the cost
model publish what they store and evict."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, Run
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.fleet import InstanceJoined
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.dispatch.recording import RIVALS, SETTINGS_EVERY, Recording
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, RequestId, SessionId, Tenant, Term
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman.state.prefix_index import ROOT
from pointsman.state.state import PoolSettings, State
from pointsman_lab.traffic import BLOCK_TOKENS, Conversations, SimulatedCache, instance_names

OUTPUT_TOKENS, TOKEN_SECONDS = 150, 0.03
RATE_EACH = 0.8
"""Requests a second and instance."""
CACHE_BLOCKS = 2_000
SEED = 1
EPOCH = Epoch(1)

Due = tuple[EngineSeconds, int, Callable[[EngineSeconds], None]]


class CachingEngine:
    """Says what it stores and evicts as its worker would."""

    def __init__(self, name: InstanceId) -> None:
        self.name = name
        self.free_at: EngineSeconds = 0.0
        self._cache = SimulatedCache(CACHE_BLOCKS)
        self._sequences = count(1)

    def join(self) -> InstanceJoined:
        return InstanceJoined(
            at=0.0, instance=self.name, epoch=EPOCH, url=f"http://{self.name}", model="m", block_tokens=BLOCK_TOKENS,
            engine_block_tokens=16, kv_capacity_tokens=CACHE_BLOCKS * BLOCK_TOKENS, max_model_len=0,
            prefill=PROFILES[DEFAULT_PROFILE].prefill_cost,
        )  # fmt: skip

    def store(self, keys: list[BlockKey], at: EngineSeconds) -> list[LogEvent]:
        known, surplus = self._cache.hold(keys)
        events: list[LogEvent] = []
        if new := keys[known:]:
            run = Run(pack_keys(new), keys[known - 1] if known else ROOT)
            events.append(
                BlocksStored(at=at, instance=self.name, epoch=EPOCH, sequence=next(self._sequences), runs=[run])
            )
        if surplus:
            packed = pack_keys(surplus)
            events.append(
                BlocksRemoved(at=at, instance=self.name, epoch=EPOCH, sequence=next(self._sequences), keys=packed)
            )
        return events


class BusyPool:
    """Advances in virtual time, from arrival to arrival."""

    def __init__(self, instances: int, policy: str, *, load: float = 1.0, seed: int = SEED) -> None:
        self._chance = Random(seed)
        policies = policy_set(routing=policy)
        self.state = State(PoolSettings(block_tokens=BLOCK_TOKENS), policies.trackers())
        self.dispatcher = Dispatcher(
            self.state, policies, term=Term(1), recording=Recording(RIVALS, settings_every=SETTINGS_EVERY)
        )
        self.now: EngineSeconds = 0.0
        self.rate = RATE_EACH * load * instances
        self.engines = {name: CachingEngine(name) for name in instance_names(instances)}
        self._due: list[Due] = []
        self._numbers = count(1)
        self._conversations = Conversations(self._chance, 4 * instances)
        for engine in self.engines.values():
            self._log(engine.join())

    def arrive(self) -> RouteRequest:
        """The next request, after everything that is due before it."""
        self.now += self._chance.expovariate(self.rate)
        while self._due and self._due[0][0] <= self.now:
            at, _, act = heappop(self._due)
            act(at)
        prompt = self._conversations.next()
        number = next(self._numbers)
        return RouteRequest(
            request=RequestId(f"r-{number}"), ingress="i", arrived_at=self.now, tenant=Tenant(f"tenant-{prompt.tenant}"),
            keys=pack_keys(prompt.keys), prompt_tokens=prompt.tokens, max_output_tokens=OUTPUT_TOKENS,
            slo_ttft=5.0, slo_tpot=0.1, session=SessionId(f"session-{prompt.session}"),
        )  # fmt: skip

    def follow(self, events: list[LogEvent]) -> None:
        """Engines start what was granted."""
        for event in events:
            if isinstance(event, RequestGranted):
                self._start(event)

    def _start(self, granted: RequestGranted) -> None:
        request, engine = self.state.workload.requests[granted.request], self.engines[granted.instance]
        took = request.prefill_seconds * self._chance.uniform(0.8, 1.2)
        engine.free_at = max(engine.free_at, self.now) + took
        keys = list(request.keys)

        def first_token(at: EngineSeconds) -> None:
            self.now = at
            self._log(
                PrefillFinished(
                    at=at, request=request.id, instance=engine.name, ttft=at - request.arrived_at, prefill=took
                )
            )
            for stored in engine.store(keys, at):
                self._log(stored)
            self.follow(self.dispatcher.grant_waiting(engine.name, at))

        def finish(at: EngineSeconds) -> None:
            self.now = at
            self._log(
                RequestFinished(
                    at=at, request=request.id, instance=engine.name, e2e=at - request.arrived_at,
                    prompt_tokens=request.prompt_tokens, completion_tokens=OUTPUT_TOKENS,
                    cached_tokens=request.prompt_tokens - request.uncached_tokens, ttft=took, tpot=TOKEN_SECONDS,
                )
            )  # fmt: skip
            self.follow(self.dispatcher.grant_waiting(engine.name, at))

        self._at(engine.free_at, first_token)
        self._at(engine.free_at + OUTPUT_TOKENS * TOKEN_SECONDS, finish)

    def _at(self, at: EngineSeconds, act: Callable[[EngineSeconds], None]) -> None:
        heappush(self._due, (at, next(self._numbers), act))

    def _log(self, event: LogEvent) -> None:
        self.state.apply(event, self.state.sequence + 1)
