"""`pointsman-lab route`: what one call of the leader costs by the number of instances, in one process without NATS. A pool
under steady load: tenants share system prompts, conversations grow, and engines that keep to the cost model publish
what they store and evict. Times are of the calls alone, the quietest of several rounds."""

import statistics
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import click
from rich.console import Console

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.fleet import InstanceReported, LivenessTimeouts
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.dispatch.recording import RIVALS, SETTINGS_EVERY, Recording
from pointsman.policies.policy_set import policy_set
from pointsman.policies.routing import DEFAULT_ROUTING
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, SessionId, Tenant, Term
from pointsman.simulation.metrics import percentile
from pointsman.state.state import PoolSettings, State
from pointsman_cli.options import CONTEXT, COUNT, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table
from pointsman_lab.traffic import BLOCK_TOKENS, Conversations, SimulatedInstance, instance_names

OUTPUT_TOKENS, TOKEN_SECONDS = 150, 0.03
RATE_EACH = 0.8
"""Requests a second and instance."""
CACHE_BLOCKS = 2_000
SEED = 1
WARM_EACH, MEASURED, ROUNDS = 8, 400, 5
TIMEOUTS = LivenessTimeouts(heard_since=0.0, suspect_after=1e9, leave_after=1e9)

Due = tuple[EngineSeconds, int, Callable[[EngineSeconds], None]]


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
        self.engines = {name: SimulatedInstance(name, CACHE_BLOCKS) for name in instance_names(instances)}
        self._due: list[Due] = []
        self._numbers = count(1)
        self._conversations = Conversations(self._chance, 4 * instances)
        for engine in self.engines.values():
            self._log(engine.join(0.0))

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
        rounds.append({"route": statistics.median(routed), "route_p99": percentile(routed, 99) or 0.0})
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
