"""Draws the plan of a seed: the fleet, its settings, and its traffic."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from pointsman.contracts.fleet import Role
from pointsman.primitives import EngineSeconds, WallSeconds
from pointsman_lab.torture.engines import EngineShape
from pointsman_scheduler.settings import SchedulerSettings

POOL_BLOCK_TOKENS = 32
SECRET = "torture"
POOL = "torture"
ROUTING = ("dualmap", "dualmap", "pointsman", "min_ttft", "cache_affinity", "least_loaded", "preble")
HARD_LIMIT = ("admission.hard_limit=true",)
"""The reference model knows no best effort."""
ADMISSION = ("predicted_ttft", "predicted_ttft", "none")
ORDERING = ("fcfs", "fcfs", "shortest_prefill", "edf")
REBIND_SHARE = 0.5
SPLIT_SHARE = 0.25
ROLES: tuple[tuple[Role, ...], ...] = (
    ("prefill", "decode", "both", "decode", "prefill", "both"),
    ("prefill", "decode", "decode", "prefill", "both", "decode"),
    ("both", "decode", "prefill", "both", "decode", "prefill"),
    ("decode", "prefill", "prefill", "both", "decode", "decode"),
)
"""By host: the first two can serve a request together."""

EQUALS: tuple[Role, ...] = ("both",) * 6
WITHOUT_REPLAY_SHARE = 0.4
OUTLIER_SETTINGS: tuple[tuple[str, ...], ...] = (
    (),
    (
        "outlier.consecutive_failures=1",
        "outlier.base_ejection_seconds=1",
        "outlier.max_ejection_seconds=3",
        "outlier.max_ejection_share=1",
    ),
    (
        "outlier.consecutive_failures=2",
        "outlier.latency_factor=2",
        "outlier.base_ejection_seconds=2",
        "outlier.max_ejection_seconds=6",
    ),
    ("outlier.consecutive_failures=0", "outlier.failure_share=0.2", "outlier.success_rate_stdev_factor=1"),
)
ADAPTER_SHARE = 0.3
ADAPTER = "torture-lora"
TENANTS = ("acme", "beta", "gamma")
TENANTS_SHARE = 0.2
OVERLOAD_SHARE = 0.35
OVERLOAD_REQUESTS = 60
OVERLOAD_OBJECTIVES_MS = (50, 100, 200, 400)
FAULTS_BEGIN: EngineSeconds = 3.0
FAULTS_SECONDS: EngineSeconds = 24.0

Releases = Literal["", "forward", "back", "mixed"]
"""All processes are of this release; each is upgraded, or set back, at its next start; or drawn at each start."""
RELEASES: tuple[Releases, ...] = ("", "", "", "forward", "back", "mixed")
Scenario = Literal["", "bad engine", "rolling restart", "slow disk", "heartbeats"]
"""A single fault in a fleet with spare capacity, for guarantees that hold without other faults."""
ENGINE_URLS = ("http://*:8000",)
BAD_ENGINE_SHARE = 0.05
ROLLING_SHARE = 0.03
BAD_SECONDS: EngineSeconds = 40.0
WELL_SECONDS: EngineSeconds = 31.0
ROLLING_SECONDS: EngineSeconds = 45.0
SLOW_DISK_SHARE = 0.04
SLOW_DISK_SECONDS: EngineSeconds = 60.0
SLOW_DISK_REST_SECONDS: EngineSeconds = 15.0
HEARTBEATS_SHARE = 0.03
HEARTBEATS_SECONDS: EngineSeconds = 36.0
QUIET_RATE = 5.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    scenario: Scenario = ""
    fault_seconds: EngineSeconds = FAULTS_SECONDS
    speed: float
    engines: int
    spare: int
    scalers: int
    ingresses: int
    schedulers: int
    roles: tuple[Role, ...]
    replays: tuple[bool, ...]
    adapters: tuple[tuple[str, ...], ...]
    overload: bool
    tenants: bool
    """Whether requests have tenants, and tenants limits (`tenants.py`)."""
    rebalancer_delay: EngineSeconds
    """Mean message delay during faults: plans of a delayed rebalancer are refused."""
    engine: EngineShape
    flush_ms: float
    window_max: int
    requests: int
    releases: Releases
    workers_pause: bool
    """Whether a stopped worker leaves its state to the next one."""
    scheduler: SchedulerSettings
    fleet_settings: dict[str, Any]
    ingress_settings: dict[str, Any]
    scaler_settings: dict[str, Any]

    @property
    def hosts(self) -> int:
        return self.engines + self.spare

    @property
    def split(self) -> bool:
        return any(role != "both" for role in self.roles)


def plan_of(seed: int) -> Plan:
    draw, plan = Random(f"scenario {seed}").random(), _any_plan(seed)
    if draw < BAD_ENGINE_SHARE:
        return _quiet(plan, "bad engine", BAD_SECONDS + WELL_SECONDS, engines=4)
    if draw > 1 - ROLLING_SHARE:
        return _quiet(plan, "rolling restart", ROLLING_SECONDS, engines=3)
    if draw > 1 - ROLLING_SHARE - SLOW_DISK_SHARE:
        return _quiet(plan, "slow disk", SLOW_DISK_SECONDS + SLOW_DISK_REST_SECONDS, engines=3, releases="")
    if draw > 1 - ROLLING_SHARE - SLOW_DISK_SHARE - HEARTBEATS_SHARE:
        return _quiet(plan, "heartbeats", HEARTBEATS_SECONDS, engines=3, releases="")
    return plan


def _quiet(plan: Plan, scenario: Scenario, seconds: EngineSeconds, *, engines: int, **others: Any) -> Plan:
    """The same policies and windows for a fleet of equals with enough capacity."""
    return replace(
        plan,
        scenario=scenario,
        fault_seconds=seconds,
        engines=engines,
        spare=0,
        scalers=1,
        ingresses=2,
        schedulers=2,
        roles=EQUALS[:engines],
        replays=(True,) * engines,
        adapters=((),) * engines,
        overload=False,
        tenants=False,
        rebalancer_delay=0.0,
        engine=replace(plan.engine, blocks=160 * 32 // plan.engine.block_size, buffer_steps=10_000),
        window_max=10_000,
        requests=int(QUIET_RATE * seconds),
        workers_pause=True,
        scheduler=replace(
            plan.scheduler,
            pending_max=10_000,
            running_max=256,
            leave_seconds=WallSeconds(30.0),
            set=(),
            prefill_window_tokens=16_384,
        ),
        ingress_settings=plan.ingress_settings | {"request_timeout_seconds": 120.0, "drain_seconds_max": 30.0},
        scaler_settings=plan.scaler_settings | {"min_instances": 1, "max_instances": engines},
        **others,
    )


def _any_plan(seed: int) -> Plan:
    chance = Random(f"plan {seed}")
    block_size = chance.choice((16, 32))
    speed = chance.choice((1.0, 1.0, 4.0))
    fleet: dict[str, Any] = {"pool": POOL, "speed": speed, "block_tokens": POOL_BLOCK_TOKENS, "secret": SECRET}
    spare = Random(f"spare {seed}").choice((0, 0, 1, 2))
    engines = chance.randint(2, 4)
    parts = Random(f"roles {seed}")
    split = parts.random() < SPLIT_SHARE
    hosts = engines + spare
    mix = Random(f"mix {seed}")
    lossy = mix.random() < WITHOUT_REPLAY_SHARE
    replays = tuple(not lossy or mix.random() < 0.5 for _ in range(hosts))
    adapted = mix.random() < ADAPTER_SHARE and not split
    adapters = tuple((ADAPTER,) if adapted and (host == 0 or mix.random() < 0.5) else () for host in range(hosts))
    overload = mix.random() < OVERLOAD_SHARE
    delay = mix.choice((0.0, 0.1, 0.5)) if overload else 0.0
    return Plan(
        seed=seed,
        speed=speed,
        engines=engines,
        spare=spare,
        scalers=2 if spare else 1,
        ingresses=chance.randint(1, 2),
        schedulers=chance.choice((1, 2, 2, 3)),
        roles=(parts.choice(ROLES) if split else EQUALS)[:hosts],
        replays=replays,
        adapters=adapters,
        overload=overload,
        tenants=not overload and Random(f"limits {seed}").random() < TENANTS_SHARE,
        rebalancer_delay=delay,
        engine=EngineShape(
            block_size=block_size,
            blocks=chance.choice((40, 80, 160)) * 32 // block_size,
            buffer_steps=chance.choice((10_000, 10_000, 10_000, 40)),
            batched_tokens=chance.choice((512, 2048)),
        ),
        flush_ms=chance.choice((2.0, 10.0, 50.0)),
        window_max=chance.choice((10_000, 10_000, 10_000, 25)),
        requests=chance.randint(40, 90) + OVERLOAD_REQUESTS * overload,
        fleet_settings=fleet,
        releases=Random(f"releases {seed}").choice(RELEASES),
        workers_pause=Random(f"state directory {seed}").random() < 0.5,
        scheduler=SchedulerSettings(
            **fleet,
            engine_urls=ENGINE_URLS,
            policy=chance.choice(ROUTING),
            admission=(admission := chance.choice(ADMISSION if not delay else ("none",))),
            set=(*Random(f"outliers {seed}").choice(OUTLIER_SETTINGS), *HARD_LIMIT[admission == "none" :]),
            order=chance.choice(ORDERING),
            prefill_window_tokens=chance.choice((600, 2000, 16_384)),
            running_max=chance.choice((1, 2, 8, 256)),
            pending_max=chance.choice((8, 10_000, 10_000)),
            suspect_seconds=WallSeconds(3.0),
            leave_seconds=WallSeconds(chance.choice((8.0, 30.0))),
            waiter_seconds=WallSeconds(3.0),
            request_seconds_max=WallSeconds(60.0),
            hold_seconds=WallSeconds(Random(f"hold {seed}").choice((0.0, 3.0, 30.0))),
            hold_max=Random(f"hold max {seed}").choice((2, 1000, 1000)),
            checkpoint_seconds=WallSeconds(chance.choice((3.0, 10.0))),
            rebind=Random(f"rebind {seed}").random() < REBIND_SHARE,
        ),
        ingress_settings={
            "engine_urls": ENGINE_URLS,
            "retries_max": 2,
            "request_timeout_seconds": chance.choice((20.0, 120.0)),
            "slo_ttft_seconds": 30.0 * speed,
            "lame_duck_seconds": 1.0,
            "drain_seconds_max": Random(f"drain {seed}").choice((0.5, 30.0)),
        },
        scaler_settings={
            "min_instances": 2 if split else 1,
            "max_instances": hosts,
            "drain_seconds_max": 10.0,
            "start_seconds_max": 15.0,
            "pause_up_seconds": 1.0,
            "pause_down_seconds": 1.0,
        },
    )
