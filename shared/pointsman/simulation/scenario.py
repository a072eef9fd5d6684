"""Input of a simulation: pool, policies and imperfections (`Scenario`), and properties of a real fleet (`FleetMirror`)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from pointsman.contracts.decisions import Settings
from pointsman.contracts.fleet import Role
from pointsman.contracts.tenants import TenantPolicies
from pointsman.policies.queue_limits import PREFILL_WINDOW_TOKENS, RUNNING_MAX
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, Tokens
from pointsman.simulation.outcome import RequestRow
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, WorkloadRequest
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES, EngineProfile

FetchPath = Literal["engine", "direct"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Instance number `instance` (from 0) dies at `at` and returns, empty, at `back_at`; None: never."""

    at: EngineSeconds
    instance: int
    back_at: EngineSeconds | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    instances: int = 8
    profile: str = DEFAULT_PROFILE
    routing: str = "dualmap"
    routing_settings: Settings = field(default_factory=dict)
    ordering: str = "fcfs"
    admission: str = "none"
    rebalancing: str = "off"
    eviction: str = "lru"
    slo_ttft_s: EngineSeconds = 5.0
    prefill_only: bool = True
    """Clients ask for one token. False: decoding shares the engine."""
    split: tuple[int, int] = (0, 0)
    """Numbers of prefill-only and decode-only instances; all others do both."""
    role_switching: bool = False
    """The scaler (`slo_attainment`) switches the roles of a split that has no other instances."""
    kv_transfer_gb_per_s: float = 12.5
    transfer_tokens_per_s: float = 0.0
    """Of prefixes that instances fetch from each other; 0: they do not."""
    fetch_path: FetchPath = "engine"
    """A fetch is a request to the source's engine and one to the target's, as with vLLM's NixlConnector; `direct`: it
    waits for neither, as Mooncake's Messenger."""
    copies: bool = True
    """Hot prefixes are copied ahead of need, where prefixes are fetched."""
    kv_capacity_tokens: Tokens | None = None
    host_cache_tokens: Tokens = 0
    """Of each instance's host tier; 0: none."""
    host_gb_per_s: float = 20.0
    tiers_known: bool = True
    """False: the scheduler does not see what the host tier holds."""
    block_tokens: Tokens = TRACE_BLOCK_TOKENS
    prefill_window_tokens: Tokens = PREFILL_WINDOW_TOKENS
    running_max: int = RUNNING_MAX
    max_num_batched_tokens: Tokens = 8192
    affinity_level_tokens: Tokens = 512
    """At least a block."""
    hot_share: float = 1.0
    cold_share: float = 0.5
    load_lag_s: EngineSeconds = 0.0
    """Policies do not see the last so many seconds, their own dispatches included."""
    event_delay_s: EngineSeconds = 0.0
    event_loss: float = 0.0
    """Share of lost cache events; reports reveal the loss, a snapshot repairs it."""
    estimate_error: tuple[float, float] = (0.0, 0.0)
    """Share of prompts with a wrong prefill estimate, and its relative error."""
    slow_instances: dict[int, float] = field(default_factory=dict)
    """Instance number to relative speed; unknown to the scheduler."""
    failures: tuple[Failure, ...] = ()
    tenant_policies: tuple[tuple[EngineSeconds, TenantPolicies], ...] = ()
    """(time, policies in force from then on), in order of time. Days of budgets begin with the run."""
    pending_max: int = 10**9
    scale_at: tuple[tuple[EngineSeconds, int], ...] = ()
    seed: int = 0

    @property
    def splits(self) -> bool:
        return self.split != (0, 0)

    def role(self, number: int) -> Role:
        prefill, decode = self.split
        if number < prefill:
            return "prefill"
        return "decode" if number < prefill + decode else "both"

    def row(self, number: int, request: WorkloadRequest) -> RequestRow:
        return RequestRow(
            number=number,
            tenant=request.tenant,
            arrived_at=request.arrival_s,
            prompt_tokens=request.input_length,
            output_tokens=1 if self.prefill_only else max(1, request.output_tokens),
            slo_ttft=self.slo_ttft(request),
            slo_tpot=request.slo_tpot_s,
        )

    def max_output_tokens(self, request: WorkloadRequest) -> Tokens:
        return 1 if self.prefill_only else request.max_output_tokens

    def slo_ttft(self, request: WorkloadRequest) -> EngineSeconds:
        return self.slo_ttft_s if request.slo_ttft_s is None else request.slo_ttft_s


def block_keys(request: WorkloadRequest, block_tokens: Tokens) -> list[BlockKey]:
    """Keys of the prompt's whole blocks. A block id identifies its whole prefix; with smaller blocks each id gives
    several keys."""
    parts = TRACE_BLOCK_TOKENS // block_tokens
    whole = request.input_length // block_tokens
    keys = [
        BlockKey(_scrambled(block_id * parts + part + 1)) for block_id in request.block_ids for part in range(parts)
    ]
    return keys[:whole]


def _scrambled(value: int) -> int:
    """A unique 64-bit number (an odd factor is invertible), never 0."""
    return value * 0x9E3779B97F4A7C15 % 2**64


def numbered_name(number: int) -> InstanceId:
    return InstanceId(f"engine-{number:03}")


@dataclass(frozen=True, kw_only=True)
class FleetMirror:
    """Properties of a real fleet, so that a simulation decides each request alike. Names and keys decide hash rings and
    ties; promises last wall seconds, so `speed` counts. `profile` replaces the scenario's."""

    name_of: Callable[[int], InstanceId] = numbered_name
    keys_of: Callable[[WorkloadRequest, Tokens], list[BlockKey]] = block_keys
    speed: float = 1.0
    profile: EngineProfile | None = None
    way_of: Callable[[WorkloadRequest], EngineSeconds] | None = None
    """Seconds from a grant until the engine has the request. None: 0."""

    def profile_of(self, scenario: Scenario, number: int | None = None) -> EngineProfile:
        profile = self.profile or PROFILES[scenario.profile]
        speed = 1.0 if number is None else scenario.slow_instances.get(number, 1.0)
        if speed == 1.0:
            return profile
        return replace(
            profile,
            flops_per_s=profile.flops_per_s * speed,
            memory_bytes_per_s=profile.memory_bytes_per_s * speed,
            step_overhead_s=profile.step_overhead_s / speed,
            decode_step_s=None if profile.decode_step_s is None else profile.decode_step_s / speed,
        )


NO_MIRROR = FleetMirror()
