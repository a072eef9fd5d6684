"""`pointsman-lab route`: what one call of the leader costs by the number of instances, in one process without NATS. A pool
under steady load: tenants share system prompts, conversations grow, and engines that keep to the cost model publish
what they store and evict. Times are of the calls alone, the quietest of several rounds."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import click
from rich.console import Console

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, Run
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.fleet import InstanceJoined, InstanceReported, LivenessTimeouts
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.policies.routing import DEFAULT_ROUTING
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, RequestId, SessionId, Tenant, Term
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman.state.prefix_index import ROOT
from pointsman.state.state import PoolSettings, State
from pointsman_cli.options import CONTEXT, COUNT, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table

BLOCK_TOKENS = 64
TENANTS = 20
SYSTEM_BLOCKS, TURN_BLOCKS, TURNS_MAX = 24, 6, 12
OUTPUT_TOKENS, TOKEN_SECONDS = 150, 0.03
RATE_EACH = 0.8
"""Requests a second and instance."""
CACHE_BLOCKS = 2_000
SEED = 1
WARM_EACH, MEASURED, ROUNDS = 8, 400, 5
TIMEOUTS = LivenessTimeouts(heard_since=0.0, suspect_after=1e9, leave_after=1e9)

Due = tuple[EngineSeconds, int, Callable[[EngineSeconds], None]]


@dataclass
class Engine:
    """What an instance holds, in the order of its last use. It evicts the leaves of the prompt used longest ago."""

    name: InstanceId
    held: dict[BlockKey, None] = field(default_factory=dict)
    sequence: int = 0
    free_at: EngineSeconds = 0.0

    def store(self, keys: list[BlockKey], at: EngineSeconds) -> list[LogEvent]:
        new = [key for key in keys if key not in self.held]
        for key in reversed(keys):
            self.held.pop(key, None)
            self.held[key] = None
        events: list[LogEvent] = []
        if new:
            parent = keys[len(keys) - len(new) - 1] if len(new) < len(keys) else ROOT
            runs = [Run(pack_keys(new), parent)]
            events.append(BlocksStored(at=at, instance=self.name, epoch=Epoch(1), sequence=self._next(), runs=runs))
        surplus = [key for key, _ in zip(self.held, range(len(self.held) - CACHE_BLOCKS), strict=False)]
        if surplus:
            for key in surplus:
                del self.held[key]
            events.append(
                BlocksRemoved(at=at, instance=self.name, epoch=Epoch(1), sequence=self._next(), keys=pack_keys(surplus))
            )
        return events

    def report(self, at: EngineSeconds) -> InstanceReported:
        digest = 0
        for key in self.held:
            digest ^= key
        return InstanceReported(
            at=at, instance=self.name, epoch=Epoch(1), serving=True, waiting=0, running=1, kv_usage=0.5,
            sequence=self.sequence, blocks=len(self.held), digest=digest,
        )  # fmt: skip

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence


class BusyPool:
    """Advances in virtual time, from arrival to arrival."""

    def __init__(self, instances: int, policy: str, *, load: float = 1.0, seed: int = SEED) -> None:
        self._chance = Random(seed)
        policies = policy_set(routing=policy)
        self.state = State(PoolSettings(block_tokens=BLOCK_TOKENS), policies.trackers())
        self.dispatcher = Dispatcher(self.state, policies, term=Term(1))
        self.now: EngineSeconds = 0.0
        self.rate = RATE_EACH * load * instances
        self.engines = {name: Engine(name) for name in _names(instances)}
        self._due: list[Due] = []
        self._numbers = count(1)
        self._systems = [self._keys(SYSTEM_BLOCKS) for _ in range(TENANTS)]
        self._sessions: deque[tuple[int, int, list[BlockKey]]] = deque()
        profile = PROFILES[DEFAULT_PROFILE]
        for name in self.engines:
            self._log(
                InstanceJoined(
                    at=0.0, instance=name, epoch=Epoch(1), url=f"http://{name}", model="m", block_tokens=BLOCK_TOKENS,
                    engine_block_tokens=16, kv_capacity_tokens=CACHE_BLOCKS * BLOCK_TOKENS, max_model_len=0,
                    prefill=profile.prefill_cost,
                )
            )  # fmt: skip

    def arrive(self) -> RouteRequest:
        """The next request, after everything that is due before it."""
        self.now += self._chance.expovariate(self.rate)
        while self._due and self._due[0][0] <= self.now:
            at, _, act = heappop(self._due)
            act(at)
        tenant, session, keys = self._conversation()
        number = next(self._numbers)
        return RouteRequest(
            request=RequestId(f"r-{number}"), ingress="i", arrived_at=self.now, tenant=Tenant(f"tenant-{tenant}"),
            keys=pack_keys(keys), prompt_tokens=len(keys) * BLOCK_TOKENS + 17, max_output_tokens=OUTPUT_TOKENS,
            slo_ttft=5.0, slo_tpot=0.1, session=SessionId(f"session-{session}"),
        )  # fmt: skip

    def follow(self, events: list[LogEvent]) -> None:
        """Engines start what was granted."""
        for event in events:
            if isinstance(event, RequestGranted):
                self._start(event)

    def report(self, name: InstanceId) -> InstanceReported:
        return self.engines[name].report(self.now)

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

    def _conversation(self) -> tuple[int, int, list[BlockKey]]:
        if len(self._sessions) > 4 * len(self.engines) and self._chance.random() < 0.8:
            tenant, session, keys = self._sessions.popleft()
            keys = [*keys, *self._keys(TURN_BLOCKS)]
        else:
            tenant, session = self._chance.randrange(TENANTS), next(self._numbers)
            keys = [*self._systems[tenant], *self._keys(TURN_BLOCKS)]
        if len(keys) < SYSTEM_BLOCKS + TURNS_MAX * TURN_BLOCKS:
            self._sessions.append((tenant, session, keys))
        return tenant, session, keys

    def _keys(self, number: int) -> list[BlockKey]:
        return [BlockKey(self._chance.getrandbits(64) or 1) for _ in range(number)]


@click.command("route", context_settings=CONTEXT)
@click.option("--instances", default="8,64,512", show_default=True, help="Sizes of the pool, comma-separated.")
@click.option("--policy", default=DEFAULT_ROUTING, show_default=True, help="Routing policies, comma-separated.")
@click.option("--load", type=float, default=1.0, show_default=True, help="Of that rate.")
@click.option("--decisions", type=COUNT, default=MEASURED, show_default=True, help="Measured in a round.")
@out_option
def route_command(instances: str, policy: str, load: float, decisions: int, out: Path | None) -> None:
    """Time the leader's calls by the number of instances: a route decision, the reaction to a report, housekeeping.

    \b
      pointsman-lab route                                     8, 64 and 512 instances
      pointsman-lab route --instances 512 --policy min_ttft,pointsman --out route.json
    """
    figures = [
        measured(int(size), name.strip(), load, decisions)
        for name in policy.split(",")
        for size in instances.split(",")
    ]
    made = table("policy", ">instances", *(f">{name}" for name in COLUMNS), title="microseconds a call")
    for row in figures:
        made.add_row(row["policy"], str(row["instances"]), *(f"{row[name]:,.0f}" for name in COLUMNS))
    Console().print(made)
    if out:
        write_json(out, {"decisions": decisions, "rounds": ROUNDS, "load": load, "rows": figures})


COLUMNS = ("route", "route_p99", "report", "react_to_report", "liveness", "grant_all", "outliers")


def measured(instances: int, policy: str, load: float, decisions: int) -> dict[str, Any]:
    pool = BusyPool(instances, policy, load=load)
    for _ in range(WARM_EACH * instances):
        pool.follow(pool.dispatcher.route(pool.arrive(), pool.now))
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        routed = _timed_routes(pool, decisions)
        rounds.append({"route": statistics.median(routed), "route_p99": sorted(routed)[int(0.99 * len(routed))]})
        rounds[-1].update(_timed_care(pool))
    best = {name: min(known[name] for known in rounds) * 1e6 for name in COLUMNS}
    return {"policy": policy, "instances": instances, **best}


def _timed_routes(pool: BusyPool, decisions: int) -> list[float]:
    took = []
    for _ in range(decisions):
        command = pool.arrive()
        began = time.perf_counter()
        events = pool.dispatcher.route(command, pool.now)
        took.append(time.perf_counter() - began)
        pool.follow(events)
    return took


def _timed_care(pool: BusyPool) -> dict[str, float]:
    state, dispatcher, now = pool.state, pool.dispatcher, pool.now
    reports = [pool.report(name) for name in list(pool.engines)[:64]]

    def fold_reports() -> None:
        for report in reports:
            state.apply(report, state.sequence + 1)

    def react() -> None:
        pool.follow(dispatcher.relocate_pending(now) + dispatcher.place_held(now))

    def grant_all() -> None:
        for name in list(state.workload.queues):
            pool.follow(dispatcher.grant_waiting(name, now))

    return {
        "report": _took(fold_reports) / len(reports),
        "react_to_report": _took(react),
        "liveness": _took(lambda: dispatcher.check_liveness(TIMEOUTS, now) + dispatcher.change_roles(now)),
        "grant_all": _took(grant_all),
        "outliers": _took(lambda: dispatcher.eject_outliers(now)),
    }


def _took(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _names(instances: int) -> list[InstanceId]:
    return [InstanceId(f"engine-{number:03}") for number in range(instances)]
