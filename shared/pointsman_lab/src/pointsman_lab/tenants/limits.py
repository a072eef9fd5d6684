"""Whether limits hold: three tenants, each over one kind of limit, send through three ingresses while the leading
scheduler is killed. Judged by the log: what was admitted and used in each stretch of time."""

import asyncio
import itertools
import os
import signal
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import FleetDescribed
from pointsman.contracts.decisions import LeaderElected, RequestRejected
from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.ports import Commands
from pointsman.primitives import EngineSeconds, RequestId, Tenant, Tokens
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import NoAnswerError, described
from pointsman_lab.tenants.load import Sample, TenantClients, Traffic

REQUESTS_PER_SECOND = 20.0
CONCURRENCY = 8
TOKENS_PER_MINUTE = 60_000
POLICIES = TenantPolicies(
    tenants={
        Tenant("by-requests"): TenantPolicy(requests_per_second=REQUESTS_PER_SECOND),
        Tenant("by-concurrency"): TenantPolicy(concurrency=CONCURRENCY),
        Tenant("by-tokens"): TenantPolicy(tokens_per_minute=TOKENS_PER_MINUTE),
    }
)
TRAFFIC = (
    Traffic(tenant="by-requests", rate=50.0, prompt_tokens=64, output_tokens=2),
    Traffic(tenant="by-concurrency", rate=20.0, prompt_tokens=64, output_tokens=100),
    Traffic(tenant="by-tokens", rate=20.0, prompt_tokens=180, output_tokens=20),
)
WARM_UP_SECONDS = 3.0  # the buckets are full at first


class LimitsReport(msgspec.Struct, kw_only=True):
    """Shares of the limit; 1 is the limit. `requests`, `tokens`: after the warm-up. `requests_most`, `tokens_most`: in the
    fullest stretch of `window_s`, the full buckets of the beginning included. `elections_s`: after the warm-up."""

    seconds: float
    window_s: float
    requests: float
    requests_most: float
    tokens: float
    tokens_most: float
    concurrency_most: int
    concurrency_limit: int = CONCURRENCY
    killed_at_s: float
    elections_s: list[float]
    statuses: dict[str, dict[str, int]]


async def leader(commands: Commands, settings: FleetSettings) -> FleetDescribed:
    while True:
        try:
            return await described(commands, settings)
        except NoAnswerError:
            await asyncio.sleep(0.05)


async def overload(clients: TenantClients, seconds: float, commands: Commands, settings: FleetSettings) -> list[Sample]:
    """Kills the leader in the middle."""

    async def strike() -> None:
        await asyncio.sleep(WARM_UP_SECONDS + seconds / 2)
        fleet = await leader(commands, settings)
        os.kill(int(fleet.scheduler.split("-")[1]), signal.SIGKILL)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(strike())
        running = tasks.create_task(clients.run(TRAFFIC, WARM_UP_SECONDS + seconds))
    return running.result()


def judged(events: Iterable[LogEvent], samples: Sequence[Sample], *, seconds: float, window_s: float) -> LimitsReport:
    """`events`: of the log, in order."""
    log = LogReading(events)
    admitted = log.admitted("by-requests")
    used = log.used("by-tokens")
    begin = min(at for at, _ in log.arrivals.values()) + WARM_UP_SECONDS
    end = begin + seconds
    requests = [(at, 1.0) for at in admitted]
    tokens = [(at, float(count)) for at, count in used]
    per_minute = TOKENS_PER_MINUTE / 60.0
    elections = [at - begin for at in log.elections if begin <= at < end]
    return LimitsReport(
        seconds=seconds,
        window_s=window_s,
        requests=round(_sum(requests, begin, end) / (seconds * REQUESTS_PER_SECOND), 4),
        requests_most=round(most(requests, window_s) / (window_s * REQUESTS_PER_SECOND), 4),
        tokens=round(_sum(tokens, begin, end) / (seconds * per_minute), 4),
        tokens_most=round(most(tokens, window_s) / (window_s * per_minute), 4),
        concurrency_most=log.most_in_flight("by-concurrency"),
        killed_at_s=seconds / 2,
        elections_s=[round(at, 2) for at in elections],
        statuses=_statuses(samples),
    )


class LogReading:
    def __init__(self, events: Iterable[LogEvent]) -> None:
        self.arrivals: dict[RequestId, tuple[EngineSeconds, Tenant]] = {}
        self.elections: list[EngineSeconds] = []
        self._refused: set[RequestId] = set()
        self._ends: dict[RequestId, EngineSeconds] = {}
        self._used: list[tuple[EngineSeconds, RequestId, Tokens]] = []
        for event in events:
            self._take(event)

    def _take(self, event: LogEvent) -> None:
        match event:
            case RequestArrived():
                self.arrivals.setdefault(event.request, (event.at, event.tenant))
            case RequestRejected():
                self._refused.add(event.request)
            case RequestFinished():
                self._ends.setdefault(event.request, event.at)
                tokens = event.prompt_tokens - max(0, event.cached_tokens) + event.completion_tokens
                self._used.append((event.at, event.request, tokens))
            case RequestFailed() | RequestCancelled():
                self._ends.setdefault(event.request, event.at)
            case LeaderElected():
                self.elections.append(event.at)
            case _:
                pass

    def admitted(self, tenant: str) -> list[EngineSeconds]:
        return sorted(at for r, (at, who) in self.arrivals.items() if who == tenant and r not in self._refused)

    def used(self, tenant: str) -> list[tuple[EngineSeconds, Tokens]]:
        return [(at, tokens) for at, r, tokens in self._used if r in self.arrivals and self.arrivals[r][1] == tenant]

    def most_in_flight(self, tenant: str) -> int:
        changes = []
        for request, (at, who) in self.arrivals.items():
            if who == tenant and request not in self._refused:
                changes += [(at, 1), (self._ends.get(request, float("inf")), -1)]
        return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _sum(counted: Sequence[tuple[EngineSeconds, float]], begin: EngineSeconds, end: EngineSeconds) -> float:
    return sum(count for at, count in counted if begin <= at < end)


def most(counted: Sequence[tuple[EngineSeconds, float]], window: EngineSeconds) -> float:
    moments = [at for at, _ in counted]
    sums = [0.0, *itertools.accumulate(count for _, count in counted)]
    return max((sums[bisect_left(moments, at + window)] - sums[first] for first, at in enumerate(moments)), default=0.0)


def _statuses(samples: Sequence[Sample]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for sample in samples:
        of_tenant = counts.setdefault(sample.tenant, {})
        name = f"{sample.status} {sample.reason}".strip()
        of_tenant[name] = of_tenant.get(name, 0) + 1
    return counts
