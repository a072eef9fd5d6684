"""The same run by a fleet and by the simulator: requests, times, policies, engines, instance names and block keys. Near
saturation a millisecond changes the queue, so the simulator runs several times with jittered arrivals; the fleet is
compared with the median."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median

from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, Tokens
from pointsman.simulation import metrics
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import FleetMirror, Scenario, simulate
from pointsman.simulation.workload import WorkloadRequest, mean_rate, prompt_token_ids
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman_cli.bench.fresh_fleet import FreshFleet
from pointsman_cli.bench.load import VOCAB_SIZE, LoadGenerator, Tally, Target
from pointsman_cli.bench.report import RunFacts, summarise
from pointsman_cli.up.plan import ENGINE_BLOCK_TOKENS, SIMULATED_MODEL
from pointsman_lab.agreement.machine import REQUEST_PATH, Heartbeat, Machine, waited_for_cores, warnings_in

SIMULATIONS = 9
WAY_WALL_SECONDS = 0.01
WAY_SHARE_MAX = 0.025
SPEED_MIN, SPEED_MAX = 0.1, 20.0
SLO_TTFT_SECONDS: EngineSeconds = 5.0
PREFILL_WINDOW_TOKENS: Tokens = 16_384
REQUESTS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    routing: str
    ordering: str = "fcfs"
    admission: str = "none"
    engines: int = 4
    seed: int = 1

    @property
    def secret(self) -> str:
        return f"agreement-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Results of one run, in engine seconds and shares; None where nothing was measured."""

    requests: int
    completed: int
    rejected: int
    failed: int
    ttft_p50_s: EngineSeconds | None
    ttft_p90_s: EngineSeconds | None
    ttft_p99_s: EngineSeconds | None
    tpot_p50_s: EngineSeconds | None
    hit_rate: float | None
    effective_capacity: float | None


# --- The fleet that runs ---


async def run_live(
    pool: Pool, requests: Sequence[WorkloadRequest], *, speed: float, warmup: int, tick: Callable[[Tally], None]
) -> tuple[Figures, Machine]:
    """Starts a fresh fleet, sends the requests over HTTP, stops it. The first `warmup` requests are not counted. Raises
    FleetStartError."""
    async with _fleet(pool, speed).running() as fleet:
        path = [process.pid for process in fleet.processes if process.role in REQUEST_PATH and process.pid]
        target = Target(url=fleet.ingress.rstrip("/"), model=fleet.model, speed=speed, seed=pool.seed)
        load = LoadGenerator(target, requests, warmup=warmup)
        waited, started = waited_for_cores(path), time.monotonic()
        async with Heartbeat().listened() as heartbeat:
            await load.run(lambda: tick(load.tally))
        waited, wall = waited_for_cores(path) - waited, time.monotonic() - started
        warned = warnings_in(Path(fleet.data) / "logs")
    outcomes = load.tally.outcomes
    report = summarise(outcomes, _facts(pool, requests, speed), wall_s=wall, interrupted=False)
    machine = Machine(
        waited_s=waited / len(requests) * speed,
        late_p90_s=metrics.percentile([outcome.late_s for outcome in outcomes], 90) or 0.0,
        stood_still_s=heartbeat.longest_pause * speed,
        warned=warned,
    )
    return Figures(**{one.name: getattr(report, one.name) for one in fields(Figures)}), machine


def _fleet(pool: Pool, speed: float) -> FreshFleet:
    scheduler = {"order": pool.ordering, "admission": pool.admission, "prefill_window_tokens": PREFILL_WINDOW_TOKENS}
    return FreshFleet(
        policy=pool.routing,
        rebalance="off",
        instances=pool.engines,
        speed=speed,
        settings=[f"scheduler.{name}={value}" for name, value in scheduler.items()],
        arguments=["--block-tokens", str(ENGINE_BLOCK_TOKENS), "--secret", pool.secret],
        environment={"POINTSMAN_LOG_FORMAT": "json"},
    )


def _facts(pool: Pool, requests: Sequence[WorkloadRequest], speed: float) -> RunFacts:
    return RunFacts(
        policy=pool.routing,
        slo_ttft_s=SLO_TTFT_SECONDS,
        speed=speed,
        offered_rate=mean_rate(requests),
        workload="",
        trace=None,
        seed=pool.seed,
    )


# --- The simulator ---


def run_simulated(
    pool: Pool, requests: Sequence[WorkloadRequest], *, speed: float, warmup: int, simulations: int = SIMULATIONS
) -> list[Figures]:
    found = []
    for number in range(simulations):
        arrivals = _jittered(requests, WAY_WALL_SECONDS * speed, random.Random(number)) if number else requests
        found.append(_simulated_figures(metrics.summarise(_outcome(pool, arrivals, speed), warmup=warmup)))
    return found


@dataclass(frozen=True, slots=True)
class Pace:
    saturation: float
    """Requests a second that keep all engines busy with prefills."""
    prefill_p50_s: EngineSeconds

    @property
    def speed(self) -> float:
        fast = WAY_SHARE_MAX * self.prefill_p50_s / WAY_WALL_SECONDS
        return max(SPEED_MIN, min(SPEED_MAX, round(fast, 1)))


def pace(pool: Pool, requests: Sequence[WorkloadRequest], *, warmup: int) -> Pace:
    """There are more than `warmup` requests."""
    cost = PROFILES[DEFAULT_PROFILE].prefill_cost
    rows = _outcome(pool, requests, 1.0).rows[warmup:]
    seconds = [cost.seconds(row.prompt_tokens, row.cached_tokens) for row in rows]
    return Pace(saturation=pool.engines / fmean(seconds), prefill_p50_s=median(seconds))


def _outcome(pool: Pool, requests: Sequence[WorkloadRequest], speed: float) -> Outcome:
    """Clients ask for as many tokens as they get, as those of the fleet do (`bench.load`)."""
    asked = [replace(request, max_output_tokens=max(1, request.output_tokens)) for request in requests]
    return simulate(_scenario(pool), asked, mirror=_mirror(pool, speed))


def _jittered(requests: Sequence[WorkloadRequest], most: EngineSeconds, chance: random.Random) -> list[WorkloadRequest]:
    moved = [replace(request, arrival_s=request.arrival_s + chance.uniform(0.0, most)) for request in requests]
    return sorted(moved, key=lambda request: request.arrival_s)


def _simulated_figures(report: metrics.Report) -> Figures:
    return Figures(
        requests=report.requests,
        completed=report.finished,
        rejected=report.rejections,
        failed=report.failures + report.unfinished,
        ttft_p50_s=report.ttft.p50_s,
        ttft_p90_s=report.ttft.p90_s,
        ttft_p99_s=report.ttft.p99_s,
        tpot_p50_s=report.tpot.p50_s,
        hit_rate=report.hit_rate,
        effective_capacity=report.effective_capacity,
    )


def _scenario(pool: Pool) -> Scenario:
    return Scenario(
        instances=pool.engines,
        routing=pool.routing,
        ordering=pool.ordering,
        admission=pool.admission,
        slo_ttft_s=SLO_TTFT_SECONDS,
        prefill_only=False,
        block_tokens=ENGINE_BLOCK_TOKENS,
        prefill_window_tokens=PREFILL_WINDOW_TOKENS,
        seed=pool.seed,
    )


def _mirror(pool: Pool, speed: float) -> FleetMirror:
    @lru_cache(maxsize=REQUESTS_REMEMBERED)
    def keys_of(request: WorkloadRequest, block_tokens: Tokens) -> list[BlockKey]:
        chain = KeyChain(secret=pool.secret.encode(), model=SIMULATED_MODEL, block_tokens=block_tokens)
        tokens = prompt_token_ids(request, vocab_size=VOCAB_SIZE, seed=pool.seed)
        return chain.extend(chain.root(), tokens)

    return FleetMirror(name_of=lambda number: InstanceId(f"engine-{number + 1}"), keys_of=keys_of, speed=speed)
